"""Random Unicode, fuzzed records and every kind of value through `modelwright clean`, without a traceback.

    python benchmarks/clean_fuzz.py --count 100000
    python benchmarks/clean_fuzz.py --count 1000 --clean.quality.thresholds auto
    python benchmarks/clean_fuzz.py --count 20000 --generator foreign      records of Faker and mimesis

Prints the exit status, the counts and any traceback, and exits with 1 if there is one.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NAMES = (
    "text", "id", "kind", "split", "source", "meta", "question", "answer", "messages", "conversations", "prompt",
    "completion", "chosen", "rejected", "instruction", "input", "output", "system", "title",
)  # fmt: skip
_WORDS = ("the", "river", "and", "a", "letter", "of", "our", "teacher", "is", "in", "it", "for", "some", "with", "old")
_PLANES = (
    (0x20, 0x7F), (0xA0, 0x24F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0xFFF), (0x3040, 0x9FFF), (0xD800, 0xDFFF),
    (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0, 0x1F), (0x2000, 0x20FF), (0xE0000, 0xE01FF),
)  # fmt: skip


def unicode_text(rng: random.Random) -> str:
    planes = rng.sample(_PLANES, rng.randrange(1, 5))
    return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(400)))


def digits(rng: random.Random) -> str:
    """Numbers and letters in the shapes of identifiers, cards, telephones and addresses."""
    shapes = ("AA######A", "####-####-####-####", "+## ### #######", "###.###.###.##", "AAA-##-####", "aaa@aaa.aa")
    text = " ".join(rng.choices(shapes, k=12))
    swap = {"A": "ABCGHKXZ", "a": "abcdexyz", "#": "0123456789"}
    return "".join(rng.choice(swap[char]) if char in swap else char for char in text)


def prose(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randrange(120))) + f" {digits(rng)}"


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON has."""
    simple: tuple[Callable[[], Any], ...] = (
        lambda: None, lambda: rng.random() < 0.5, lambda: rng.randrange(-(10**20), 10**20), rng.random,
        lambda: float("inf"), lambda: unicode_text(rng), lambda: prose(rng), lambda: "", lambda: "user",
        lambda: rng.choice(("prose", "code", "qa", "train", "heldout", "open")),
    )  # fmt: skip
    if depth < 3 and rng.random() < 0.25:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and rng.random() < 0.25:
        return {rng.choice((*_NAMES, "role", "content", "from", "value")): value(rng, depth + 1) for _ in range(4)}
    return rng.choice(simple)()


def foreign_records(count: int, seed: int) -> Iterator[bytes]:
    """Lines of records under the fields of all forms, with values of Faker and mimesis; of some, a few bytes are
    changed, removed or repeated.
    """
    from faker import Faker
    from mimesis import Generic, Locale  # pyright: ignore[reportMissingImports]

    from modelwright.data.sources.fields import SIGNIFICANT
    from modelwright.data.sources.forms import FIELDS, FORMS_OF_RECORDS

    rng, names = random.Random(seed), [*FIELDS, *SIGNIFICANT]
    Faker.seed(seed)
    fake, made = Faker(["en_US", "ar_AA", "hi_IN", "th_TH", "he_IL", "ja_JP"]), [Generic(one) for one in Locale]

    def anything(depth: int = 0) -> Any:
        text = rng.choice(made).text
        role, content = rng.choice(("role", "from")), rng.choice(("content", "value"))
        turn: dict[str, Any] = {
            role: rng.choice(("user", "assistant", "human", "gpt", "tool", "model")),
            content: text.sentence(),
        }
        turn[rng.choice(names)] = rng.choice((0, 1, None, "x"))
        made_here = (
            text.text(quantity=3), text.word(), fake.pyfloat(), fake.pybool(), None, fake.pystr(), fake.iso8601(), turn,
            [turn] * rng.randrange(4), fake.pydict(4, allowed_types=[str, int, float, bool]),
            fake.pylist(3, allowed_types=[str]), json.dumps([turn], ensure_ascii=False),
            {rng.choice(names): anything(depth + 1)} if depth < 3 else 0,
        )  # fmt: skip
        return rng.choice(made_here)

    for _ in range(count):
        form = rng.choice(FORMS_OF_RECORDS)
        chosen = [*form.needs, *rng.sample(names, rng.randrange(4))]
        line = json.dumps({name: anything() for name in chosen}, ensure_ascii=rng.random() < 0.5).encode()
        if rng.random() < 0.2:
            at = rng.randrange(len(line))
            line = line[:at] + rng.choice((b"", rng.randbytes(3), line[at : at + 9] * 3)) + line[at + 1 :]
        yield line.replace(b"\n", b" ") + b"\n"


def record(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return json.dumps({"text": unicode_text(rng)})
    if kind == 1:
        return json.dumps({"text": prose(rng), "kind": rng.choice(("prose", "code"))})
    if kind == 2:
        return json.dumps({"question": prose(rng), "answer": unicode_text(rng)}, ensure_ascii=rng.random() < 0.5)
    if kind == 3:
        document = {"id": "x", "text": prose(rng), "kind": "qa", "split": "train", "source": "s", "meta": {}}
        return json.dumps(document | {rng.choice(tuple(document)): value(rng) for _ in range(rng.randrange(3))})
    line = json.dumps({name: value(rng) for name in rng.sample(_NAMES, rng.randrange(1, 8))})
    return line if kind == 4 else line[: rng.randrange(len(line) + 1)].replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generator", choices=("own", "foreign"), default="own")
    given, settings = parser.parse_known_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "records.jsonl"
        with open(source, "wb") as file:
            lines = (f"{record(rng)}\n".encode("utf-8", "replace") for _ in range(given.count))
            file.writelines(foreign_records(given.count, given.seed) if given.generator == "foreign" else lines)
        words = ["clean", str(source), "--out", f"{name}/out", "--data.on_bad_record", "skip", *settings]
        done = subprocess.run([sys.executable, "-m", "modelwright.cli.main", *words], capture_output=True, text=True)
    print(done.stdout)
    failed = done.returncode != 0 or "Traceback" in done.stderr
    print(f"exit status {done.returncode}, {'FAILED' if failed else 'no traceback'}")
    if failed:
        print(done.stderr[-4000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
