"""Captioning in the training loop: its loss written out token by token, and every layout against one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed
from modelwright.core.config import ConfigError, DataError, parse
from modelwright.data.images.decode import encode
from modelwright.data.images.store import ImageStore, write_images
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.model.attention import causal_attend
from modelwright.model.vision.folders import save_vision_tower
from modelwright.model.vision.llava import IMAGES, ImagePrefix
from modelwright.model.vision.vit import VisionTower
from modelwright.objectives.captioning import LOSS, CaptionConfig, Captioning, image_numbers
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.build import attach_modules
from modelwright.train.objective import forward
from modelwright.train.precision.policy import ALWAYS_FP32

EOS, IMAGE_TOKEN, NUM_PATCHES, NUM_IMAGES, LENGTH = 0, 1, 4, 30, 32
VISION = {"image_size": 8, "patch_size": 4, "num_layers": 2, "model_dim": 16, "num_heads": 2, "ffn_dim": 24}
SETTINGS = {
    "num_steps": 4, "checkpoint_every_steps": 2, "checkpoint_every_minutes": 0.0, "eval_every_steps": 2,
    "learning_rate": 1e-3, "precision": {"policy": "fp32", "fp32_ops": [*ALWAYS_FP32]}, "vision_tower": VISION,
    "train_tower": True, "batch_tokens": 8 * LENGTH,
}  # fmt: skip


def conversations() -> list[tuple[list[int], list[int]]]:
    """Tokens before the answer, image tokens included, and the answer."""
    dice = np.random.default_rng(3)

    def text(least: int, most: int) -> list[int]:
        return dice.integers(2, tiny_run.VOCABULARY, int(dice.integers(least, most))).tolist()

    return [([*text(0, 3), *[IMAGE_TOKEN] * NUM_PATCHES, *text(1, 5)], text(2, 6)) for _ in range(NUM_IMAGES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captions")
    sequences = [
        TokenSequence([*prompt, *answer], [0] * len(prompt) + [1] * len(answer), value=float(number + 1))
        for number, (prompt, answer) in enumerate(conversations())
    ]
    settings = PackConfig(seq_len=LENGTH)
    pack(sequences, path / "rows", settings, vocab_size=tiny_run.VOCABULARY, eos_id=EOS)
    with write_images(path / "images") as images:
        for number in range(NUM_IMAGES):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            images.add(encode(pixels, lossless=True))
    return path


def objective_of(folder: Path, **changes: Any) -> Captioning:
    """Batches of eight rows."""
    rows, images = PackedRows(folder / "rows"), ImageStore(folder / "images")
    config = parse(CaptionConfig, {**SETTINGS, **changes}, constants=True)
    return Captioning(
        source=PackedLoader(rows, batch_rows=8, seed=1),
        config=config,
        shape=config.vision_tower,
        tower=None,
        image_token=IMAGE_TOKEN,
        images=images,
        heldout_images=images,
    )


@pytest.mark.parametrize("layer", [-1, -2])
def test_loss_and_gradients_are_those_written_out_image_by_image(layer: int, folder: Path) -> None:
    objective = objective_of(folder, feature_layer=layer)
    model = tiny_run.tiny_model(torch.float64)
    attach_modules(model, objective, 1)
    rows = PackedRows(folder / "rows")
    batch = objective.prepare(next(rows.batches(rows.num_groups)).padded(rows.num_groups + 2), model)
    model.ends.loss_in_fp32 = False
    found = objective.losses(forward(model, batch), batch, model).losses[LOSS]
    assert int(objective.weights(batch)[LOSS]) == sum(len(answer) for _, answer in conversations())
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    gradients = torch.autograd.grad(found, list(trained.values()))

    prefix = model.heads[IMAGES]
    assert isinstance(prefix, ImagePrefix)
    total = torch.zeros((), dtype=torch.float64)
    for number, (prompt, answer) in enumerate(conversations()):
        pixels = torch.from_numpy(ImageStore(folder / "images").pixels(number, size=8, fit="crop"))[None]
        hidden = prefix.tower.patches(prefix.tower.normalized(pixels)).flatten(2).transpose(1, 2)
        hidden = torch.cat([prefix.tower.class_token.expand(1, 1, -1), hidden], dim=1)
        hidden = prefix.tower.norm_in(hidden + prefix.tower.positions)
        for block in list(prefix.tower.blocks)[: 3 + layer]:
            hidden = block(hidden)
        inner = torch.nn.functional.gelu(prefix.projector.linear_1(hidden[0, 1:]))
        patches = iter(prefix.projector.linear_2(inner))
        tokens = torch.tensor([*prompt, *answer])
        embeddings = [next(patches) if token == IMAGE_TOKEN else model.embedding.weight[token] for token in tokens]
        stacked = torch.stack(embeddings)[None]
        places = torch.arange(len(tokens))[None]
        states = model.norm(model.run_blocks(stacked, places, causal_attend()))[0]
        log_probs = model.logits(states).log_softmax(dim=-1)
        for place, token in enumerate(answer, start=len(prompt)):
            total = total - log_probs[place - 1, token]
    torch.testing.assert_close(found.double(), total, rtol=1e-6, atol=0.0)  # the sum itself is in FP32
    expected = torch.autograd.grad(total, list(trained.values()))
    for name, ours, theirs in zip(trained, gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert gradients[list(trained).index("heads.images.projector.linear_1.weight")].abs().max() > 1e-4


@pytest.mark.parametrize(("layer", "train_tower"), [(-1, True), (-2, True), (-2, False)])
def test_flops_of_images_are_those_of_the_products_that_run(layer: int, train_tower: bool, folder: Path) -> None:
    objective = objective_of(folder, feature_layer=layer, train_tower=train_tower)
    model = tiny_run.tiny_model(torch.float64)
    attach_modules(model, objective, 1)
    batch = next(PackedRows(folder / "rows").batches(2))
    width, num_tokens, num_blocks, decoder = 16, NUM_PATCHES + 1, 3 + layer, model.config.model_dim
    patches = 2 * NUM_PATCHES * 3 * 4 * 4 * width
    blocks = num_blocks * (2 * num_tokens * (4 * width**2 + 2 * width * 24) + 4 * num_tokens**2 * width)
    layers = [2 * NUM_PATCHES * num_inputs * decoder for num_inputs in (width, decoder)]
    trained = 3 * (blocks + sum(layers)) + 2 * patches  # pixels have no gradient
    frozen = patches + blocks + 3 * sum(layers) - layers[0]  # a frozen tower has none either
    num_images = int((image_numbers(batch) >= 0).sum())
    assert num_images > 1
    assert objective.own_flops(batch) == num_images * (trained if train_tower else frozen)


def test_what_does_not_reach_the_projector_is_frozen(folder: Path) -> None:
    for train_tower, expected in (
        (True, {"patches", "class_token", "positions", "norm_in", "blocks.0"}),
        (False, set()),
    ):
        model = tiny_run.tiny_model(torch.float64)
        attach_modules(model, objective_of(folder, train_tower=train_tower), 1)
        tower = model.heads.get_submodule("images.tower")
        trained = {name for name, one in tower.named_parameters() if one.requires_grad}
        assert {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in trained} == expected
        assert all(one.requires_grad for one in model.heads.get_submodule("images.projector").parameters())


def trained(folder: Path, out: Path, world: World, *, changes: Any = None, **more: Any) -> dict[str, Tensor]:
    objective = objective_of(folder, **(changes or {}))
    model = tiny_run.tiny_model(torch.float64)
    heldout = list(PackedRows(folder / "rows").batches(5))
    result = tiny_run.run(out, objective.config, model=model, objective=objective, world=world, heldout=heldout, **more)
    found = {name: one.detach().clone() for name, one in model.state_dict().items()}
    numbers = {"loss": result.loss, "heldout": result.heldout_loss}
    return found | {name: torch.tensor(value) for name, value in numbers.items()}


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Weights are in FP64, sums of losses in FP32."""
    return torch.allclose(found, expected, rtol=1e-8 if found.dtype == torch.float64 else 1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return trained(folder, tmp_path_factory.mktemp("alone"), single())


@pytest.mark.parametrize("parts", [2, 8])
def test_microbatches_give_the_weights_of_whole_batches(
    parts: int, folder: Path, alone: dict[str, Tensor], tmp_path: Path
) -> None:
    found = trained(folder, tmp_path, single(), changes={"gradient_accumulation_steps": parts})
    for name, value in alone.items():
        assert is_close(found[name], value), f"{name}: {(found[name] - value).abs().max()}"


def in_all_layouts(world: World, folder: Path, out: Path) -> dict[str, dict[str, Tensor]]:
    layouts = {name: tiny_run.TWO_RANK_LAYOUTS[name] for name in ("one copy", "copies", "zero 3")}
    return {
        name: trained(folder, out / name, world, parallel=ParallelConfig(**layout)) for name, layout in layouts.items()
    }


@pytest.mark.slow
def test_every_layout_gives_the_weights_of_one_process(folder: Path, alone: dict[str, Tensor], tmp_path: Path) -> None:
    fresh = tiny_run.tiny_model(torch.float64)
    attach_modules(fresh, objective_of(folder), 1)
    is_trained = {name: one.requires_grad for name, one in fresh.named_parameters()}
    for name, before in fresh.state_dict().items():
        assert torch.equal(before, alone[name]) != is_trained[name], name
    for ranks in run_distributed(in_all_layouts, 2, folder, tmp_path):
        for layout, found in ranks.items():
            for name, value in alone.items():
                assert is_close(found[name], value), f"{layout}: {name}"


def refusals(world: World, folder: Path, out: Path, layouts: list[dict[str, Any]]) -> list[str]:
    found = []
    for layout in layouts:
        try:
            trained(folder, out, world, parallel=ParallelConfig(**layout))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_layouts_that_divide_layers_or_rows_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    names = ("context", "tensor", "pipeline")
    for texts in run_distributed(refusals, 2, folder, tmp_path, [{name: 2} for name in names]):
        assert all(f"parallel.{name}" in text or name in text for name, text in zip(names, texts, strict=True)), texts
        assert all(texts)


def test_training_starts_from_a_folder_of_the_tower(folder: Path, tmp_path: Path) -> None:
    objective = objective_of(folder)
    torch.manual_seed(5)
    tower = VisionTower(objective.shape)
    save_vision_tower(tower, tmp_path)
    objective.tower = tmp_path
    model = tiny_run.tiny_model(torch.float32)
    attach_modules(model, objective, 1)
    for name, one in tower.state_dict().items():
        assert torch.equal(model.heads.get_submodule("images.tower").state_dict()[name], one)


def test_rows_of_another_tower_are_refused(folder: Path) -> None:
    objective = objective_of(folder, vision_tower={**VISION, "patch_size": 2})
    with pytest.raises(DataError, match="packed for another vision tower"):
        next(iter(objective.batches(tiny_run.tiny_model(torch.float64), first=0, rank=0, world_size=1)))
