"""Claims on stable training: the bench on a text of random tokens, and the verdicts."""

import json
import math
import random
from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.data.loader import PackedLoader
from modelwright.objectives.pretrain import Pretrain
from modelwright_claims import adaptive_clipping, dynamic_decay, loss_scaling, workbench
from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Setting

SIZE = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=20)


@pytest.fixture
def setting(tmp_path) -> Setting:
    draw = random.Random(0)
    documents = [[draw.randrange(1, 64) for _ in range(draw.randrange(2, 40))] for _ in range(200)]
    text = {"vocab_size": 64, "eos_id": 0, "train": documents[:180], "heldout": documents[180:]}
    (tmp_path / "text.json").write_text(json.dumps(text))
    return Setting(quick=False, folder=tmp_path, progress=SilentProgress())


def outcome(*curve: tuple[int, float], ended: str = "") -> bench.Outcome:
    return bench.Outcome(curve=curve, losses=(), skipped=(), records=(), ended=ended, wall_s=1.0)


def test_steps_to_a_loss():
    run = outcome((10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0))
    assert run.steps_to(5.0) == 10
    assert run.steps_to(3.5) == 15
    assert run.steps_to(2.5) == pytest.approx(30 + 10 * (1.0 / 1.5))
    assert run.steps_to(1.0) == math.inf
    assert run.final_loss == pytest.approx((3.0 + 3.5 + 2.0) / 3)
    assert outcome((10, 4.0), ended="gave up").final_loss == math.inf


def test_wild_batches_are_wild_in_training_only_and_the_same_every_time(setting):
    text = workbench.prepare_text(setting)
    wild = bench.Wild(every=2, first=1, factor=20.0)
    config = SIZE.train_config(num_steps=6, eval_every_steps=1)
    calm, once, again = (bench.run(setting, text, SIZE, config, seed=1, wild=found) for found in (None, wild, wild))
    assert once.losses == again.losses
    assert once.losses[0] == calm.losses[0]
    assert [loss > 10 * calm.losses[0] for loss in once.losses] == [False, True] * 3
    assert all(loss < 2 * calm.curve[0][1] for _, loss in once.curve)
    rows = workbench.packed_rows(setting, text, seq_len=32, mode="best_fit", split="train")
    plain = Pretrain(PackedLoader(rows, batch_rows=8, seed=0))
    spoiled = bench.WildBatches(plain, wild, 64, seed=0).batches(None, first=1, rank=0, world_size=1)  # pyright: ignore
    batch, untouched = next(spoiled), next(plain.batches(None, first=1, rank=0, world_size=1))  # pyright: ignore
    assert batch.num_targets == untouched.num_targets
    assert not (batch.labels_BT == untouched.labels_BT).all()


def comparison(plain: list[float], main: list[float], rival: list[float] | None = None) -> bench.Comparison:
    """Runs that reach the target at these steps; 0 never. rival: a lower fixed limit, like the plain one without it."""

    def run(step: float) -> bench.Outcome:
        return outcome((1, 9.0), (int(step), 2.0), (500, 2.0)) if step else outcome((1, 9.0), (500, 8.0))

    runs = {"fixed at 1.0": plain, "fixed at 0.3": rival or plain, adaptive_clipping.STUDY.main: main}
    runs |= {arm: plain for arm in adaptive_clipping.STUDY.arms if arm not in runs}
    return bench.Comparison(
        target=2.0,
        rates=dict.fromkeys(runs, 1e-3),
        tuning={arm: [2.0] for arm in runs},
        runs={arm: [run(step) for step in of] for arm, of in runs.items()},
    )


def test_a_gain_must_be_there_among_wild_batches_and_no_loss_in_calm(setting):
    size = workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=500)

    def kind(calm: bench.Comparison, wild: bench.Comparison) -> str:
        found = {"calm": calm, "wild batches": wild}
        return bench.judge(setting, adaptive_clipping.STUDY, size, found, adaptive_clipping.GAIN).kind

    plain = [300.0, 320.0, 280.0]
    same, faster, slower = [301.0, 318.0, 281.0], [200.0, 221.0, 180.0], [400.0, 421.0, 380.0]
    assert kind(comparison(plain, same), comparison(plain, faster)) == "met"
    assert kind(comparison(plain, same), comparison(plain, same)) == "short"
    assert kind(comparison(plain, slower), comparison(plain, faster)) == "short"
    assert kind(comparison(plain, same), comparison(plain, faster, rival=faster)) == "short"
    assert kind(comparison(plain, same), comparison([300.0, 0.0, 280.0], plain)) == "short"


def test_what_never_gets_there_is_counted_and_named(setting):
    found = {"calm": comparison([300.0] * 3, [300.0] * 3), "wild batches": comparison([0.0] * 3, [250.0] * 3)}
    size = workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=500)
    result = bench.judge(setting, adaptive_clipping.STUDY, size, found, 1.1)
    assert result.kind == "met"
    assert "fixed at 1.0 3 of 3 never" in result.reason
    assert "250 steps against 500 of fixed at 1.0 (2.00x, p = 0), 500 of fixed at 0.3" in result.reason
    assert result.samples["steps, fixed at 1.0, wild batches"] == [500] * 3


def test_every_arm_is_a_configuration():
    for study in (adaptive_clipping.STUDY, dynamic_decay.STUDY):
        configs = [SIZE.train_config(**arm) for arm in study.arms.values()]
        assert study.main in study.arms
        assert study.main != study.plain
        assert set(study.rivals) <= set(study.arms) - {study.main, study.plain}
        assert len({str(config) for config in configs}) == len(configs)


def test_underflow_is_seen_without_a_scale_and_not_with_one(setting):
    """Each gradient is a share of the whole batch, which FP16 may not have; 2^24 is too large at once."""
    text = workbench.prepare_text(setting)
    size = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=3)
    found = {}
    for arm in (loss_scaling.NONE, "static 2^15", loss_scaling.STATIC, loss_scaling.FP32):
        found[arm] = loss_scaling.one_run(setting, text, size, loss_scaling.ARMS[arm], seed=1)
    assert found[loss_scaling.FP32].lost == 0.0
    assert found[loss_scaling.NONE].lost > found["static 2^15"].lost
    assert found[loss_scaling.STATIC].skipped == 3
    assert found[loss_scaling.STATIC].stable == 0


def test_loss_scaling_verdict(setting):
    def run(stable: int, lost: float) -> loss_scaling.Run:
        return loss_scaling.Run(stable=stable, skipped=100 - stable, lost=lost, loss=4.0)

    def kind(dynamic: int, none: int, lost: float) -> str:
        runs = {arm: [run(95, 0.0)] * 2 for arm in loss_scaling.ARMS}
        runs[loss_scaling.DYNAMIC] = [run(dynamic, 0.0)] * 2
        runs[loss_scaling.NONE] = [run(none, lost)] * 2
        runs[loss_scaling.STATIC] = [run(0, 1.0)] * 2
        return loss_scaling.judge(setting, SIZE, runs).kind

    assert kind(95, 20, 0.5) == "met"
    assert kind(95, 50, 0.5) == "short"
    assert kind(95, 20, 0.1) == "short"


def test_an_update_that_is_skipped_keeps_nothing_of_its_gradient(setting):
    text, size = workbench.prepare_text(setting), replace(SIZE, num_steps=14)
    found = loss_scaling.one_run(setting, text, size, loss_scaling.ARMS[loss_scaling.DYNAMIC], seed=1)
    assert 0 < found.skipped < 14
    assert found.lost >= found.skipped / 14
    assert found.stable <= 14 - found.skipped
