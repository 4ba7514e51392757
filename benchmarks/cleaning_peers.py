"""Cleaning beside its peers on the same documents and the same machine, one core each: near-duplicates beside datatrove
and datasketch, personal data beside presidio, quality filters beside datatrove.

    python -m venv ENV && ENV/bin/pip install "datatrove[processing]" spacy datasketch presidio-analyzer
    python benchmarks/cleaning_peers.py --peers ENV/bin/python
    python benchmarks/cleaning_peers.py --peers ENV/bin/python --quick
    python benchmarks/cleaning_peers.py --judge benchmarks/results/cleaning_peers-MACHINE.json

The target: twice the documents per CPU-second of each peer at equal or better recall and precision; near-duplicates at
a Jaccard similarity of 0.85 with both at least 0.99; personal data with both at least 0.95. Misses are in the record.

Near-duplicates: prose of this machine's libraries, half of the texts with a copy in which words are replaced, at seven
similarities from 0.6 to 0.98. All pairs of at least 0.85 are known from an exact comparison of the sets of word
5-grams. A pair is found if one of both is dropped; a dropped text is right if it is in a pair. Ours reads, decides
and writes a cleaned folder; datatrove writes signatures and clusters; datasketch only keeps them in memory.

Personal data: `personal_data.py`, sentences in eight languages with values of `faker` in eight locales, and hard
negatives. Presidio has a blank spaCy model, so that its patterns are measured: its models for names come from no
package index, and names are no kind of ours.

Quality: the labeled texts of `quality_sets.py`; recall is the share of bad texts that are dropped, precision the share
of bad texts among the dropped ones. Ours again reads, decides and writes; the filters of datatrove only filter.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.features import split_words
from modelwright.data.clean.fingerprints import SHINGLE_WORDS, DuplicatesConfig
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.steps.duplicates import Duplicates
from modelwright.data.document import Document
from modelwright_claims.cleaning_scores import COPIES, clean_texts, document_of, spoil
from modelwright_claims.results import circumstances, machine_slug
from personal_data import run_modelwright, run_presidio, score, wrong
from personal_data_set import labeled, negatives
from quality_sets import HALVES, dropped, dropped_by_datatrove
from quality_sets import labelled as labeled_texts

RESULTS = Path(__file__).parent / "results"
OURS = "modelwright"
NEAR, PERSONAL, QUALITY = "near-duplicates", "personal data", "quality"
FEWEST: Mapping[str, float] = {NEAR: 0.99, PERSONAL: 0.95, QUALITY: 0.0}
"""Recall and precision of ours."""
SPEED = 2.0
MIN_JACCARD = 0.85
SHARE_COPIED = 0.5
_NEAR_PEERS = ("datatrove", "datatrove-0.85", "datasketch", "datasketch-verified")
_FILTERS: Mapping[str, Sequence[str]] = {
    "datatrove, all filters": (),
    "datatrove, Gopher": ("gopher repetition", "gopher quality"),
    "datatrove, C4": ("c4",),
    "datatrove, FineWeb": ("fineweb",),
}
_JUDGES = ("quality", "noise")
"""Steps of ours that do what the filters do; the step format would repair encodings as well."""
_PEERS_NEAR = Path(__file__).with_name("near_duplicate_peers.py")

Row = dict[str, Any]
"""Recall, precision and documents per CPU-second of one tool: of one run, or the median of `runs`."""


def near_duplicates(python: Path, most: int) -> dict[str, Row]:
    spoiled = list(spoil(clean_texts(("stdlib",), most), SHARE_COPIED, 1, forms=COPIES))
    random.Random(0).shuffle(spoiled)
    texts = [text for text, _ in spoiled]
    pairs = true_pairs([word_5_grams(text) for text in texts], MIN_JACCARD)
    in_pair = {number for pair in pairs for number in pair}

    def row(numbers: set[int], cpu_s: float) -> Row:
        found = sum(first in numbers or second in numbers for first, second in pairs)
        return {
            "recall": found / len(pairs),
            "precision": len(numbers & in_pair) / max(1, len(numbers)),
            "documents_per_cpu_s": len(texts) / cpu_s,
            "documents": len(texts),
            "pairs": len(pairs),
            "misses": [texts[first][:200] for first, second in pairs if not numbers & {first, second}],
        }

    rows = {OURS: row(*our_near_duplicates(texts))}
    for name in _NEAR_PEERS:
        command = [str(python), str(_PEERS_NEAR), name]
        answer = _answer(command, json.dumps(texts))
        rows[name] = row(set(answer["dropped"]), answer["cpu_s"])
    return rows


def our_near_duplicates(texts: Sequence[str]) -> tuple[set[int], float]:
    documents = [document_of(str(number), text) for number, text in enumerate(texts)]
    step = Duplicates(DuplicatesConfig(contained="off", min_jaccard=MIN_JACCARD))

    def run(some: Sequence[Document]) -> set[int]:
        with tempfile.TemporaryDirectory() as folder:
            clean_documents(iter(some), [step], Path(folder), SilentProgress())
            return {int(entry.document.id) for entry in read_dropped(Path(folder))}

    run([document_of(str(number), f"Text {number} loads what is needed once.") for number in range(500)])
    started = time.process_time()
    numbers = run(documents)
    return numbers, time.process_time() - started


def word_5_grams(text: str) -> set[tuple[str, ...]]:
    words = split_words(text)
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def true_pairs(sets: Sequence[set[tuple[str, ...]]], least: float) -> list[tuple[int, int]]:
    """All pairs whose Jaccard similarity is at least `least`, exactly. Two such sets have one of each other's rarest
    (1 - least) * size + 1 members in common (the prefix filter of Bayardo et al. 2007, Scaling Up All Pairs Similarity
    Search).
    """
    counts = Counter(member for members in sets for member in members)
    holders, pairs = defaultdict[tuple[str, ...], list[int]](list), list[tuple[int, int]]()
    for number, members in enumerate(sets):
        rarest = sorted(members, key=lambda one: (counts[one], one))[: math.floor((1 - least) * len(members)) + 1]
        for other in sorted({one for member in rarest for one in holders[member]}):
            common = len(members & sets[other])
            if common >= least * (len(members) + len(sets[other]) - common):
                pairs.append((other, number))
        for member in rarest:
            holders[member].append(number)
    return pairs


def personal_data(python: Path, per_kind: int) -> dict[str, Row]:
    examples = labeled("test", per_kind=per_kind) + negatives("test", count=6 * per_kind)
    random.Random(0).shuffle(examples)
    texts, labels = [example.text for example in examples], [example.values for example in examples]
    found, speed = run_modelwright(texts, [example.is_code for example in examples])
    rows = {OURS: _personal_row(score(labels, found), speed, len(texts))}
    rows[OURS]["misses"] = wrong(texts, labels, found)
    for name in ("presidio", "presidio, every country"):
        found_by_presidio, its_speed = run_presidio(python, name, texts)
        rows[name] = _personal_row(score(labels, found_by_presidio), its_speed, len(texts))
    return rows


def _personal_row(scores: Mapping[str, tuple[float, float]], speed: float, count: int) -> Row:
    recall, precision = scores["all"]
    by_kind = {kind: [round(value, 4) for value in of_kind] for kind, of_kind in scores.items()}
    measured = {"recall": recall, "precision": precision, "documents_per_cpu_s": speed, "documents": count}
    return {**measured, "recall and precision by kind": by_kind}


def quality(python: Path, man: Path, count: int) -> dict[str, Row]:
    entries = labeled_texts("test", count, man)
    trusted = [document for _, bad, document in labeled_texts(HALVES[0], count, man) if not bad]
    random.Random(0).shuffle(trusted)
    bad = {document.id for _, is_bad, document in entries if is_bad}

    def row(ids: set[str], cpu_s: float) -> Row:
        kinds = dict.fromkeys(kind for kind, is_bad, _ in entries if is_bad)
        missed = {
            kind: sum(one.id not in ids for name, is_bad, one in entries if is_bad and name == kind) for kind in kinds
        }
        return {
            "recall": len(ids & bad) / len(bad),
            "precision": len(ids & bad) / max(1, len(ids)),
            "documents_per_cpu_s": len(entries) / cpu_s,
            "documents": len(entries),
            "good texts dropped": len(ids - bad) / (len(entries) - len(bad)),
            "missed by kind": {kind: number for kind, number in missed.items() if number},
        }

    short = [(name, bad, replace(one, text=f"{one.id} loads what is needed once.")) for name, bad, one in entries]
    dropped(short, [], only=_JUDGES)
    rows = {OURS: row(*dropped(entries, [], only=_JUDGES))}
    rows[f"{OURS}, with noise"] = row(*dropped(entries, trusted, only=_JUDGES))
    return rows | {name: row(*dropped_by_datatrove(python, entries, *of)) for name, of in _FILTERS.items()}


def _answer(command: Sequence[str], request: str) -> dict[str, Any]:
    """What a tool in the peers' environment says in its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def repeated(measure: Callable[[], dict[str, Row]], repeats: int) -> dict[str, Row]:
    """All tools in turn, `repeats` times; only speeds differ between the runs."""
    rounds = [measure() for _ in range(repeats)]
    speeds = {name: [one[name]["documents_per_cpu_s"] for one in rounds] for name in rounds[0]}
    return {
        name: {**row, "documents_per_cpu_s": statistics.median(speeds[name]), "runs": speeds[name]}
        for name, row in rounds[0].items()
    }


