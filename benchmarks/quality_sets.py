"""What cleaning drops of labelled text, by kind: good text of machines and people, and nine kinds of bad text.

    python benchmarks/quality_sets.py --man /usr/share/man --count 100
    python benchmarks/quality_sets.py --man /usr/share/man --half development
    python benchmarks/quality_sets.py --man /usr/share/man --set foreign --code /usr/share /usr/lib
    python benchmarks/quality_sets.py --man /usr/share/man --datatrove ENV/bin/python

Good text: sources and docstrings of the standard library, manual pages by language from `--man` (Debian's manpages-de,
-fr, -es, -ja and -zh), chats, tables and short texts. Bad text has generators of its own, not those from which the
noise classifier learns; it is made of the good English text of the same half. Limits may be tuned on the half
`development` only. The column "with noise" has the step noise as well, with the good text of the other half as trusted
text.

datatrove has the quality filters of Gopher, C4 and FineWeb with their defaults, those of its example for FineWeb; what
one of them drops counts. It runs in an environment of its own: `python -m venv ENV && ENV/bin/pip install
"datatrove[processing]" spacy`.
"""

import argparse
import ast
import gzip
import json
import os
import random
import re
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path

from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.fingerprints import DuplicatesConfig
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.steps.noise import NoiseConfig
from modelwright.data.clean.steps.privacy import PrivacyConfig
from modelwright.data.document import Document

HALVES = ("development", "test")
STEPS_THAT_JUDGE = ("format", "quality", "noise")
_NAMES = ("Ann", "Bob", "Chen", "Dora", "Emil", "Fatima")
_LOREM = re.findall(
    r"\w+",
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna "
    "aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea commodo consequat duis "
    "irure in reprehenderit voluptate velit esse cillum fugiat nulla pariatur excepteur sint occaecat cupidatat non",
)
_OFFERS = (
    "cheap",
    "hotel",
    "deals",
    "flights",
    "quotes",
    "best",
    "price",
    "voucher",
    "jackpot",
    "diet",
    "loans",
    "fast",
)
_CONFUSED = str.maketrans({"l": "1", "o": "0", "e": "c", "m": "rn", "i": "!", "a": "@", "s": "5", "t": "f", "d": "cl"})
_STATUS = ("404 Not Found", "403 Forbidden", "500 Internal Server Error", "502 Bad Gateway", "503 Service Unavailable")
_DATATROVE = Path(__file__).with_name("datatrove_filters.py")
_NOT_CODE = {"site-packages", "test", "tests", "encodings", "pydoc_data"}
"""The last two are tables of data."""


def docstrings() -> Iterator[str]:
    """Docstrings of at least 300 characters of the standard library."""
    for path in _sources():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        yield from (text for node in nodes if len(text := ast.get_docstring(node) or "") >= 300)


def code() -> Iterator[str]:
    for path in _sources():
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from (part for start in range(0, len(text) - 500, 4000) if len(part := text[start : start + 3000]) > 500)


def manual(folder: Path, *languages: str) -> Iterator[str]:
    """Plain text of manual pages, without roff requests."""
    for language in languages:
        for path in sorted((folder / language).rglob("*.gz")):
            raw = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
            lines = [re.sub(r'^\.\w+ ?"?|"$', "", line) for line in raw.split("\n") if not re.match(r"^[.']\\\"", line)]
            text = re.sub(r"\\f\(?\w{1,2}|\\[&|^/]|\\\*\(..", "", "\n".join(lines)).replace("\\-", "-").strip()
            if len(text) > 400:
                yield text[:5000]


def chats(sentences: list[str], rng: random.Random) -> Iterator[str]:
    while True:
        people = rng.sample(_NAMES, 2)
        yield "\n".join(f"{people[turn % 2]}: {rng.choice(sentences)}" for turn in range(rng.randrange(6, 16)))


def tables(sentences: list[str], rng: random.Random) -> Iterator[str]:
    while True:
        rows = [f"| {rng.choice(_NAMES)} | {rng.randrange(99)} | {rng.choice(sentences)[:40]} |" for _ in range(10)]
        yield "\n".join(["| name | number | remark |", "| --- | --- | --- |", *rows])


def short(sentences: list[str], rng: random.Random) -> Iterator[str]:
    while True:
        yield " ".join(rng.sample(sentences, rng.randrange(1, 3)))


