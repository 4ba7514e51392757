"""The contrastive objective in the training loop: its loss written out, and every layout against one process."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed import run_distributed
from modelwright.core.config import ConfigError, parse
from modelwright.data.images.decode import encode
from modelwright.data.images.store import ImageStore, write_images
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.model.decoder import Decoder
from modelwright.objectives.contrastive import CONTRASTIVE, MAX_SCALE, AlignConfig, Contrastive, LearnedScale
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.build import attach_modules
from modelwright.train.objective import forward
from refusals import config_error

EOS, NUM_PAIRS, LENGTH = 0, 40, 24
VISION = {"image_size": 8, "patch_size": 4, "num_layers": 1, "model_dim": 16, "num_heads": 2, "ffn_dim": 24}
SETTINGS = {
    "num_steps": 4, "checkpoint_every_steps": 2, "checkpoint_every_minutes": 0.0, "eval_every_steps": 2,
    "learning_rate": 1e-3, "precision": {"policy": "fp32"}, "embed_dim": 8, "temperature": 0.3, "vision_tower": VISION,
}  # fmt: skip


def pairs() -> list[tuple[list[int], list[int], int]]:
    """Text, code and the number of an image, -1 for code; some texts come twice."""
    dice = np.random.default_rng(3)
    found, num_images = [], 0
    for number in range(NUM_PAIRS):
        text = dice.integers(1, tiny_run.VOCABULARY, int(dice.integers(2, 8))).tolist()
        if number % 7 == 6:
            text = found[number - 3][0]
        is_image = number % 3 == 0
        code = [EOS, EOS] if is_image else dice.integers(1, tiny_run.VOCABULARY, int(dice.integers(3, 12))).tolist()
        found.append((text, code, num_images if is_image else -1))
        num_images += is_image
    return found


def packed(folder: Path) -> tuple[PackedRows, ImageStore]:
    sequences = [TokenSequence(ids, value=float(image + 1)) for text, code, image in pairs() for ids in (text, code)]
    settings = PackConfig(seq_len=LENGTH)
    pack(sequences, folder / "rows", settings, vocab_size=tiny_run.VOCABULARY, eos_id=EOS, group_size=2)
    with write_images(folder / "images") as images:
        for number in range(sum(image >= 0 for _, _, image in pairs())):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            images.add(encode(pixels, lossless=True))
    return PackedRows(folder / "rows"), ImageStore(folder / "images")


def objective_of(folder: Path, **changes: Any) -> Contrastive:
    """Batches of eight groups of rows."""
    rows, images = PackedRows(folder / "rows"), ImageStore(folder / "images")
    config = parse(AlignConfig, {**SETTINGS, "batch_tokens": 8 * 2 * LENGTH, **changes}, constants=True)
    return Contrastive(PackedLoader(rows, batch_rows=8, seed=1), config, images=images, heldout_images=images)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs")
    packed(path)
    return path


def embedded(model: Decoder, head: str, ids: list[int], pooling: str) -> Tensor:
    """One sequence in a forward pass of its own, with its end token."""
    batch = TokenBatch.of_sequences([[*ids, EOS] if ids[-1] != EOS else ids])
    hidden = forward(model, batch)[0]
    return F.normalize(model.heads[head](hidden.mean(0) if pooling == "mean" else hidden[-1]), dim=-1)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_loss_and_gradients_are_those_written_out_pair_by_pair(pooling: str, folder: Path) -> None:
    objective = objective_of(folder, pooling=pooling)
    model = tiny_run.tiny_model(torch.float64)
    attach_modules(model, objective, 1)
    rows, images = packed(folder)
    batch = objective.prepare(next(rows.batches(rows.num_groups)).padded(rows.num_groups + 2), model)
    assert int(objective.weights(batch)[CONTRASTIVE]) == NUM_PAIRS
    found = objective.losses(forward(model, batch), batch, model)
    names = [name for name, _ in model.named_parameters() if name != "head.weight"]
    parameters = [model.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(found.losses[CONTRASTIVE], parameters, allow_unused=True)

    texts = torch.stack([embedded(model, "text", text, pooling) for text, _, _ in pairs()])
    others = []
    for _, code, image in pairs():
        if image < 0:
            others.append(embedded(model, "code", code, pooling))
            continue
        pixels = torch.from_numpy(images.pixels(image, size=8, fit="crop"))[None]
        others.append(F.normalize(model.heads["image"](pixels)[0], dim=-1))
    views = torch.stack([texts, torch.stack(others)])
    scale = model.heads["scale"].get_parameter("log_scale").exp()
    total = torch.zeros((), dtype=torch.float64)
    same = [[a[0] == b[0] for b in pairs()] for a in pairs()]
    for side in range(2):
        for i in range(NUM_PAIRS):
            others_of = [j for j in range(NUM_PAIRS) if not same[i][j]]
            logits = [scale * (views[side, i] @ views[1 - side, i])]
            logits += [scale * (views[side, i] @ views[place, j]) for place in range(2) for j in others_of]
            total = total + (torch.cat(logits).logsumexp(0) - logits[0][0]) / 2
    torch.testing.assert_close(found.losses[CONTRASTIVE], total, rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    for name, ours, theirs in zip(names, gradients, expected, strict=True):
        if theirs is None:
            assert ours is None or not ours.any(), name
        else:
            torch.testing.assert_close(
                ours, theirs, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
    total_code = sum(image < 0 for _, _, image in pairs())
    assert [int(found.metrics[f"accuracy/{kind}"][1]) for kind in ("code", "image")] == [
        total_code, NUM_PAIRS - total_code,
    ]  # fmt: skip


def trained(folder: Path, out: Path, world: World, **more: Any) -> dict[str, Tensor]:
    objective = objective_of(folder)
    model = tiny_run.tiny_model(torch.float64)
    heldout = list(PackedRows(folder / "rows").batches(5))
    result = tiny_run.run(out, objective.config, model=model, objective=objective, world=world, heldout=heldout, **more)
    found = {name: one.detach().clone() for name, one in model.state_dict().items()}
    numbers = {"loss": result.loss, "heldout": result.heldout_loss, **result.heldout_metrics}
    return found | {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {name: tiny_run.TWO_RANK_LAYOUTS[name] for name in ("one copy", "copies", "zero 3", "tensor")},
    4: {"copies": {"shared_memory": False}, "tensor and data": {"tensor": 2, "shared_memory": False}},
}


def in_all_layouts(world: World, folder: Path, out: Path) -> dict[str, dict[str, Tensor]]:
    return {
        name: trained(folder, out / name, world, parallel=ParallelConfig(**layout))
        for name, layout in LAYOUTS[world.size].items()
    }


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return trained(folder, tmp_path_factory.mktemp("alone"), single())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_gives_the_weights_of_one_process(
    world_size: int, folder: Path, alone: dict[str, Tensor], tmp_path: Path
) -> None:
    fresh = tiny_run.tiny_model(torch.float64)
    attach_modules(fresh, objective_of(folder), 1)
    for name, before in fresh.state_dict().items():
        assert torch.equal(before, alone[name]) == (name in ("head.weight", "heads.scale.bias")), name
    for ranks in run_distributed(in_all_layouts, world_size, folder, tmp_path):
        for layout, found in ranks.items():
            for name, value in alone.items():
                assert torch.allclose(found[name], value, rtol=1e-8, atol=1e-9), f"{layout}: {name}"


def refused(world: World, folder: Path, out: Path, layout: dict[str, Any]) -> str:
    try:
        trained(folder, out, world, parallel=ParallelConfig(**layout))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_layout_that_divides_rows_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for text in run_distributed(refused, 2, folder, tmp_path, {"context": 2}):
        assert "parallel.context" in text


def test_a_space_that_has_collapsed_finds_nothing(folder: Path) -> None:
    objective, model = objective_of(folder), tiny_run.tiny_model(torch.float64)
    attach_modules(model, objective, 1)
    batch = next(objective.batches(model, first=0, rank=0, world_size=1))
    for name, weight in model.heads.named_parameters():
        if name.endswith("projection.weight") or name in ("text.weight", "code.weight"):
            weight.data.zero_()[0] = 1.0  # every vector is a multiple of the first unit vector
    found = objective.losses(forward(model, batch).abs(), batch, model)
    assert int(found.metrics["accuracy/code"][0]) == 0


def test_a_scale_beyond_its_limit_can_come_back() -> None:
    scale = LearnedScale(0.07, 0.0)
    scale.log_scale.data.fill_(math.log(MAX_SCALE) + 0.5)
    assert scale(torch.zeros(1))[0].item() == pytest.approx(MAX_SCALE)
    for sign, expected in ((1.0, MAX_SCALE), (-1.0, 0.0)):
        (gradient,) = torch.autograd.grad(sign * scale(torch.zeros(1))[0], scale.log_scale)
        assert float(gradient) == pytest.approx(expected)
    scale.log_scale.data.fill_(math.log(3.0))
    (gradient,) = torch.autograd.grad(-scale(torch.zeros(1))[0], scale.log_scale)
    assert float(gradient) == pytest.approx(-3.0)


def test_a_batch_that_memory_divides_is_an_error_and_no_other_loss(folder: Path) -> None:
    objective, model = objective_of(folder), tiny_run.tiny_model(torch.float64)
    attach_modules(model, objective, 1)
    batch = next(objective.batches(model, first=0, rank=0, world_size=1))
    half = batch.split(2)[0]
    with config_error("batch_tokens", match="does not fit into memory whole"):
        objective.losses(forward(model, half), half, model)
