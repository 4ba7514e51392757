"""Value models of their own: how they begin, layouts, number formats, adapters, FLOPs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny_rollouts
from distributed import run_distributed
from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.config import ConfigError, parse
from modelwright.data.rows.batch import IGNORED
from modelwright.model.adapters import attach_adapters
from modelwright.model.decoder import decoders_in
from modelwright.model.hf import save_model, save_sequence_classifier
from modelwright.model.low_rank import AdapterConfig
from modelwright.model.peft_folder import save_adapter
from modelwright.objectives.ppo import VALUE, PpoConfig, separate_value_model
from modelwright.objectives.preference import HEAD
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.build import attach_modules
from modelwright.train.config import check_layout
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import forward
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.work import dense_flops

LAYOUTS = {name: tiny_run.TWO_RANK_LAYOUTS[name] for name in ("one copy", "zero 3", "tensor", "pipeline")}
LAYOUTS |= {
    "tensor, sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "zero bubble": {"pipeline": 2, "schedule": "zero_bubble"},
}


def test_a_value_model_begins_as_the_reward_model_or_with_zero(tmp_path: Path) -> None:
    judge, policy = tiny_rollouts.reward_model(), tiny_rollouts.model(seed=2)
    save_sequence_classifier(judge, tmp_path / "reward", head=HEAD, label="reward", eos_id=1, pad_id=0)
    save_model(policy, tmp_path / "policy")
    batch = tiny_run.Rows(num_rows=2).batch(0)
    expected = FrozenModel(judge, single()).head_output(HEAD, batch)[..., 0]
    for name, start in (("reward", judge), ("policy", policy)):
        value = separate_value_model(tmp_path / name)
        model = value.own_modules(policy.config)[VALUE]
        found = model(value.inputs(batch, lambda: pytest.fail("needs no hidden states of the policy")))
        torch.testing.assert_close(found, expected if name == "reward" else torch.zeros_like(expected))
        assert {key for key, _ in model.named_parameters()} == {
            "head.linear.weight",
            *(f"decoder.{key}" for key, _ in start.named_parameters() if not key.startswith(("head.", "heads."))),
        }
        with torch.device("meta"):  # what rollouts of a divided model make
            skeleton = value.own_modules(policy.config)[VALUE]
        assert [(key, one.shape) for key, one in skeleton.named_parameters()] == [
            (key, one.shape) for key, one in model.named_parameters()
        ]


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Old values are FP32, as with one process."""
    return {name: trained(world, folder / name, parallel=layout) for name, layout in LAYOUTS.items()}


def trained(world: World, folder: Path, **options: object) -> dict[str, Tensor]:
    objective = tiny_rollouts.ppo(
        world, dtype=torch.float64, num_completions=4, num_ppo_epochs=2, value_model="reward", vf_coef=0.5
    )
    return tiny_rollouts.train(
        world, folder, objective, dtype=torch.float64, num_steps=3, gradient_accumulation_steps=2, **options
    )


@pytest.mark.slow
def test_every_layout_learns_what_one_process_does(tmp_path: Path) -> None:
    expected = trained(single(), tmp_path / "alone")
    start = tiny_rollouts.reward_model()
    for name, before in (("decoder.blocks.0.ffn.up_proj", start.blocks["0"].ffn.up_proj.weight),
                         ("head.linear", start.heads[HEAD].weight)):  # fmt: skip
        assert not torch.allclose(expected[f"heads.value.{name}.weight"], before.double())
    for found in run_distributed(in_all_layouts, 2, tmp_path):
        for name in LAYOUTS:
            tiny_rollouts.assert_same(found[name], expected, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel": {"context": 2}},
            "value_model: reward needs whole rows on every rank, which parallel.context 2 takes away",
        ),
    ],
)
def test_what_a_value_model_cannot_have_is_named(options: dict[str, Any], message: str) -> None:
    parallel = ParallelConfig(**options.pop("parallel", {}))
    with pytest.raises(ConfigError, match=message):
        check_layout(parse(PpoConfig, {"value_model": "reward", **options}), parallel, num_processes=2)
    check_layout(parse(PpoConfig, options), parallel, num_processes=2)


def test_an_objective_from_python_says_what_it_needs() -> None:
    assert WHOLE_ROWS in tiny_rollouts.ppo(value_model="reward").needs
    assert WHOLE_ROWS not in tiny_rollouts.ppo().needs


