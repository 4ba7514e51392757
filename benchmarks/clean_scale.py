"""`modelwright clean` on 10,000, 100,000 and 1,000,000 made-up documents: resident memory of all its processes, CPU
time a document, and how many of the near-duplicates it finds.

    python benchmarks/clean_scale.py                                    about 25 minutes on two cores; 6 GB of disk
    python benchmarks/clean_scale.py --sizes 2000 8000 --folder /tmp    a smoke run
    python benchmarks/clean_scale.py --judge benchmarks/results/clean_scale-MACHINE.json

The documents have about 600 characters: function words and punctuation follow one another as in the language reference
of Python, content words come from 60,000 by Zipf's law, so that documents have hardly any 5-grams in common, as on the
web. A tenth are copies of earlier ones (Jaccard similarity 0.87 to 0.93, each of another original), one in fifty has an
e-mail address, one in fifty is junk. They are written as they are made.

Resident memory is the largest sum over the command and its workers at any of the moments when it was read; memory that
processes share counts in each of them. CPU time is that of all processes. What a document costs more is computed from
the differences between sizes, so that the time to start does not make small corpora look expensive.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import num_usable_cores
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.steps.noise import keyword_spam, menus
from modelwright_claims.results import circumstances, machine_slug

SIZES = (10_000, 100_000, 1_000_000)
RESULTS = Path(__file__).parent / "results"
MOST_BYTES = 2 * 2**30
MOST_GROWTH = 1.3
"""By how much the cost of a document may grow from one size to the next."""
FEWEST_FOUND = 0.99
"""A pair of similarity 0.87 shares a MinHash band with a probability of 0.997."""
MOST_WALL_S = 25 * 60
COPIES, WITH_VALUES, JUNK = 0.1, 0.02, 0.02
NUM_FUNCTION_WORDS, NUM_CONTENT_WORDS = 300, 60_000
WORDS = (60, 140)
FEWEST_WORDS_OF_COPIED = 100
_AT_ONCE = 1000
_WAITING = 2000
"""Originals that may still be copied."""
_READ_EVERY_S = 0.1
_SYLLABLES = re.findall("..", "bacedifoguhajikolumenipaqurosutevawixozubralengansto")


class Prose:
    """Word lists of documents, in blocks of `_AT_ONCE`; equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        paragraphs = [part for text in topics.values() for part in text.split("\n\n") if len(part.split()) >= 20]
        pairs = re.findall(r"([A-Za-z]+)([.,;:]?)(?=\s)", "\n".join(paragraphs))
        counts = Counter(word.lower() for word, _ in pairs)
        common = {word for word, _ in counts.most_common(NUM_FUNCTION_WORDS)}
        self.tokens = [f"{word}{mark}" for word, mark in pairs]
        self.marks = [mark for _, mark in pairs]
        self.is_content = np.array([word.lower() not in common for word, _ in pairs])
        _, self.ids = np.unique([word.lower() for word, _ in pairs], return_inverse=True)
        self.places = np.argsort(self.ids, kind="stable")
        self.counts = np.bincount(self.ids)
        self.starts = np.cumsum(self.counts) - self.counts
        draw = random.Random(seed)
        made = {"".join(draw.choices(_SYLLABLES, k=draw.randrange(3, 6))) for _ in range(2 * NUM_CONTENT_WORDS)}
        self.content = draw.sample(sorted(made), min(NUM_CONTENT_WORDS, len(made)))
        frequencies = 1.0 / np.arange(1, len(self.content) + 1)
        self.cumulated = np.cumsum(frequencies) / frequencies.sum()

    def block(self) -> Iterator[list[str]]:
        """The words of some documents: a walk in which each word is followed as it is somewhere in the text, and then a
        word from the vocabulary in place of each content word.
        """
        lengths = self.rng.integers(*WORDS, _AT_ONCE)
        steps = np.empty((_AT_ONCE, WORDS[1]), np.int64)
        steps[:, 0] = self.rng.integers(0, len(self.ids), _AT_ONCE)
        for step in range(1, WORDS[1]):
            ids = self.ids[steps[:, step - 1]]
            same = self.places[self.starts[ids] + (self.rng.random(_AT_ONCE) * self.counts[ids]).astype(np.int64)]
            steps[:, step] = (same + 1) % len(self.ids)
        drawn = np.searchsorted(self.cumulated, self.rng.random(steps.shape))
        for row, words, length in zip(steps.tolist(), drawn.tolist(), lengths.tolist(), strict=True):
            content = self.is_content[row].tolist()
            yield [
                f"{self.content[word]}{self.marks[place]}" if is_content else self.tokens[place]
                for place, word, is_content in islice(zip(row, words, content, strict=True), length)
            ]


