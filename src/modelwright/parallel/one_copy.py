"""One copy of weights and optimizer states for all processes of a host, each of which makes its part of every update.

Processes of one host that share out the rows of a batch, and nothing else, would each keep the same weights and make
the same update, with cores and memory that they share. Here weights and states lie once, in shared memory. Each process
puts its gradients beside them, adds up all processes' gradients in its part of the parameters, and updates that part:
the division of ZeRO-1 (Rajbhandari et al. 2020), of which nothing has to be sent, for everybody sees the result.

Sums are taken in the order of the ranks, so that they have the same bits every time. Element-wise optimizers only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from modelwright.parallel.mesh import Mesh
from modelwright.parallel.shared_memory import has_room, make_states, share
from modelwright.parallel.turns import Done

_ALIGNMENT = 16
"""Elements, at least a cache line of FP32: no two parameters, and no two processes' parts, share one."""


class OneCopy:
    """`Turns` and `GradientTransport` of one process among those of a host that train together.

    Use as a context manager around the run, on every process of the mesh's world alike; at its end each process has
    weights of its own again. Between `begin` and that end all processes change the same weights.
    """

    divides = True

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.world = mesh.world
        self.bytes_sent = 0
        """Nothing goes over a network."""
        self._parameters: list[Tensor] = []
        self._own: dict[Tensor, Tensor] = {}
        self._sums: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._optimizer: Optimizer | None = None
        self._hooks: list[RemovableHandle] = []
        self._armed = False

    def __enter__(self) -> "OneCopy":
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.data, parameter.grad = parameter.data.clone(), None

    def begin(self, optimizer: Optimizer, step: int) -> None:
        """Move what the optimizer changes into shared memory, with the first process's values."""
        make_states(optimizer)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._counts = [optimizer.state[p]["step"] for p in self._parameters]
        starts = _starts(self._parameters)
        flat = torch.zeros(starts[-1], dtype=self._parameters[0].dtype)
        keys = [key for key in optimizer.state[self._parameters[0]] if key != "step"]
        whole = share(self.world, [flat] * (1 + len(keys) + self.world.size))
        weights, states, gradients = whole[0], dict(zip(keys, whole[1:], strict=False)), whole[1 + len(keys) :]
        for parameter, view in zip(self._parameters, self._views(weights, starts), strict=True):
            parameter.data = self._moved(parameter.data, view)
        for key, flat in states.items():
            for parameter, view in zip(self._parameters, self._views(flat, starts), strict=True):
                optimizer.state[parameter][key] = self._moved(optimizer.state[parameter][key], view)
        self.world.barrier()
        own = self._views(gradients[self.world.rank], starts)
        self._own = dict(zip(self._parameters, own, strict=True))
        self._sums = self._views(gradients[0], starts)
        first, last = self._range(starts[-1])
        self._parts = [flat[first:last] for flat in gradients]
        self._divide(optimizer, starts, weights, states, gradients[0])
        self._hooks = [p.register_post_accumulate_grad_hook(self._finished) for p in self._parameters]

    def updates(
        self, one_step: Callable[[int], Done], first: int, last: int, interrupted: Callable[[], bool]
    ) -> Iterator[Done]:
        yield one_step(first)

    def figures(self) -> Mapping[str, float]:
        return {}

    def arm(self, parameters: Sequence[Tensor]) -> None:
        """Before the last backward of a step: gradients are put into shared memory as they are finished."""
        self._armed = True

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Sum the gradients in this process's part; the other parts are finished when all processes have done this."""
        self._armed = False
        for parameter in self._parameters:
            self._put(parameter)
        self.world.barrier()
        total, *others = self._parts
        for other in others:
            total.add_(other)
        for parameter, gradient in zip(self._parameters, self._sums, strict=True):
            parameter.grad = gradient

    def part(self, gradients: list[Tensor]) -> list[Tensor]:
        return self._parts[:1]

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Update this process's part, and wait for the others'."""
        for whole, own in self._groups:
            own.update({name: value for name, value in whole.items() if name != "params"})
        if self._optimizer is not None:
            self._optimizer.step()
        torch._foreach_add_(self._counts, 1)  # pyright: ignore
        self.world.barrier()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def _divide(
        self, optimizer: Optimizer, starts: Sequence[int], weights: Tensor, states: Mapping[str, Tensor], sums: Tensor
    ) -> None:
        """An optimizer of the same kind over this process's part, with the shared states."""
        first, last = self._range(starts[-1])
        pieces, number = [], 0
        for group in optimizer.param_groups:
            begin, number = starts[number], number + len(group["params"])
            low, high = max(first, begin), min(last, starts[number])
            if low < high:
                pieces.append((group, low, high))
        if not pieces:
            return
        parameters = [weights[low:high] for _, low, high in pieces]
        groups = [{**group, "params": [piece]} for (group, _, _), piece in zip(pieces, parameters, strict=True)]
        self._optimizer = type(optimizer)(groups)  # pyright: ignore[reportCallIssue]
        for (group, low, high), piece in zip(pieces, parameters, strict=True):
            piece.grad = sums[low:high]
            count = optimizer.state[group["params"][0]]["step"].clone()
            self._optimizer.state[piece] = {"step": count, **{key: flat[low:high] for key, flat in states.items()}}
        self._groups = [(group, own) for (group, _, _), own in zip(pieces, self._optimizer.param_groups, strict=True)]

    def _range(self, total: int) -> tuple[int, int]:
        """This process's part of so many elements."""
        lines, rank, size = total // _ALIGNMENT, self.world.rank, self.world.size
        return rank * lines // size * _ALIGNMENT, (rank + 1) * lines // size * _ALIGNMENT

    def _views(self, flat: Tensor, starts: Sequence[int]) -> list[Tensor]:
        return [
            flat[start : start + parameter.numel()].view_as(parameter)
            for parameter, start in zip(self._parameters, starts, strict=False)
        ]

    def _moved(self, values: Tensor, place: Tensor) -> Tensor:
        return place.copy_(values) if self.world.is_first else place

    def _finished(self, parameter: Tensor) -> None:
        if self._armed:
            self._put(parameter)

    def _put(self, parameter: Tensor) -> None:
        place = self._own[parameter]
        if parameter.grad is not place:
            assert parameter.grad is not None
            place.copy_(parameter.grad)
            parameter.grad = place


def fits(mesh: Mesh, parameters: Sequence[Tensor]) -> bool:
    """Whether the processes can share weights: one host, one format, in its memory, which has room. Collective."""
    if mesh.world.size == 1 or not mesh.is_only_data_parallel:
        return False
    if {(parameter.device.type, parameter.dtype) for parameter in parameters} - {("cpu", parameters[0].dtype)}:
        return False
    num_states = 2  # of an AdamW
    num_bytes = _starts(parameters)[-1] * parameters[0].element_size()
    return has_room(mesh.world, num_bytes * (1 + num_states + mesh.world.size))


def _starts(parameters: Sequence[Tensor]) -> list[int]:
    """Where each begins in one flat tensor of them all, and its length."""
    return [0, *accumulate(-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters)]