def verdicts(record: Mapping[str, Any]) -> Iterator[str]:
    """What the record says to each part of the target."""
    for task, rows in record["tasks"].items():
        ours = rows[OURS]
        least = FEWEST[task]
        if least:
            holds = min(ours["recall"], ours["precision"]) >= least
            text = f"recall {ours['recall']:.4f} and precision {ours['precision']:.4f}, at least {least}"
            yield _verdict(holds, f"{task}: {text}")
        for name, row in rows.items():
            if name.startswith(OURS):
                continue
            times = ours["documents_per_cpu_s"] / row["documents_per_cpu_s"]
            yield _verdict(times >= SPEED, f"{task}: {times:.2f} times the speed of {name}, at least {SPEED:g}")
            for what in ("recall", "precision"):
                text = f"{what} {ours[what]:.4f}, {name} {row[what]:.4f}"
                yield _verdict(ours[what] >= row[what], f"{task}: {text}")


def _verdict(holds: bool, text: str) -> str:
    return f"{'met' if holds else 'short'}: {text}"


def table(record: Mapping[str, Any]) -> Iterator[str]:
    yield "| task | tool | documents | recall | precision | documents per CPU-second |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for task, rows in record["tasks"].items():
        for name, row in rows.items():
            figures = f"{row['recall']:.4f} | {row['precision']:.4f} | {row['documents_per_cpu_s']:,.0f}"
            yield f"| {task} | {name} | {row['documents']:,} | {figures} |"


