"""What the benchmarks of cleaning take for true is true, and their verdicts follow from their records."""

import random
import subprocess
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from clean_engines import COMMAND_KILLED, RUNS, WORKER_KILLED
from clean_engines import verdicts as engine_verdicts
from clean_scale import clean, documents, found_duplicates, marginal_costs, verdicts, write_documents
from cleaning_peers import FEWEST, MIN_JACCARD, OURS, true_pairs, word_5_grams
from cleaning_peers import verdicts as peer_verdicts
from forked_commands import SPAWNING_POPEN


def similarity(first: str, second: str) -> float:
    one, other = word_5_grams(first), word_5_grams(second)
    return len(one & other) / len(one | other)


@pytest.mark.slow
def test_made_up_documents_are_copied_as_they_say() -> None:
    made = list(islice(documents(3000, seed=3), 3000))
    copies = [(text, of) for text, of in made if of >= 0]
    assert 0.08 * len(made) < len(copies) < 0.12 * len(made)
    assert len({of for _, of in copies}) == len(copies)
    levels = [similarity(text, made[of][0]) for text, of in copies]
    assert 0.86 < min(levels) < 0.9 < max(levels) < 0.95
    others = random.Random(0).sample([text for text, of in made if of < 0], 60)
    assert max(similarity(one, other) for one in others for other in others if one != other) < 0.3
    assert made == list(documents(3000, seed=3))
    assert 500 < np.mean([len(text) for text, _ in made]) < 750


@pytest.mark.slow
def test_scale_counts_what_the_command_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", SPAWNING_POPEN)  # the benchmark calls os.wait4
    pairs = write_documents(tmp_path / "documents.jsonl", 600, seed=5)
    run = clean(tmp_path / "documents.jsonl", tmp_path / "out", ["--clean.num_workers", "1"])
    counts = found_duplicates(tmp_path / "out", 600, pairs)
    assert counts["found"] == counts["pairs"] > 40
    assert counts["false"] == 0
    assert 50 * 2**20 < run["pss"] <= run["rss"] < 2**30
    assert 0 < run["cpu_s"] < 60
    assert found_duplicates(tmp_path / "out", 600, pairs[:0])["false"] == counts["found"]


def test_verdict_on_scale() -> None:
    runs = [
        {
            "documents": count,
            "cpu_s": 10 + cost * count,
            "rss": 2**30,
            "wall_s": 60,
            "pairs": 100,
            "found": 100,
            "false": 0,
        }
        for count, cost in ((10, 0.1), (100, 0.1), (1000, 0.11))
    ]
    assert all(line.startswith("met") for line in verdicts({"runs": runs}))
    assert list(marginal_costs(runs)) == pytest.approx([0.1, 0.1111], abs=1e-3)
    for change in ({"rss": 3 * 2**30}, {"cpu_s": 200.0}, {"found": 90}, {"false": 9}, {"wall_s": 1600}):
        lines = list(verdicts({"runs": [*runs[:2], runs[2] | change]}))
        assert sum(line.startswith("short") for line in lines) == 1, change


def test_verdict_on_engines() -> None:
    def short(name: str, **changes: object) -> int:
        runs = {one: {"sha256": {"text.jsonl": "a"}, "shards_before": 12, "done_again": 0} for one in RUNS}
        runs[name] |= changes
        return sum(line.startswith("short") for line in engine_verdicts({"runs": runs}))

    assert short(WORKER_KILLED) == 0
    assert short(WORKER_KILLED, sha256={"text.jsonl": "b"}) == 1
    assert short(COMMAND_KILLED, done_again=1) == short(COMMAND_KILLED, shards_before=0) == 1


def test_all_true_pairs_are_known() -> None:
    rng = random.Random(1)
    base = [[str(rng.randrange(400)) for _ in range(60)] for _ in range(12)]
    texts = []
    for number in range(80):
        words = list(base[number % 12])
        for _ in range(rng.randrange(3)):
            words[rng.choice((0, 1, 30, 59))] = "x"
        texts.append(" ".join(words))
    sets = [word_5_grams(text) for text in texts]
    expected = {
        (first, second)
        for second in range(len(sets))
        for first in range(second)
        if len(sets[first] & sets[second]) >= MIN_JACCARD * len(sets[first] | sets[second])
    }
    pairs = true_pairs(sets, MIN_JACCARD)
    assert set(pairs) == expected
    assert len(pairs) == len(expected) > 20


def test_verdict_beside_peers() -> None:
    ours = {"recall": 0.995, "precision": 1.0, "documents_per_cpu_s": 200.0}
    peer = {"recall": 0.99, "precision": 0.9, "documents_per_cpu_s": 100.0}

    def short(**changes: float) -> int:
        tasks = {task: {OURS: ours | changes, "peer": peer} for task in FEWEST}
        return sum(line.startswith("short") for line in peer_verdicts({"tasks": tasks}))

    assert short() == 0
    assert short(documents_per_cpu_s=199.0) == 3
    assert short(recall=0.9) == 5, "below the peer three times, and twice below what is wanted"
