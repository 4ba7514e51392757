"""Experiments: tuning inside the grid and on its own split, paired seeds, and runs that are made once."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.config import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright_claims import experiment
from modelwright_claims.claim import Setting
from modelwright_claims.experiment import Experiment, Runner, Tuning, beyond, run_experiment, tune, with_value
from modelwright_claims.training_run import Outcome, Processes, Run
from modelwright_claims.workbench import Size

SIZE = Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=6)
VARIANTS = {
    "low": Run(size=SIZE, settings={"max_grad_norm": 0.1}),
    "high": Run(size=SIZE, settings={"max_grad_norm": 1.0}),
}


class Bench:
    """Pretends to make runs: the best learning rate of a variant is a hundredth of its clip norm."""

    def __init__(self) -> None:
        self.made: list[Run] = []

    def execute(self, setting: Setting, run: Run, *, begin: Path | None = None, keep: Path | None = None) -> Outcome:
        self.made.append(run)
        if keep:
            keep.write_text(str(run.seed))
        started = f"from {begin.read_text()}" if begin else ""
        off = abs(math.log(run.size.learning_rate / (0.01 * run.settings["max_grad_norm"])))
        return Outcome(heldout_loss=off + run.seed / 1000, seconds=float(len(self.made)), diverged=started)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(quick=False, folder=tmp_path, progress=SilentProgress(), kept=tmp_path / "kept")


def test_each_variant_is_tuned_on_the_validation_split_and_reported_on_the_test_split(setting, bench):
    tuning = Tuning(values=(1e-3, 2e-3, 4e-3), seeds=(7, 8))
    found = run_experiment(setting, Experiment(variants=VARIANTS, seeds=(1, 2), tuning=tuning), bench.execute)
    assert (found.best("low"), found.best("high")) == (1e-3, 8e-3)
    assert {name: run.size.learning_rate for name, run in found.tuned.items()} == {"low": 1e-3, "high": 8e-3}
    assert found.losses("low") == pytest.approx([0.001, 0.002])
    tuned, reported = ([run for run in bench.made if run.heldout == split] for split in ("validation", "test"))
    assert {run.seed for run in tuned} == {7, 8}
    assert {run.seed for run in reported} == {1, 2}
    assert len(reported) == 4
    assert found.tuning["low"][1e-3] == pytest.approx(0.0075)


def test_a_seed_that_was_tuned_on_cannot_be_reported():
    with pytest.raises(ValueError, match=r"seeds \[7\] are tuned on"):
        Experiment(variants=VARIANTS, seeds=(6, 7), tuning=Tuning(values=(1e-3,), seeds=(7,)))


def test_the_best_value_lies_inside_the_grid(setting, bench):
    grids = tune(Runner(setting, bench.execute), VARIANTS, Tuning(values=(1e-3, 2e-3, 4e-3), seeds=(7,)))
    assert list(grids["low"]) == [5e-4, 1e-3, 2e-3, 4e-3]
    assert list(grids["high"]) == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert beyond({1e-3: 1.0}) == []
    assert beyond({1e-3: 1.0, 3e-3: 0.5, 9e-3: 0.7}) == []
    assert beyond({1e-3: 1.0, 3e-3: 0.5}) == [9e-3]
    assert beyond({1e-3: 0.1, 2e-3: math.inf}) == [5e-4]


def test_a_grid_that_never_holds_the_best_value_is_an_error(setting, bench):
    with pytest.raises(ModelwrightError, match="low: the best learning_rate is still at the edge of"):
        tune(Runner(setting, bench.execute), VARIANTS, Tuning(values=(8.0, 8.8), seeds=(7,)))


def test_a_run_that_gives_no_number_is_the_worst(setting, bench):
    def execute(setting, run, **weights):
        outcome = bench.execute(setting, run, **weights)
        return replace(outcome, heldout_loss=math.nan) if run.size.learning_rate > 3e-3 else outcome

    grids = tune(Runner(setting, execute), VARIANTS, Tuning(values=(1e-3, 2e-3, 4e-3), seeds=(7,)))
    assert grids["high"] == {1e-3: pytest.approx(2.309, abs=1e-3), 2e-3: pytest.approx(1.616, abs=1e-3), 4e-3: math.inf}


def test_a_setting_of_the_training_config_can_be_tuned():
    run = Run(size=SIZE, settings={"async_updates": {"mode": "hogwild"}})
    other = with_value(run, "async_updates.delay_compensation", 2.0)
    assert other.settings == {"async_updates": {"mode": "hogwild", "delay_compensation": 2.0}}
    assert run.settings == {"async_updates": {"mode": "hogwild"}}
    assert other.train_config().async_updates.delay_compensation == 2.0


def test_a_later_call_makes_only_what_is_missing(setting, bench):
    run_experiment(setting, Experiment(variants=VARIANTS, seeds=(1, 2)), bench.execute)
    assert len(bench.made) == 4
    found = run_experiment(setting, Experiment(variants=VARIANTS, seeds=(1, 2, 3)), bench.execute)
    assert [run.seed for run in bench.made[4:]] == [3, 3]
    assert [len(of) for of in found.runs.values()] == [3, 3]


def test_what_is_compared_by_time_is_made_side_by_side(setting, bench):
    runner = Runner(setting, bench.execute)
    runs = list(VARIANTS.values())
    runner.all(runs[:1])
    assert [outcome.seconds for outcome in runner.timed(runs)] == [2.0, 3.0]  # the first one again
    assert [outcome.seconds for outcome in runner.timed(runs)] == [2.0, 3.0]


def test_the_weights_that_runs_start_from_are_made_first_and_once(setting, bench):
    base = replace(VARIANTS["low"], seed=5)
    later = [replace(run, start_from=base) for run in VARIANTS.values()]
    runner = Runner(setting, bench.execute)
    outcomes = runner.all([*later, base])
    assert [outcome.diverged for outcome in outcomes] == ["from 5", "from 5", ""]
    assert bench.made == [base, *later]
    runner.weights(base).unlink()
    runner.all([*later, base])
    assert len(bench.made) == 3  # nothing needs them
    for number, make in enumerate((runner.all, runner.timed)):
        runner.weights(base).unlink(missing_ok=True)
        made = bench.made[:]
        make([replace(later[0], seed=9 + number)])
        assert bench.made[len(made) :] == [base, replace(later[0], seed=9 + number)]


def test_quick_measurements_keep_nothing_and_other_sources_make_everything_again(setting, bench, monkeypatch):
    quick = replace(setting, quick=True)
    assert not Runner(quick, bench.execute).cache.folder.is_relative_to(setting.kept)
    Runner(setting, bench.execute).all([VARIANTS["low"]])
    monkeypatch.setattr(experiment, "setup_digest", lambda modules: "other")
    Runner(setting, bench.execute).all([VARIANTS["low"]])
    assert len(bench.made) == 2


def test_runs_at_the_same_time_need_processes_of_their_own(setting, bench, monkeypatch):
    prepared = []
    monkeypatch.setattr(experiment, "prepare", lambda setting, run: prepared.append(run))
    with pytest.raises(ValueError, match="processes of their own"):
        Runner(setting, bench.execute).all(list(VARIANTS.values()), at_once=2)
    apart = [replace(run, processes=Processes(threads=1)) for run in VARIANTS.values()]
    assert len(Runner(setting, bench.execute).all(apart, at_once=2)) == 2
    assert prepared == apart
