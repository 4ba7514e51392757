"""Batch norm and ResNet against PyTorch's own layers, alone and over ranks, and in the number formats of training."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed import run_distributed
from modelwright.core.config import ConfigError
from modelwright.model.vision.classifier import (
    BatchNorm,
    Convolution,
    ImageClassifier,
    ResNet,
    alone,
    forward_flops,
    statistics_over,
)
from modelwright.model.vision.config import ResNetConfig, VisionConfig
from modelwright.model.vision.vit import VisionTower
from modelwright.ops import matmul
from modelwright.ops.lowp_linear import in_float
from modelwright.parallel.mesh import World, gather_rows, single

SHAPE = ResNetConfig(image_size=8, widths=(4, 8), blocks_per_stage=2)
NUM_IMAGES = 7


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 + 2 * torch.randn(NUM_IMAGES, 3, 8, 8, generator=generator, dtype=dtype)


def network(dtype: torch.dtype = torch.float64) -> ResNet:
    torch.manual_seed(1)
    return ResNet(SHAPE).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_batch_norm_is_that_of_pytorch(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = BatchNorm(3).to(dtype), nn.BatchNorm2d(3).to(dtype)
    weight, bias = torch.tensor([0.5, 2.0, -1.0], dtype=dtype), torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
    for norm in (ours, theirs):
        norm.weight.data, norm.bias.data = weight.clone(), bias.clone()
    for number in range(3):
        inputs = [images(dtype).add(number).requires_grad_() for _ in range(2)]
        outputs = [norm(x) for norm, x in zip((ours, theirs), inputs, strict=True)]
        torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
        weights = torch.linspace(-1, 1, outputs[0].numel(), dtype=dtype).view_as(outputs[0])
        for out in outputs:
            (out * weights).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=10 * tolerance, atol=10 * tolerance)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=10 * tolerance, atol=10 * tolerance)
    torch.testing.assert_close(ours.eval()(images(dtype)), theirs.eval()(images(dtype)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_normalized_in_fp32(dtype: torch.dtype) -> None:
    """Values around 300 with a spread of 1, whose moments 8 or 11 bits cannot hold."""
    narrow = (300 + 4 * torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0))).to(dtype)
    norm, reference = BatchNorm(3), nn.BatchNorm2d(3)
    out = norm(narrow)
    assert out.dtype == dtype
    assert norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(out.float(), reference(narrow.float()).to(dtype).float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(norm.running_var, reference.running_var, rtol=1e-4, atol=1e-4)


def test_a_batch_that_is_not_finite_leaves_the_running_statistics() -> None:
    norm = BatchNorm(3)
    norm(images(torch.float32))
    before = [norm.running_mean.clone(), norm.running_var.clone()]
    norm(images(torch.float32).index_fill(0, torch.tensor([0]), float("inf")))
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])


def learned(world: World, ends: list[int]) -> Mapping[str, Tensor]:
    """Loss, gradients and running statistics of images that are divided among the ranks at `ends`."""
    net = network()
    own = images()[0 if not world.rank else ends[world.rank - 1] : ends[world.rank]]
    everything = torch.linspace(0.5, 2, NUM_IMAGES, dtype=torch.float64)
    weights = everything[0 if not world.rank else ends[world.rank - 1] : ends[world.rank]]
    with statistics_over(net, lambda x: gather_rows(x[None], world)[0]):
        for _ in range(2):
            net.zero_grad()
            loss = (net(own).square().sum(1) * weights).sum()
            loss.backward()
    found = {name: world.all_reduce_sum(one.grad) for name, one in net.named_parameters() if one.grad is not None}
    return {**found, **dict(net.named_buffers()), "loss": world.all_reduce_sum(loss.detach())}


@pytest.mark.parametrize("ends", [[4, 7], [7, 7]], ids=["uneven", "one rank without images"])
def test_two_ranks_have_the_statistics_and_gradients_of_one(ends: list[int]) -> None:
    expected = learned(single(), [NUM_IMAGES])
    assert len(expected) == len(list(network().parameters())) + len(list(network().buffers())) + 1
    ranks = run_distributed(learned, 2, ends)
    for found in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
            )
    for name, _ in network().named_buffers():
        assert torch.equal(ranks[0][name], ranks[1][name])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.02)]
)
def test_one_pass_equals_the_way_of_several_ranks(dtype: torch.dtype, tolerance: float) -> None:
    found: list[list[Tensor]] = []
    for gather in (alone, lambda own_E: own_E[None]):
        norm = BatchNorm(3).to(torch.promote_types(dtype, torch.float32))
        norm.weight.data = torch.tensor([0.5, 2.0, -1.0]).to(norm.weight)
        x = images().to(dtype).requires_grad_()
        with statistics_over(norm, gather):
            out = norm(x)
            (out * images().to(dtype)).sum().backward()
        assert out.dtype == dtype
        found.append([out, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("instructions", [matmul.CPU_MULTIPLIES, frozenset()], ids=["own", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_convolution_in_a_format_that_is_only_cast_to_copies_no_patches(
    dtype: torch.dtype, instructions: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", instructions)
    convolution = Convolution(3, 5, size=3, stride=1)
    convolution.kernel.product = partial(in_float, dtype)
    found: list[list[Tensor]] = []
    for run in (convolution.by_patches, convolution):
        convolution.zero_grad()
        x = images(torch.float32).requires_grad_()
        out = run(x)
        assert out.dtype == dtype
        out.float().square().mean().backward()
        found.append([out, x.grad, convolution.kernel.weight.grad])
        monkeypatch.setattr(F, "unfold", None)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("size", "stride", "side"), [(3, 1, 7), (3, 2, 8), (3, 2, 7), (1, 2, 8), (1, 1, 5)])
def test_a_convolution_is_the_product_of_patches(size: int, stride: int, side: int) -> None:
    convolution = Convolution(3, 5, size=size, stride=stride).double()
    inputs = [torch.randn(2, 3, side, side, dtype=torch.float64, requires_grad=True) for _ in range(1)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    outputs, gradients = [], []
    for x, run in zip(inputs, (convolution, convolution.by_patches), strict=True):
        convolution.zero_grad()
        outputs.append(run(x))
        outputs[-1].square().sum().backward()
        gradients.append(convolution.kernel.weight.grad)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-11, atol=1e-11)


def test_the_network_written_out() -> None:
    """The same network by PyTorch's functions, from its parameters."""
    net = network().eval()
    state = net.state_dict()

    def convolved(x: Tensor, name: str, size: int, stride: int) -> Tensor:
        weight = state[f"{name}.kernel.weight"]
        return F.conv2d(x, weight.view(len(weight), -1, size, size), stride=stride, padding=size // 2)

    def normed(x: Tensor, name: str) -> Tensor:
        own = [state[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *own)

    x = F.relu(normed(F.conv2d(images(), state["stem.weight"], padding=1), "norm"))
    for number, stride in enumerate((1, 1, 2, 1)):
        block = f"blocks.{number}"
        out = F.relu(normed(convolved(x, f"{block}.conv1", 3, stride), f"{block}.norm1"))
        out = normed(convolved(out, f"{block}.conv2", 3, 1), f"{block}.norm2")
        if number == 2:
            x = normed(convolved(x, f"{block}.shortcut", 1, 2), f"{block}.shortcut_norm")
        x = F.relu(x + out)
    torch.testing.assert_close(net(images()), x.mean((2, 3)), rtol=1e-12, atol=1e-12)


def test_flops_are_those_counted_by_hand() -> None:
    shape = ResNetConfig(image_size=8, widths=(4,), blocks_per_stage=1)
    by_hand = 2 * 64 * 9 * 3 * 4 + 2 * (2 * 64 * 9 * 4 * 4) + 2 * 4 * 10
    assert forward_flops(shape, 10) == by_hand


def test_a_transformer_computes_the_same_with_its_products_replaced() -> None:
    shape = VisionConfig(image_size=8, patch_size=4, num_layers=2, model_dim=16, num_heads=2, ffn_dim=24)
    torch.manual_seed(0)
    model = ImageClassifier(shape, 5).double()
    tower = VisionTower(shape).double()
    tower.load_state_dict(model.tower.state_dict())
    torch.testing.assert_close(model(images()), model.head(tower(images())), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"image_size": 0}, "image_size"), ({"widths": ()}, "widths"), ({"image_size": 6, "widths": (1, 2, 3)}, "halved")],
)
def test_a_shape_that_cannot_be_is_named(settings: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ResNetConfig(**settings)
