"""Weights updated in backward by several processes, through THE loop: in every layout what the same layout does when it
waits for all gradients; norms, clipping, losses that are not finite, and stops.
"""

from typing import Any

import pytest
import torch

from modelwright.core.records import column, read_records
from wired_cases import RARE, Runs, case, ended, losses, values, weights

PLAIN = {**RARE, "max_grad_norm": 0.0, "num_steps": 6}
WITHIN = {**PLAIN, "optimizer_in_backward": True}
BY_LAST_NORM = {**RARE, "max_grad_norm": 0.5, "optimizer_in_backward": True, "num_steps": 8}
"""Stopped after the fifth step: the norm that the sixth is clipped by has to come from the checkpoint."""
TWO = {
    "one-copy": ({}, {}),
    "copies": ({"shared_memory": False}, {}),
    "optimizer": ({"zero_stage": 1}, {}),
    "gradients": ({"zero_stage": 2}, {}),
    "full": ({"zero_stage": 3}, {}),
    "tensor": ({"tensor": 2}, {}),
    "context": ({"context": 2}, {}),
    "microbatches": ({}, {"gradient_accumulation_steps": 2}),
    "microbatches-optimizer": ({"zero_stage": 1}, {"gradient_accumulation_steps": 2}),
    "recomputed": ({}, {"activation_checkpointing": {"mode": "full", "layers_per_segment": 1}}),
    "int8": ({}, {"optimizer": "adamw_8bit"}),
    "lion-full": ({"zero_stage": 3}, {"optimizer": "lion"}),
}
FOUR = {
    "hybrid": ({"zero_stage": 3, "shard_group_size": 2}, {}),
    "copies-tensor": ({"tensor": 2}, {}),
    "full-tensor": ({"zero_stage": 3, "tensor": 2}, {}),
    "full-context": ({"zero_stage": 3, "context": 2}, {}),
}
ALONE = ("one-copy", "copies", "full", "tensor")
"""Layouts in which something goes wrong, or a run is stopped."""


def both_ways(layouts: dict[str, tuple[dict, dict]]) -> list[dict[str, Any]]:
    return [
        case(f"{name}-{way}", settings={**settings, **more}, parallel=layout)
        for name, (layout, more) in layouts.items()
        for way, settings in (("after", PLAIN), ("within", WITHIN))
    ]


def alone(what: str, folder: str = "", *, settings: dict[str, Any], **rest: Any) -> list[dict[str, Any]]:
    return [
        case(f"{name}-{what}", f"{name}-{folder}" if folder else "", settings=settings, parallel=TWO[name][0], **rest)
        for name in ALONE
    ]


CASES = [
    *both_ways(TWO),
    *alone("clipped", settings=BY_LAST_NORM),
    *alone("stopped", "twice", settings=BY_LAST_NORM, mishap={"kind": "stop", "step": 5}),
    *alone("again", "twice", settings=BY_LAST_NORM),
    *alone("nan", settings=WITHIN, mishap={"kind": "nan", "step": 3, "rank": 1}),
    *alone("overflow", settings=WITHIN, mishap={"kind": "overflow", "step": 3, "rank": 1}),
    case("pipeline", settings={**WITHIN, "gradient_accumulation_steps": 2}, parallel={"pipeline": 2}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("two"), CASES)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Runs:
    shape = {"num_kv_heads": 4}
    cases = [{**one, "shape": shape} for one in both_ways(FOUR)]
    return Runs(tmp_path_factory.mktemp("four"), cases, size=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_same_bits_as_after_backward(request, name):
    """But for ZeRO-1 of several microbatches, whose gradients are then summed one by one."""
    size = 4 if name in FOUR else 2
    runs: Runs = request.getfixturevalue("four" if name in FOUR else "runs")
    assert ended(runs, f"{name}-within")["error"] == ""
    for metric, tolerance in (("loss", 0.0), ("grad_norm", 1e-5)):
        within, after = (values(runs, f"{name}-{way}", metric) for way in ("within", "after"))
        rounding = 1e-5 if name == "microbatches-optimizer" else tolerance
        assert within == pytest.approx(after, rel=rounding, abs=0.0)
    for rank in range(size):
        within, after = weights(runs, f"{name}-within", rank), weights(runs, f"{name}-after", rank)
        if name != "microbatches-optimizer":
            assert all(torch.equal(within[key], after[key]) for key in after)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one-copy", "copies", "context"])
@pytest.mark.parametrize("way", ["after", "within"])
def test_a_run_leaves_no_hooks_on_the_model(runs, name, way):
    assert ended(runs, f"{name}-{way}")["num_hooks"] == 0


@pytest.mark.slow
def test_bytes_sent_are_counted(runs):
    """Copies of the weights send gradients; one shared copy sends only sums of a few values."""
    sent = [ended(runs, f"copies-{way}")["bytes_sent"] for way in ("within", "after")]
    assert sent[0] == pytest.approx(sent[1], rel=0.05)
    assert ended(runs, "one-copy-within")["bytes_sent"] < 0.5 * sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_clipping_by_the_last_norm_is_that_of_one_process_and_goes_on_after_a_stop(tiny, tmp_path, runs, name):
    tiny.run(tmp_path, tiny.settings(**BY_LAST_NORM))
    for metric in ("loss", "grad_norm"):
        expected = [value for _, value in column(read_records(tmp_path / "metrics.jsonl"), metric)]
        assert values(runs, f"{name}-clipped", metric) == pytest.approx(expected, rel=1e-3)
    unclipped = losses(runs, f"{name}-within")
    assert losses(runs, f"{name}-clipped")[: len(unclipped)] != unclipped
    assert ended(runs, f"{name}-stopped")["kind"] == "Stopped"
    assert losses(runs, f"{name}-twice") == losses(runs, f"{name}-clipped")
    once, again = weights(runs, f"{name}-clipped"), weights(runs, f"{name}-again", rank=1)
    assert all(torch.equal(once[key], again[key]) for key in once)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(runs, name):
    for rank in range(2):
        found = ended(runs, f"{name}-nan", rank)
        assert (found["error"], found["skipped"]) == ("", [4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all(runs, name):
    for rank in range(2):
        found = ended(runs, f"{name}-overflow", rank)
        assert found["kind"] == "ModelwrightError"
        assert "was not finite after other weights had been updated" in found["error"]


def test_a_pipeline_is_refused(runs):
    assert ended(runs, "pipeline")["kind"] == "ConfigError"
    assert ended(runs, "pipeline")["error"].startswith("parallel.pipeline: 2 needs whole gradients")
