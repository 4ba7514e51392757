"""AdamW with its states on the host against PyTorch's own."""

import copy

import torch
from torch import nn

from modelwright.train.optim.adamw import OffloadedAdamW
from modelwright.train.optim.build import build_optimizer
from tolerances import TOLERANCES

SETTINGS = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        net(inputs).square().sum().backward()
        if number % 3 == 2:
            net[2].bias.grad = None  # a parameter that a step leaves out
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_weights_and_states_are_adamw_s():
    ours, theirs = model(), model()
    offloaded, plain = build_optimizer(ours, **SETTINGS, offload=True), build_optimizer(theirs, **SETTINGS)
    assert isinstance(offloaded, OffloadedAdamW)
    train(ours, offloaded, 0, 10)
    train(theirs, plain, 0, 10)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCES["fp32_op"])
        for name, value in plain.state[other].items():
            torch.testing.assert_close(offloaded.state[mine][name], value, **TOLERANCES["fp32_op"])
    assert not torch.equal(ours[0].weight, model()[0].weight)


def test_it_goes_on_from_states_that_were_put_in_with_the_same_bits():
    once, optimizer = model(), None
    optimizer = build_optimizer(once, **SETTINGS, offload=True)
    train(once, optimizer, 0, 4)
    again = copy.deepcopy(once)
    second = build_optimizer(again, **SETTINGS, offload=True)
    for mine, other in zip(again.parameters(), once.parameters(), strict=True):
        second.state[mine] = {name: value.clone() for name, value in optimizer.state[other].items()}
        assert second._inner.state[second._steps[mine]]["exp_avg"].device.type == "cpu"  # at once, not at the next step
        second.state[mine]["exp_avg"].zero_()  # what is shown is what is kept
        assert not second._inner.state[second._steps[mine]]["exp_avg"].any()
        second.state[mine] = {name: value.clone() for name, value in optimizer.state[other].items()}
    assert {id(parameter) for parameter in second.state} == {id(parameter) for parameter in again.parameters()}
    train(once, optimizer, 4, 8)
    train(again, second, 4, 8)
    for mine, other in zip(again.parameters(), once.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert second.state[mine]["step"] == optimizer.state[other]["step"]
