"""A search that is killed with kill -9, again and again, tries what an undisturbed one tries."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import chance_latencies
from modelwright.core.config import digest
from modelwright.core.records import read_records
from modelwright.model.decoder import ModelConfig
from modelwright_search.candidates import Candidates
from rank_processes import start_process
from search_runs import copied, search_in, trials_of, wish

COMMAND = "modelwright.cli.main"


def words_of(run: Path, packed: Path, strategies: Sequence[str], **options: object) -> list[str]:
    """The command line of a search. options: of it, with underscores."""
    space = str(packed.parent / "shapes.yaml")
    given = {"budget": 2, "steps": 4, "repetitions": 0, "max_latency_ms": 1e6, "max_parameters": 10**9, **options}
    named = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["search", str(run), "--space", space, "--strategies", *strategies, *named]


def kill_when(words: Sequence[str], is_time: Callable[[], bool], script: Path | str = COMMAND) -> str:
    """Starts the search, kills it when it is time, and returns its output."""
    started = start_process(script, *words)
    while started.is_alive and not is_time():
        time.sleep(0.002)
    started.process.kill()
    code, _, errors = started.end()
    assert code == -signal.SIGKILL, f"it ended before it was killed: {errors}"
    return errors


def finish(words: Sequence[str], script: Path | str = COMMAND) -> tuple[str, str]:
    """Lets the search finish; returns its standard output and its standard error."""
    code, output, errors = start_process(script, *words).end()
    assert code == 0, errors
    return output, errors


def trains_after(run: Path, num_trials: int) -> Callable[[], bool]:
    """Returns a check that the journal has this number of trials and a further training has begun."""
    trainings = run / "search" / "trainings"
    return lambda: len(trials_of(run)) >= num_trials and any(trainings.glob("*/metrics.jsonl"))


def facts(run: Path, kind: str) -> list[Mapping[str, Any]]:
    """Reads the journal's facts of a kind."""
    return [record for record in read_records(run / "search" / "journal.jsonl") if record["kind"] == kind]


def undisturbed(packed: Path, folder: Path, **changes: Any) -> Path:
    """The run of a search in this process, without a kill."""
    folder.mkdir()
    run = copied(packed, folder)
    search_in(run, wish(packed, **changes))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [("tpe", "random"), ("halving",), ("reinforce",)], ids=" ".join)
def test_the_same_trials(packed: Path, tmp_path: Path, strategies: tuple[str, ...]) -> None:
    expected = trials_of(undisturbed(packed, tmp_path / "whole", strategies=strategies))
    run = copied(packed, tmp_path)
    words = words_of(run, packed, strategies)
    for num_trials in (1, len(expected) - 2):
        kill_when(words, trains_after(run, num_trials))
        assert trials_of(run) == expected[: len(trials_of(run))]
        assert num_trials <= len(trials_of(run)) < len(expected), "it was killed before its end"
    with open(run / "search" / "journal.jsonl", "a") as journal:
        journal.write('{"kind": "trial", "key": "random/9')  # a line that a kill has cut off
    output, _ = finish(words)
    assert "measured again in a fresh engine" in output
    assert trials_of(run) == expected


@pytest.mark.slow
def test_decisions_that_depend_on_measured_latencies_are_not_made_anew(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latencies are chance. A search without a kill that measures what the killed one has in its journal tries the
    same.
    """
    strategies, limit_ms = ("tpe", "random", "reinforce"), chance_latencies.LIMIT_MS
    run, script = copied(packed, tmp_path), Path(chance_latencies.__file__)
    words, before = words_of(run, packed, strategies, max_latency_ms=limit_ms), list[Mapping[str, Any]]()
    for num_trials in (2, 8):
        kill_when(words, trains_after(run, num_trials), script)
        assert facts(run, "trial")[: len(before)] == before
        before = facts(run, "trial")
    finish(words, script)
    trials = facts(run, "trial")
    assert trials[: len(before)] == before
    measured = {fact["key"]: fact["ms"] for fact in facts(run, "latency")}
    assert len(measured) == len(facts(run, "latency")), "each shape was measured once"
    assert {trial["reason"] for trial in trials} == {"", "latency"}

    def as_measured(self: Candidates, shape: ModelConfig) -> float:
        return measured[digest(shape)]

    monkeypatch.setattr(Candidates, "measure", as_measured)
    whole = undisturbed(packed, tmp_path / "whole", strategies=strategies, max_latency_ms=limit_ms)
    names = ("strategy", "number", "choices", "share", "loss", "cost", "latency_ms", "reason")
    assert [[one[name] for name in names] for one in facts(whole, "trial")] == [
        [one[name] for name in names] for one in trials
    ]
