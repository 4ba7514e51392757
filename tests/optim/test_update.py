"""Clipping against its twin; the update list: order, skipping, agreement, state."""

import copy
import math

import pytest
import torch
from torch import nn

from modelwright.core.errors import ModelwrightError
from modelwright.ops.total_norm import total_norm
from modelwright.optim.build import build_optimizer
from modelwright.optim.clip import clip_naive, scale_to_norm
from modelwright.optim.schedule import ScheduleConfig
from modelwright.optim.update import Context, LearningRate, load_all, standard_updates


def gradients(scale=1.0):
    draw = torch.Generator().manual_seed(0)
    return [scale * torch.randn(shape, generator=draw) for shape in ((3, 5), (7,), (), (2, 1, 4))]


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_equals_its_naive_twin(max_norm):
    fast, naive = gradients(), gradients()
    norm = float(total_norm(fast))
    scale_to_norm(fast, norm, max_norm)
    assert norm == pytest.approx(clip_naive(naive, max_norm), rel=1e-6)
    for ours, theirs in zip(fast, naive, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def updates_of(model, agree=lambda flag: flag, max_skipped=3):
    optimizer = build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    names = {p: name for name, p in model.named_parameters()}
    schedule = ScheduleConfig(kind="warmup_linear")
    updates = standard_updates(
        optimizer,
        names,
        agree=agree,
        norm=lambda gradients: float(total_norm(gradients)),
        max_skipped=max_skipped,
        clip_norm=1.0,
        schedule=schedule,
        peak_rate=0.1,
    )
    return optimizer, updates


def model_with_gradients(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.RMSNorm(3))
    model(torch.randn(5, 4)).square().sum().backward()
    return model


def apply(updates, model, step=0, loss=1.0):
    context = Context(step=step, num_steps=20, gradients=[p.grad for p in model.parameters()], loss=loss)
    for update in updates.values():
        update.apply(context)
    return context


def test_order_and_rate():
    model = model_with_gradients()
    optimizer, updates = updates_of(model)
    assert list(updates) == ["finite_check", "clip", "learning_rate", "optimizer"]
    context = apply(updates, model)
    assert context.grad_norm > 1.0
    assert float(total_norm([p.grad for p in model.parameters()])) == pytest.approx(1.0, rel=1e-4)
    assert context.learning_rate == optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_only_matrices_decay():
    model = model_with_gradients()
    optimizer, _ = updates_of(model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.1 if p.dim() >= 2 else 0.0 for p in model.parameters()]


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_what_is_not_finite_changes_nothing(loss, gradient):
    model = model_with_gradients()
    optimizer, updates = updates_of(model)
    apply(updates, model)
    weights = [p.detach().clone() for p in model.parameters()]
    state = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}
    model[0].bias.grad[0] = gradient
    assert apply(updates, model, loss=loss).skip
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(state[key], value) for key, value in optimizer.state[model[0].weight].items())


def test_another_ranks_overflow_skips_here_too():
    model = model_with_gradients()
    _, updates = updates_of(model, agree=lambda flag: 1.0)
    weight = model[0].weight.detach().clone()
    assert apply(updates, model).skip
    assert torch.equal(weight, model[0].weight)


def test_gives_up_after_skips_in_a_row_only():
    model = model_with_gradients()
    _, updates = updates_of(model, max_skipped=2)
    for loss in (math.nan, 1.0, math.nan):
        apply(updates, model, loss=loss)
    with pytest.raises(ModelwrightError, match="2 steps in a row"):
        apply(updates, model, loss=math.nan)


def test_state_goes_on_bit_for_bit():
    model, twin = model_with_gradients(), model_with_gradients()
    _, updates = updates_of(model)
    apply(updates, model)
    state = copy.deepcopy({name: update.state_dict() for name, update in updates.items()})
    twin.load_state_dict(model.state_dict())
    _, resumed = updates_of(twin)
    for name, update in resumed.items():
        update.load_state_dict(state[name])
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    apply(updates, model, step=1)
    apply(resumed, twin, step=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_last_rate_is_state_and_that_of_another_version_is_named():
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    first, second = (LearningRate(torch.optim.SGD(groups, lr=1.0), ScheduleConfig(), 1.0) for _ in range(2))
    first.apply(Context(step=0, num_steps=100, gradients=[], loss=1.0))
    load_all({"learning_rate": second}, {"learning_rate": first.state_dict()})
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    for state in ({}, {"learning_rate": {}}):
        with pytest.raises(ModelwrightError, match="state of learning_rate is not of the form"):
            load_all({"learning_rate": second}, state)