def documents(count: int, seed: int) -> Iterator[tuple[str, int]]:
    """`(text, number of the document that it is a copy of)`, -1 for no copy. No document is copied twice, because its
    copies need not be similar to each other.
    """
    prose, rng = Prose(seed), random.Random(seed)
    originals = deque[tuple[int, list[str]]](maxlen=_WAITING)
    number = 0
    while True:
        for words in prose.block():
            dice = rng.random()
            if originals and dice < COPIES:
                of, copied = originals[rng.randrange(len(originals))]
                originals.remove((of, copied))
                yield " ".join(_changed(copied, prose, rng)) + ".", of
            elif dice < COPIES + JUNK:
                yield (menus if rng.random() < 0.5 else keyword_spam)(" ".join(words), rng), -1
            elif dice < COPIES + JUNK + WITH_VALUES:
                address = f"{rng.choice(prose.content)}.{number}@example-{number % 97}.org"
                yield f"{' '.join(words)}. Write to {address}.", -1
            else:
                if len(words) >= FEWEST_WORDS_OF_COPIED:
                    originals.append((number, words))
                yield " ".join(words) + ".", -1
            number += 1
            if number == count:
                return


def _changed(words: Sequence[str], prose: Prose, rng: random.Random) -> list[str]:
    """The words with one or two others in their midst."""
    place, num_changed = rng.randrange(8, len(words) - 8), rng.randrange(1, 3)
    return [*words[:place], *rng.choices(prose.content, k=num_changed), *words[place + num_changed :]]


def write_documents(path: Path, count: int, seed: int) -> NDArray[np.int32]:
    """Write the documents as JSON lines; returns the numbers of copies and of what they are copies of [copies, 2]."""
    pairs = array("i")
    with open(path, "w", encoding="utf-8") as file:
        for number, (text, of) in enumerate(documents(count, seed)):
            file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
            pairs.extend((number, of) if of >= 0 else ())
    return np.array(pairs, np.int32).reshape(-1, 2)


@dataclass
class Memory:
    """The largest sums over a process and all that descend from it."""

    rss: int = 0
    """Bytes; what several processes share counts in each."""
    pss: int = 0
    """Bytes; what processes share is divided among them."""
    num_processes: int = 0

    def watch(self, pid: int, ended: threading.Event) -> None:
        reads = 0
        while not ended.wait(_READ_EVERY_S):
            processes = list(descendants(pid))
            rss = sum(_rss(one) for one in processes)
            has_grown = rss > 1.05 * self.rss
            self.rss = max(self.rss, rss)
            self.num_processes = max(self.num_processes, len(processes))
            if has_grown or reads % 20 == 0:  # takes much longer
                self.pss = max(self.pss, sum(_pss(one) for one in processes))
            reads += 1


def descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in (int(name) for names in children for name in names):
        yield from descendants(child)


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _pss(pid: int) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return 1024 * int(found[1]) if found else 0
    except OSError:
        return 0


