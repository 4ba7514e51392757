"""The stages format and quality, one document at a time."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelwright.core.progress import SilentProgress
from modelwright.data.clean import features
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.features import FEATURES, hash_words, may_have_error_sign, measure
from modelwright.data.clean.folder import read_kept
from modelwright.data.clean.steps.format import Format, FormatConfig
from modelwright.data.clean.steps.quality import (
    Quality,
    QualityConfig,
    has_language,
    judge,
    judged_kinds,
    limits_by_kind,
)
from modelwright.data.clean.steps.step import Drop
from modelwright.data.document import KINDS, Document
from refusals import config_error

PROSE = (
    "The committee met on Tuesday to discuss the new rules for the library. Most of the members agreed that the "
    "reading room should stay open until nine in the evening, and that the fines for late books were too high. A vote "
    "is planned for the next meeting, which will be held in the town hall because the roof of the library has to be "
    "repaired. Nobody knows how long that is going to take, but the work has been paid for by a donation."
)


def document(text: str, **changes) -> Document:
    return Document(**{"id": "d", "text": text, "kind": "prose", "split": "train", "source": "test"} | changes)


def formatted(text: str, **settings) -> str:
    result = Format(FormatConfig(**settings))(document(text))
    assert isinstance(result, Document)
    return result.text


@pytest.mark.parametrize(("raw", "expected"), [
    ("The cafÃ© is closed, itâ€™s Sunday.", "The café is closed, it’s Sunday."),
    ("schÃ¶ne GrÃ¼ÃŸe", "schöne Grüße"),
    ("naïve café, “quoted”, 深度学习, Привет", "naïve café, “quoted”, 深度学习, Привет"),
    ("soft\u00adhyphen, zero\u200bwidth", "softhyphen, zerowidth"),
])  # fmt: skip
def test_encodings_are_repaired(raw: str, expected: str) -> None:
    assert formatted(raw) == expected
    assert formatted(expected) == expected
    code = Format(FormatConfig())(document(raw, kind="code"))
    assert isinstance(code, Document)
    assert code.text == raw, "code keeps its characters"


def test_markup_becomes_text() -> None:
    body = "<h1>Bees</h1><p>Bees are <b>insects</b>.</p><ul><li>One</li></ul>"
    page = f"<html><body><nav>Home | About</nav>{body}</body></html>"
    text = formatted(page)
    assert "Bees are insects." in text
    assert "<" not in text
    assert "Home" not in text
    assert formatted(page, html="keep") == page
    about = "In HTML, a paragraph begins with <p> and ends with </p>. " + PROSE
    assert formatted(about) == about, "text about markup is not markup"


def test_urls() -> None:
    text = "See https://example.org/a?b=c#d (or www.example.com/x) for more, not http or a.b."
    assert formatted(text) == text
    assert formatted(text, urls="mark") == "See <URL> (or <URL>) for more, not http or a.b."
    assert formatted(text, urls="remove") == "See  (or ) for more, not http or a.b."


def test_binary_data() -> None:
    result = Format(FormatConfig())(document("\x00\x01\x02 data \x03\x04\x05"))
    assert isinstance(result, Drop)
    assert result.reason == "binary data"
    with config_error("max_control_fraction"):
        FormatConfig(max_control_fraction=2)


def reasons(text: str, kind: str = "prose", **settings) -> list[str]:
    config = QualityConfig(**settings)
    row = np.array([measure(document(text, kind=kind))], np.float32)
    return [reason for violates, reason, *_ in judge(row, limits_by_kind(config, {})[kind]) if violates[0]]


JUNK = {
    "too short": "Home",
    "repetitive": "buy now " * 200,
    "repeated phrase": "click here to subscribe " * 100,
    "repeated lines": "\n".join(["This line is here again."] * 20),
    "many symbols": " ".join(["@#$% ^&*( {}[] <>|~"] * 40),
    "many digits": " ".join(str(number) for number in range(10000, 10200)),
    "table of data": "\n".join(f"{i}, 0x{i:04x}, '{i}'" for i in range(30)),
    "low entropy": "a" * 200 + " " + "a b " * 60,
    "no stop words": " ".join(f"keyword{i} brand{i} price{i}" for i in range(40)),
    "cut off": "The council met on Tuesday and discussed the new rules of the library, which most of th...",
    "long words": " ".join(f"abcdefghijklmnopqrstuvwxyz{i}" for i in range(60)),
}


@pytest.mark.parametrize("reason", JUNK)
def test_junk_is_recognized(reason: str) -> None:
    assert reason in reasons(JUNK[reason])


def test_ordinary_text_stays() -> None:
    assert reasons(PROSE) == []
    assert reasons("Return the absolute version of a path.") == []
    assert reasons("def f(x):\n    return {key: value for key, value in x.items() if key != '%s'}\n" * 1, "code") == []
    chinese = (
        "委员会在周二开会，讨论图书馆的新规定。大多数成员同意阅览室应该开放到晚上九点，而且逾期还书的罚款太高了。" * 1
    )
    assert reasons(chinese) == []
    with_commands = "用 ls -l --color=auto /usr/share/doc/manpages 列出目录里的文件，再用 grep -rn pattern . 查找。" * 6
    assert "no stop words" not in reasons(with_commands)
    assert reasons("Wait for it ... and then read more of the same book, said the teacher of the class.") == []


def test_features_by_their_definition() -> None:
    text = "The cat sat on the mat.\nThe cat sat on the mat.\n" + "\n".join(f"Line {i} here" for i in range(10))
    values = dict(zip(FEATURES, measure(document(text)), strict=True))
    assert values["num_chars"] == len(text)
    assert values["num_words"] == 12 + 30
    assert values["digit_fraction"] == pytest.approx(10 / len(text))
    assert values["symbol_fraction"] == 0
    counts = [text.count(char) for char in set(text)]
    entropy = -sum(count / len(text) * np.log2(count / len(text)) for count in counts)
    assert values["char_entropy"] == pytest.approx(entropy)
    lines = text.split("\n")
    assert values["duplicate_line_fraction"] == pytest.approx(len(lines[0]) / sum(map(len, lines)))
    umlauts = dict(zip(FEATURES, measure(document(text + " äöü €")), strict=True))
    assert umlauts["symbol_fraction"] == pytest.approx(1 / (len(text) + 6))


def test_limits_from_quantiles_and_from_the_user() -> None:
    rng = np.random.default_rng(0)
    features = np.abs(rng.normal(10, 1, (1000, len(FEATURES)))).astype(np.float32)
    features[:, FEATURES.index("num_words")] = 100
    fractions = [number for number, name in enumerate(FEATURES) if name.endswith("fraction")]
    features[:, fractions] /= 100
    features[:, FEATURES.index("char_entropy")] /= 2
    config = QualityConfig(thresholds="auto", limits={"prose.max_symbol_fraction": 3.0})
    limits = limits_by_kind(config, {"prose": lambda number: features[:, number]})["prose"]
    middle, high = np.quantile(features[:, FEATURES.index("digit_fraction")], [0.5, 0.99])
    assert limits["max_digit_fraction"] == pytest.approx(high + 0.5 * (high - middle), rel=1e-5)
    assert limits["max_symbol_fraction"] == 3.0
    assert limits["min_num_chars"] == 20, "lengths keep their limits"
    assert limits["max_digit_fraction"] < 0.5, "the fixed limit"
    dropped = sum(violates.mean() for violates, _, feature, _ in judge(features, limits) if feature == "char_entropy")
    assert dropped < 0.01


def test_automatic_limits_only_tighten_and_can_be_violated() -> None:
    """On a dirty corpus the quantiles lie beyond what a feature can be."""
    features = np.random.default_rng(0).uniform(0, 1, (1000, len(FEATURES))).astype(np.float32)
    features[:, FEATURES.index("num_words")] = 100
    fixed = limits_by_kind(QualityConfig(), {})["prose"]
    limits = limits_by_kind(QualityConfig(thresholds="auto"), {"prose": lambda number: features[:, number]})["prose"]
    for name, value in limits.items():
        if name in fixed:
            assert value <= fixed[name] if name.startswith("max_") else value >= fixed[name], name
        if name.endswith("_fraction"):
            assert 0 < value < 1, name
    assert limits["max_duplicate_line_fraction"] == fixed["max_duplicate_line_fraction"] == 0.3
    assert limits["min_compression_ratio"] == fixed["min_compression_ratio"] == 0.1


def test_languages() -> None:
    config = QualityConfig(languages=("en", "de"))
    assert has_language(document(PROSE), config)
    assert not has_language(
        document("Le comité s'est réuni mardi pour discuter des nouvelles règles de la ville."), config
    )
    assert has_language(document("xyz = 1", kind="code"), config)


LOREM = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore "
    "magna aliqua. Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo "
    "consequat. Duis aute irure dolor in reprehenderit in voluptate velit esse cillum dolore eu fugiat nulla pariatur. "
    "Excepteur sint occaecat cupidatat non proident, sunt in culpa qui officia deserunt mollit anim id est laborum."
)
LOG = "Jan 12 03:14:{0:02} host7 sshd[43{0}]: session of the user opened from 10.0.7.{0}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" ".join(random.Random(1).sample(PROSE.split(), PROSE.count(" ") + 1)), "words out of order"),
        ("\n".join(sorted({word.lower() for word in re.findall(r"\w+", PROSE)})), "word list"),
        ("\n".join(LOG.format(number) for number in range(10, 30)), "log or records"),
        ("503 Service Unavailable\n\nThe server is busy.\nPlease come back later.", "error page"),
        (PROSE.replace("o", "0").replace("i", "1"), "broken words"),
        (LOREM, "no stop words"),
    ],
)  # fmt: skip
def test_signs_of_text_that_is_no_prose(text: str, reason: str) -> None:
    assert reason in reasons(text)


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "The committee met on Tuesday.",
        "ich bin in einer der Städte gewesen, die im Westen liegen.",
        "Paid 3 of 14 invoices on 12 May 2021, 2 more in June, and the rest of them in the winter.",
        "Use utf8 or base64 for the x86 machines in room 4b, and mp3 or mp4 files for the others.",
        "The page may say 404 Not Found, or 500 Internal Server Error, when the server is not well. " * 2,
        "委员会在 2021 年 3 月 4 日开会，讨论图书馆的新规定。用 utf8 编码。",
    ],
)
def test_prose_with_some_of_the_signs_stays(text: str) -> None:
    assert not reasons(text)


@pytest.mark.parametrize("text", [
    "mmittee met on Tuesday to dis", "e members agreed that the reading room (which sh", "The vote is planned for a qu",
])  # fmt: skip
def test_fragments_are_dropped(text: str) -> None:
    assert reasons(text) == ["fragment"]
    assert not reasons(text, limits={"max_cut_end_fraction": 1.0})


@pytest.mark.parametrize("text", [
    "anyone knows when they met?", "The committee met on Tuesday", "the fog comes\non little cat feet", PROSE[3:-1],
    "for name in os.listdir(folder):", "blue and white",
])  # fmt: skip
def test_texts_with_ends_of_their_own_stay(text: str) -> None:
    assert "fragment" not in reasons(text)


@pytest.mark.parametrize(("num_cut", "num_kept"), [(3, 12), (24, 36)])
def test_ends_say_nothing_where_most_texts_have_them(tmp_path: Path, num_cut: int, num_kept: int) -> None:
    cut = [document(f"yes we met there in room {n} again", id=f"c{n}") for n in range(num_cut)]
    whole = [document(f"We met there in room {n} again.", id=f"w{n}") for n in range(12)]
    clean_documents(iter([*cut, *whole]), [Quality(QualityConfig())], tmp_path, SilentProgress())
    assert len(list(read_kept(tmp_path))) == num_kept


WORDS = sorted({word.lower() for word in re.findall(r"\w{3,}", PROSE + LOREM)}, key=len)
SCAN = PROSE.replace("the ", "tbe ").replace("and", "ancl").replace("in ", "ln ").replace("for", "f0r")


@pytest.mark.parametrize(("text", "reason"), [
    (", ".join(WORDS), "word list"), (SCAN, "broken words"),
    ("Oops! That page can't be found.\n\nIt looks like nothing was found at this location.", "error page"),
    ("Access denied\n\nThis site uses a security service to protect itself.\nRay ID: 94b6", "error page"),
    ("Seite nicht gefunden\n\nDie Seite konnte nicht gefunden werden (Fehler 404).\n\nZur Startseite", "error page"),
])  # fmt: skip
def test_lists_scans_and_pages_of_other_makers(text: str, reason: str) -> None:
    assert reason in reasons(text)


@pytest.mark.parametrize("text", [
    "\n".join(f"{n}\t{WORDS[-n].title()}\t{WORDS[n].title()}\tTokarz" for n in range(10, 40)),
    "\n".join(f"[1{n % 10}:00] {('Olcay', 'Mika')[n % 2]}: {('lol', 'ok', 'peki tamam')[n % 3]}" for n in range(40)),
    "\n".join(f"**{('Kansu', 'Acun')[n % 2]}**: {('ok', 'tamam', ':)')[n % 3]}" for n in range(40)),
    "Hence it is finite.\n\\begin{equation}\n  \\int_{0}^{\\infty} \\frac{\\sin(x)}{x} dx = 1\n\\end{equation}\n",
    "The page says Access denied when the login failed. Ask the administrator of the site for a new one.",
])  # fmt: skip
def test_tables_chats_and_formulas_stay(text: str) -> None:
    assert not reasons(text)


def test_code_without_a_kind_is_judged_as_code() -> None:
    lines = ["import os", "", "", "def names(folder):", "    result = []", "    for name in os.listdir(folder):"]
    lines += [f"        if name.endswith('.{n}'):\n            result.append(name)" for n in ("txt", "py", "md")]
    features = np.array([measure(document(text)) for text in ("\n".join(lines), PROSE)], np.float32)
    kinds = np.array([KINDS.index("prose")] * 2, np.int8)
    assert [KINDS[kind] for kind in judged_kinds(features, kinds)] == ["code", "prose"]


@pytest.mark.parametrize(("text", "is_cut"), [
    ("ch provides the buffer slot that the caller asked for.", True),
    ("ts are the most common values of the given data.", True),
    ('". Note that the other argument is left as it was', True),
    ("u should see how they build these boats.", False), ("im going to the market in the old town.", False),
    ("we met at the harbour and walked home.", False), ("ok let us do that tomorrow morning.", False),
    ('"Yes," she said, "but not before noon."', False),
])  # fmt: skip
def test_a_text_of_one_line_that_begins_with_the_end_of_a_word_is_a_fragment(text: str, is_cut: bool) -> None:
    document = Document(id="1", text=text, kind="prose", split="train", source="")
    assert (measure(document)[FEATURES.index("cut_end_fraction")] == 1.0) == is_cut


@given(st.from_regex(features._ERROR_SIGN))
@settings(max_examples=2000, deadline=None, derandomize=True)
def test_a_text_with_a_sign_of_an_error_page_is_searched_for_them(text: str) -> None:
    assert may_have_error_sign(text)


class _NotIterated(dict[str, int]):
    """Known words. To go through all of them for each text takes longer than all other features together."""

    def keys(self) -> Any:
        raise AssertionError("all known words are gone through")

    __iter__ = keys


def test_a_new_word_does_not_go_through_all_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hash_words(["known", "new", "known"])
    monkeypatch.setattr(features, "_cache", _NotIterated(known=int(expected[0])))
    assert hash_words(["known", "new", "known"]).tolist() == expected.tolist()
