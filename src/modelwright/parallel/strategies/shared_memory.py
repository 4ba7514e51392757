"""One copy of weights and optimizer states for all processes of a host, each of which updates its part of them.

Data-parallel processes of one host would each hold the same weights and make the same update, with cores and memory
that they share. Here weights and states are stored once, in shared memory. Each process stores the part of its
gradients that others sum next to them, adds up all processes' gradients in its part of the parameters, and updates that
part: the partitioning of ZeRO-1 (Rajbhandari et al. 2020), without any communication. Every element is summed by one
process in one order, so the sums are bit-identical in every run. Element-wise optimizers only.

Writes to the shared memory by one process are visible to all, without locks. It is backed by a file in the host's
memory whose name is removed once every process has opened it, so the memory is freed even if the processes are killed.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from modelwright.core import compatibility as traits
from modelwright.core.artifacts import StorageError, writing
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.ops.dtensor import TensorView, flat_view_of
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.strategy import Replica, Strategy, Unscale, combine_norms, total_norm

_ALIGNED_BYTES = 64
"""Bytes of a cache line: no two tensors share one."""
_ALIGNMENT = 16
"""Elements of a cache line of FP32: no two parameters, and no two processes' parts, share one."""
_HOST_MEMORY = "/dev/shm"
_SPARE_BYTES = 64 * 2**20
"""Bytes left for others: checkpoints kept in memory, data loaders, other runs."""


