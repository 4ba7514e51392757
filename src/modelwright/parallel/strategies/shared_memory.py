"""One copy of weights and optimizer states for all processes of a host, each of which makes its part of every update.

Processes of one host that share out the rows of a batch, and nothing else, would each keep the same weights and make
the same update, with cores and memory that they share. Here weights and states lie once, in shared memory. Each process
puts what others are to sum of its gradients beside them, adds up all processes' gradients in its part of the
parameters, and updates that part: the division of ZeRO-1 (Rajbhandari et al. 2020), of which nothing has to be sent,
for everybody sees the result.

Every element is summed by one process in one order, so that sums have the same bits every time. Element-wise optimizers
only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from modelwright.parallel.mesh import Mesh
from modelwright.parallel.optimizer_states import make_states
from modelwright.parallel.shared_memory import has_room, shared_zeros
from modelwright.parallel.strategy import Together

_ALIGNMENT = 16
"""Elements, at least a cache line of FP32: no two parameters, and no two processes' parts, share one."""


@dataclass(frozen=True)
class _Piece:
    """What one parameter has in this process's part: elements `first` to `last` of it, none where they are equal.

    weight: that piece, as the own optimizer's parameter; slots: that piece of all processes' gradients.
    """

    first: int
    last: int
    weight: Tensor
    slots: Sequence[Tensor]


