"""Small optimizer states: their codes, AdamW on top of them, and their way through a checkpoint."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from modelwright.ops.dtensor import view_of
from modelwright.train.optim.adamw import (
    BLOCK,
    LowBitAdamW,
    ScaleBlocks,
    pack_signed,
    pack_square,
    random_16_bits,
    round_stochastically,
    unpack_signed,
    unpack_square,
)

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def values(seed: int, numel: int = 3 * BLOCK + 5) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=draw) ** 3 * torch.logspace(-8, 3, numel)


def test_codes_are_near_and_packing_them_again_changes_no_bit():
    signed, square = values(0), values(1).square()
    square[7] = 0.0
    for original, pack, unpack in ((signed, pack_signed, unpack_signed), (square, pack_square, unpack_square)):
        blocks = ScaleBlocks(original)
        packed = pack(original, blocks)
        found = unpack(packed, original.shape, blocks)
        again = pack(found, blocks)
        assert torch.equal(packed.codes, again.codes)
        assert torch.equal(unpack(again, original.shape, blocks), found)
        largest = torch.cat([original, torch.zeros(-len(original) % BLOCK)]).view(-1, BLOCK).abs().amax(1)
        scale = largest.repeat_interleave(BLOCK)[: len(original)]
        assert bool(((found - original).abs() <= 0.009 * scale).all())
        assert torch.equal(found == 0, original == 0) or pack is pack_signed
        assert found.sign().equal(original.sign()) or pack is pack_signed


def test_packing_what_is_all_zero():
    zeros = torch.zeros(5)
    for pack, unpack in ((pack_signed, unpack_signed), (pack_square, unpack_square)):
        assert torch.equal(unpack(pack(zeros, ScaleBlocks(zeros)), zeros.shape, ScaleBlocks(zeros)), zeros)


def noise_for(values: torch.Tensor, name: str = "w", seed: int = 0) -> torch.Tensor:
    return random_16_bits(view_of(name, values), seed)


def test_stochastic_rounding_keeps_the_mean_and_what_fits():
    one = torch.full((100_000,), 1.0 + 2**-9)
    rounded = round_stochastically(one, noise_for(one))
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.float().mean()) == pytest.approx(1.0 + 2**-9, abs=1e-4)
    fits = torch.tensor([1.0, -0.375, 0.0, torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(fits, noise_for(fits)).float(), fits)
    nan = torch.tensor([torch.nan])
    assert bool(round_stochastically(nan, noise_for(nan)).isnan().all())


def test_random_bits_are_uniform_and_differ_between_positions_and_seeds():
    values = torch.zeros(300, 700)
    bits = noise_for(values)
    assert bits.dtype == torch.int32
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 16
    counts = torch.bincount((bits >> 8).flatten(), minlength=256).double()
    expected = values.numel() / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 330  # chi-squared with 255 degrees: 99.9% below 330
    other = noise_for(values, seed=1)
    correlation = torch.corrcoef(torch.stack([bits.flatten(), other.flatten()]).double())[0, 1]
    neighbors = torch.corrcoef(torch.stack([bits.flatten()[1:], bits.flatten()[:-1]]).double())[0, 1]
    assert abs(float(correlation)) < 0.01
    assert abs(float(neighbors)) < 0.01


def test_parameters_with_equal_gradients_are_rounded_with_different_bits():
    """Two parameters of one shape drew the same bits while these depended on the step alone."""
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    names = dict(zip(weights, "ab", strict=True))
    optimizer = LowBitAdamW([{"params": weights}], **SETTINGS, names=names, states="bf16")
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    for weight in weights:
        weight.grad = gradient.clone()
    optimizer.step()
    first, second = (optimizer.state[weight]["exp_avg"] for weight in weights)
    assert 0.3 < float((first != second).double().mean()) < 0.6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if kind == "fp32":
        return AdamW(groups, **SETTINGS)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return LowBitAdamW(groups, **SETTINGS, names=names, states=kind)  # pyright: ignore


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    teacher = torch.randn(24, 8, generator=torch.Generator().manual_seed(9))
    for number in range(first, last):
        inputs = torch.randn(64, 24, generator=torch.Generator().manual_seed(number))
        loss = (model(inputs) - torch.tanh(inputs @ teacher)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_it_learns_as_adamw_does(kind):
    ours, theirs = net(), net()
    mine, plain = (train(model, optimizer_of(model, name), 0, 300) for model, name in ((ours, kind), (theirs, "fp32")))
    assert mine[0] == plain[0]
    assert mine[1] == pytest.approx(plain[1], rel=1e-4)
    assert sum(mine[-30:]) == pytest.approx(sum(plain[-30:]), rel=0.05)
    assert sum(plain[-30:]) < 0.3 * 30 * plain[0]


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_a_run_goes_on_with_the_same_bits_from_states_in_fp32(kind):
    once = net()
    optimizer = optimizer_of(once, kind)
    train(once, optimizer, 0, 5)
    again = copy.deepcopy(once)
    second = optimizer_of(again, kind)
    for mine, other in zip(again.parameters(), once.parameters(), strict=True):
        state = optimizer.state[other]
        assert state["exp_avg"].dtype == torch.float32
        assert state["exp_avg"].shape == other.shape
        second.state[mine] = {name: value.clone() for name, value in state.items()}
    train(once, optimizer, 5, 9)
    train(again, second, 5, 9)
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), again.parameters(), strict=True))


def test_states_take_a_quarter_and_a_half_of_their_memory():
    weight = nn.Parameter(torch.randn(512, 512))
    for states, share in (("int8", 0.26), ("bf16", 0.5)):
        optimizer = LowBitAdamW([{"params": [weight]}], **SETTINGS, names={weight: "w"}, states=states)  # pyright: ignore
        weight.grad = torch.randn(512, 512)
        optimizer.step()
        kept = optimizer.packed[weight][1:]
        tensors = [tensor for one in kept for tensor in (one.codes, one.scales) if tensor is not None]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert num_bytes <= share * 8 * weight.numel()