def test_its_layers_compute_in_the_formats_of_the_run() -> None:
    """Values are those of the reward model alone in the same formats, and FP32 ones afterwards."""
    model, alone = tiny_rollouts.model(), tiny_rollouts.reward_model()
    objective = tiny_rollouts.ppo(value_model="reward")
    attach_modules(model, objective, 0)
    batch = tiny_run.Rows(num_rows=2).batch(0)
    rows = objective.value.inputs(batch, lambda: torch.empty(0))
    module = model.heads[VALUE]
    in_fp32 = module(rows)
    changes = {"output_dtype": "bf16", "overrides": {"embedding": "bf16"}, "eval_dtype": "fp32"}
    narrow = parse(PrecisionConfig, {"policy": "bf16_mixed", **changes}, constants=True)
    formats = ModelPrecision(model, narrow)
    ModelPrecision(alone, narrow)
    assert {one.ends.stream_dtype for one in decoders_in(model).values()} == {torch.bfloat16}
    found = module(rows)
    expected = alone.head_output(HEAD, forward(alone, batch).float())[..., 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert 0 < float((found - in_fp32).detach().abs().max()) < 0.2
    with formats.evaluating():
        assert torch.equal(module(rows), in_fp32)


def test_adapters_leave_it_whole(tmp_path: Path) -> None:
    """LoRA is for the policy; the value model is trained with all of its weights."""
    model = tiny_rollouts.model()
    attach_modules(model, tiny_rollouts.ppo(value_model="reward"), 0)
    attach_adapters(model, AdapterConfig(r=2, base_format="int8"), 0)
    found = {name for name, one in model.named_parameters() if one.requires_grad}
    of_value = {name for name in found if name.startswith("heads.")}
    assert of_value == {f"heads.value.{name}" for name, _ in model.heads[VALUE].named_parameters()}
    assert found - of_value
    assert all(".adapter." in name for name in found - of_value)
    save_adapter(model, tmp_path)  # without it
    assert not any("decoder" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_its_flops_are_those_of_a_decoder_without_labels() -> None:
    batch = tiny_run.Rows(num_rows=2).batch(0)
    unlabeled = replace(batch, labels_BT=torch.full_like(batch.labels_BT, IGNORED))
    assert tiny_rollouts.ppo().own_flops(batch) == 0
    found = tiny_rollouts.ppo(value_model="reward").own_flops(batch)
    assert found == dense_flops(tiny_rollouts.VALUE_SHAPE, unlabeled) > 0


NARROW = {
    "bf16, zero 3": ({"zero_stage": 3}, {"policy": "bf16_mixed"}),
    "fp8 with delayed scaling, pipeline": ({"pipeline": 2}, {"policy": "fp8", "fp8": {"scaling": "delayed"}}),
}
"""Layouts and formats: the first gathers projections in their format, the second agrees on maxima of all ranks."""


def in_narrow_formats(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {name: narrow(world, folder / name, name) for name in NARROW}


def narrow(world: World, folder: Path, name: str) -> dict[str, Tensor]:
    layout, precision = NARROW[name]
    objective = tiny_rollouts.ppo(world, num_completions=4, num_ppo_epochs=2, value_model="reward", vf_coef=0.5)
    options = {"precision": precision, "num_steps": 2, "gradient_accumulation_steps": 2, "eval_every_steps": 0}
    return tiny_rollouts.train(
        world, folder, objective, parallel=layout if world.size > 1 else {}, learning_rate=1e-3, **options
    )


@pytest.mark.slow
def test_layouts_divide_it_in_narrow_formats(tmp_path: Path) -> None:
    bf16, fp8 = NARROW
    expected = narrow(single(), tmp_path / "alone", bf16)
    names = [key for key in expected if key.startswith("heads.value.")]
    start = tiny_rollouts.reward_model().blocks["0"].ffn.up_proj.weight.detach()
    first, second = run_distributed(in_narrow_formats, 2, tmp_path / "two")
    for found in (first, second):
        # Two updates of Adam change a weight by 2e-3; where its gradient is rounding, in either direction.
        far = {key: float((found[bf16][key] - expected[key]).abs().mean()) for key in names}
        assert {key: one for key, one in far.items() if one > 1e-4} == {}
    for key in names:  # what is generated in FP8 depends on how many ranks share it, so ranks are compared
        assert torch.equal(first[fp8][key], second[fp8][key])
        assert first[fp8][key].isfinite().all()
    assert float((first[fp8]["heads.value.decoder.blocks.0.ffn.up_proj.weight"] - start).abs().mean()) > 1e-4
