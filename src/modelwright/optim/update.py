"""The update seam: a list of small objects, applied in their written order between gradient and weight.

An update reads and changes the `Context` that travels down the list. Agreement between ranks is handed in as a
function; nothing here knows a rank. `standard_updates` writes the usual order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.errors import ModelwrightError
from modelwright.ops.pieces import laid_out_as, local
from modelwright.optim.clip import AdaptiveClipConfig, scale_to_norm
from modelwright.optim.decay import DynamicDecayConfig
from modelwright.optim.schedule import ScheduleConfig, rate_factor


@dataclass
class Context:
    """One step on its way down the list.

    step: update number from 0; gradients: summed over ranks and normalised; loss: of the whole batch, which joins
    the check for finite values; skip: later updates leave weights and optimizer alone; is_empty: nothing in the
    whole batch is learned; rate_multiplier: of the scheduled learning rate.
    """

    step: int
    num_steps: int
    gradients: list[Tensor]
    loss: float
    grad_norm: float = math.nan
    learning_rate: float = 0.0
    skip: bool = False
    is_empty: bool = False
    rate_multiplier: float = 1.0
    scalars: dict[str, float] = field(default_factory=dict)
    """Further figures that an update wants in the metrics."""


class Update(Protocol):
    """One thing that happens between gradient and weight; its state (tensors and JSON values) is checkpointed."""

    def apply(self, context: Context) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_all(updates: Mapping[str, Update], state: Mapping[str, Any]) -> None:
    """What a checkpoint says of the updates, by their names.

    Raises `ModelwrightError` for one whose state another version of this project wrote in another form.
    """
    for name, update in updates.items():
        try:
            update.load_state_dict(state[name])
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelwrightError(
                f"the checkpoint's state of {name} is not of the form that this version keeps ({error!r}); end the run "
                "with the version that began it, or begin anew with another --run-dir"
            ) from error


NOTHING: Mapping[str, Update] = MappingProxyType({})


class FiniteCheck:
    """Measures the gradient norm and skips the step on all ranks when it or the loss is not finite on any.

    `agree`: the maximum of a float over all ranks; `norm`: the norm of the whole model's gradients. After
    `max_skipped` skipped steps in a row a `ModelwrightError` ends the run: nothing is learned any more.
    """

    def __init__(
        self, agree: Callable[[float], float], norm: Callable[[list[Tensor]], float], *, max_skipped: int
    ) -> None:
        self.agree = agree
        self.norm = norm
        self.max_skipped = max_skipped
        self.num_skipped = 0
        self.num_in_a_row = 0

    def apply(self, context: Context) -> None:
        context.grad_norm = self.norm(context.gradients)
        finite = math.isfinite(context.grad_norm) and math.isfinite(context.loss)
        context.skip = self.agree(0.0 if finite else 1.0) > 0.0
        self.num_skipped += context.skip
        self.num_in_a_row = self.num_in_a_row + 1 if context.skip else 0
        if self.num_in_a_row >= self.max_skipped:
            raise ModelwrightError(
                f"step {context.step + 1}: loss or gradients were not finite for {self.num_in_a_row} steps in a row; "
                "lower the learning rate, or clip harder, and run again"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped, self.num_in_a_row = state["num_skipped"], state["num_in_a_row"]


class SkipEmpty:
    """Leaves weights and moments alone in a step that has nothing to learn from. Comes after the loss scale, since that
    is no overflow, and before what keeps a history of losses and norms."""

    def apply(self, context: Context) -> None:
        if context.is_empty:
            context.skip = True
            context.scalars["empty"] = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Clip:
    """Scales the gradients so that their global norm is at most `max_norm`, or what the norms of late make of it."""

    def __init__(self, max_norm: float, adaptive: AdaptiveClipConfig) -> None:
        self.max_norm = max_norm
        self.adaptive = adaptive
        self.norms: list[float] = []

    def apply(self, context: Context) -> None:
        if context.skip:
            return
        limit = self.adaptive.limit(self.norms, self.max_norm)
        scale_to_norm(context.gradients, context.grad_norm, limit)
        if self.adaptive.kind != "none":
            context.scalars["clip_norm"] = limit
            self.norms = [*self.norms, context.grad_norm][-self.adaptive.window :]

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = list(state["norms"])


class DynamicDecay:
    """Lowers the weight decay of all parameter groups while gradients are large."""

    def __init__(self, optimizer: Optimizer, config: DynamicDecayConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        self.usual = [group["weight_decay"] for group in optimizer.param_groups]
        self.low = False

    def apply(self, context: Context) -> None:
        if context.skip:
            return
        self.low = self.config.is_low(context.grad_norm, self.low)
        factor = self.config.factor if self.low else 1.0
        for group, usual in zip(self.optimizer.param_groups, self.usual, strict=True):
            group["weight_decay"] = factor * usual
        context.scalars["decay_factor"] = factor

    def state_dict(self) -> dict[str, Any]:
        return {"low": self.low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.low = bool(state["low"])


class LearningRate:
    """Sets the scheduled rate in all parameter groups. Its state is the last one: updates before it read it there."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, peak: float) -> None:
        self.optimizer = optimizer
        self.config = config
        self.peak = peak
        self.rate = peak

    def apply(self, context: Context) -> None:
        scheduled = self.peak * rate_factor(self.config, context.step, context.num_steps)
        context.learning_rate = scheduled * context.rate_multiplier
        self._set(context.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set(state["rate"])

    def _set(self, rate: float) -> None:
        self.rate = rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class OptimizerStep:
    """Lets the optimizer change the weights, unless the step is skipped.

    change_weights: has the optimizer do so; its `step`, but for processes that share the work.
    State: the optimizer's tensors and scalars by parameter name, so that it fits any order or grouping of parameters.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[Tensor, str], change_weights: Callable[[Optimizer], object]
    ) -> None:
        self.optimizer = optimizer
        self.names = names
        self.change_weights = change_weights

    def apply(self, context: Context) -> None:
        if not context.skip:
            self.change_weights(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {self.names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for parameter, name in self.names.items():
            if name in state:
                place = {key: _like(value, parameter, key) for key, value in state[name].items()}
                self.optimizer.state[parameter] = place


def _step(optimizer: Optimizer) -> None:
    optimizer.step()


def standard_updates(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    *,
    agree: Callable[[float], float],
    norm: Callable[[list[Tensor]], float],
    max_skipped: int,
    clip_norm: float,
    adaptive_clip: AdaptiveClipConfig | None = None,
    dynamic_decay: DynamicDecayConfig | None = None,
    schedule: ScheduleConfig,
    peak_rate: float,
    change_weights: Callable[[Optimizer], object] = _step,
    before_check: Mapping[str, Update] = NOTHING,
    after_check: Mapping[str, Update] = NOTHING,
) -> dict[str, Update]:
    """`before_check`, finite check, `after_check`, clip (when `clip_norm` > 0), dynamic decay, learning rate,
    optimizer: in this order, by the names of their state.

    `names`: every trainable parameter's name.
    """
    check = FiniteCheck(agree, norm, max_skipped=max_skipped)
    updates: dict[str, Update] = {**before_check, "finite_check": check, **after_check}
    if clip_norm > 0:
        updates["clip"] = Clip(clip_norm, adaptive_clip or AdaptiveClipConfig())
    if dynamic_decay is not None and dynamic_decay.above_norm > 0:
        updates["decay"] = DynamicDecay(optimizer, dynamic_decay)
    updates["learning_rate"] = LearningRate(optimizer, schedule, peak_rate)
    updates["optimizer"] = OptimizerStep(optimizer, names, change_weights)
    return updates


def _like(value: Any, parameter: Tensor, key: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.to(parameter.device)
    return laid_out_as(value, local(value).to(local(parameter).device, parameter.dtype))
