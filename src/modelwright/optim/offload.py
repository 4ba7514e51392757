"""AdamW whose states wait in host memory (ZeRO-Offload: Ren et al. 2021), for models on an accelerator.

Gradients go down to the host, which computes AdamW's step, and the step comes up: 4 bytes each way per parameter and
update, against 8 bytes of accelerator memory per parameter that are free for something else. Weights stay where they
are; weight decay happens there. Knows no layout: of a divided parameter each rank keeps the states of its own piece.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from modelwright.ops.pieces import laid_out_as, local

HOST = torch.device("cpu")


class OffloadedAdamW(Optimizer):
    """An `Optimizer` by its interface: parameter groups of `params` and `weight_decay`, states by parameter, `step`.

    Gives AdamW's weights up to the rounding of one addition.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__([{**group} for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._steps = {parameter: _host_buffer(local(parameter)) for parameter in parameters}
        self._gradients: dict[Tensor, Tensor] = {}
        on_host = [{"params": [self._steps[parameter] for parameter in group["params"]]} for group in self.param_groups]
        self._inner = AdamW(on_host, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self._views: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have gradients."""
        self._adopt()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
            for parameter in group["params"]:
                self._steps[parameter].zero_()
                self._steps[parameter].grad = self._bring_down(parameter)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = local(parameter)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(self._steps[parameter].to(weight.device, non_blocking=True))
        for parameter, step in self._steps.items():
            if step in self._inner.state and parameter not in self._views:
                self._show(parameter)

    def _bring_down(self, parameter: Tensor) -> Tensor | None:
        if parameter.grad is None:
            return None
        gradient = local(parameter.grad)
        if parameter not in self._gradients:
            self._gradients[parameter] = _host_buffer(gradient)
        return self._gradients[parameter].copy_(gradient, non_blocking=True)

    def _adopt(self) -> None:
        """Take over states that were put in from outside: a checkpoint's."""
        for parameter, state in list(self.state.items()):
            if self._views.get(parameter) is not state:
                self._inner.state[self._steps[parameter]] = {
                    name: local(value).to(HOST).clone() for name, value in state.items()
                }
                self._show(parameter)

    def _show(self, parameter: Tensor) -> None:
        """The host's states of a parameter, sharing memory, laid out as it is."""
        own = self._inner.state[self._steps[parameter]]
        view = {name: value if name == "step" else laid_out_as(parameter, value) for name, value in own.items()}
        self.state[parameter] = self._views[parameter] = view


def _host_buffer(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=HOST, pin_memory=like.is_cuda)
