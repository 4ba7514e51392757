"""Quantization-aware training: integers equal what was trained, resume, layouts, the gain over rounding later."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed
from modelwright.compress.int8 import (
    Int8WeightsConfig,
    TrainedGrid,
    choose_backend,
    load_int8,
    quantize_to_grid,
    save_grid_model,
)
from modelwright.core.config import ConfigError, ModelError, Stopped
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.ops.int_grid import WeightGrid
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.pipeline.stages.qat import with_step_sizes
from modelwright.train.objective import forward
from modelwright.train.techniques.fake_quantization import (
    MODULE,
    RANGES,
    FakeQuantization,
    QuantizationAwareConfig,
    Range,
    StepSizes,
    fake_quantization,
)
from refusals import config_error

SETTINGS = {"num_steps": 6, "checkpoint_every_steps": 1, "eval_every_steps": 3, "keep_best": False}
CHOOSE = partial(choose_backend, Int8WeightsConfig(backend="int_mm"))
GRIDS = [
    WeightGrid(bits=bits, symmetric=symmetric, granularity=granularity)
    for bits in (4, 8)
    for symmetric in (True, False)
    for granularity in ("tensor", "channel", "group_32")
]
CONFIGS = {
    "int8": QuantizationAwareConfig(start_step=2),
    "int4 learned": QuantizationAwareConfig(
        weights=WeightGrid(bits=4, granularity="channel"), learned_steps=True, start_step=2
    ),
    "int4 asymmetric": QuantizationAwareConfig(
        weights=WeightGrid(bits=4, symmetric=False, granularity="group_32"),
        activations="tensor_moving_average",
        start_step=3,
    ),
}


def train(
    world: World,
    folder: Path,
    config: QuantizationAwareConfig | None,
    *,
    parallel: Any = None,
    changes: Any = None,
    stop: int = 0,
    dtype: torch.dtype = torch.float32,
    model: Decoder | None = None,
) -> Decoder:
    torch.set_num_threads(1)
    model = model or tiny_run.tiny_model(dtype)
    objective: Any = (
        tiny_run.Float64Objective(tiny_run.Rows()) if dtype == torch.float64 else NextToken(tiny_run.Rows())
    )
    techniques = tiny_run.watching(stop=tiny_run.StopAfter(stop))
    if config is not None:
        techniques.append(partial(fake_quantization, config))
        if config.learned_steps:
            objective = with_step_sizes(objective, config.weights)
    tiny_run.run(
        folder,
        tiny_run.settings(**{**SETTINGS, **(changes or {})}),
        model=model,
        objective=objective,
        world=world,
        techniques=techniques,
        parallel=ParallelConfig(**(parallel or {})),
        heldout=[tiny_run.Rows().batch(900)],
    )
    return model


def trained_grid(model: Decoder, config: QuantizationAwareConfig, folder: Path | None = None) -> TrainedGrid:
    steps = model.heads[MODULE] if config.learned_steps else None
    names = model.projections() if isinstance(steps, StepSizes) else ()
    ranges = json.loads((folder / RANGES).read_text()) if folder else {}
    return TrainedGrid(
        weights=config.weights,
        activations="tensor" if config.has_observers else config.activations,
        steps={name: steps.step(name).detach() for name in names},
        ranges={name: tuple(ends) for name, ends in ranges.items()},
    )


def rounding(model: Decoder, config: QuantizationAwareConfig, ranges: Mapping[str, Range] | None = None) -> None:
    """Make the model multiply rounded factors."""
    fake = FakeQuantization(config=config, model=model, is_on=True)
    fake.ranges |= ranges or {}
    for name, projection in model.projections().items():
        projection.product = fake.wrap(name, projection.product)


@torch.no_grad()
def hidden(model: Decoder) -> Tensor:
    return forward(model.eval(), tiny_run.Rows().batch(7))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("activations", ["none", "token", "tensor_min_max"])
def test_integers_equal_fake_quantization(grid: WeightGrid, activations: Any, tmp_path: Path) -> None:
    """Layer by layer; and the whole model in FP64, for in FP32 a sum in another order now and then ends on the other
    side of a rounding edge of the next layer."""
    config = QuantizationAwareConfig(weights=grid, activations=activations, start_step=1)
    has_kernel = grid == WeightGrid(granularity=grid.granularity) and not grid.group_size and activations == "token"
    model = tiny_run.tiny_model(torch.float32 if has_kernel else torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(5.0 if name.startswith("blocks") and parameter.dim() > 1 else 1.0)
    ranges = {name: Range(least=-2.0, most=1.5, is_empty=False) for name in model.projections()}
    trained = TrainedGrid(
        weights=grid,
        activations="tensor" if config.has_observers else activations,
        ranges={name: (one.least, one.most) for name, one in ranges.items()},
    )
    integers = quantize_to_grid(model, trained, choose=CHOOSE)
    save_grid_model(integers, trained, tmp_path / "m")
    loaded = load_int8(tmp_path / "m", Int8WeightsConfig(backend="int_mm"))
    plain = hidden(model)
    rounding(model, config, ranges)
    found, wanted = hidden(integers), hidden(model)
    if not has_kernel:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for name, projection in model.float().projections().items():
        x = torch.randn(9, projection.in_features, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            fake, own = projection(x), loaded.get_submodule(name)(x).float()
        torch.testing.assert_close(own, fake, rtol=1e-5, atol=1e-5)
    assert torch.equal(hidden(loaded), found)
    assert float((plain - wanted).abs().max()) > 1e-3  # rounding does something
    if grid.bits == 4:
        assert integers.blocks["0"].ffn.up_proj.quantized.nbytes * 2 == model.blocks["0"].ffn.up_proj.weight.numel()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    grid = TrainedGrid(weights=WeightGrid(bits=4))
    save_grid_model(quantize_to_grid(tiny_run.tiny_model(), grid, choose=CHOOSE), grid, tmp_path)
    description = json.loads((tmp_path / "config.json").read_text())
    description["model"]["num_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match="missing or unknown tensors"):
        load_int8(tmp_path, Int8WeightsConfig())
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="is damaged"):
        load_int8(tmp_path, Int8WeightsConfig())


def test_a_rank_without_rows_leaves_the_range_to_the_others() -> None:
    model = tiny_run.tiny_model().train()
    fake = FakeQuantization(config=CONFIGS["int4 asymmetric"], model=model, is_observing=True)
    (name, projection), *_ = model.projections().items()
    out = fake.wrap(name, projection.product)(torch.empty(0, projection.in_features), projection.weight)
    assert out.shape == (0, projection.out_features)
    fake.collect(lambda own: [max(pair) for pair in zip(own, (1.0, 2.5), strict=True)])
    assert fake.state_dict() == {name: [-1.0, 2.5]}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_stopped_run_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    whole = train(single(), tmp_path / "whole", config)
    for stop in (2, 4):
        with pytest.raises(Stopped):
            train(single(), tmp_path / "cut", config, stop=stop)
    resumed = train(single(), tmp_path / "cut", config)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    files = [tmp_path / place / RANGES for place in ("whole", "cut")]
    assert files[0].read_text() == files[1].read_text()
    plain = train(single(), tmp_path / "plain", None)
    assert not all(torch.equal(value, whole.state_dict()[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_trained_model_is_the_integer_model(name: str, tmp_path: Path) -> None:
    """The grid that is stored gives integers whose loss is the last held-out loss of the training."""
    config = CONFIGS[name]
    model = train(single(), tmp_path, config)
    integers = quantize_to_grid(model, trained_grid(model, config, tmp_path), choose=CHOOSE)
    batch = tiny_run.Rows().batch(900)
    with torch.no_grad():
        total = integers.cross_entropy(forward(integers, batch), batch.labels_BT, chunk_tokens=64)
    (*_, (_, heldout)) = column(read_records(tmp_path / "metrics.jsonl"), "heldout_loss")
    assert float(total) / batch.num_targets == pytest.approx(heldout, rel=1e-5)


def test_learned_steps_are_learned(tmp_path: Path) -> None:
    config = CONFIGS["int4 learned"]
    model = train(single(), tmp_path, config)
    steps = model.heads[MODULE]
    assert isinstance(steps, StepSizes)
    assert (tmp_path / "checkpoints").is_dir()
    stored = tiny_run.final_weights(tmp_path, 6)
    for name, projection in model.projections().items():
        found = steps.step(name)
        assert found.shape == (projection.out_features,)
        assert torch.equal(torch.exp2(stored[f"heads.{MODULE}.{name.replace('.', '_')}"]), found)
    first = tiny_run.final_weights(tmp_path, 5)
    assert any(not torch.equal(value, first[key]) for key, value in stored.items() if MODULE in key)


LAYOUTS: dict[str, Any] = {"copies": {}, "zero 3": {"zero_stage": 3}, "context": {"context": 2}}


def on_two_ranks(world: World, folder: Path) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    found = {}
    for place, name in enumerate(CONFIGS):
        for layout, parallel in [list(LAYOUTS.items())[place], ("zero 3", LAYOUTS["zero 3"])][: 1 + (place != 1)]:
            model = train(world, folder / name / layout, CONFIGS[name], parallel=parallel, dtype=torch.float64)
            found[f"{name}/{layout}"] = {key: value.clone() for key, value in model.state_dict().items()}
    refused = []
    for place, parallel in enumerate(({"tensor": 2}, {"pipeline": 2})):
        with pytest.raises(ConfigError) as error:
            train(world, folder / str(place), CONFIGS["int8"], parallel=parallel)
        refused.append(str(error.value))
    return found, refused


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    alone = {
        name: train(single(), tmp_path / "alone" / name, config, dtype=torch.float64).state_dict()
        for name, config in CONFIGS.items()
    }
    for found, refused in run_distributed(on_two_ranks, 2, tmp_path / "two"):
        for case, weights in found.items():
            for key, value in alone[case.split("/")[0]].items():
                torch.testing.assert_close(
                    weights[key], value, rtol=1e-7, atol=1e-9, msg=lambda t, c=case, k=key: f"{c} {k}: {t}"
                )
        assert refused[0].startswith(
            "fake_quantization: needs all layers, undivided, on every rank, which parallel.tensor"
        )
        assert "parallel.pipeline" in refused[1]


def with_outliers(model: Decoder) -> Decoder:
    """The same function by weights with outlier channels, which large models grow by themselves."""
    with torch.no_grad():
        for block in model.blocks.values():
            block.ffn.up_proj.weight[:4] *= 12
            block.ffn.down_proj.weight[:, :4] /= 12
            block.attention.v_proj.weight[:2] *= 12
            for head in (0, 1):  # which read the first key/value head
                block.attention.o_proj.weight[:, 8 * head : 8 * head + 2] /= 12
    return model


@pytest.mark.slow
def test_training_at_four_bits_ends_closer_than_rounding_afterwards(tmp_path: Path) -> None:
    """After 40 steps in FP32, 30 more: in FP32, which is then rounded to 4 bits per tensor, or on that grid."""
    grid = WeightGrid(bits=4, granularity="tensor")
    changes = {"num_steps": 40, "eval_every_steps": 0, "checkpoint_every_steps": 0}
    base = train(single(), tmp_path / "base", None, changes=changes)
    before = hidden(base)
    torch.testing.assert_close(hidden(with_outliers(base)), before, rtol=1e-4, atol=1e-4)
    weights = {key: value.clone() for key, value in base.state_dict().items()}

    def loss(model: Decoder) -> float:
        batches = [tiny_run.Rows().batch(number) for number in range(900, 904)]
        with torch.no_grad():
            sums = [model.cross_entropy(forward(model, one), one.labels_BT, chunk_tokens=64) for one in batches]
        return float(torch.stack(sums).sum()) / sum(one.num_targets for one in batches)

    def continued(name: str, config: QuantizationAwareConfig | None) -> Decoder:
        model = tiny_run.tiny_model()
        model.load_state_dict(weights)
        more = {**changes, "num_steps": 30, "learning_rate": 3e-3}
        return train(single(), tmp_path / name, config, changes=more, model=model)

    plain = continued("fp32", None)
    fp32 = loss(plain)
    rounded = loss(quantize_to_grid(plain, TrainedGrid(weights=grid, activations="token"), choose=CHOOSE))
    for learned in (False, True):
        config = QuantizationAwareConfig(weights=grid, learned_steps=learned)
        model = continued(str(learned), config)
        trained = loss(quantize_to_grid(model, trained_grid(model, config), choose=CHOOSE))
        assert abs(trained - fp32) < 0.5 * (rounded - fp32), (learned, fp32, rounded, trained)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activations": "tensor_min_max"}, "start_step: activations tensor_min_max are observed in the steps before"),
        ({"learned_steps": True, "weights": WeightGrid(symmetric=False)}, "asymmetric: learned_steps are those of"),
        ({"start_step": -1}, "start_step: must not be negative"),
    ],
)
def test_settings_are_checked(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizationAwareConfig(**settings)


def test_what_a_run_lacks_is_named(tmp_path: Path) -> None:
    model = tiny_run.tiny_model()
    with config_error("learned_steps"):
        FakeQuantization(config=QuantizationAwareConfig(learned_steps=True), model=model)
    wide = QuantizationAwareConfig(weights=WeightGrid(granularity="group_128"))
    with config_error("granularity", match="do not divide into groups of 128"):
        train(single(), tmp_path, wide)
