"""FSDP gathers weights in the format in which products read them: fewer bytes, the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelwright.core.config import parse
from modelwright.precision.policy import PrecisionConfig
from parallel import gather_run
from rank_processes import all_well, start_ranks, wait_for

SCRIPT = Path(gather_run.__file__)
BF16 = {"policy": "bf16_mixed"}
FFN_ALONE = {"policy": "bf16_mixed", "layers": {"attention": "fp32"}}
FULL = {"shard": "full"}


def case(name: str, precision: dict[str, Any], layout: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"name": name, "settings": {"precision": precision, **settings}, "layout": layout}


def pair(name: str, precision: dict[str, Any], layout: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """The run, and beside it the same training that gathers FP32 weights, because it evaluates in FP32."""
    wide = precision | {"evaluation": "fp32"}
    return [case(name, precision, layout, **settings), case(f"{name}-wide", wide, layout, **settings)]


TWO = [
    *pair("full", BF16, FULL),
    *pair("optimizer", BF16, {"shard": "optimizer"}),
    *pair("ffn", FFN_ALONE, FULL),
    *pair("fp16", {"policy": "fp16_mixed"}, FULL),
    *pair("recomputed", BF16, FULL, activations={"mode": "unit", "unit_layers": 1}),
    *pair("units", BF16, FULL, activations={"mode": "unit", "unit_layers": 2}),
    case("fp32", {"policy": "fp32"}, FULL),
    case("int8", {"policy": "int8"}, FULL),
]
FOUR = [
    *pair("tensor", BF16, {"tensor": 2, "shard": "full"}),
    *pair("hybrid", BF16, {"shard": "full", "shard_group": 2}),
    *pair("pipeline", BF16, {"pipeline": 2, "shard": "full", "schedule": "zero_bubble"}),
]
PAIRS = [one["name"] for one in TWO + FOUR if f"{one['name']}-wide" in [other["name"] for other in TWO + FOUR]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gathers")
    started = []
    for size, cases in ((2, TWO), (4, FOUR)):
        (folder / f"cases-{size}.json").write_text(json.dumps(cases))
        started += start_ranks(SCRIPT, folder, folder / f"cases-{size}.json", size=size)
    all_well(wait_for(started))
    return folder


def ended(runs: Path, name: str) -> dict[str, Any]:
    return json.loads((runs / f"{name}-0.json").read_text())


@pytest.mark.parametrize("name", PAIRS)
def test_narrow_gathers_train_to_the_same_bits(runs, name):
    assert ended(runs, name)["losses"] == ended(runs, f"{name}-wide")["losses"]
    narrow, wide = (load_file(runs / f"{one}-0.safetensors") for one in (name, f"{name}-wide"))
    assert narrow.keys() == wide.keys()
    for key, weight in narrow.items():
        # ZeRO-1 sums over ranks and microbatches; for norms, which go with the root, in another order.
        rounding = 2e-7 if name == "optimizer" and "norm" in key else 0.0
        torch.testing.assert_close(weight, wide[key], rtol=0.0, atol=rounding)
    assert all(weight.dtype == torch.float32 for weight in narrow.values())


@pytest.mark.parametrize(
    ("name", "attention", "ffn"),
    [
        ("full", "bfloat16", "bfloat16"),
        ("optimizer", "bfloat16", "bfloat16"),
        ("ffn", "float32", "bfloat16"),
        ("fp16", "float16", "float16"),
        ("tensor", "bfloat16", "bfloat16"),
        ("pipeline", "bfloat16", "bfloat16"),
        ("fp32", "float32", "float32"),
        ("int8", "float32", "float32"),
        ("full-wide", "float32", "float32"),
    ],
)
def test_each_weight_is_gathered_in_the_format_of_its_products(runs, name, attention, ffn):
    """Norms, embedding and head in FP32."""
    for parameter, found in ended(runs, name)["formats"].items():
        of_part = {"attention": attention, "ffn": ffn}
        part = parameter.split(".")[2] if "_proj" in parameter else ""
        assert found == of_part.get(part, "float32"), parameter


@pytest.mark.parametrize(("name", "gathers"), [("full", 2), ("recomputed", 2), ("optimizer", 1), ("ffn", 2)])
def test_narrow_gathers_send_half_the_bytes_of_their_weights(runs, name, gathers):
    """Each of two microbatches gathers weights in forward and, where they are let go, in backward. This rank sends its
    half of each, and of that 2 bytes of a weight are saved."""
    shape = gather_run.SHAPE
    attention = shape.model_dim * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    narrow = shape.num_layers * (3 * shape.model_dim * shape.ffn_dim + (name != "ffn") * attention)
    saved = ended(runs, f"{name}-wide")["sent"] - ended(runs, name)["sent"]
    assert saved == pytest.approx(2 * gathers * 0.5 * 2 * narrow, rel=0.15)


def test_formats_that_may_change_are_gathered_in_fp32():
    changing = {"policy": "bf16_mixed", "adaptive": {"kind": "rules"}}
    assert parse(PrecisionConfig, changing).gathered_as("ffn") == torch.float32
    assert parse(PrecisionConfig, BF16).gathered_as("ffn") == torch.bfloat16
