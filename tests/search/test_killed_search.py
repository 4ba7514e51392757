"""A search that is killed with kill -9, again and again, tries what an undisturbed one tries."""

import time
from pathlib import Path

from rank_processes import start_process
from search_runs import copied, search_in, trials_of, wish

STRATEGIES = ("tpe", "random")


def kill_while_it_trains(words: list[str], run: Path, num_trials: int) -> None:
    """Kill once so many trials are in the journal and a further training has begun."""
    started = start_process("modelwright.cli.main", *words)
    while started.is_alive:
        if len(trials_of(run)) >= num_trials and list((run / "search" / "trainings").glob("*/metrics.jsonl")):
            started.process.kill()
            break
        time.sleep(0.002)
    started.end()


def test_the_same_trials(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = copied(packed, tmp_path / "whole")
    search_in(whole, wish(packed, strategies=STRATEGIES))
    expected = trials_of(whole)

    run = copied(packed, tmp_path)
    space = str(packed.parent / "shapes.yaml")
    words = ["search", str(run), "--budget", "2", "--steps", "4", "--space", space, "--strategies", *STRATEGIES,
             "--repetitions", "0", "--max-latency-ms", "1e6", "--max-parameters", "1000000000"]  # fmt: skip
    for num_trials in (1, len(expected) - 2):
        kill_while_it_trains(words, run, num_trials)
        assert trials_of(run) == expected[: len(trials_of(run))]
        assert num_trials <= len(trials_of(run)) < len(expected), "it was killed before its end"
    with open(run / "search" / "journal.jsonl", "a") as journal:
        journal.write('{"kind": "trial", "key": "random/9')  # a line that a kill has cut off
    code, output, errors = start_process("modelwright.cli.main", *words).end()
    assert code == 0, errors
    assert "measured again in a fresh engine" in output
    assert trials_of(run) == expected
