"""AdamW with its states in host memory (ZeRO-Offload: Ren et al. 2021), for models on an accelerator.

Gradients are copied to the host, which computes AdamW's step, and the step is copied back: 4 bytes each way per
parameter and update, and 8 bytes of accelerator memory per parameter are saved. Weights stay on the accelerator, where
weight decay is applied.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from modelwright.ops.dtensor import as_dtensor_like, local

HOST = torch.device("cpu")


class OffloadedAdamW(Optimizer):
    """AdamW with the `Optimizer` interface: parameter groups of `params` and `weight_decay`, states by parameter,
    `step`. Gives AdamW's weights up to the rounding of one addition.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__([{**group} for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._steps = {parameter: _host_buffer(local(parameter)) for parameter in parameters}
        self._gradients: dict[Tensor, Tensor] = {}
        on_host = [{"params": [self._steps[parameter] for parameter in group["params"]]} for group in self.param_groups]
        # It updates the steps, which start each update at zero; decay needs the weights, so it is applied to them.
        self._inner = AdamW(on_host, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self.state = _OnHost(self)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have gradients."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
            for parameter in group["params"]:
                self._steps[parameter].zero_()
                self._steps[parameter].grad = None
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    if parameter not in self._gradients:
                        self._gradients[parameter] = _host_buffer(gradient)
                    on_host = self._gradients[parameter].copy_(gradient, non_blocking=True)
                    self._steps[parameter].grad = on_host
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the copies must have arrived before the host reads them
        self._inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = local(parameter)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(self._steps[parameter].to(weight.device, non_blocking=True))

    def shown(self, parameter: Tensor) -> dict[str, Any]:
        """The host's states of a parameter, sharing memory, laid out like it. Raises `KeyError` before a step."""
        own = self._inner.state.get(self._steps[parameter])
        if not own:
            raise KeyError(parameter)
        return {name: value if name == "step" else as_dtensor_like(parameter, value) for name, value in own.items()}

    def take_over(self, parameter: Tensor, state: Mapping[str, Any] | None) -> None:
        """Sets the states from a checkpoint; None removes them."""
        step = self._steps[parameter]
        self._inner.state.pop(step, None)
        if state is not None:
            self._inner.state[step] = {name: local(value).to(HOST).clone() for name, value in state.items()}

    @property
    def known(self) -> list[Tensor]:
        """The parameters that have states."""
        return [parameter for parameter, step in self._steps.items() if self._inner.state.get(step)]


@dataclass(eq=False)
class _OnHost(MutableMapping[Tensor, dict[str, Any]]):
    """The states by parameter. Set states move to the host at once, so that a resumed run needs no more memory."""

    optimizer: OffloadedAdamW

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self.optimizer.shown(parameter)

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self.optimizer.take_over(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self.optimizer.take_over(parameter, None)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.optimizer.known)

    def __len__(self) -> int:
        return len(self.optimizer.known)


def _host_buffer(like: Tensor) -> Tensor:
    # Pinned, because only copies to pinned memory can overlap with the accelerator's work.
    return torch.zeros(like.shape, dtype=like.dtype, device=HOST, pin_memory=like.is_cuda)