def share(world: World, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in shared memory with the first process's values; shapes and dtypes are the same on all
    processes. Raises `ConfigError` if the processes are not on one host or a tensor is not in host memory,
    `StorageError` if there is too little shared memory.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ConfigError("device: sharing weights in host memory requires the CPU")
    shared = shared_zeros(world, tensors)
    if world.is_first:
        for place, tensor in zip(shared, tensors, strict=True):
            place.copy_(tensor)
    # Nobody reads before the first process has written.
    world.barrier()
    return shared


def shared_zeros(world: World, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns zeros in shared memory in the shapes and dtypes of `tensors`, which are not read. Raises like `share`."""
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNED_BYTES) * _ALIGNED_BYTES for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    with shared_file(world, max(1, starts[-1])) as path:
        whole = torch.from_file(path, shared=True, size=max(1, starts[-1]), dtype=torch.uint8)
        shared = []
        for tensor, start in zip(tensors, starts, strict=False):
            used = whole[start : start + tensor.numel() * tensor.element_size()]
            shared.append(used.view(tensor.dtype).view(tensor.shape))
    return shared


def has_room(world: World, num_bytes: int) -> bool:
    """Returns whether all processes are on one host with that much shared memory left. Collective."""
    try:
        with shared_file(world, 1):
            folder = _folder()
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except ModelwrightError:
        return False
    return world.maxima(free < num_bytes + _SPARE_BYTES)[0] == 0


@contextmanager
def shared_file(world: World, num_bytes: int) -> Iterator[str]:
    """Makes a zero-filled file under one name for all processes of one host; its name is removed at the end of the
    block. A failure on the first process is raised on all of them.
    """
    path, problem = "", ""
    if world.is_first:
        try:
            file, path = tempfile.mkstemp(prefix="modelwright-", dir=_folder())
            try:
                with writing(path):
                    # A sparse file would end the run by SIGBUS in a step, when the host's memory is full.
                    os.posix_fallocate(file, 0, num_bytes)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(file)
        except StorageError as error:
            path, problem = "", str(error)
    try:
        path, problem = world.gather_json((path, problem))[0]
        if problem:
            raise StorageError(problem)
        if any(world.maxima(not os.path.exists(path))):
            raise ConfigError("processes: all of them must be on one host to train on shared weights")
        yield path
        # All processes have opened the file before its name goes.
        world.barrier()
    finally:
        if world.is_first and path:
            os.unlink(path)


def _folder() -> str:
    return _HOST_MEMORY if os.access(_HOST_MEMORY, os.W_OK) else tempfile.gettempdir()


def make_states(optimizer: Optimizer, parameters: Sequence[Tensor] | None = None) -> None:
    """Creates the states that an optimizer has before its first step, for those of the parameters (all by default)
    without states. None of these parameters has a gradient.
    """
    if parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    new = [p for p in parameters if not optimizer.state[p]]
    # Optimizers create their states in a step and nowhere else. At rate 0 on zero gradients it changes no weight.
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in new:
        parameter.grad = None
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()


OwnRange = Callable[[Tensor, int, int], tuple[int, int]]
"""`(parameter, its start among all elements, number of all elements) -> its elements that this process updates`; by
default those in this process's contiguous part of all elements."""
GradientPlaces = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]
"""`(a process's room for gradients, the parameters) -> the place of each parameter's gradient in it`."""


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that this process updates: elements `first` to `last`. weight: these elements, as the
    local optimizer's parameter; slots: these elements of all processes' gradients.
    """

    first: int
    last: int
    weight: Tensor
    slots: Sequence[Tensor]


class SharedModel:
    """Weights and optimizer states in shared memory, with room for each process's gradients.

    Created on all processes of `world` alike, with the first process's values. Parameters are moved one by one, so that
    no process ever holds all states itself, unless it starts with them. Call `close` at the end, which gives each
    process its own weights again. optimizer: of whole parameters; room: elements of each process's gradients; places,
    own_range: see their types.
    """

    def __init__(
        self,
        world: World,
        optimizer: Optimizer,
        *,
        room: int | None = None,
        places: GradientPlaces | None = None,
        own_range: OwnRange | None = None,
    ) -> None:
        self.world = world
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.shards: dict[Tensor, Shard] = {}
        self.shard_optimizer: Optimizer | None = None
        """Updates this process's shards; None where it has none."""
        starts = starts_of(self.parameters)
        make_states(optimizer, self.parameters[:1])
        keys = [key for key in optimizer.state[self.parameters[0]] if key != "step"]
        dtype = self.parameters[0].dtype
        # Layout of the shared memory: weights, one tensor per kind of state, then one gradient buffer per rank.
        sizes = [starts[-1]] * (1 + len(keys)) + [starts[-1] if room is None else room] * world.size
        weights, *others = shared_zeros(world, [torch.empty(size, dtype=dtype, device="meta") for size in sizes])
        states = dict(zip(keys, (_views(self.parameters, other, starts) for other in others), strict=False))
        own_places = _views(self.parameters, weights, starts)
        for number, (parameter, place) in enumerate(zip(self.parameters, own_places, strict=True)):
            make_states(optimizer, [parameter])
            parameter.data = place.copy_(parameter.data) if world.is_first else place
            for key, tensors in states.items():
                state, moved = optimizer.state[parameter], tensors[number]
                state[key] = moved.copy_(state[key]) if world.is_first else moved
        self._counts = [optimizer.state[p]["step"] for p in self.parameters]
        # The first process writes the values; the others may read them from here on.
        world.barrier()
        gradients = [
            places(flat, self.parameters) if places else _views(self.parameters, flat, starts)
            for flat in others[len(keys) :]
        ]
        self.slots = dict(zip(self.parameters, gradients[world.rank], strict=True))
        """Place of each parameter's gradient from this process."""
        self.groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Parameter groups of the whole optimizer, with those of the shards."""
        first, last = shard_range(world, starts[-1])
        for number, (parameter, start) in enumerate(zip(self.parameters, starts, strict=False)):
            if own_range is not None:
                low, high = own_range(parameter, start, starts[-1])
            else:
                # The parameter's elements in this process's contiguous part of all elements.
                low, high = (min(max(bound - start, 0), parameter.numel()) for bound in (first, last))
            if low < high:
                slots = [of_rank[number].reshape(-1)[low:high] for of_rank in gradients]
                self.shards[parameter] = Shard(low, high, parameter.data.reshape(-1)[low:high], slots)
        groups = []
        for group in optimizer.param_groups:
            own_weights = [self.shards[p].weight for p in group["params"] if p in self.shards]
            if own_weights:
                groups.append((group, {**group, "params": own_weights}))
        if not groups:
            return
        # An optimizer of the same kind over this process's shards, with the shared states.
        self.shard_optimizer = type(optimizer)([own for _, own in groups])  # pyright: ignore[reportCallIssue]
        for parameter, shard in self.shards.items():
            self.shard_optimizer.state[shard.weight] = {
                key: value.clone() if key == "step" else value.reshape(-1)[shard.first : shard.last]
                for key, value in optimizer.state[parameter].items()
            }
        self.groups = [(group, own) for (group, _), own in zip(groups, self.shard_optimizer.param_groups, strict=True)]

    def close(self) -> None:
        for parameter in self.parameters:
            parameter.data, parameter.grad = parameter.data.clone(), None

    def count_step(self) -> None:
        """Advances the optimizer's step counts and waits until all processes have updated their shards."""
        torch._foreach_add_(self._counts, 1)  # pyright: ignore
        self.world.barrier()


class SharedMemory(Strategy):
    """Strategy in which all processes of a host make every update together, each on its part of one copy. overlap:
    gradients are copied to shared memory while backward runs.
    """

    needs = frozenset[str]()
    breaks = frozenset(
        {
            traits.GRADIENT_SUMS,
            traits.REVERSIBLE_UPDATES,
            traits.UNDIVIDED_GRADIENTS,
            traits.WHOLE_MATRICES,
            traits.OWN_WEIGHTS,
        }
    )

    def __init__(self, replica: Replica, *, overlap: bool = True) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self.overlap = overlap
        self.shared: SharedModel | None = None
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._already_put: set[Tensor] = set()

    def begin(self, step: int, num_steps: int) -> None:
        self.shared = SharedModel(self.mesh.world, self.replica.optimizer)
        self._hooks = [p.register_post_accumulate_grad_hook(self._finished) for p in self.shared.parameters]

    def before_last_backward(self, loss_sums: Tensor, *, is_empty: bool) -> None:
        self._armed = self.overlap

    def abandon_step(self) -> None:
        self._armed = False
        self._already_put.clear()

    def reduce_gradients(self, unscale: Unscale) -> list[TensorView]:
        """Sums the gradients of this process's shards; the others sum the rest."""
        assert self.shared is not None
        self._armed = False
        self.replica.gradients()  # completes them: zeros where none flowed
        for parameter in self.shared.parameters:
            if parameter not in self._already_put:
                self._put(parameter)
        self._already_put.clear()
        # Nobody reads before all gradients are in shared memory.
        self.mesh.world.barrier()
        sums: list[Tensor] = []
        views: list[TensorView] = []
        for parameter, shard in self.shared.shards.items():
            assert parameter.grad is not None
            own = parameter.grad.reshape(-1)[shard.first : shard.last]
            for rank, slot in enumerate(shard.slots):
                if rank != self.mesh.world.rank:
                    own.add_(slot)
            shard.weight.grad = own
            sums.append(own)
            views.append(flat_view_of(self.replica.names[parameter], parameter.shape, own, shard.first))
        for parameter in self.shared.parameters:
            parameter.grad = None
        unscale(sums)
        return views

    def grad_norm(self, gradients: list[Tensor]) -> float:
        return combine_norms({1: float(total_norm(gradients))}, self.mesh.world)

    @torch.no_grad()
    def optimizer_step(self) -> None:
        """Updates this process's shards, and waits for the others."""
        assert self.shared is not None
        # Schedules and other techniques change rates and decay in the groups of the whole optimizer.
        for whole, own in self.shared.groups:
            own.update({name: value for name, value in whole.items() if name != "params"})
        if self.shared.shard_optimizer is not None:
            self.shared.shard_optimizer.step()
        self.shared.count_step()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.shared is not None:
            self.shared.close()

    def _finished(self, parameter: Tensor) -> None:
        if self._armed:
            self._put(parameter)

    @torch.no_grad()
    def _put(self, parameter: Tensor) -> None:
        """Publishes the gradients that other processes sum; those that this one sums stay where they are."""
        assert parameter.grad is not None
        assert self.shared is not None
        slot, gradient = self.shared.slots[parameter].view(-1), parameter.grad.reshape(-1)
        shard = self.shared.shards.get(parameter)
        first, last = (shard.first, shard.last) if shard else (0, 0)
        slot[:first].copy_(gradient[:first])
        slot[last:].copy_(gradient[last:])
        self._already_put.add(parameter)
        # The gradient's own memory can be freed.
        if shard is None:
            parameter.grad = slot.view_as(parameter)


def fits(mesh: Mesh, parameters: Sequence[Tensor], *, gradient_room: int = 0) -> bool:
    """Returns whether the processes can share weights: on one host, in one dtype, in host memory with enough room.
    Collective. gradient_room: elements of each process's gradients in shared memory, 0 for whole ones.
    """
    if mesh.world.size == 1 or not mesh.is_only_data_parallel:
        return False
    if {(parameter.device.type, parameter.dtype) for parameter in parameters} - {("cpu", parameters[0].dtype)}:
        return False
    num_states = 2  # AdamW's
    num_elements = starts_of(parameters)[-1]
    gradients = mesh.world.size * (gradient_room or num_elements)
    return has_room(mesh.world, parameters[0].element_size() * (num_elements * (1 + num_states) + gradients))


def shard_range(world: World, total: int) -> tuple[int, int]:
    """Returns this process's part of `total` elements, in whole cache lines except at the end."""
    lines, rank, size = -(-total // _ALIGNMENT), world.rank, world.size
    return rank * lines // size * _ALIGNMENT, min(total, (rank + 1) * lines // size * _ALIGNMENT)


def starts_of(parameters: Sequence[Tensor]) -> list[int]:
    """Returns the offset of each parameter in one flat tensor of all of them, and the length of that tensor."""
    return [0, *accumulate(-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters)]


def _views(parameters: Sequence[Tensor], flat: Tensor, starts: Sequence[int]) -> list[Tensor]:
    return [
        flat[start : start + parameter.numel()].view_as(parameter)
        for parameter, start in zip(parameters, starts, strict=False)
    ]
