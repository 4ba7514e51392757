"""The claim on Hogwild: its verdict, its comparison, and one small run of real processes."""

from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright_claims import hogwild, training_run, workbench
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.experiment import Runner, with_value
from modelwright_claims.judging import judge

SIZE = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=14)


@pytest.fixture
def setting(text_folder) -> Setting:
    return Setting(quick=True, folder=text_folder, progress=SilentProgress())


def comparison(workers: int, *, speed: float, gap: float, uneven: float = 0.0) -> dict[str, list[float]]:
    """uneven: nats by which the gap to the synchronous run of the same time differs between the seeds."""
    arms = {
        hogwild.SINGLE: (3.0, 100.0), "hogwild": (3.0 + gap, 100.0 * speed), "compensated": (3.0, 90.0),
        "synchronous": (2.9, 90.0 * workers), hogwild.SYNCHRONOUS_IN_TIME: (3.0, 90.0 * workers),
    }  # fmt: skip
    samples: dict[str, list[float]] = {}
    for arm, (loss, pace) in arms.items():
        more = uneven if arm == hogwild.SYNCHRONOUS_IN_TIME else 0.0
        values = {"heldout_loss": [loss, loss + 0.01 + more], "tokens_per_s": [pace] * 2, "staleness": [0.9] * 2}
        samples |= {f"{arm}, {workers} workers, {what}": of for what, of in values.items()}
    return samples


def verdict(*comparisons: dict[str, list[float]]) -> Verdict:
    samples = {name: values for one in comparisons for name, values in one.items()}
    return judge(hogwild.CLAIM, Measurement(samples=samples, conditions={"cores": 2}))


def test_it_is_met_only_where_the_published_number_of_workers_was_measured():
    two, eight = comparison(2, speed=1.8, gap=0.01), comparison(8, speed=6.9, gap=0.01)
    assert verdict(two).line.startswith("cannot be tested here: 8 workers need 16 cores, there are 2")
    assert verdict(two, eight).line.startswith("met: 2 workers: 1.80x one process (target 1.70x)")
    uneven = comparison(8, speed=6.9, gap=0.01, uneven=0.01)
    assert verdict(two, uneven).line.startswith(
        "short: 8 workers: loss above synchronous at equal time 0.005 nats (upper"
    )
    assert verdict(two, comparison(8, speed=6.7, gap=0.0)).line.startswith("short")


def test_two_workers_suffice_to_fall_short_of_it():
    assert verdict(comparison(2, speed=1.6, gap=0.0)).line.startswith("short")
    assert verdict(comparison(2, speed=1.9, gap=0.03)).line.startswith("short")


def test_figures_are_paired_by_seed():
    figures = verdict(comparison(2, speed=1.8, gap=0.05)).figures
    assert figures["speed over one process, 2 workers"].value == pytest.approx(1.8)
    assert figures["speed over synchronous, 2 workers"].value == pytest.approx(1.0)
    gap = figures["loss above synchronous at equal tokens, hogwild, 2 workers"]
    assert gap.value == pytest.approx(0.15)
    assert gap.spread == pytest.approx(0.0, abs=1e-9)


def test_times_leave_the_beginning_out():
    steps = {"ended_s": [0.0, 50.0, 51.0, 52.5], "num_tokens": [10.0, 20.0, 30.0, 40.0]}
    outcome = training_run.Outcome(heldout_loss=2.0, seconds=60.0, steps={**steps, "staleness": [0.0, 1.0, 1.0, 2.0]})
    expected = {"heldout_loss": 2.0, "tokens_per_s": 40 / 1.5, "step_s": 1.5, "staleness": 1.0}
    assert hogwild.whole_run(outcome) == expected
    assert hogwild.whole_run(replace(outcome, steps=steps)) == expected | {"staleness": 0.0}


@pytest.mark.usefixtures("forked_ranks")
def test_two_real_workers(setting):
    run = with_value(hogwild.variant(SIZE, 2, "hogwild"), "async_updates.delay_compensation", 256.0)
    found = hogwild.whole_run(training_run.execute(setting, run))
    assert 0 < found["heldout_loss"] < 5
    assert found["tokens_per_s"] > 0
    assert 0 <= found["staleness"] <= 1.1


def test_the_methods_are_tuned_apart_and_the_synchronous_one_gets_as_much_time(setting, monkeypatch):
    """Hogwild's steps take twice as long; each method has another best rate."""
    made: list[training_run.Run] = []

    def all_runs(self, runs, *, at_once=1):
        made.extend(runs)
        return [pretended(run) for run in runs]

    def pretended(run: training_run.Run) -> training_run.Outcome:
        asynchronous = run.settings["async_updates"]
        best = 1e-3 if asynchronous["mode"] == "hogwild" else 2e-3
        loss = abs(run.size.learning_rate - best) + abs(asynchronous.get("delay_compensation", 0.0) - 2560.0)
        pace = 2.0 if asynchronous["mode"] == "hogwild" else 1.0
        steps = {"ended_s": [pace * step for step in range(20)], "num_tokens": [1.0] * 20}
        return training_run.Outcome(heldout_loss=loss, seconds=1.0, steps=steps)

    monkeypatch.setattr(Runner, "all", all_runs)
    monkeypatch.setattr(Runner, "timed", all_runs)
    size = replace(SIZE, num_steps=20)
    found = hogwild.compare(replace(setting, quick=False), size, workers=2)
    rates = {"hogwild": 1e-3, "synchronous": 2e-3, "compensated": 1e-3}
    expected = {f"rate, {method}, 2 workers": rate for method, rate in rates.items()}
    assert found.conditions == expected | {"strength of compensation, 2 workers": 2560.0}
    assert {run.heldout for run in made if run.seed == hogwild.TUNING_SEED} == {"validation"}
    in_time = [run for run in made if run.size.num_steps == 40]
    assert [(run.seed, run.size.learning_rate, run.processes.count) for run in in_time] == [
        (seed, 2e-3, 2) for seed in range(hogwild.FIRST_SEED, hogwild.FIRST_SEED + 5)
    ]
    alone = [run for run in made if run.processes.count == 1]
    assert {run.size.learning_rate for run in alone} == {2e-3}
    paces = zip(*(found.samples[f"{arm}, 2 workers, tokens_per_s"] for arm in ("hogwild", hogwild.SINGLE)), strict=True)
    assert [own / alone for own, alone in paces] == [0.5] * 5
