"""Image classification in the training loop: its loss written out; data ranks, formats and kills against one run."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed, start_distributed
from modelwright.core.config import ConfigError, parse
from modelwright.data.images import store as image_store
from modelwright.data.images.decode import encode
from modelwright.data.images.store import ImageStore, LabeledImages, image_layout, write_images, write_labels
from modelwright.data.rows.ahead import LookaheadLoader
from modelwright.data.rows.cache import layout as block_layout
from modelwright.data.rows.cache import row_cache
from modelwright.data.rows.cache.reader import DISK, MEMORY, SOURCE
from modelwright.data.rows.cache.row_cache import RowCacheConfig
from modelwright.data.rows.loader import PackedLoader, PackedRows, row_layout
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import save_vision_tower
from modelwright.model.vision.vit import VisionTower
from modelwright.objectives.image_classification import (
    CLASSIFIER,
    CROSS_ENTROPY,
    PIXELS,
    TARGETS,
    ImageClassification,
    ImageQuantization,
    ImageTrainConfig,
    carrier,
    quantization_of,
)
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.build import attach_modules
from modelwright.train.objective import HeldoutBatches, forward
from modelwright.train.technique import StepInfo, Technique, TechniqueBuilder
from modelwright.train.techniques.fake_quantization import RANGES, fake_quantization
from own_tiers import wait_for_expected

NUM_IMAGES, NUM_HELDOUT, NUM_CLASSES, SIDE, BATCH = 40, 10, 4, 8, 8
RESNET = {"resnet": {"image_size": SIDE, "widths": [8, 16], "blocks_per_stage": 1}}
VIT = {
    "architecture": "vit",
    "vision_tower": {
        "image_size": SIDE,
        "patch_size": 4,
        "num_layers": 1,
        "model_dim": 16,
        "num_heads": 2,
        "ffn_dim": 32,
    },
}
SETTINGS = {
    "num_steps": 6, "batch_tokens": 2 * BATCH, "checkpoint_every_steps": 2, "checkpoint_every_minutes": 0.0,
    "eval_every_steps": 3, "learning_rate": 1e-2, "precision": {"policy": "fp32"}, "label_smoothing": 0.1,
    "keep_best": False, "augment": {"crop_padding": 1, "mixup_alpha": 0.4, "cutmix_alpha": 1.0},
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


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows and images, divided into many small blocks."""
    path = tmp_path_factory.mktemp("blocked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_layout, "BLOCK_BYTES", 64)
        patch.setattr(image_store, "BLOCK_BYTES", 512)
        written(path / "train", NUM_IMAGES, 0)
    written(path / "heldout", NUM_HELDOUT, 1)
    return path


def objective_of(folder: Path, **changes: Any) -> ImageClassification:
    config = parse(ImageTrainConfig, {**SETTINGS, **RESNET, **changes}, constants=True)
    rows = PackedRows(folder / "train" / "rows")
    return ImageClassification(
        source=PackedLoader(rows, batch_rows=BATCH, seed=1), config=config, seed=7,
        images=LabeledImages(ImageStore(folder / "train" / "images")),
        heldout_images=LabeledImages(ImageStore(folder / "heldout" / "images")),
    )  # fmt: skip


@contextmanager
def cached_objective(
    folder: Path, place: Path, *, memory_bytes: int = 2**20, num_ahead: int = 2, **changes: Any
) -> Iterator[ImageClassification]:
    """The same objective with rows and images read through a cache in two folders of `place`."""
    (place / "memory").mkdir(parents=True, exist_ok=True)
    config = RowCacheConfig(enabled=True, folder=str(place / "disk"), memory_bytes=memory_bytes, disk_bytes=8000)
    layouts = row_layout(folder / "train" / "rows"), image_layout(folder / "train" / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_cache, "memory_folder", lambda: place / "memory")
        with row_cache.open_cache(config, *layouts) as (rows, images):
            loader = PackedLoader(PackedRows(folder / "train" / "rows", rows), batch_rows=BATCH, seed=1)
            store = ImageStore(folder / "train" / "images", images, num_ahead=num_ahead)
            yield replace(
                objective_of(folder, **changes), images=LabeledImages(store),
                source=LookaheadLoader(loader, rows, num_ahead=num_ahead),
            )  # fmt: skip


def trained(
    data: Path, out: Path, *, world: World | None = None, techniques: Any = (), dtype: Any = torch.float64,
    parallel: Mapping[str, Any] = {}, objective: ImageClassification | None = None, **changes: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The classifier's weights and running statistics at the end, and the figures of each record."""
    objective, model = objective or objective_of(data, **changes), carrier(dtype)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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

    death = tiny_run.always(Technique(name="death", on_step_end=die, needs=frozenset()))
    trained(data, out, world=world, techniques=[death], dtype=torch.float32, parallel=parallel)


def resumed(world: World, data: Path, out: Path, parallel: Mapping[str, Any]) -> dict[str, Tensor]:
    return trained(data, out, world=world, dtype=torch.float32, parallel=parallel)


@pytest.mark.slow
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
InFp32 = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module", params=[RESNET, VIT], ids=["resnet", "vit"])
def in_fp32(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> InFp32:
    """A shape, and two steps of it in FP32."""
    out, shape = tmp_path_factory.mktemp("fp32"), request.param
    return shape, trained(folder, out, dtype=torch.float32, num_steps=2, **shape)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16_mixed", "int8", "fp8", DELAYED], ids=str)
def test_precision_policies_reach_the_layers_and_keep_the_norms_in_fp32(
    precision: Any, in_fp32: InFp32, folder: Path, tmp_path: Path
) -> None:
    """The loss of the first step differs from that in FP32, by little; running statistics are FP32 and finite."""
    precision = precision if isinstance(precision, dict) else {"policy": precision}
    shape, exact = in_fp32
    found = trained(folder, tmp_path / "own", dtype=torch.float32, num_steps=2, precision=precision, **shape)
    assert found["1, loss"] != exact["1, loss"]
    torch.testing.assert_close(found["1, loss"], exact["1, loss"], rtol=0.1, atol=0)
    for name, one in found.items():
        assert one.isfinite().all(), name
        assert one.dtype == (torch.float64 if "," in name else torch.float32)


def rounded(name: ImageQuantization) -> TechniqueBuilder:
    """As the stage vision builds it."""
    return lambda run: fake_quantization(quantization_of(name, run.num_steps), run)


@pytest.mark.slow
def test_rounding_to_integers_in_training_reaches_the_layers(in_fp32: InFp32, folder: Path, tmp_path: Path) -> None:
    shape, exact = in_fp32
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


@pytest.mark.slow
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


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in found.items())


def test_the_cache_changes_no_bit(alone: dict[str, Tensor], blocked: Path, tmp_path: Path) -> None:
    """With room for all, and for a few blocks of many. Decoded images take no memory besides."""
    for memory_bytes in (2**20, 5000):
        with cached_objective(blocked, tmp_path / str(memory_bytes), memory_bytes=memory_bytes) as objective:
            reader = objective.images.store.reader
            found = trained(blocked, tmp_path / f"run-{memory_bytes}", objective=objective)
            figures = reader.tiers.figures
            assert reader.figures.num_rows == SETTINGS["num_steps"] * BATCH, "each is read again for every batch"
        assert equal(found, alone)
        assert figures.blocks[SOURCE] > 0
        assert (figures.blocks[DISK] > 0) == (memory_bytes == 5000)


def test_what_other_ranks_have_is_known_from_the_plan(blocked: Path, tmp_path: Path) -> None:
    """Partners of other ranks cost no row, and are read before their batch as well."""
    model, plain = carrier(), objective_of(blocked)
    expected = plain.batches(model, first=0, rank=1, world_size=2)
    with cached_objective(blocked, tmp_path) as objective:
        rows, images = objective.source.rows.reader.figures, objective.images.store.reader.figures
        found = objective.batches(model, first=0, rank=1, world_size=2)
        for step in range(6):
            before = images.num_rows, images.num_ready
            ours, theirs = next(found), next(expected)
            assert all(torch.equal(ours.extras[name], theirs.extras[name]) for name in (PIXELS, TARGETS))
            asked, ready = images.num_rows - before[0], images.num_ready - before[1]
            assert BATCH // 2 < asked <= BATCH
            assert step == 0 or ready == asked
            assert rows.num_rows == (step + 1) * BATCH // 2
            wait_for_expected(objective.images.store.reader)


def over_two_cached_ranks(world: World, data: Path, out: Path) -> dict[str, Any]:
    parallel = {"shared_memory": False}
    plain = trained(data, out / "plain", world=world, parallel=parallel)
    with cached_objective(data, out) as objective:
        found = trained(data, out / "cached", world=world, parallel=parallel, objective=objective)
        store = objective.images.store
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        if world.rank == 0:
            store.read(range(NUM_IMAGES))
            store.reader.tiers.flush()
        world.barrier()
        before = dict(store.reader.tiers.figures.blocks)
        store.read(range(NUM_IMAGES))
        blocks_read = {name: number - before[name] for name, number in store.reader.tiers.figures.blocks.items()}
        world.barrier()
    return {
        "equal": equal(found, plain),
        "slots": sorted(link for link in links if link.endswith("slots.bin")),
        "read": blocks_read,
        "left": [str(path) for name in ("memory", "disk") for path in (out / name).iterdir()] if world.rank else [],
    }


def test_two_ranks_train_through_the_same_tiers(blocked: Path, tmp_path: Path) -> None:
    ranks = run_distributed(over_two_cached_ranks, 2, blocked, tmp_path)
    num_blocks = image_layout(blocked / "train" / "images").num_blocks
    assert num_blocks > 15
    for rank in ranks:
        assert rank["equal"]
        assert rank["slots"] == ranks[0]["slots"]
        assert len(rank["slots"]) == 2
        assert rank["read"][MEMORY] > num_blocks / 2, "all but those that the reader still has"
        assert rank["read"][DISK] == rank["read"][SOURCE] == 0, "also what the other one has put there"


def test_a_vision_tower_from_a_folder_is_trained_on(folder: Path, tmp_path: Path) -> None:
    """Its shape and its normalization are the folder's, whatever the settings say."""
    shape = VisionConfig(
        image_size=SIDE, patch_size=2, num_layers=2, model_dim=24, num_heads=3, ffn_dim=40, pooling="class_token",
        pixel_mean=(0.1, 0.2, 0.3), pixel_std=(0.5, 0.6, 0.7),
    )  # fmt: skip
    tower = VisionTower(shape)
    save_vision_tower(tower, tmp_path / "tower")
    changes = {
        "architecture": "vit",
        "vision_tower": {**VIT["vision_tower"], "init_from": str(tmp_path / "tower")},
        "augment": {},
    }
    objective, model = objective_of(folder, **changes), carrier()
    assert objective.shape == shape
    attach_modules(model, objective, 1)
    own = model.heads[CLASSIFIER].get_submodule("tower").state_dict()
    assert own.keys() == tower.state_dict().keys()
    assert all(torch.equal(own[name], weight) for name, weight in tower.state_dict().items())
    batch = next(objective.batches(model, first=0, rank=0, world_size=1))
    number = objective.source.share(0).groups[0]
    square = torch.from_numpy(objective.images.pixels(int(number), size=SIDE, fit=shape.fit)).float() / 255
    mean, std = (torch.tensor(one)[:, None, None] for one in (shape.pixel_mean, shape.pixel_std))
    torch.testing.assert_close(batch.extras[PIXELS][0], (square - mean) / std)
    still = trained(folder, tmp_path / "still", dtype=torch.float32, num_steps=1, learning_rate=1e-12, **changes)
    moved = trained(folder, tmp_path / "moved", dtype=torch.float32, num_steps=3, **changes)
    for name, weight in tower.state_dict().items():
        torch.testing.assert_close(still[f"{CLASSIFIER}.tower.{name}"], weight, rtol=0, atol=1e-9)
    assert any(not torch.equal(moved[f"{CLASSIFIER}.tower.{name}"], one) for name, one in tower.state_dict().items())