def clean(source: Path, out: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Run the command. Ends the program with its error if it fails."""
    words = [sys.executable, "-m", "modelwright.cli.main", "clean", str(source), "--out", str(out), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    memory, ended, started = Memory(), threading.Event(), time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        watcher = threading.Thread(target=memory.watch, args=(process.pid, ended), daemon=True)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - started
        ended.set()
        watcher.join()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(errors.read().decode(errors="replace")[-3000:])
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, **asdict(memory)}


def measure(count: int, folder: Path, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """One size."""
    source, out = folder / "documents.jsonl", folder / "cleaned"
    pairs = write_documents(source, count, seed)
    run = clean(source, out, settings)
    report = json.loads((out / "report.json").read_text())
    kept = sum(entry["documents"] for splits in report["kept"].values() for entry in splits.values())
    size = {"documents": count, "bytes": source.stat().st_size, "kept": kept}
    found = found_duplicates(out, count, pairs)
    source.unlink()
    shutil.rmtree(out)
    return {**size, **found, **run}


def found_duplicates(out: Path, count: int, pairs: NDArray[np.int32]) -> dict[str, int]:
    """pairs: of documents that reached the step duplicates; found: those of which it dropped one; false: documents that
    it dropped without being in a pair.
    """
    is_duplicate, is_other = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for entry in read_dropped(out):
        drops = is_duplicate if entry.step == "duplicates" else is_other
        drops[int(entry.document.meta.get("id", entry.document.id).removeprefix("d"))] = True
    pairs_left = pairs[~is_other[pairs].any(axis=1)]
    in_pair = np.zeros(count, np.bool_)
    in_pair[pairs] = True
    found = int(is_duplicate[pairs_left].any(axis=1).sum())
    return {"pairs": len(pairs_left), "found": found, "false": int((is_duplicate & ~in_pair).sum())}


def verdicts(record: Mapping[str, Any]) -> Iterator[str]:
    """What the record says to each part of the target."""
    runs = record["runs"]
    last = runs[-1]
    name = f"{last['documents']:,} documents"
    yield _verdict(last["rss"] <= MOST_BYTES, f"{last['rss'] / 2**20:,.0f} MiB resident at {name}, at most 2,048")
    yield _verdict(last["wall_s"] <= MOST_WALL_S, f"{last['wall_s'] / 60:.1f} minutes for {name}, at most 25")
    costs = list(marginal_costs(runs))
    for (small, large), (cost, more) in zip(pairwise(runs[1:]), pairwise(costs), strict=True):
        text = f"{1e3 * cost:.2f} ms a document up to {small['documents']:,} and {1e3 * more:.2f} ms from there to "
        text += f"{large['documents']:,}: {more / cost:.2f} times, at most {MOST_GROWTH}"
        yield _verdict(more <= MOST_GROWTH * cost, text)
    for run in runs:
        recall = run["found"] / max(1, run["pairs"])
        precision = run["found"] / max(1, run["found"] + run["false"])
        text = f"near-duplicates of {run['documents']:,}: recall {recall:.2%}, precision {precision:.2%}, at least "
        yield _verdict(min(recall, precision) >= FEWEST_FOUND, f"{text}{FEWEST_FOUND:.0%}")


def marginal_costs(runs: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """CPU seconds of each further document, from each size to the next."""
    for small, large in pairwise(runs):
        yield (large["cpu_s"] - small["cpu_s"]) / (large["documents"] - small["documents"])


def _verdict(holds: bool, text: str) -> str:
    return f"{'met' if holds else 'short'}: {text}"


def show(run: Mapping[str, Any]) -> str:
    return (
        f"| {run['documents']:,} | {run['bytes'] / run['documents']:,.0f} | {run['cpu_s']:,.1f} | "
        f"{1e3 * run['cpu_s'] / run['documents']:.2f} | {run['wall_s']:,.1f} | {run['rss'] / 2**20:,.0f} | "
        f"{run['pss'] / 2**20:,.0f} | {run['num_processes']} | {run['kept']:,} | "
        f"{run['found']:,} of {run['pairs']:,}, {run['false']:,} false |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--workers", type=int, default=num_usable_cores())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for documents and results while they are needed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--judge", type=Path, help="print the verdicts of a record and stop")
    given, settings = parser.parse_known_args()
    if given.judge:
        print("\n".join(verdicts(json.loads(given.judge.read_text()))))
        return
    around = circumstances()
    print("| documents | bytes each | CPU s | ms each | wall s | RSS MiB | PSS MiB | processes | kept | duplicates |")
    print(f"|{' --- |' * 10}")
    runs: list[dict[str, Any]] = []
    for count in sorted(given.sizes):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            options = ["--clean.num_workers", str(given.workers), *settings]
            runs.append(measure(count, Path(folder), given.seed, options))
        print(show(runs[-1]), flush=True)
    record = {"benchmark": "clean_scale", "workers": given.workers, "settings": settings, "runs": runs, **around}
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / f"clean_scale-{machine_slug(around['machine'])}.json"
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print("\n".join(verdicts(record)), f"\n{path}")


if __name__ == "__main__":
    main()