def log(text: str, rng: random.Random) -> str:
    words = text.split()
    lines = [
        f"{rng.choice(('Jan', 'Feb', 'Mar'))} {rng.randrange(1, 29):2} {rng.randrange(24):02}:{rng.randrange(60):02}:"
        f"{rng.randrange(60):02} host{rng.randrange(9)} {rng.choice(('sshd', 'cron'))}[{rng.randrange(9999)}]: "
        f"{rng.choice(words)} {rng.choice(words)} from 10.0.{rng.randrange(99)}.{rng.randrange(99)}"
        for _ in range(25)
    ]
    return "\n".join(lines)


def word_list(text: str, rng: random.Random) -> str:
    words = sorted({word.lower() for word in re.findall(r"[A-Za-z]{3,}", text)})
    return rng.choice(("\n", ", ", " ")).join(words * (1 + 60 // max(1, len(words))))


def error_page(text: str, rng: random.Random) -> str:
    status = rng.choice(_STATUS)
    address = "/".join(rng.sample(re.findall(r"[a-z]{4,}", text) or ["x"], 1))
    return (
        f"{status}\n\nThe requested URL /{address} was not found on this server or could not be shown.\n"
        f"Please contact the administrator.\n\nApache/2.4.{rng.randrange(60)} (Debian) at {address}.example Port 443"
    )


def lorem(text: str, rng: random.Random) -> str:
    return ". ".join(" ".join(rng.choices(_LOREM, k=rng.randrange(6, 14))).capitalize() for _ in range(10)) + "."


def shuffled(text: str, rng: random.Random) -> str:
    words = text.split()
    return " ".join(rng.sample(words, len(words)))


def scanned(text: str, rng: random.Random) -> str:
    """Characters as a bad scan confuses them."""
    return "".join(char.translate(_CONFUSED) if rng.random() < 0.3 else char for char in text)


def truncated(text: str, rng: random.Random) -> str:
    """A piece cut out at any characters, with nothing that says so."""
    start = rng.randrange(max(1, len(text) - 60))
    return text[start : start + rng.randrange(25, 60)].replace("\n", " ")


def spam(text: str, rng: random.Random) -> str:
    where = ("online", "near me", "2024")
    return " ".join(f"{rng.choice(_OFFERS)} {rng.choice(_OFFERS)} {rng.choice(where)}," for _ in range(60))


def csv_dump(text: str, rng: random.Random) -> str:
    rows = [
        f"{rng.randrange(9**7)},{rng.choice(_NAMES)},{rng.random():.4f},{rng.randrange(9**9)},TRUE,{rng.random():.3f}"
        for _ in range(30)
    ]
    return "\n".join(["id,name,score,account,active,weight", *rows])


BAD: dict[str, Callable[[str, random.Random], str]] = {
    "log": log, "word list": word_list, "error page": error_page, "lorem ipsum": lorem, "shuffled words": shuffled,
    "bad scan": scanned, "truncated": truncated, "keyword spam": spam, "CSV dump": csv_dump,
}  # fmt: skip


def labelled(half: str, count: int, man: Path) -> list[tuple[str, bool, Document]]:
    """`(kind, is bad, document)`; both halves have no text in common."""
    offset = HALVES.index(half)
    rng = random.Random(offset)

    def part(texts: Iterator[str]) -> list[str]:
        chosen = list(dict.fromkeys(texts))[offset::2]
        return random.Random(7).sample(chosen, min(count, len(chosen)))

    english = part(docstrings())
    sentences = [one for text in english for one in re.findall(r"[A-Z][^.\n]{30,120}\.", text)]
    good: dict[str, list[str]] = {"code": part(code()), "code without kind": part(code()), "docstrings": english}
    for name, languages in (("de", ["de"]), ("fr", ["fr"]), ("es", ["es"]), ("ja", ["ja"]), ("zh", ["zh_CN", "zh_TW"])):
        good[f"manual, {name}"] = part(manual(man, *languages))
    for name, generator in (("chat", chats), ("table", tables), ("short", short)):
        texts = generator(sentences, rng)
        good[name] = [next(texts) for _ in range(count)]
    entries = [(kind, False, text) for kind, texts in good.items() for text in texts]
    entries += [(kind, True, make(rng.choice(english), rng)) for kind, make in BAD.items() for _ in range(count)]
    return [
        (
            kind,
            bad,
            Document(id=f"{number}", text=text, kind="code" if kind == "code" else "prose", split="train", source=""),
        )
        for number, (kind, bad, text) in enumerate(entries)
    ]


def dropped(
    entries: list[tuple[str, bool, Document]], trusted: list[Document], *, only: Collection[str] = STEPS_THAT_JUDGE
) -> tuple[set[str], float]:
    """Ids of the documents that the steps named in `only` drop, and the CPU seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        other_half = Path(folder) / "trusted.jsonl"
        other_half.write_text("\n".join(document.to_json() for document in trusted))
        config = CleanConfig(
            noise=NoiseConfig(trusted=(str(other_half),) if trusted else ()),
            duplicates=DuplicatesConfig(near=False, contained="off"), privacy=PrivacyConfig(replace=()),
        )  # fmt: skip
        documents = (document for _, _, document in entries)
        started = time.process_time()
        steps = [step for step in build_steps(config) if step.name in only]
        clean_documents(documents, steps, Path(folder), SilentProgress())
        cpu_s = time.process_time() - started
        return {entry.document.id for entry in read_dropped(Path(folder))}, cpu_s


def dropped_by_datatrove(
    python: Path, entries: list[tuple[str, bool, Document]], *filters: str
) -> tuple[set[str], float]:
    """Ids of the documents that one of datatrove's filters drops, of all or of those named, and the CPU seconds."""
    texts = {document.id: document.text for _, _, document in entries}
    command = [str(python), str(_DATATROVE), *filters]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=json.dumps(texts), stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return set(answer["dropped"]), answer["cpu_s"]


def foreign(count: int, man: Path, code: tuple[Path, ...]) -> list[tuple[str, bool, Document]]:
    """`(kind, is bad, document)` of `foreign_quality_sets.py`."""
    import foreign_quality_sets as sets

    rng = random.Random(3)
    english = [*islice(sets.pages(man, "man1", "man8"), 400)]
    entries = [(kind, False, text) for kind, texts in sets.good(count, man, code, rng).items() for text in texts]
    entries += [(kind, True, make(rng.choice(english), rng)) for kind, make in sets.BAD.items() for _ in range(count)]
    return [
        (kind, bad, Document(id=f"{number}", text=text, kind="prose", split="train", source=""))
        for number, (kind, bad, text) in enumerate(entries)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--man", type=Path, required=True)
    parser.add_argument("--datatrove", type=Path, help="Python of an environment with datatrove")
    parser.add_argument("--count", type=int, default=100, help="documents of each kind")
    parser.add_argument("--half", choices=HALVES, default="test")
    parser.add_argument("--set", choices=("own", "foreign"), default="own")
    parser.add_argument("--code", type=Path, nargs="*", default=[], help="folders with code of the foreign set")
    given = parser.parse_args()
    other = HALVES[1 - HALVES.index(given.half)]
    entries = labelled(given.half, given.count, given.man)
    if given.set == "foreign":
        entries = foreign(given.count, given.man, tuple(given.code))
    trusted = [document for _, bad, document in labelled(other, given.count, given.man) if not bad]
    random.Random(0).shuffle(trusted)
    columns = {"quality drops": dropped(entries, [])[0], "with noise": dropped(entries, trusted)[0]}
    if given.datatrove:
        columns["datatrove"] = dropped_by_datatrove(given.datatrove, entries)[0]
    print(f"| kind | label | documents | {' | '.join(columns)} |\n|{' --- |' * (3 + len(columns))}")
    groups = [(kind, bad) for kind, bad in dict.fromkeys((kind, bad) for kind, bad, _ in entries)]
    for kind, bad in [*groups, ("all", False), ("all", True)]:
        ids = [one.id for name, is_bad, one in entries if is_bad == bad and kind in (name, "all")]
        shares = " | ".join(f"{sum(one in found for one in ids) / len(ids):.1%}" for found in columns.values())
        print(f"| {kind} | {'bad' if bad else 'good'} | {len(ids)} | {shares} |")


def _sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _NOT_CODE & set(path.parts)]


if __name__ == "__main__":
    main()
