"""Clipping against its naive twin; finite check, clipping, learning rate and optimizer together: skipping, state."""

import copy
import math

import pytest
import torch
from torch import nn

from modelwright.core.config import ModelwrightError
from modelwright.data.rows.batch import TokenBatch
from modelwright.ops.dtensor import view_of
from modelwright.parallel.strategy import total_norm
from modelwright.train.checkpoint.manager import load_optimizer_state, reading_state
from modelwright.train.objective import TermSums
from modelwright.train.optim.build import build_optimizer
from modelwright.train.technique import NOT_FINITE, Update
from modelwright.train.techniques.finite_check import FiniteCheck
from modelwright.train.techniques.gradient_clipping import (
    AdaptiveClipConfig,
    GradientClipping,
    clip_naive,
    scale_to_norm,
)
from modelwright.train.techniques.learning_rate import LearningRate, ScheduleConfig

EMPTY = torch.zeros(1, 1, dtype=torch.int64)
ROWS = TokenBatch(input_ids_BT=EMPTY, labels_BT=EMPTY, positions_BT=EMPTY, segments_BT=EMPTY)


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


class Steps:
    """Finite check, clipping and learning rate around one optimizer, as a run on one process has them."""

    def __init__(self, model, max_skipped=3):
        self.model = model
        self.names = {p: name for name, p in model.named_parameters()}
        self.optimizer = build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        self.rate = LearningRate(self.optimizer, ScheduleConfig(kind="warmup_linear"), peak=0.1, num_steps=20)
        self.check = FiniteCheck(lambda gradients: float(total_norm(gradients)), max_skipped=max_skipped)
        self.clip = GradientClipping(1.0, AdaptiveClipConfig())

    def __call__(self, step=0, loss=1.0) -> Update:
        gradients = [view_of(self.names[p], p.grad) for p in self.model.parameters()]
        update = Update(step=step, num_steps=20, gradients=gradients, losses={"loss": loss}, weights={"loss": 1.0})
        self.rate.on_batch(step, ROWS)
        for technique in (self.check, self.clip):
            technique.on_gradients(update)
        if not update.skipped:
            self.optimizer.step()
        return update

    def state_dict(self):
        parts = {"check": self.check, "clip": self.clip, "rate": self.rate}
        states = {name: part.state_dict() for name, part in parts.items()}
        return {**states, "optimizer": {self.names[p]: dict(state) for p, state in self.optimizer.state.items()}}

    def load_state_dict(self, state):
        for name, part in {"check": self.check, "clip": self.clip, "rate": self.rate}.items():
            part.load_state_dict(state[name])
        load_optimizer_state(self.optimizer, self.names, state["optimizer"])


def model_with_gradients(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.RMSNorm(3))
    model(torch.randn(5, 4)).square().sum().backward()
    return model


def test_gradients_are_clipped_and_the_rate_is_the_scheduled_one():
    model = model_with_gradients()
    steps = Steps(model)
    update = steps()
    assert update.grad_norm > 1.0
    assert float(total_norm([p.grad for p in model.parameters()])) == pytest.approx(1.0, rel=1e-4)
    assert steps.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_only_matrices_decay():
    model = model_with_gradients()
    groups = Steps(model).optimizer.param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.1 if p.dim() >= 2 else 0.0 for p in model.parameters()]


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_what_is_not_finite_changes_nothing(loss, gradient):
    model = model_with_gradients()
    steps = Steps(model)
    steps()
    weights = [p.detach().clone() for p in model.parameters()]
    state = {key: value.clone() for key, value in steps.optimizer.state[model[0].weight].items()}
    model[0].bias.grad[0] = gradient
    assert steps(loss=loss).skip_reason == NOT_FINITE
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(state[key], value) for key, value in steps.optimizer.state[model[0].weight].items())


def test_gives_up_after_skips_in_a_row_only():
    steps = Steps(model_with_gradients(), max_skipped=2)
    for loss in (math.nan, 1.0, math.nan):
        steps(loss=loss)
    with pytest.raises(ModelwrightError, match="2 steps in a row"):
        steps(loss=math.nan)


def test_state_goes_on_bit_for_bit():
    model, twin = model_with_gradients(), model_with_gradients()
    steps, resumed = Steps(model), Steps(twin)
    steps()
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(steps.state_dict()))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    steps(step=1)
    resumed(step=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_last_rate_is_state():
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    first, second = (
        LearningRate(torch.optim.SGD(groups, lr=1.0), ScheduleConfig(), peak=1.0, num_steps=100) for _ in range(2)
    )
    first.on_batch(0, ROWS)
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_state_of_another_form_is_one_clear_error():
    rate = LearningRate(
        torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), ScheduleConfig(), peak=1.0, num_steps=9
    )
    with pytest.raises(ModelwrightError, match="state has another form"), reading_state():
        rate.load_state_dict({})


def test_losses_and_norm_are_read_together():
    """In one transfer where they are on a device: until then nothing of them is on the host."""
    sums = TermSums({"a": 1.0, "b": 0.5}, ("share",), torch.device("cpu"))
    sums.vector.copy_(torch.tensor([2.0, 3.0, 1.0, 4.0]))
    update = Update(step=0, num_steps=1, gradients=[], sums=sums, weights={"a": 1.0, "b": 1.0})
    assert not update.losses
    update.read(torch.tensor(0.1))
    assert update.losses == {"a": 2.0, "b": 3.0}
    assert update.metrics == {"share": 0.25}
    assert update.grad_norm == torch.tensor(0.1).item()  # FP32's bits
    assert update.sums is None
    update.read(0.5)
    assert (update.grad_norm, update.loss) == (0.5, 5.0)
