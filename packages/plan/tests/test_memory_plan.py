"""Traces of the loop's step on fake tensors against real ones and real peaks; the plan; its pictures."""

import json
import os
import shutil
import sys
from dataclasses import replace
from functools import cache

import pytest

from memory_references import check_arena
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, parse
from modelwright.model.decoder import ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.train.config import TrainConfig
from modelwright.train.memory.trace import Lifetime, MemoryTimeline, plan_arena
from modelwright_claims import memory_probe
from modelwright_claims.memory_probe import Probe
from modelwright_plan import memory_plan
from modelwright_plan.catalog import MODELS
from modelwright_plan.claims import planned_memory
from modelwright_plan.claims.planned_memory import Case
from modelwright_plan.format_memory import Known, heap_lines, plan_text
from modelwright_plan.measured import MeasuredError, heap_gap_text
from modelwright_plan.memory_plan import OffloadTarget, StepPlan, plan_step, trace_step
from refusals import config_error

pytestmark = pytest.mark.slow

SHAPE = ModelConfig(
    vocab_size=512, num_layers=3, model_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=176,
    max_seq_len=128, tie_embeddings=False,
)  # fmt: skip
SMALL = replace(SHAPE, num_layers=2)
LARGER = replace(SHAPE, num_layers=4, vocab_size=1024, model_dim=256, ffn_dim=688, head_dim=64, max_seq_len=256)
SETTINGS = {
    "num_steps": 3,
    "batch_tokens": 512,
    "precision": {"policy": "fp32"},
    "checkpoint_every_minutes": 0,
    "keep_best": False,
    "max_grad_norm": 0.0,
}
SLACK_BYTES = 6 * 2**20
"""What a process takes for itself in a run: it does not grow with the model."""
CASES = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "microbatches": {"gradient_accumulation_steps": 2},
    "in backward": {"optimizer_in_backward": True},
    "recomputed": {"activation_checkpointing": {"mode": "full", "layers_per_segment": 2}},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "on disk": {"activation_checkpointing": {"offload": "disk"}},
    "units on disk": {"activation_checkpointing": {"mode": "full", "layers_per_segment": 2, "offload": "disk"}},
    "int8 states": {"optimizer": "adamw_8bit"},
    "bf16": {"precision": {"policy": "bf16_mixed"}},
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to reset the peak of a process")


def settings(**changes) -> TrainConfig:
    return parse(TrainConfig, {**SETTINGS, **changes}, constants=True)


trace_once = cache(trace_step)
"""A trace depends on its arguments alone, and plans compare many of the same steps, so each step is traced once."""


@pytest.fixture(autouse=True)
def plans_share_traces(monkeypatch):
    monkeypatch.setattr(memory_plan, "trace_step", trace_once)


def trace(train: TrainConfig, *, model: ModelConfig = SHAPE, fake: bool = True) -> MemoryTimeline:
    return trace_once(model, train, NextToken, seq_len=model.max_seq_len, fake=fake)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_live_as_long_as_real_ones(case):
    fake, real = (trace(settings(**CASES[case]), fake=fake) for fake in (True, False))
    assert fake.length == real.length, "reads of a fake tensor's device are no operators"
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    for kind, num_bytes in real.by_kind(real.peak_time).items():
        assert fake.by_kind(fake.peak_time)[kind] == pytest.approx(num_bytes, rel=0.02, abs=8192), kind


def test_what_a_trace_says_of_a_step():
    found = trace(settings())
    states = found.by_kind(0)
    assert states["weights"] == 4 * SHAPE.num_parameters
    assert states["optimizer"] == pytest.approx(8 * SHAPE.num_parameters, rel=0.01)
    assert max(found.live_bytes("gradients")) == 4 * SHAPE.num_parameters
    assert [phase for _, phase in found.phases] == ["forward", "backward", "update"]
    of_loss = 8  # bytes in FP64, which are read together with the gradient norm
    assert max(found.live_bytes("activations")[found.phases[-1][0] + 1 :]) <= of_loss
    assert any("ffn" in one.place for one in found.alive(found.peak_time))
    check_arena(plan_arena(found.of_step))


def test_gradients_do_not_all_live_at_once_where_weights_are_updated_in_backward():
    within = trace(settings(optimizer_in_backward=True))
    largest = 4 * SHAPE.vocab_size * SHAPE.model_dim
    assert max(within.live_bytes("gradients")) < largest + 4 * 2 * SHAPE.block_parameters / SHAPE.num_layers
    assert within.peak_bytes <= trace(settings()).peak_bytes