def peer_versions(python: Path) -> dict[str, str]:
    names = ("datatrove", "datasketch", "presidio-analyzer", "spacy", "numpy")
    code = "import json, sys; from importlib.metadata import version as of; "
    code += "print(json.dumps({name: of(name) for name in sys.argv[1:]}))"
    return _answer([str(python), "-c", code, *names], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="Python of the environment with the peers")
    parser.add_argument("--man", type=Path, default=Path("/usr/share/man"), help="manual pages, as for quality_sets.py")
    parser.add_argument("--only", nargs="+", choices=(NEAR, PERSONAL, QUALITY), default=(NEAR, PERSONAL, QUALITY))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smoke run, which is not written to the results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--judge", type=Path, help="print the verdicts of a record and stop")
    given = parser.parse_args()
    if given.judge:
        print("\n".join(verdicts(json.loads(given.judge.read_text()))))
        return
    if not given.peers:
        parser.error("--peers: name the Python of an environment with datatrove, datasketch and presidio-analyzer")
    around, started = circumstances(), time.perf_counter()
    measures = {
        NEAR: lambda: near_duplicates(given.peers, 300 if given.quick else 4000),
        PERSONAL: lambda: personal_data(given.peers, 40 if given.quick else 400),
        QUALITY: lambda: quality(given.peers, given.man, 30 if given.quick else 60),
    }
    tasks = {task: repeated(measures[task], 1 if given.quick else given.repeats) for task in given.only}
    record = {"benchmark": "cleaning_peers", "tasks": tasks, "peers": peer_versions(given.peers), **around}
    record["wall_s"] = time.perf_counter() - started
    print("\n".join(table(record)), "\n")
    print("\n".join(verdicts(record)))
    if not given.quick:
        given.results.mkdir(parents=True, exist_ok=True)
        path = given.results / f"cleaning_peers-{machine_slug(around['machine'])}.json"
        write_atomic(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(path)


if __name__ == "__main__":
    main()
