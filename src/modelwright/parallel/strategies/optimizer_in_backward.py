"""Each parameter is updated as soon as its gradient is final, amid the last backward of a step, and the gradient goes.

Gradients then never stand all at once (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with
Limited Resources", section 3.1). Optimizers that change every parameter by itself give the bits that they would give
afterwards. What needs the norm of the whole gradient first cannot have it: the loss is judged before backward, and a
gradient that is not finite amid it ends the run, for other weights are changed by then. When a gradient is final, and
which part of it is this process's to use, is for a `Finals` to say; nothing here knows a rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from modelwright.core.errors import ModelwrightError
from modelwright.ops.pieces import local
from modelwright.ops.total_norm import total_norm
from modelwright.optim.update import Context

UpdateInBackward = Literal["none", "unclipped", "clip_by_last_norm"]
"""`unclipped`: gradients as they are; `clip_by_last_norm`: scaled down by the norm of the step before, which is known,
where that was above the limit. The first step is not clipped."""

Then = Callable[[Tensor, Tensor], None]
"""A parameter whose gradient is final, and what of it is to be updated, with that gradient: itself, or a part."""


@runtime_checkable
class Finals(Protocol):
    """Makes gradients final while backward runs."""

    def arm_updates(self, parameters: Sequence[Tensor], then: Then) -> None:
        """Before the last backward of a step. then: called for each parameter once its gradient is final; it lets the
        gradient go."""
        ...

    def finish_updates(self) -> None:
        """After that backward: for those that are left, to which perhaps nothing flowed (zeros)."""
        ...


class AsTheyCome:
    """Gradients are final when they are there: of one process, or where backward itself divides and sums them."""

    def __init__(self) -> None:
        self._waiting: dict[Tensor, None] = {}
        self._hooks: list[RemovableHandle] = []
        self._then: Then = lambda parameter, held: None

    def arm_updates(self, parameters: Sequence[Tensor], then: Then) -> None:
        self._remove_hooks()
        self._waiting, self._then = dict.fromkeys(parameters), then
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._finished) for parameter in parameters]

    @torch.no_grad()
    def finish_updates(self) -> None:
        for parameter in list(self._waiting):
            parameter.grad = torch.zeros_like(parameter)
            self._finished(parameter)
        self._remove_hooks()

    def _finished(self, parameter: Tensor) -> None:
        self._waiting.pop(parameter, None)
        self._then(parameter, parameter)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class InBackward:
    """Updates parameters in backward, once armed. As an `Update` it remembers the norm that the next step clips by.

    names: of the parameters of the optimizer; clip_norm: the limit that the last norm is held against, 0 for none;
    joined: the norm of the whole gradient from those of what this process updated of each parameter. Where a process
    updates parts of parameters, `optimizer` is to be set to that of the parts before the first step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Tensor, str],
        *,
        clip_norm: float = 0.0,
        finals: Finals | None = None,
        joined: Callable[[Mapping[Tensor, float]], float] = lambda norms: math.hypot(*norms.values()),
    ) -> None:
        self.optimizer = optimizer
        self.names = names
        self.clip_norm = clip_norm
        self.finals = finals or AsTheyCome()
        self.joined = joined
        self.norm_of: Callable[[list[Tensor]], float] = lambda gradients: float(total_norm(gradients))
        self.last_norm = 0.0
        """0 before the first step."""
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._armed = False
        self._norms: dict[Tensor, float] | None = None
        self._not_finite = ""

    @property
    def has_begun(self) -> bool:
        """Whether some weights of this step are changed already."""
        return bool(self._norms)

    def arm(self) -> None:
        """Before the last backward of a step, with the rates set."""
        self._armed, self._norms, self._not_finite = True, {}, ""
        self.finals.arm_updates([one for one in self.names if one in self._group_of], self._update)

    def finish(self) -> None:
        """After backward, if it was armed: the parameters to which nothing flowed have gradients of zero."""
        if not self._armed:
            return
        self.finals.finish_updates()
        self._armed = False
        if late := [name for parameter, name in self.names.items() if parameter.grad is not None]:
            raise ModelwrightError(
                f"update_in_backward: the gradient of {late[0]} came in parts, and was used too early"
            )

    def abandon(self) -> None:
        """The step is not made."""
        self._armed, self._norms = False, None

    def norm(self) -> float:
        """Of the whole gradient, as it was before it was scaled, once a step; nan when the step was not armed.

        Raises `ModelwrightError` when a gradient was not finite: some weights are updated and others are not.
        """
        norms, self._norms = self._norms, None
        if norms is None:
            return math.nan
        norm = self.joined(norms)
        if not math.isfinite(norm):
            raise ModelwrightError(
                f"the gradient of {self._not_finite or 'a parameter'} was not finite when other weights had been "
                "updated already; run again to go on from the last checkpoint, with update_in_backward none such steps "
                "are skipped"
            )
        return norm

    def apply(self, context: Context) -> None:
        if not context.skip:
            self.last_norm = context.grad_norm

    def state_dict(self) -> dict[str, Any]:
        return {"last_norm": self.last_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_norm = state["last_norm"]

    @torch.no_grad()
    def _update(self, parameter: Tensor, held: Tensor) -> None:
        if self._norms is None:
            return  # an earlier attempt at this step was given up
        assert held.grad is not None
        assert parameter not in self._norms, f"the gradient of {self.names[parameter]} came twice"
        self._norms[parameter] = norm = self.norm_of([local(held.grad)])
        if not math.isfinite(norm):
            self._not_finite = self._not_finite or self.names[parameter]
        if not self._not_finite:
            if 0 < self.clip_norm < self.last_norm:
                held.grad.mul_(self.clip_norm / (self.last_norm + 1e-6))
            self._step(self._group_of[parameter], held)
        held.grad = None

    def _step(self, group: dict[str, Any], held: Tensor) -> None:
        """The optimizer's own step, of one parameter or a part of it."""
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**group, "params": [held]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
