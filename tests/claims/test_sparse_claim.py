"""The sparse claim: its verdict from given losses, its stream, and one tiny run of its bench."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.batch import IGNORED
from modelwright.data.pack import PackConfig, pack
from modelwright_claims import sparse_arms as arms
from modelwright_claims import sparse_updates as claim
from modelwright_claims.claim import Setting
from modelwright_claims.sparse_probe import CODE, PROSE, RANDOM, SHUFFLED, Found, Run, execute_all, stream
from modelwright_claims.workbench import Size

SIZE = Size(model_dim=64, num_layers=2, seq_len=32, batch_rows=4, num_steps=6)


def found(loss: float, flops: float) -> Found:
    return Found(losses={"prose": loss, "code": loss}, flops=flops, step_s=1.0)


def outcome(method: float, flops: float, *, baseline: float = 2.2, regime: str = arms.UPDATE) -> arms.Outcome:
    losses = {arms.DENSE: 2.0, arms.METHOD: method, arms.CLEANED: 1.9} | dict.fromkeys(arms.LIMIT_ALONE, 1.99)
    losses |= dict.fromkeys(arms.BASELINES, baseline)
    costs = {arms.DENSE: 1.0, arms.METHOD: flops}
    final = {
        name: [found(loss + noise, costs.get(name, 0.4)) for noise in (0.0, 0.01, 0.02)]
        for name, loss in losses.items()
    }
    return arms.Outcome(regime=regime, rates=dict.fromkeys(losses, 1e-3), final=final)


def judge(given: arms.Outcome, time: float = 0.5, **others: arms.Outcome):
    times = ([0.1 * time] * 3, [0.1] * 3)
    outcomes = {one.regime: one for one in (given, *others.values())}
    return claim.judge(outcomes, times, base=found(2.1, 1.0), size=SIZE, before=SIZE)


def test_met_needs_flops_time_loss_and_every_baseline():
    met = judge(outcome(2.005, 0.39))
    assert met.kind == "met"
    assert met.figures["held-out loss above dense"].value == pytest.approx(0.25, abs=0.01)
    assert met.figures["executed FLOPs, method to dense"].value == pytest.approx(0.39)
    assert "better than every baseline" in met.reason
    assert "a perfect cleaner before dense training would leave -4.98%" in met.reason
    assert "the limit alone, random rows within the limit (0.40 of the FLOPs) -0.50% and -0.50%" in met.reason
    assert judge(outcome(2.005, 0.41)).kind == "short"
    assert judge(outcome(2.005, 0.39), time=0.61).kind == "short"
    assert judge(outcome(2.02, 0.39)).kind == "short"
    beaten = judge(outcome(2.005, 0.39, baseline=2.004))
    assert beaten.kind == "short"
    assert "not worse with p < 0.05: dense, fewer steps, dense, as much time" in beaten.reason
    noisy = outcome(2.005, 0.39)
    noisy.final["random rows"][:] = [found(loss, 0.4) for loss in (2.0, 2.03, 2.4)]  # type: ignore[index]
    assert "p < 0.05: random rows;" in judge(noisy).reason


def test_the_row_says_what_the_method_costs_in_a_clean_stream():
    reason = judge(outcome(1.99, 0.39), clean=outcome(2.02, 0.38, baseline=2.01, regime=arms.CLEAN)).reason
    assert (
        "clean continual update: +1.00% from dense on the new text, +1.00% on both, at 0.38 of the FLOPs "
        "(dense, as much time +0.50% and +0.50%)" in reason
    )


def test_pretraining_names_the_best_form_at_every_budget():
    """A curve: losses fall with the budget, at the smallest the smaller model leads, then columns."""
    losses = {arms.at_budget(form, budget): 2.5 - budget for form in arms.FORMS for budget in arms.BUDGETS}
    losses |= {arms.at_budget("smaller dense", 0.2): 2.2, arms.at_budget("columns", 0.4): 2.06}
    losses |= {arms.at_budget("columns", 0.6): 1.89, arms.DENSE: 2.0}
    final = {name: [found(loss, 1.0)] * 3 for name, loss in losses.items()}
    pretraining = arms.Outcome(regime=arms.PRETRAIN, rates=dict.fromkeys(final, 1e-3), final=final)
    reason = judge(outcome(2.005, 0.39), pretraining=pretraining).reason
    assert reason.endswith(
        "pretraining, best: at 0.2 of the FLOPs smaller dense, +10.00% from dense, at 0.4 of the FLOPs columns, +3.00% "
        "from dense, at 0.6 of the FLOPs columns, -5.50% from dense"
    )


def test_both_texts_count_in_the_proportion_of_the_useful_rows():
    one = Found(losses={"prose": 2.0, "code": 3.0}, flops=1.0, step_s=1.0)
    assert arms.mixed_loss(one, arms.UPDATE) == pytest.approx(2.5)  # a quarter each, beside a half of garbage
    assert arms.mixed_loss(one, arms.CLEAN) == pytest.approx(2.2)
    assert arms.mixed_loss(one, arms.PRETRAIN) == 2.0


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(0)
    for kind, first in (("prose", 1), ("code", 32)):
        for split in ("train", "heldout"):
            documents = [([draw.randrange(first, first + 30) for _ in range(24)], None) for _ in range(120)]
            pack(documents, tmp_path / kind / split, PackConfig(seq_len=32), vocab_size=64, eos_id=0)
    (tmp_path / "vocabulary.json").write_text(json.dumps(64))
    return tmp_path


def make_run(**changes) -> Run:
    run = Run(name="one", regime="update", size=SIZE, seed=1, share_of_code=0.25)
    return replace(run, **changes)


def test_a_place_of_the_stream_depends_on_seed_and_place_alone(folder):
    once, again = stream(folder, make_run()), stream(folder, make_run())
    batches = [once.batch(index) for index in range(6)]
    assert torch.equal(again.batch(4).input_ids_BT, batches[4].input_ids_BT)
    halves = [once.batch(3, rank=rank, world_size=2).input_ids_BT for rank in range(2)]
    assert torch.equal(torch.cat(halves), batches[3].input_ids_BT)
    tokens = torch.cat([batch.input_ids_BT for batch in batches])
    is_code = (tokens[:, :10] >= 32).any(dim=1)
    assert np.array_equal(is_code.numpy(), once.kinds == CODE)
    assert len({tuple(row) for row in tokens.tolist()}) == 24  # nothing comes twice
    other = stream(folder, make_run(seed=2))
    assert not torch.equal(other.batch(0).input_ids_BT, batches[0].input_ids_BT)


def test_garbage_is_shuffled_prose_or_drawn_evenly_and_costs_no_row_of_text_its_place(folder):
    clean = stream(folder, make_run(share_of_code=0.5))
    mixed = stream(folder, make_run(share_of_code=0.25, share_of_garbage=0.5))
    batches = [mixed.batch(index) for index in range(6)]
    halves = [mixed.batch(3, rank=rank, world_size=2).input_ids_BT for rank in range(2)]
    assert torch.equal(torch.cat(halves), batches[3].input_ids_BT)
    tokens = torch.cat([batch.input_ids_BT for batch in batches])
    labels = torch.cat([batch.labels_BT for batch in batches])
    texts = {}
    for kind, loader in clean.sources.items():
        texts[kind] = loader.rows.gather(np.arange(loader.rows.num_rows)).input_ids_BT.tolist()
    assert {PROSE, CODE, SHUFFLED, RANDOM} == set(mixed.kinds.tolist())
    for row, label, kind in zip(tokens.tolist(), labels.tolist(), mixed.kinds, strict=True):
        if kind == PROSE:
            assert row in texts["prose"]
        if kind == CODE:
            assert row in texts["code"]
        if kind == SHUFFLED:
            assert sorted(row) in [sorted(text) for text in texts["prose"]]
            assert row not in texts["prose"]
        if kind == RANDOM:
            assert max(row) >= 32 > min(row)  # of the vocabularies of prose and of code
        if kind in (SHUFFLED, RANDOM):
            assert label == [*row[1:], IGNORED]
    assert len({tuple(row) for row in tokens.tolist()}) == 24


def test_runs_are_made_once_and_say_what_they_executed(folder):
    setting = Setting(quick=True, folder=folder, progress=SilentProgress())
    sparse = {"batch": {"signal": "random", "keep": 0.5}}
    runs = [make_run(keep="base.safetensors"), make_run(name="half", begin="base.safetensors", sparse=sparse)]
    kept = folder / "kept"
    first = [execute_all(folder, [run], setting, kept=kept, processes=1)[0] for run in runs]
    assert first[1].flops == pytest.approx(first[0].flops / 2, rel=0.02)
    assert set(first[0].losses) == {"prose", "code"}
    assert execute_all(folder, runs, setting, kept=kept, processes=1) == first
    (kept / "base.safetensors").unlink()
    again = execute_all(folder, runs, setting, kept=kept, processes=1)
    assert (kept / "base.safetensors").exists()
    assert (again[0].losses, again[1]) == (first[0].losses, first[1])
    timed = execute_all(folder, runs[1:], setting, kept=kept, processes=1, timed=True)
    assert timed[0].losses == first[1].losses
    assert timed[0].step_s != first[1].step_s


@pytest.mark.parametrize("quick", [False, True])
def test_every_arm_runs_at_its_best_rate_and_baselines_at_equal_compute(tmp_path, monkeypatch, quick):
    """The plan of a whole measurement, with runs that only say what they would cost; the rate of 1e-3 is best."""
    made: list[Run] = []

    def cost(run: Run) -> float:
        per_step = (1.0 if not run.sparse else 0.3) * run.size.batch_rows / arms.SIZE.batch_rows
        return run.size.num_steps * per_step * (0.5 if run.size.model_dim < arms.SIZE.model_dim else 1.0)

    def pretend(folder, runs, setting, *, kept, processes, timed=False):
        assert timed == (runs[0].seed >= 900)
        made.extend(runs)
        off = [abs(run.size.learning_rate - 1e-3) for run in runs]
        losses = [dict.fromkeys(("prose", "code"), 2.0 + bad) for bad in off]
        seconds = [(0.62 if run.sparse else 1.0) * run.size.batch_rows / arms.SIZE.batch_rows for run in runs]
        return [Found(losses=one, flops=cost(run), step_s=s) for one, run, s in zip(losses, runs, seconds, strict=True)]

    monkeypatch.setattr(arms, "execute_all", pretend)
    monkeypatch.setattr(arms, "prepare", lambda *args, **kwargs: None)
    result = claim.measure(Setting(quick=quick, folder=tmp_path, progress=SilentProgress()))
    final = [run for run in made if run.regime == arms.UPDATE and run.seed in arms.SEEDS]
    assert {run.size.learning_rate for run in final} == {1e-3}
    num_steps = {run.name: run.size.num_steps for run in final}
    most = num_steps[arms.DENSE]
    assert num_steps["dense, fewer steps"] == num_steps[arms.CLEANED] == round(0.4 * most)
    assert num_steps["dense, as much time"] == round(0.65 * most)
    assert num_steps["dense within the limit"] == num_steps["dense within the limit, as much time"] == most // 2
    rows = {run.name: run.size.batch_rows * run.size.num_steps for run in final}
    assert rows["dense within the limit"] == pytest.approx(rows[arms.DENSE], rel=0.1)  # what there is to read
    assert num_steps["smaller dense"] == round(0.8 * most)
    assert num_steps["random rows"] == num_steps[arms.METHOD] == most
    shares = {run.name: (run.share_of_code, run.share_of_garbage) for run in final}
    assert shares.pop(arms.CLEANED) == (0.5, 0.0)
    assert set(shares.values()) == {(0.25, 0.5)}
    assert {run.begin for run in final if run.name != "smaller dense"} == {"base.safetensors"}
    assert result.kind == ("cannot be tested here" if quick else "short")
    assert result.figures["time of a step, method to dense"].value == pytest.approx(0.62)
    timed = [run.name for run in made if run.seed >= 900]
    assert timed == [arms.METHOD, arms.AS_MUCH_TIME, arms.LIMIT_ALONE[-1]] * arms.NUM_ROUNDS
    if not quick:
        pretraining = {run.name: run for run in made if run.regime == arms.PRETRAIN and run.seed in arms.SEEDS}
        assert len(pretraining) == 1 + len(arms.FORMS) * len(arms.BUDGETS)
        assert pretraining["dense, fewer steps, 0.2 of the FLOPs"].size.num_steps == 160
        assert pretraining["columns, 0.2 of the FLOPs"].size.num_steps == round(160 / 0.3)
        assert pretraining["columns, 0.6 of the FLOPs"].size.num_steps == 800
