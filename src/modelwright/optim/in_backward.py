"""Each parameter is updated as soon as its gradient is final, amid the last backward of a step, and the gradient goes.

Gradients then never stand all at once (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with
Limited Resources", section 3.1). Optimizers that change every parameter by itself give the bits that they would give
afterwards. What needs the norm of the whole gradient first cannot have it: the loss is judged before backward, and a
gradient that is not finite amid it ends the run, for other weights are changed by then. One process only.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from modelwright.core.errors import ModelwrightError
from modelwright.ops.total_norm import total_norm
from modelwright.optim.update import Context

UpdateInBackward = Literal["none", "unclipped", "clip_by_last_norm"]
"""`unclipped`: gradients as they are; `clip_by_last_norm`: scaled down by the norm of the step before, which is known,
where that was above the limit. The first step is not clipped."""


class InBackward:
    """Updates parameters in backward, once armed. As an `Update` it remembers the norm that the next step clips by.

    names: of the parameters of the optimizer; clip_norm: the limit that the last norm is held against, 0 for none.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[Tensor, str], *, clip_norm: float = 0.0) -> None:
        self.optimizer = optimizer
        self.names = names
        self.clip_norm = clip_norm
        self.norm_of: Callable[[list[Tensor]], float] = lambda gradients: float(total_norm(gradients))
        self.last_norm = 0.0
        """0 before the first step."""
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._waiting: dict[Tensor, None] = {}
        self._hooks: list[RemovableHandle] = []
        self._squares = math.nan
        self._not_finite = ""

    @property
    def has_begun(self) -> bool:
        """Whether some weights of this step are changed already."""
        return bool(self._hooks) and len(self._waiting) < len(self._group_of)

    def arm(self) -> None:
        """Before the last backward of a step, with the rates set."""
        self._waiting = dict.fromkeys(self._group_of)
        self._squares, self._not_finite = 0.0, ""
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._update) for parameter in self._group_of]

    def abandon(self) -> None:
        """The step is not made, or is over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._squares = [], math.nan

    def norm(self) -> float:
        """Of the whole gradient, as it was before it was scaled; nan when the step was not armed.

        Raises `ModelwrightError` when a gradient was not finite: some weights are updated and others are not.
        """
        if self._not_finite:
            raise ModelwrightError(
                f"the gradient of {self._not_finite} was not finite when other weights had been updated already; run "
                "again to go on from the last checkpoint, with update_in_backward none such steps are skipped"
            )
        return math.sqrt(self._squares)

    @torch.no_grad()
    def finish(self, optimizer: Optimizer) -> None:
        """After backward: the parameters to which nothing flowed have gradients of zero."""
        for parameter in list(self._waiting):
            parameter.grad = torch.zeros_like(parameter)
            self._update(parameter)
        self.abandon()

    def apply(self, context: Context) -> None:
        if not context.skip:
            self.last_norm = context.grad_norm

    def state_dict(self) -> dict[str, Any]:
        return {"last_norm": self.last_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_norm = state["last_norm"]

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        norm = self.norm_of([parameter.grad])
        if not math.isfinite(norm):
            self._not_finite = self._not_finite or self.names[parameter]
        if self._not_finite:
            return
        self._squares += norm * norm
        self._waiting.pop(parameter)
        if 0 < self.clip_norm < self.last_norm:
            parameter.grad.mul_(self.clip_norm / (self.last_norm + 1e-6))
        self._step(parameter)
        parameter.grad = None

    def _step(self, parameter: Tensor) -> None:
        """The optimizer's own step, of one parameter."""
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**self._group_of[parameter], "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
