"""Several optimizers, each with its own parameters, behind the interface of one."""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class MultiOptimizer(Optimizer):
    """`param_groups` are those of all parts; a parameter's state is held by the part that updates it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{**group} for group in groups], {})
        self.parts = list(parts)
        self.param_groups = groups
        self.state = _Joined(self.parts)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have gradients."""
        for part in self.parts:
            part.step()


class _Joined(MutableMapping[Tensor, dict[str, Any]]):
    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        self.owner = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self.owner[parameter].state[parameter]

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self.owner[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self.owner[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for part in self.parts for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self.parts)
