"""Image classification in the training loop: its loss written out; data ranks, formats and kills against one run."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed, start_distributed
from modelwright.core.config import parse
from modelwright.core.errors import ConfigError
from modelwright.data.images.labeled import LabeledImages, write_labels
from modelwright.data.images.store import write_images
from modelwright.data.images.stored import encode
from modelwright.data.loader import PackedLoader, PackedRows
from modelwright.data.pack import PackConfig, TokenSequence, pack
from modelwright.objectives.image_classification import (
    CLASSIFIER,
    CROSS_ENTROPY,
    PIXELS,
    TARGETS,
    ImageClassification,
    ImageTrainConfig,
    carrier,
)
from modelwright.objectives.image_quantization import ImageQuantization, quantization_of
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, single
from modelwright.train.evaluation import HeldoutBatches
from modelwright.train.objective import forward
from modelwright.train.own_modules import attach_modules
from modelwright.train.runtime import TechniqueBuilder
from modelwright.train.technique import StepInfo, Technique
from modelwright.train.techniques.fake_quantization import RANGES, fake_quantization

NUM_IMAGES, NUM_HELDOUT, NUM_CLASSES, SIDE, BATCH = 40, 10, 4, 8, 8
RESNET = {"resnet": {"image_size": SIDE, "widths": [8, 16], "blocks_per_stage": 1}}
VIT = {
    "architecture": "vit",
    "vit": {"image_size": SIDE, "patch_size": 4, "num_layers": 1, "model_dim": 16, "num_heads": 2, "ffn_dim": 32},
}
SETTINGS = {
    "num_steps": 6, "batch_tokens": 2 * BATCH, "checkpoint_every_steps": 2, "checkpoint_every_minutes": 0.0,
    "eval_every_steps": 3, "learning_rate": 1e-2, "precision": {"policy": "fp32"}, "label_smoothing": 0.1,
    "keep_best": False, "augment": {"crop_padding": 1, "contrast": 0.2, "mixup_alpha": 0.4, "cutmix_alpha": 1.0},
}  # fmt: skip


def written(folder: Path, num_images: int, seed: int) -> None:
    """Squares of one of four colors in noise."""
    dice = np.random.default_rng(seed)
    labels = [int(one) for one in dice.integers(NUM_CLASSES, size=num_images)]
    sequences = [TokenSequence([0, 0], value=float(number + 1)) for number in range(num_images)]
    pack(sequences, folder / "rows", PackConfig(seq_len=2, mode="one_per_row"), vocab_size=8, eos_id=0)
    with write_images(folder / "images") as images:
        for label in labels:
            pixels = dice.integers(0, 160, (SIDE, SIDE, 3))
            pixels[2:6, 2:6] += np.array([[80, 0, 0], [0, 80, 0], [0, 0, 80], [80, 80, 0]][label])
            images.add(encode(pixels.astype(np.uint8), lossless=True))
    write_labels(folder / "images", labels, [f"color {number}" for number in range(NUM_CLASSES)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    written(path / "train", NUM_IMAGES, 0)
    written(path / "heldout", NUM_HELDOUT, 1)
    return path


def objective_of(folder: Path, **changes: Any) -> ImageClassification:
    config = parse(ImageTrainConfig, {**SETTINGS, **RESNET, **changes}, constants=True)
    rows = PackedRows(folder / "train" / "rows")
    return ImageClassification(
        source=PackedLoader(rows, batch_rows=BATCH, seed=1), config=config, seed=7,
        images=LabeledImages(folder / "train" / "images"), heldout_images=LabeledImages(folder / "heldout" / "images"),
    )  # fmt: skip


def trained(
    data: Path, out: Path, *, world: World | None = None, techniques: Any = (), dtype: Any = torch.float64,
    parallel: Mapping[str, Any] = {}, **changes: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The classifier's weights and running statistics at the end, and the figures of each record."""
    objective, model = objective_of(data, **changes), carrier(dtype)
    heldout = HeldoutBatches(PackedRows(data / "heldout" / "rows"), batch_rows=4)
    tiny_run.run(
        out, objective.config, model=model, objective=objective, heldout=heldout, world=world or single(),
        parallel=ParallelConfig(**parallel), techniques=list(techniques),
    )  # fmt: skip
    found = {name: one.clone() for name, one in model.heads.state_dict().items()}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("loss", "accuracy", "grad_norm", "heldout_loss", "heldout/accuracy", "executed_flops"):
            if name in record:
                found[f"{record['step']}, {name}"] = torch.tensor(record[name], dtype=torch.float64)
    return found


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return trained(folder, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("shape", [RESNET, VIT], ids=["resnet", "vit"])
def test_the_loss_is_the_cross_entropy_with_soft_labels_written_out(shape: dict[str, Any], folder: Path) -> None:
    objective = objective_of(folder, **shape)
    model = carrier(torch.float64)
    attach_modules(model, objective, 1)
    batch = next(objective.batches(model, first=2, rank=0, world_size=1))
    assert (batch.extras[TARGETS] > 0.2).sum(1).max() == 2  # two labels share an image
    padded = batch.padded(BATCH + 3)
    found = objective.losses(forward(model, padded), padded, model)
    logits = model.train().heads[CLASSIFIER](batch.extras[PIXELS].double())
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(BATCH):
        probabilities = logits[row].exp() / logits[row].exp().sum()
        for number in range(NUM_CLASSES):
            expected = expected - batch.extras[TARGETS][row, number] * probabilities[number].log()
    torch.testing.assert_close(found.losses[CROSS_ENTROPY], expected, rtol=1e-10, atol=1e-10)
    assert int(objective.weights(padded)[CROSS_ENTROPY]) == BATCH
    parameters = list(model.heads.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found.losses[CROSS_ENTROPY], parameters), torch.autograd.grad(expected, parameters),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_only_the_classifier_is_trained_and_it_learns(alone: dict[str, Tensor], folder: Path, tmp_path: Path) -> None:
    fresh = carrier(torch.float64)
    attach_modules(fresh, objective_of(folder), 1)
    before = fresh.heads.state_dict()
    assert all(not torch.equal(one, alone[name]) for name, one in before.items())
    assert not any(one.requires_grad for name, one in fresh.named_parameters() if not name.startswith("heads."))
    assert float(alone["6, executed_flops"]) > 3 * BATCH * 2 * SIDE**2 * 9 * 8 * (3 + 8)
    plain = {"augment": {}, "label_smoothing": 0.0, "num_steps": 40, "eval_every_steps": 40}
    found = trained(folder, tmp_path, dtype=torch.float32, **plain)
    assert float(found["40, heldout/accuracy"]) >= 0.9


def over_two_ranks(world: World, data: Path, out: Path) -> dict[str, dict[str, Tensor]]:
    layouts = {"one copy": {}, "copies": {"shared_memory": False}, "zero 3": {"zero_stage": 3}}
    return {name: trained(data, out / name, world=world, parallel=layout) for name, layout in layouts.items()}


def test_two_data_ranks_give_the_losses_weights_and_statistics_of_one_process(
    alone: dict[str, Tensor], folder: Path, tmp_path: Path
) -> None:
    ranks = run_distributed(over_two_ranks, 2, folder, tmp_path)
    for name, found in ranks[0].items():
        assert_close(found, alone, 1e-9)
        for key, tensor in found.items():
            assert torch.equal(tensor, ranks[1][name][key]), (name, key)


def fp32_over_two_ranks(world: World, data: Path, out: Path) -> dict[str, Tensor]:
    return trained(data, out, world=world, parallel={"shared_memory": False}, dtype=torch.float32)


def test_two_data_ranks_agree_in_fp32(folder: Path, tmp_path: Path) -> None:
    """Adam divides by the size of gradients: weights whose gradient is rounding alone may move apart."""
    expected = trained(folder, tmp_path / "alone", dtype=torch.float32)
    found = run_distributed(fp32_over_two_ranks, 2, folder, tmp_path / "two")[0]
    names = [name for name in expected if "running" in name or "loss" in name]
    assert_close({name: found[name] for name in names}, {name: expected[name] for name in names}, 1e-3)


def killed(world: World, data: Path, out: Path, parallel: Mapping[str, Any]) -> None:
    def die(info: StepInfo) -> None:
        if info.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    death = tiny_run.always(Technique(name="death", on_step_end=die))
    trained(data, out, world=world, techniques=[death], dtype=torch.float32, parallel=parallel)


def resumed(world: World, data: Path, out: Path, parallel: Mapping[str, Any]) -> dict[str, Tensor]:
    return trained(data, out, world=world, dtype=torch.float32, parallel=parallel)


@pytest.mark.parametrize(("num_ranks", "parallel"), [(1, {}), (2, {"shared_memory": False}), (2, {"zero_stage": 3})])
def test_a_killed_run_resumes_with_the_same_bits(
    num_ranks: int, parallel: Mapping[str, Any], folder: Path, tmp_path: Path
) -> None:
    ended = start_distributed(killed, num_ranks, folder, tmp_path / "cut", parallel).wait()
    assert {one.code for one in ended} == {-signal.SIGKILL}
    found = run_distributed(resumed, num_ranks, folder, tmp_path / "cut", parallel)[0]
    whole = run_distributed(resumed, num_ranks, folder, tmp_path / "whole", parallel)[0]
    assert found.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


DELAYED = {"policy": "fp8", "fp8": {"scaling": "delayed"}}


@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16_mixed", "int8", "fp8", DELAYED], ids=str)
@pytest.mark.parametrize("shape", [RESNET, VIT], ids=["resnet", "vit"])
def test_precision_policies_reach_the_layers_and_keep_the_norms_in_fp32(
    precision: Any, shape: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """The loss of the first step differs from that in FP32, by little; running statistics are FP32 and finite."""
    precision = precision if isinstance(precision, dict) else {"policy": precision}
    exact = trained(folder, tmp_path / "fp32", dtype=torch.float32, num_steps=2, **shape)
    found = trained(folder, tmp_path / "own", dtype=torch.float32, num_steps=2, precision=precision, **shape)
    assert found["1, loss"] != exact["1, loss"]
    torch.testing.assert_close(found["1, loss"], exact["1, loss"], rtol=0.1, atol=0)
    for name, one in found.items():
        assert one.isfinite().all(), name
        assert one.dtype == (torch.float64 if "," in name else torch.float32)


def rounded(name: ImageQuantization) -> TechniqueBuilder:
    """As the stage vision builds it."""
    return lambda run: fake_quantization(quantization_of(name, run.num_steps), run)


@pytest.mark.parametrize("shape", [RESNET, VIT], ids=["resnet", "vit"])
def test_rounding_to_integers_in_training_reaches_the_layers(
    shape: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    exact = trained(folder, tmp_path / "fp32", dtype=torch.float32, num_steps=2, **shape)
    grid = [rounded("int8")]
    found = trained(folder, tmp_path / "own", dtype=torch.float32, num_steps=2, techniques=grid, **shape)
    assert found["1, loss"] != exact["1, loss"]
    torch.testing.assert_close(found["1, loss"], exact["1, loss"], rtol=0.1, atol=0)
    for name in ("running_mean", "running_var"):
        for key in (key for key in exact if key.endswith(name)):
            torch.testing.assert_close(found[key], exact[key], rtol=0.05, atol=0.05)


def rounded_over_two_ranks(world: World, data: Path, out: Path, grid: ImageQuantization) -> dict[str, Any]:
    layouts = {"copies": {"shared_memory": False}, "zero 3": {"zero_stage": 3}}
    return {
        name: trained(data, out / name, world=world, parallel=layout, techniques=[rounded(grid)])
        for name, layout in layouts.items()
    }


def test_two_data_ranks_round_as_one_process(folder: Path, tmp_path: Path) -> None:
    """Ranges are observed over both, in the first step of six."""
    alone = trained(folder, tmp_path / "alone", techniques=[rounded("int8_static")])
    plain = trained(folder, tmp_path / "plain")
    torch.testing.assert_close(alone["1, loss"], plain["1, loss"], rtol=1e-9, atol=0)
    assert abs(float(alone["2, loss"] - plain["2, loss"])) > 1e-5
    found = run_distributed(rounded_over_two_ranks, 2, folder, tmp_path / "two", "int8_static")[0]
    for one in found.values():
        assert_close(one, alone, 1e-7)
    ranges = [json.loads((tmp_path / place / RANGES).read_text()) for place in ("alone", "two/copies", "two/zero 3")]
    assert ranges[1] == ranges[2]
    for name, ends in ranges[0].items():
        np.testing.assert_allclose(ends, ranges[1][name], rtol=1e-9)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_layouts_that_divide_a_row_or_a_layer_are_refused_by_name(
    layout: dict[str, int], folder: Path, tmp_path: Path
) -> None:
    two = replace(single(), size=2)
    with pytest.raises(ConfigError, match=rf"architecture: resnet needs .*parallel\.{next(iter(layout))} 2"):
        trained(folder, tmp_path, world=two, parallel=layout)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"compile": True}, "compile"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        objective_of(folder, **changes)


def test_a_transformer_may_be_trained_in_microbatches(folder: Path, tmp_path: Path) -> None:
    whole = trained(folder, tmp_path / "whole", **VIT)
    assert_close(trained(folder, tmp_path / "parts", gradient_accumulation_steps=2, **VIT), whole, 1e-9)