@pytest.mark.slow
@linux
def test_predicted_peaks_against_real_processes():
    wanted = ("plain", "in backward", "recomputed", "on disk")
    configs = [settings(batch_tokens=512, **CASES[case]) for case in wanted]
    probes = [Probe(model=LARGER, train=config, seq_len=LARGER.max_seq_len, num_steps=2) for config in configs]
    for config, (measured,) in zip(configs, memory_probe.measure_all(probes), strict=True):
        predicted = trace(config, model=LARGER).peak_bytes
        assert predicted == pytest.approx(measured.peak_bytes, rel=0.1, abs=SLACK_BYTES), config


PLANNED = settings(batch_tokens=1024)


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    """The plan of `PLANNED`, which several tests compare with others."""
    return plan_step(SMALL, PLANNED, NextToken, seq_len=128)


@pytest.mark.slow
def test_a_plan_takes_less_memory_for_a_bounded_share_of_compute(plan):
    assert plan.more_flops <= 0.2
    assert plan.saved_share > 0.3
    assert plan.train.optimizer_in_backward
    assert plan.after.peak_bytes == trace(plan.train, model=SMALL).peak_bytes
    assert set(plan.settings(PLANNED)) == {"activation_checkpointing", "optimizer_in_backward"}


@pytest.mark.slow
@linux
@pytest.mark.skipif(
    not shutil.which((os.environ.get("CXX") or "g++").split()[0]), reason="the heap for tensors needs a C++ compiler"
)
def test_a_plan_in_training_as_it_is_takes_what_was_predicted():
    """In the heap that keeps freed memory and has gaps."""
    case = Case(model=planned_memory.base(num_layers=2), rows=4, train={})
    plan = plan_step(case.model, case.settings, NextToken, seq_len=512)
    measured = planned_memory._in_training(case, plan.train)
    assert plan.after.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1)


def test_what_is_said_of_gaps():
    without = MeasuredError(claim="c", processor="P", date="d", num_predictions=2, max_error_percent=6.04)
    gaps = {"as configured": 27.8, "as planned": 73.5}
    said = heap_gap_text([replace(without, heap_gap_percent=gaps), without])
    assert said == "28% for a step as configured, 74% for a step as planned: P, d"
    on_top = "the heap's gaps come on top of these peaks"
    assert heap_lines(Known(gaps=said)) == [f"gaps: {on_top} ({said})"]
    assert heap_lines(Known()) == [f"gaps: {on_top} (how much has not been measured here)"]


def test_nothing_is_computed_again_where_that_frees_nothing():
    """A short row and clipping: gradients and states hold the peak, whatever blocks keep."""
    train = settings(batch_tokens=16, max_grad_norm=1.0)
    plan = plan_step(SMALL, train, NextToken, seq_len=16)
    assert (plan.more_flops, plan.settings(train)) == (0.0, {})
    assert plan.after.peak_bytes == plan.before.peak_bytes


@pytest.mark.slow
def test_a_plan_holds_its_budget_with_as_little_as_that_takes():
    train = settings(batch_tokens=1024)
    lowest = plan_step(SMALL, train, NextToken, seq_len=128, more_compute=1.0)
    before = lowest.before.peak_bytes
    budget = (before + lowest.after.peak_bytes) // 2
    plan = plan_step(SMALL, train, NextToken, seq_len=128, budget_bytes=budget)
    assert plan.after.peak_bytes <= budget
    assert plan.more_flops < lowest.more_flops
    with pytest.raises(ConfigError, match="budget: "):
        plan_step(SMALL, train, NextToken, seq_len=128, budget_bytes=lowest.after.peak_bytes // 2)
    assert plan_step(SMALL, train, NextToken, seq_len=128, budget_bytes=before).train == train


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [{"mode": "full", "layers_per_segment": 2}, {"mode": "selective"}], ids=["full", "selective"]
)
def test_a_plan_is_the_same_whatever_blocks_keep_as_configured(plan, mode):
    train = settings(batch_tokens=1024, activation_checkpointing=mode)
    found = plan_step(SMALL, train, NextToken, seq_len=128)
    assert found.train == plan.train
    assert (found.after.peak_bytes, found.more_flops) == (plan.after.peak_bytes, plan.more_flops)
    assert found.before.peak_bytes == trace(train, model=SMALL).peak_bytes
    assert plan.present_flops == 0.0
    if mode["mode"] == "full":
        assert found.present_flops > found.more_flops
        assert f"more FLOPs ({found.present_flops:.1%} as configured)" in plan_text(found, train, top=3, known=Known())


