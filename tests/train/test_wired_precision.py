"""Number formats in a run of two processes, through THE loop: policies, layouts, and formats that change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wired_cases import COPIES, RARE, Runs, case, ended, losses, values, weights

POLICIES = ("bf16_mixed", "fp16_mixed", "pure_fp16", "hybrid", "fp8", "int8")
LAYOUTS = {
    "tensor": {"tensor": 2},
    "whole-tokens": {"tensor": 2, "sequence_parallel": False},
    "zero": {"zero_stage": 3},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
}
STOP_AT_7 = {"kind": "stop", "step": 7}
DELAYED = {"policy": "fp8", "fp8": {"scaling": "delayed", "amax_history_len": 3}, "eval_dtype": "fp32"}
ADAPTIVE = {
    "decide_every_steps": 3,
    "measure_steps": 2,
    "cooldown_decisions": 1,
    "candidates": ["bf16", "int8"],
    "tolerance": 0.5,
    "revert_on_loss_rise": 5.0,
}
SECONDS = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
"""As on a machine with INT8 and BF16 instructions; this is what decisions rest on, whatever the tests run on."""
ADAPTIVE_FOLDERS = ("rules", "rules-twice", "rules-pipeline", "rules-tensor", "rules-zero", "bandit", "bandit-twice",
                    "amid", "amid-twice", "amid-pipeline", "amid-pipeline-twice")  # fmt: skip
AMID = {"decide_every_steps": 4, "measure_steps": 3}
"""Looks on in steps 6 to 8, so that a stop after the seventh comes amid them, and again in the last two of eleven."""
AMID_LAYOUTS = {"amid": {"shared_memory": False}, "amid-pipeline": {"pipeline": 2}}


def precise(name: str, folder: str = "", *, precision: dict[str, Any], **rest: Any) -> dict[str, Any]:
    settings = {**RARE, "precision": {"policy": "fp32", **precision}, **rest.pop("settings", {})}
    return case(name, folder, settings=settings, **rest)


def adaptive(kind: str, **given: Any) -> dict[str, Any]:
    return {"adaptive": {**ADAPTIVE, "kind": kind, **given}}


CASES = [
    precise("fp32", precision={}, **COPIES),
    *[precise(policy, precision={"policy": policy}, **COPIES) for policy in POLICIES],
    *[precise(f"int8-{name}", precision={"policy": "int8"}, parallel=layout) for name, layout in LAYOUTS.items()],
    precise("half-pipeline", precision={"policy": "pure_fp16"}, parallel={"pipeline": 2}),
    precise("bf16-tensor", precision={"policy": "bf16_mixed"}, parallel={"tensor": 2}),
    precise("delayed", precision=DELAYED),
    precise("delayed-stopped", "delayed-twice", precision=DELAYED, mishap=STOP_AT_7),
    precise("delayed-again", "delayed-twice", precision=DELAYED),
    precise("delayed-pipeline", precision=DELAYED, parallel={"pipeline": 2}),
    precise("delayed-empty-stage", precision=DELAYED, parallel={"pipeline": 2, "layers_per_stage": [0, 2]}),
    *[precise(kind, precision=adaptive(kind)) for kind in ("rules", "bandit")],
    *[
        precise(f"{kind}-{when}", f"{kind}-twice", precision=adaptive(kind), mishap=mishap)
        for kind in ("rules", "bandit")
        for when, mishap in (("stopped", STOP_AT_7), ("again", {}))
    ],
    *[
        precise(f"rules-{name}", precision=adaptive("rules"), parallel=LAYOUTS[name])
        for name in ("pipeline", "tensor", "zero")
    ],
    *[
        precise(
            f"{name}{end}",
            f"{name}{folder}",
            precision=adaptive("bandit", **AMID),
            settings={"num_steps": 11},
            parallel=layout,
            mishap=mishap,
        )
        for name, layout in AMID_LAYOUTS.items()
        for end, folder, mishap in (("", "", {}), ("-stopped", "-twice", STOP_AT_7), ("-again", "-twice", {}))
    ],
    precise("schedule", precision=adaptive("schedule", schedule=[[4, 0.5], [8, 1.0]], low_precision="int8")),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("precision")
    write_speeds(folder)
    return Runs(folder, CASES)


def write_speeds(folder: Path) -> None:
    """Give runs of adaptive precision their speeds, so that what they choose does not depend on the machine."""
    speeds = {f"{kind}/{name}": value for kind in ("attention", "ffn") for name, value in SECONDS.items()}
    for name in ADAPTIVE_FOLDERS:
        (folder / name).mkdir()
        (folder / name / "formats.json").write_text(json.dumps({**speeds, "memory": 0.1}))


def changes(runs: Runs, folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs.folder(folder) / "formats.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_learns_nearly_as_fp32_does(runs, policy):
    exact, found = losses(runs, "fp32"), losses(runs, policy)
    assert ended(runs, policy)["error"] == ""
    assert found != exact
    assert found == pytest.approx(exact, rel=0.02)
    assert found[-1] < found[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_int8_learns_alike_under_every_layout(runs, name):
    assert ended(runs, f"int8-{name}")["error"] == ""
    assert losses(runs, f"int8-{name}") == pytest.approx(losses(runs, "int8"), rel=0.02)


@pytest.mark.slow
def test_narrow_streams_travel_between_stages_and_narrow_inputs_between_tensor_ranks(runs):
    assert losses(runs, "half-pipeline") == pytest.approx(losses(runs, "pure_fp16"), rel=0.01)
    assert losses(runs, "bf16-tensor") == pytest.approx(losses(runs, "bf16_mixed"), rel=0.01)


@pytest.mark.slow
def test_delayed_scales_are_state_and_the_same_on_all_ranks(runs):
    assert losses(runs, "delayed") == pytest.approx(losses(runs, "fp32"), rel=0.02)
    assert ended(runs, "delayed-stopped")["kind"] == "Stopped"
    assert losses(runs, "delayed-twice") == losses(runs, "delayed")
    once, again = weights(runs, "delayed"), weights(runs, "delayed-again", rank=1)
    assert all(torch.equal(once[key], again[key]) for key in once)
    for name in ("delayed-pipeline", "delayed-empty-stage"):
        assert ended(runs, name)["error"] == ""
        assert losses(runs, name) == pytest.approx(losses(runs, "delayed"), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rules", "bandit"])
def test_formats_change_for_a_reason_and_a_stopped_run_goes_on_with_the_same_bits(runs, kind):
    assert ended(runs, f"{kind}-stopped")["kind"] == "Stopped"
    assert losses(runs, f"{kind}-twice") == losses(runs, kind)
    once, again = weights(runs, kind), weights(runs, f"{kind}-again", rank=1)
    assert all(torch.equal(once[key], again[key]) for key in once)
    assert changes(runs, f"{kind}-twice") == changes(runs, kind)
    assert changes(runs, kind)
    assert all(change["reason"] and change["step"] % 3 == 0 for change in changes(runs, kind))
    assert losses(runs, kind) == pytest.approx(losses(runs, "fp32"), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", AMID_LAYOUTS)
def test_a_run_that_stops_amid_a_look_goes_on_with_what_every_rank_had_seen(runs, name):
    once, twice = (states(runs, folder) for folder in (name, f"{name}-twice"))
    assert ended(runs, f"{name}-stopped")["kind"] == "Stopped"
    assert once["switcher"] == twice["switcher"]
    assert once["switcher"]["last_signs"]
    assert once["observed"] == twice["observed"]
    assert once["observed"]["0"] != once["observed"]["1"]
    assert once["observed"]["1"]


def states(runs: Runs, folder: str) -> dict[str, Any]:
    """The state of adaptive precision at the end of a run."""
    last = max((runs.folder(folder) / "checkpoints").glob("step-*/state.json"))
    return json.loads(last.read_text())["state"]["techniques"]["adaptive_precision"]


@pytest.mark.slow
def test_rules_take_the_fastest_format_that_is_tolerable_everywhere(runs):
    assert {change["to"] for change in changes(runs, "rules")} == {"int8"}
    assert values(runs, "rules", "low_precision_fraction")[:2] == [0.0, 0.0]
    assert values(runs, "rules", "low_precision_fraction")[-1] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "tensor", "zero"])
def test_ranks_that_hold_parts_decide_alike(runs, name):
    assert ended(runs, f"rules-{name}", rank=1)["error"] == ""
    narrow = [(change["step"], change["part"], change["to"]) for change in changes(runs, f"rules-{name}")]
    assert narrow == [(change["step"], change["part"], change["to"]) for change in changes(runs, "rules")]
    assert losses(runs, f"rules-{name}") == pytest.approx(losses(runs, "rules"), rel=0.02)


def test_a_schedule_needs_no_measuring(runs):
    shares = values(runs, "schedule", "low_precision_fraction")
    assert (shares[0], shares[5], shares[-1]) == (0.0, 0.5, 1.0)
    assert not (runs.folder("schedule") / "formats.json").exists()
    assert {change["reason"] for change in changes(runs, "schedule")} == {"by schedule"}