class OneCopy(Together):
    """`Turns` and `GradientTransport` of one process among those of a host that train together.

    Use as a context manager around the run, on every process of the mesh's world alike; at its end each process has
    weights of its own again. Between `begin` and that end all processes change the same weights.
    """

    divides = True

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.world = mesh.world
        self.bytes_sent = 0
        """Nothing goes over a network."""
        self._parameters: list[Tensor] = []
        self._pieces: dict[Tensor, _Piece] = {}
        self._slots: dict[Tensor, Tensor] = {}
        self._counts: list[Tensor] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._optimizer: Optimizer | None = None
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._put_already: set[Tensor] = set()

    def __enter__(self) -> "OneCopy":
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.data, parameter.grad = parameter.data.clone(), None

    def begin(self, optimizer: Optimizer, step: int) -> Optimizer:
        """Move what the optimizer changes into shared memory, with the first process's values.

        One parameter after the other: this process never has all states of its own, unless it comes with them.
        """
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        starts = starts_of(self._parameters)
        make_states(optimizer, self._parameters[:1])
        keys = [key for key in optimizer.state[self._parameters[0]] if key != "step"]
        dtype = self._parameters[0].dtype
        flat, room = (torch.empty(n, dtype=dtype, device="meta") for n in (starts[-1], self._gradient_room(starts)))
        weights, *others = shared_zeros(self.world, [flat] * (1 + len(keys)) + [room] * self.world.size)
        states = dict(zip(keys, (self._views(other, starts) for other in others), strict=False))
        for number, (parameter, place) in enumerate(zip(self._parameters, self._views(weights, starts), strict=True)):
            make_states(optimizer, [parameter])
            parameter.data = self._moved(parameter.data, place)
            for key, places in states.items():
                optimizer.state[parameter][key] = self._moved(optimizer.state[parameter][key], places[number])
        self._counts = [optimizer.state[p]["step"] for p in self._parameters]
        self.world.barrier()
        gradients = [self._gradient_places(one, starts) for one in others[len(keys) :]]
        self._slots = dict(zip(self._parameters, gradients[self.world.rank], strict=True))
        self._divide(optimizer, starts, gradients)
        self._follow_backward()
        return self._optimizer or optimizer

    def arm(self, parameters: Sequence[Tensor]) -> None:
        """Before the last backward of a step: gradients are put into shared memory as they are finished."""
        self._armed = True

    def abandon(self) -> None:
        """The gradients of this step so far are worth nothing: it is made again, by all processes."""
        self._armed = False
        self._put_already.clear()

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Sum the gradients of this process's part, in the pieces that `part` gives; the others sum the rest."""
        self._armed = False
        for parameter in self._parameters:
            if parameter not in self._put_already:
                self._put(parameter)
        self._put_already.clear()
        self.world.barrier()
        for parameter, piece in self._pieces.items():
            assert parameter.grad is not None
            own = parameter.grad.reshape(-1)[piece.first : piece.last]
            for rank, slot in enumerate(piece.slots):
                if rank != self.world.rank:
                    own.add_(slot)
            piece.weight.grad = own
        for parameter in self._parameters:
            parameter.grad = None

    def part(self, gradients: list[Tensor]) -> list[Tensor]:
        return [piece.weight.grad for piece in self._pieces.values() if piece.weight.grad is not None]

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

    def _divide(self, optimizer: Optimizer, starts: Sequence[int], gradients: Sequence[Sequence[Tensor]]) -> None:
        """An optimizer of the same kind over this process's part, with the shared states."""
        for number, (parameter, start) in enumerate(zip(self._parameters, starts, strict=False)):
            low, high = self._own_range(parameter, start, starts[-1])
            if low < high:
                slots = [of_rank[number].reshape(-1)[low:high] for of_rank in gradients]
                self._pieces[parameter] = _Piece(low, high, parameter.data.reshape(-1)[low:high], slots)
        groups = []
        for group in optimizer.param_groups:
            held = [self._pieces[p].weight for p in group["params"] if p in self._pieces]
            if held:
                groups.append((group, {**group, "params": held}))
        if not groups:
            return
        self._optimizer = type(optimizer)([own for _, own in groups])  # pyright: ignore[reportCallIssue]
        for parameter, piece in self._pieces.items():
            self._optimizer.state[piece.weight] = {
                key: value.clone() if key == "step" else value.reshape(-1)[piece.first : piece.last]
                for key, value in optimizer.state[parameter].items()
            }
        self._groups = [(group, own) for (group, _), own in zip(groups, self._optimizer.param_groups, strict=True)]

    def _gradient_room(self, starts: Sequence[int]) -> int:
        """Elements that each process has in shared memory for its gradients."""
        return starts[-1]

    def _gradient_places(self, room: Tensor, starts: Sequence[int]) -> list[Tensor]:
        """Where in a process's room the gradient of each parameter stands."""
        return self._views(room, starts)

    def _own_range(self, parameter: Tensor, start: int, total: int) -> tuple[int, int]:
        """What of a parameter, which begins at `start` among `total` elements, this process sums and updates."""
        first, last = self._share(total)
        return min(max(first - start, 0), parameter.numel()), min(max(last - start, 0), parameter.numel())

    def _share(self, total: int) -> tuple[int, int]:
        """This process's part of so many elements, in whole cache lines but for the end."""
        lines, rank, size = -(-total // _ALIGNMENT), self.world.rank, self.world.size
        return rank * lines // size * _ALIGNMENT, min(total, (rank + 1) * lines // size * _ALIGNMENT)

    def _follow_backward(self) -> None:
        self._hooks = [p.register_post_accumulate_grad_hook(self._finished) for p in self._parameters]

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

    @torch.no_grad()
    def _put(self, parameter: Tensor) -> None:
        """Show the other processes what they are to sum; what this one sums stays where it is."""
        assert parameter.grad is not None
        slot, gradient = self._slots[parameter].view(-1), parameter.grad.reshape(-1)
        piece = self._pieces.get(parameter)
        first, last = (piece.first, piece.last) if piece else (0, 0)
        slot[:first].copy_(gradient[:first])
        slot[last:].copy_(gradient[last:])
        self._put_already.add(parameter)
        if piece is None:
            parameter.grad = slot.view_as(parameter)  # the memory of its own can go


def fits(mesh: Mesh, parameters: Sequence[Tensor], *, gradient_room: int = 0) -> bool:
    """Whether the processes can share weights: one host, one format, in its memory, which has room. Collective.

    gradient_room: elements of each process's gradients there, 0 for whole ones.
    """
    if mesh.world.size == 1 or not mesh.is_only_data_parallel:
        return False
    if {(parameter.device.type, parameter.dtype) for parameter in parameters} - {("cpu", parameters[0].dtype)}:
        return False
    num_states = 2  # of an AdamW
    num_elements = starts_of(parameters)[-1]
    gradients = mesh.world.size * (gradient_room or num_elements)
    return has_room(mesh.world, parameters[0].element_size() * (num_elements * (1 + num_states) + gradients))


def starts_of(parameters: Sequence[Tensor]) -> list[int]:
    """Where each begins in one flat tensor of them all, and its length."""
    return [0, *accumulate(-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters)]
