"""A labeled set of personal data: sentences in eight languages around made-up values, and texts that only look like it.

Sentences and hard negatives are split by their templates, so that the test half has none that the development half has.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from faker import Faker

from modelwright_claims.personal_values import ALNUM, HEX, KEYS, LOCALES, NAMED_KEYS, VALUES, pick

_TEMPLATES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("personal_data_templates.yaml").read_text(encoding="utf-8")
)
_LANGUAGE = {"zh_CN": "zh", "ja_JP": "ja"}


@dataclass(frozen=True)
class Example:
    """A text, whether it is code, and the values in it: kind, start and end."""

    text: str
    is_code: bool
    values: tuple[tuple[str, int, int], ...]
    locale: str = ""


def labeled(half: str, *, per_kind: int, seed: int = 0) -> list[Example]:
    """Examples with values of all kinds, from the templates of one half ("development" or "test")."""
    rng = random.Random(f"{seed} {half} values")
    Faker.seed(rng.randrange(2**32))
    result: list[Example] = []
    for locale in LOCALES:
        fake = Faker(locale)
        sentences = _TEMPLATES["sentences"][_LANGUAGE.get(locale, locale[:2])]
        for kind, make in VALUES.items():
            for _ in range(per_kind // len(LOCALES)):
                value, needs_name = make(fake, rng)
                templates = halved(_TEMPLATES["urls"] if kind == "credentials" else sentences[kind], half)
                if kind not in ("credentials", "ip") and not needs_name and rng.random() < 0.4:
                    templates = halved(sentences["any"], half)
                result.append(_example(kind, rng.choice(templates), value, False, locale))
    for number in range(per_kind):
        name = list(KEYS)[number % len(KEYS)]
        result.append(
            _example("secret", rng.choice(halved(_TEMPLATES["keys"], half)), KEYS[name](rng), rng.random() < 0.5)
        )
    for number in range(per_kind // 2):
        name, make_key = list(NAMED_KEYS.values())[number % len(NAMED_KEYS)]
        template = rng.choice(halved(_TEMPLATES["named_keys"], half)).replace("{n}", name)
        result.append(_example("secret", template, make_key(rng), True))
    return result


def halved(templates: list[str], half: str) -> list[str]:
    """Half of the templates, by a shuffle with a fixed seed."""
    shuffled = sorted(templates, key=lambda template: random.Random(f"half {template}").random())
    return shuffled[::2] if half == "development" else shuffled[1::2] or shuffled


def _example(kind: str, template: str, value: str, is_code: bool, locale: str = "") -> Example:
    """The value in its template; of a value with `[[brackets]]` only what they enclose is labeled."""
    start = template.replace("{{", "{").index("{v}")
    text = template.replace("{{", "{").replace("}}", "}").replace("{v}", value)
    end = start + len(value)
    if "[[" in value:
        start, end = text.index("[["), text.index("]]") - 2
        text = text.replace("[[", "").replace("]]", "")
    return Example(text, is_code, ((kind, start, end),), locale)


_WORDS = ("alpha", "engine", "parser", "report", "widget", "delta", "core", "render", "station", "module", "harbor")


def negatives(half: str, *, count: int, seed: int = 0) -> list[Example]:
    """Examples without values, from the templates of one half."""
    rng = random.Random(f"{seed} {half} negatives")
    templates = halved(_TEMPLATES["negatives"], half)
    return [Example(_fill(templates[n % len(templates)], rng), rng.random() < 0.3, ()) for n in range(count)]


def _fill(template: str, rng: random.Random) -> str:
    return "".join(_filled(template.replace("{{", "\x01").replace("}}", "\x02"), rng)).translate({1: "{", 2: "}"})


def _filled(template: str, rng: random.Random) -> Iterator[str]:
    for part in template.split("{"):
        if "}" not in part:
            yield part
            continue
        field, _, rest = part.partition("}")
        name, size = field.rstrip("0123456789"), int("0" + field.lstrip("abcdefghijklmnopqrstuvwxyz")[-2:])
        if field == "b64":
            yield pick(rng, ALNUM, 86) + rest
        elif name == "w":
            yield rng.choice(_WORDS) + rest
        elif name == "s":
            yield str(rng.choice((rng.randrange(1, 10), rng.randrange(1, 50)))) + rest
        else:
            alphabet = {"d": "0123456789", "e": "012", "hex": HEX, "u": "ABCDEFGHJKLMNPRSTVWXYZ"}[name]
            yield pick(rng, alphabet, size) + rest
