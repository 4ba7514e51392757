"""Folded norms: the same function in FP64, from memory and from disk; integers of a classifier equal its training."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor, nn

from modelwright.compress.fold import fold_batch_norms, fold_norms, norm_readers
from modelwright.compress.int8 import GridLinear, TrainedGrid
from modelwright.model.decoder import AttentionConfig, Decoder, FeedForwardConfig, ModelConfig, NormConfig, RMSNorm
from modelwright.model.hf import deferred_model, load_model, save_model
from modelwright.model.vision.classifier import BatchNorm, ImageClassifier
from modelwright.model.vision.config import ResNetConfig, VisionConfig
from modelwright.objectives.image_classification import carrier, quantize_classifier
from modelwright.ops.int_grid import WeightGrid
from modelwright.parallel.sharded_weights import read_deferred
from modelwright.train.objective import forward
from modelwright.train.techniques.fake_quantization import FakeQuantization, QuantizationAwareConfig, Range

SHAPES: dict[str, ModelConfig] = {
    "plain": tiny_run.SHAPE,
    "biases": replace(
        tiny_run.SHAPE,
        attention=AttentionConfig(qkv_bias=True, output_bias=True),
        feed_forward=FeedForwardConfig(bias=True),
    ),
    "routed": replace(tiny_run.SHAPE, attention_gate="head", head_budget=0.5, qk_norm=True),
    "gemma": replace(
        tiny_run.SHAPE,
        norms=NormConfig(post_norms=True, one_plus_weight=True),
        feed_forward=FeedForwardConfig(activation="gelu_tanh"),
    ),
}


def decoder(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """Every norm has weights of its own."""
    model, draw = Decoder(SHAPES[name]), torch.Generator().manual_seed(0)
    model.init_weights(2)
    with torch.no_grad():
        for one in model.modules():
            if isinstance(one, RMSNorm):
                one.weight.add_(0.4 * torch.randn(one.weight.shape, generator=draw))
            elif isinstance(one, nn.Linear):
                one.weight.mul_(5.0)
    return model.to(dtype).eval()


@torch.no_grad()
def hidden(model: Decoder) -> Tensor:
    return forward(model, tiny_run.Rows().batch(5))


@pytest.mark.parametrize("name", SHAPES)
def test_a_decoder_computes_the_same(name: str) -> None:
    model, plain = decoder(name), decoder(name)
    fold_norms(model)
    torch.testing.assert_close(hidden(model), hidden(plain), rtol=1e-10, atol=1e-10)
    for block, before in zip(model.blocks.values(), plain.blocks.values(), strict=True):
        for norm, readers in norm_readers(block).items():
            folded = block.get_submodule(norm)
            assert torch.equal(folded.weight, torch.full_like(folded.weight, folded.neutral_weight))
            for reader in readers:
                assert not torch.equal(block.get_submodule(reader).weight, before.get_submodule(reader).weight)
        assert torch.equal(block.attention.o_proj.weight, before.attention.o_proj.weight)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_weights_on_disk_are_folded_when_they_are_read(stored: torch.dtype, tmp_path: Path) -> None:
    save_model(decoder("plain", stored), tmp_path, eos_id=0)
    model, expected = deferred_model(tmp_path), load_model(tmp_path).float()
    fold_norms(model)
    read_deferred(model, torch.device("cpu"))
    fold_norms(expected)
    parameters = dict(model.named_parameters())
    for name, one in expected.named_parameters():
        assert torch.equal(parameters[name], one), name


def classifier(shape: ResNetConfig | VisionConfig) -> ImageClassifier:
    """With running statistics of its own, and batch norms of both signs, one of which shuts a channel off."""
    torch.manual_seed(0)
    model = ImageClassifier(shape, 5).double()
    with torch.no_grad():
        for one in model.modules():
            if isinstance(one, BatchNorm):
                one.weight.normal_(0.5, 1.0)
                one.weight[0] = 0.0
                one.bias.normal_()
        model.train()
        for _ in range(4):
            model(torch.randn(6, 3, 8, 8, dtype=torch.float64))
    return model.eval()


RESNET = ResNetConfig(image_size=8, widths=(8, 16), blocks_per_stage=2)
VIT = VisionConfig(image_size=8, patch_size=4, num_layers=2, model_dim=32, num_heads=2, ffn_dim=64)
PIXELS = torch.randn(7, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_resnet_computes_the_same_without_its_batch_norms() -> None:
    model, plain = classifier(RESNET), classifier(RESNET)
    fold_batch_norms(model)
    assert not any(isinstance(one, BatchNorm) for one in model.modules())
    torch.testing.assert_close(model(PIXELS), plain(PIXELS), rtol=1e-10, atol=1e-10)
    by_patches = model.tower.blocks[1].conv1.by_patches
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(by_patches(x), model.tower.blocks[1].conv1(x), rtol=1e-10, atol=1e-10)


def rounding(model: ImageClassifier, config: QuantizationAwareConfig, ranges: Mapping[str, Range]) -> None:
    """Make the classifier multiply rounded factors, as in training."""
    whole = carrier(torch.float64)
    whole.heads["classifier"] = model
    fake = FakeQuantization(config=config, model=whole, is_on=True)
    fake.ranges |= {f"heads.classifier.{name}": one for name, one in ranges.items()}
    for name, projection in whole.projections().items():
        projection.product = fake.wrap(name, projection.product)


GRIDS = [
    WeightGrid(bits=bits, symmetric=symmetric, granularity=granularity)
    for bits in (4, 8)
    for symmetric in (True, False)
    for granularity in ("tensor", "channel")
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [RESNET, VIT], ids=["resnet", "vit"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("activations", ["none", "token", "tensor_min_max"])
@torch.no_grad()
def test_integers_equal_rounded_factors(grid: WeightGrid, activations: Any, shape: Any) -> None:
    """Those of the folded classifier; and, on the grid that it is trained on, of one that still has its norms."""
    model, config = classifier(shape), QuantizationAwareConfig(weights=grid, activations=activations, start_step=1)
    plain, folded = model(PIXELS), copy.deepcopy(model)
    fold_batch_norms(folded)
    names = [name for name, one in model.named_modules() if hasattr(one, "product")]
    ranges = {name: Range(least=-1.0, most=2.5, is_empty=False) for name in names}
    trained = TrainedGrid(
        weights=grid,
        activations="tensor" if config.has_observers else activations,
        ranges={name: (one.least, one.most) for name, one in ranges.items()},
    )
    integers = quantize_classifier(model, trained)
    assert sum(isinstance(one, GridLinear) for one in integers.modules()) == len(names) > 0
    assert not any(isinstance(one, BatchNorm) for one in integers.modules())
    found = integers(PIXELS)
    for one in (folded, model):
        rounding(one, config, ranges)
    torch.testing.assert_close(found, folded(PIXELS), rtol=1e-6, atol=1e-6)
    if grid == WeightGrid(bits=grid.bits):
        torch.testing.assert_close(found, model(PIXELS), rtol=1e-6, atol=1e-6)
    elif grid.granularity == "tensor" and shape is RESNET:
        assert float((found - model(PIXELS)).abs().max()) > 1e-3, "a norm changes codes on this grid"
    assert float((plain - found).abs().max()) > 1e-3