@pytest.mark.parametrize(("budget", "peak"), [(0, 173), (180, 179), (215, 200), (172, 0)])
def test_peaks_that_do_not_fall_along_the_candidates(monkeypatch, budget, peak):
    """The cheapest that holds, wherever it lies: between dearer ones that do not, too."""
    peaks = [219, 230, 200, 230, 179, 173, 179, 198, 260]
    train = settings(batch_tokens=4096)
    _, candidates = memory_plan._candidates(SMALL, train, 128, memory_plan.NOWHERE)
    known = {one.train: peaks[min(place, len(peaks) - 1)] for place, one in enumerate(candidates)}

    def traced(model, settings, objective_of, *, seq_len):
        block = Lifetime(num_bytes=known.get(settings, 300), birth=0, death=1, kind="temporary")
        return MemoryTimeline(lifetimes=(block,), length=1)

    monkeypatch.setattr(memory_plan, "trace_step", traced)
    plan = lambda: plan_step(SMALL, train, NextToken, seq_len=128, budget_bytes=budget, more_compute=1.0)  # noqa: E731
    if peak:
        assert plan().after.peak_bytes == peak
    else:
        with config_error("budget", match=r"reaches is .* \(173\)"):
            plan()


@pytest.mark.slow
def test_a_plan_lets_activations_wait_elsewhere_where_that_is_cheaper():
    """Cheap moving: nothing is computed again, and the budget is held. Dear moving: nothing is moved."""
    train = settings(batch_tokens=4096)
    before = trace(train, model=SMALL).peak_bytes
    cheap, dear = (OffloadTarget(tier="disk", flops_per_byte=cost) for cost in (1.0, 1e9))
    budget = before * 3 // 4
    moved, again = (
        plan_step(SMALL, train, NextToken, seq_len=128, budget_bytes=budget, elsewhere=one) for one in (cheap, dear)
    )
    assert max(moved.after.peak_bytes, again.after.peak_bytes) <= budget
    assert (moved.more_flops, moved.moved_bytes > 0) == (0.0, True)
    assert (again.more_flops > 0.0, again.moved_bytes) == (True, 0)
    assert moved.settings(train)["activation_checkpointing"]["offload"] == "disk"  # type: ignore[index]


def test_clipping_keeps_updates_after_backward():
    clipped = settings(max_grad_norm=1.0, batch_tokens=128)
    plan = plan_step(replace(SHAPE, num_layers=1), clipped, NextToken, seq_len=128)
    assert not plan.train.optimizer_in_backward


def test_the_number_of_operators_does_not_grow_with_the_width():
    """A trace of a wide model took most of its time for the pieces of a norm."""
    lean = settings(optimizer="adamw_8bit", optimizer_in_backward=True)
    narrow, wide = (replace(SHAPE, model_dim=64 * factor, ffn_dim=176 * factor) for factor in (8, 16))
    assert trace(lean, model=narrow).length == trace(lean, model=wide).length


def test_a_model_that_no_machine_here_could_hold_is_traced():
    """Two layers of the widest published: 6 GB of weights, and nothing of that is allocated."""
    model = replace(MODELS["gpt3-175b"], num_layers=2)
    found = trace_step(model, settings(batch_tokens=2048), NextToken, seq_len=2048)
    assert found.by_kind(0)["weights"] == 4 * model.num_parameters
    assert found.peak_bytes > 16 * model.num_parameters


@pytest.mark.slow
def test_the_picture(plan, capsys, tmp_path):
    text = plan_text(plan, PLANNED, top=3, known=Known())
    assert "as configured: peak" in text
    assert "optimizer_in_backward: True" in text
    assert max(map(len, text.splitlines())) <= 130
    page = tmp_path / "memory.html"
    assert main(["plan", "memory", "tiny", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "activations" in shown
    assert "reused" in shown
    assert page.read_text().count("<svg") == 3


@pytest.mark.slow
def test_the_picture_of_activations_that_wait_elsewhere(capsys):
    moving = ["plan", "memory", "tiny", "--offload", "disk"]
    assert main(moving) == 0
    assert "as configured" in capsys.readouterr().out
    assert main([*moving, "--flops-per-byte", "0.01", "--batch-tokens", "8192"]) == 0
    assert "written and read again in each step" in capsys.readouterr().out


def test_a_picture_that_cannot_be_drawn(capsys, tmp_path):
    assert main(["plan", "memory", "tiny", "--flops-per-byte", "3"]) == 2
    assert "--flops-per-byte: must be above 0 and goes with --offload" in capsys.readouterr().err
    for words, said in (
        (["--max-recompute", "-1"], "--max-recompute: must not be negative"),
        (["--seq-len", "-5"], "--seq-len: must be from 1 to"),
        (["--html", str(tmp_path / "none" / "x.html")], "--html: "),
    ):
        assert main(["plan", "memory", "tiny", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_picture_as_json(capsys):
    assert main(["plan", "memory", "tiny", "--json", "--batch-tokens", "2048", "--top", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["after"]["peak_bytes"] <= data["before"]["peak_bytes"]
    assert len(data["before"]["largest"]) == 2
