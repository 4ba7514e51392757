"""The processes of a run: this process's rank, their number, its device, and their collectives.

`torchrun` starts processes and sets the environment; `join_world` reads it. `build_mesh` arranges the processes of a
world along the axes of a mesh; along each axis they are a smaller world. A single process is a world of size 1 whose
collectives do nothing.

Differentiable collectives along one axis come with their conjugates in backward: each name describes the forward pass,
the docstring the gradient. A tensor that is the same on all ranks has the same gradient on all ranks; one of which each
rank holds a part has that part's gradient. Sums are computed in FP32, whatever the dtype, and rounded once. Source:
Shoeybi et al. 2019, "Megatron-LM" (`enter` and `leave` are its f and g); Korthikanti et al. 2022 (the others).

Legend: P rows of this rank, N rows of all ranks, E width.

`ParallelConfig` has the settings of this layout.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from modelwright.core import compatibility as traits
from modelwright.core.compatibility import Feature, feature
from modelwright.core.config import ConfigError, constant

ZeroStage = Literal[0, 1, 2, 3]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
ContextAttention = Literal["all_gather", "ring"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout of training over processes, whose number is the product of pipeline, data, context and tensor."""

    pipeline: int = 1
    """Pipeline stages of consecutive layers; with one microbatch, a plain layer-to-device map."""
    data: int = 0
    """Replicas that each take different rows; 0 for all processes that the other axes leave."""
    context: int = 1
    """Processes that share the tokens of each row."""
    context_attention: ContextAttention = "all_gather"
    """`all_gather` collects the keys and values of whole rows in every layer; `ring` passes them from rank to rank
    (Liu et al. 2023), in less memory."""
    tensor: int = 1
    """Processes that share each layer's heads and feed-forward columns, and the vocabulary."""
    zero_stage: ZeroStage = 0
    """ZeRO stage: 0 shards nothing over the replicas, 1 optimizer states, 2 gradients too, 3 parameters too. Weights
    stay FP32; those that are only read in BF16 or FP16 are gathered in that format."""
    shard_group_size: int = 0
    """Replicas that share one model; 0 for all. Fewer is hybrid sharding: sharded within groups of neighboring ranks,
    replicated across groups."""
    sequence_parallel: bool = True
    """Shard norms and the residual stream over the tokens too, with `tensor` above 1 (Korthikanti et al. 2022)."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule."""
    stages_per_rank: int = 1
    """Pipeline stages per rank; above 1 for interleaved and zero-bubble schedules."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage, in order; empty for a balanced split."""
    shared_memory: bool = True
    """Data-parallel processes of one host keep one copy of weights and optimizer states, on the CPU, where the host's
    shared memory has room."""
    heartbeat_timeout_s: float = constant(120.0)
    """A process that has sent no heartbeat for this long is taken for lost, in every stage, and the others exit with
    status 3, so that a launcher can restart the run; 0 never."""
    reorder_ranks: bool = False
    """Measure the links between hosts at the start, and renumber ranks so that the busiest axes use the fastest."""

    def __post_init__(self) -> None:
        for name in ("pipeline", "context", "tensor", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("data", "shard_group_size"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}: must not be negative, got {getattr(self, name)}; 0 uses the remaining processes"
                )
        if self.heartbeat_timeout_s < 0:
            raise ConfigError(
                f"heartbeat_timeout_s: must not be negative, got {self.heartbeat_timeout_s}; 0 disables it"
            )
        if self.zero_stage == 0 and self.shard_group_size:
            raise ConfigError("shard_group_size: takes effect only with ZeRO; set zero_stage to 1, 2 or 3")
        if self.shard_group_size == 1 and self.context == 1:
            raise ConfigError(
                "shard_group_size: 1 replica has nobody to share with; set at least 2, 0 for all replicas, or "
                "zero_stage 0"
            )
        if self.stages_per_rank > 1 and (self.pipeline == 1 or self.schedule in ("gpipe", "1f1b")):
            raise ConfigError("stages_per_rank: above 1 needs a pipeline and an interleaved or zero_bubble schedule")
        if self.schedule == "interleaved" and self.pipeline > 1 and self.stages_per_rank == 1:
            raise ConfigError("stages_per_rank: an interleaved schedule needs at least 2")
        stages = self.pipeline * self.stages_per_rank
        if self.layers_per_stage and (len(self.layers_per_stage) != stages or min(self.layers_per_stage) < 0):
            raise ConfigError(
                f"layers_per_stage: needs one number for each of the {stages} stages, got {self.layers_per_stage}"
            )

    def axes(self, num_processes: int) -> dict[str, int]:
        """Returns the ranks along each axis of the mesh, slowest first: pipeline, replicate, shard, context, tensor.

        Neighboring ranks are the ones that talk most. Raises `ConfigError` if the product cannot be `num_processes`.
        """
        others = self.pipeline * self.context * self.tensor
        data = self.data or num_processes // others
        if data * others != num_processes:
            # The number of processes nearest to the given one that the axes permit.
            usable = others * (self.data or max(1, round(num_processes / others)))
            raise ConfigError(
                f"data: pipeline {self.pipeline} x data {self.data or 'rest'} x context {self.context} x tensor "
                f"{self.tensor} does not make {num_processes} processes; start {usable} (--nproc)"
            )
        shard = 1 if self.zero_stage == 0 else self.shard_group_size or data
        if data % shard:
            raise ConfigError(f"shard_group_size: {shard} does not divide the {data} replicas")
        return {
            "pipeline": self.pipeline,
            "replicate": data // shard,
            "shard": shard,
            "context": self.context,
            "tensor": self.tensor,
        }

    def features(self, num_processes: int) -> list[Feature]:
        """Returns the features of this layout, with the properties of a run that each needs and breaks."""
        result = []
        if not self.shared_memory:
            result.append(feature("shared_memory", "false", breaks=[traits.ONE_COPY]))
        if self.pipeline > 1:
            breaks = {traits.WHOLE_MODEL, traits.WHOLE_LAYERS, traits.WHOLE_BATCHES}
            breaks |= {traits.UNDIVIDED_GRADIENTS, traits.LAYER_OUTPUTS}
            result.append(feature("pipeline", self.pipeline, needs=[traits.WHOLE_GRADIENTS], breaks=breaks))
        if self.context > 1:
            result.append(feature("context", self.context, breaks=[traits.WHOLE_MODEL, traits.WHOLE_ROWS]))
        if self.tensor > 1:
            breaks = {traits.WHOLE_MODEL, traits.WHOLE_MATRICES, traits.UNDIVIDED_GRADIENTS, traits.WHOLE_LAYERS}
            result.append(feature("tensor", self.tensor, breaks=breaks))
            if self.sequence_parallel:
                result.append(feature("sequence_parallel", "true", breaks=[traits.LAYER_OUTPUTS]))
        if self.zero_stage != 0:
            axes = self.axes(num_processes)
            num_sharing = axes["shard"] * axes["context"]
            # One shard group that holds all copies: FSDP sums their gradients itself, in backward, exactly.
            breaks = {traits.GRADIENT_SUMS} if axes["replicate"] == 1 and num_sharing > 1 else set()
            if num_sharing > 1:
                breaks |= {traits.WHOLE_MODEL, traits.WHOLE_MATRICES, traits.UNDIVIDED_GRADIENTS}
            result.append(feature("zero_stage", self.zero_stage, breaks=breaks))
        return result

    def offers(self, num_processes: int) -> frozenset[str]:
        """Returns the properties of this layout that some settings require to take effect."""
        axes = self.axes(num_processes)
        # Without ZeRO, context ranks hold copies of the weights too, whose gradients the same sum joins.
        num_replicas = axes["replicate"] * (axes["context"] if self.zero_stage == 0 else 1)
        offered = {traits.SEVERAL_REPLICAS: num_replicas > 1, traits.SEVERAL_STAGES: self.pipeline > 1}
        return frozenset(name for name, is_offered in offered.items() if is_offered)


@dataclass(frozen=True, kw_only=True)
class World:
    """A group of processes, and this one's rank in it. Collectives work in place and on every rank, in the same order.
    group: None for all processes.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums over all ranks, in place; the same bits everywhere."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        """Starts a sum over all ranks, in place; the returned function waits for it."""
        if self.size == 1:
            return lambda: None
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work.wait

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks (of one shape), stacked along a new first dimension."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=self.group)
        return gathered

    def gather_bytes(self, message: Tensor) -> list[Tensor]:
        """Returns the messages [bytes, uint8, on the CPU] of all ranks, of any lengths, in rank order."""
        if self.size == 2:
            # A swap as in `sums`; the messages need not be equally long.
            length = int(self.start_ring_shift(torch.tensor(len(message)))())
            received = self.start_ring_shift(message.cpu(), torch.empty(length, dtype=torch.uint8))()
            return [received, message.cpu()] if self.rank else [message.cpu(), received]
        # Collectives need equal shapes: lengths are gathered first, then every message is padded to the longest.
        lengths = self.all_gather(torch.tensor(len(message), device=self.device)).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(message)] = message.to(self.device)
        gathered = self.all_gather(padded).cpu() if max(lengths) else padded.cpu().expand(self.size, 0)
        return [row[:length] for row, length in zip(gathered, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order. They must be JSON values; tuples arrive as lists."""
        # JSON replaces PyTorch's object collectives, which unpickle the messages: a pickle can run any code. A lone
        # process converts too, so that its values have the same types as those of many.
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(other.numpy().tobytes()) for other in self.gather_bytes(message)]

    def start_ring_shift(self, tensor: Tensor, into: Tensor | None = None, *, tag: int = 0) -> Callable[[], Tensor]:
        """Starts sending a tensor to the next rank and receiving the previous rank's; the first follows the last.

        The returned function waits for both and returns the received tensor; it must be called, and until then `tensor`
        must not change. into: where to receive; None for a new tensor of the same shape. tag: distinguishes messages in
        flight at the same time.
        """
        if self.size == 1:
            return lambda: tensor
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format) if into is None else into
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=before),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over the ranks, in one message."""
        if self.size == 1:
            return list(values)
        # On the host, by gloo on a GPU machine, too: the answer is needed there, and no kernel has to end before.
        own = torch.tensor(values, dtype=torch.float64)
        if self.size == 2:
            # Two ranks swap their values. gloo's ring would cut them into pieces: 1,150 bytes on the network for five
            # numbers, instead of 430. The sum has the same bits in either order.
            return (own + self.start_ring_shift(own)()).tolist()
        return self.all_reduce_sum(own).tolist()

    def maxima(self, *values: float) -> list[float]:
        """Returns the maximum of each value over the ranks, in one message."""
        if self.size == 1:
            return list(values)
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.group)
        return maxima.tolist()

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcasts the first rank's values, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=0, group=self.group)
        return tensor

    def barrier(self) -> None:
        """Waits until all ranks have arrived."""
        if self.size > 1:
            dist.barrier(group=self.group)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The processes of a world along the axes of a `ParallelConfig`.

    data: replicas with their own rows (replicate x shard); reduce: the ranks whose gradients a gradient sync sums;
    sharing: the ranks among which FSDP divides states (shard x context). devices: PyTorch's mesh with the axes
    pipeline, replicate, shard, context, tensor; sharing_devices: that of the flattened axis sharing; None for one
    process.
    """

    world: World
    pipeline: World
    replicate: World
    shard: World
    context: World
    tensor: World
    data: World
    reduce: World
    sharing: World
    devices: DeviceMesh | None
    sharing_devices: DeviceMesh | None

    @property
    def speaks_for_rows(self) -> bool:
        """True on one of the ranks that hold the same rows: the one that counts their tokens."""
        return self.pipeline.is_first and self.context.is_first and self.tensor.is_first

    @property
    def is_only_data_parallel(self) -> bool:
        return self.pipeline.size == self.context.size == self.tensor.size == self.shard.size == 1


_LAID_OUT: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Mesh]] = WeakKeyDictionary()
"""Meshes by the group of all processes, as long as that group lives. The threads, sockets and device buffers of a group
are only freed with it, so consecutive trainings in one process share them."""


def build_mesh(world: World, config: ParallelConfig) -> Mesh:
    """Arranges the world along the axes; the same axes give the same mesh again. Every rank calls it. Raises
    `ConfigError` if the axes do not make up the world.
    """
    sizes = config.axes(world.size)
    if world.size == 1:
        axes = dict.fromkeys((*sizes, "data", "reduce", "sharing"), world)
        return Mesh(world=world, devices=None, sharing_devices=None, **axes)
    everybody = dist.group.WORLD
    assert everybody is not None
    copies_weights = config.zero_stage == 0
    known, key = _LAID_OUT.setdefault(everybody, {}), (world, *sizes.items(), copies_weights)
    if key in known:
        return known[key]
    # Every group is made by a collective, so all ranks make them in this order.
    devices = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = {name: axis_world(devices[name], world.device) for name in sizes}
    joint = {"data": ("replicate", "shard"), "sharing": ("shard", "context")}
    joined = {name: devices[parts]._flatten(name) for name, parts in joint.items()}
    axes |= {name: axis_world(mesh, world.device) for name, mesh in joined.items()}
    # Context ranks hold copies of the weights unless FSDP shards over them, which then sums their gradients itself.
    if copies_weights:
        axes["reduce"] = axis_world(devices["replicate", "context"]._flatten("copies"), world.device)
    else:
        axes["reduce"] = axes["replicate"]
    known[key] = Mesh(world=world, devices=devices, sharing_devices=joined["sharing"], **axes)
    return known[key]


def axis_world(mesh: DeviceMesh, device: torch.device) -> World:
    """Returns the ranks along a mesh of one dimension."""
    group = mesh.get_group()
    return World(rank=group.rank(), size=group.size(), device=device, group=group)


def duplicate_group(world: World) -> World:
    """Makes a second group of the same ranks, for collectives from another thread. Called by all of them."""
    if world.size == 1:
        return world
    # Local synchronization: the ranks outside of the world do not call this.
    ranks = dist.get_process_group_ranks(world.group or dist.group.WORLD)
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return World(rank=world.rank, size=world.size, device=world.device, group=group)


def single(device: torch.device | str = "cpu") -> World:
    """Returns a world of this process alone."""
    return World(rank=0, size=1, device=torch.device(device))


def default_device() -> torch.device:
    """Returns CUDA (the process's own device under torchrun) if available, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backends(device: torch.device) -> str:
    """Backends of a process group: NCCL for CUDA tensors, gloo for tensors on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def join_world(device: torch.device | None = None) -> Iterator[World]:
    """Joins the world that `torchrun` set up in the environment (RANK, WORLD_SIZE, MASTER_*), or yields this process
    alone. The process group is destroyed on exit.
    """
    device = default_device() if device is None else device
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield single(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backends(device))
    try:
        yield World(rank=dist.get_rank(), size=size, device=device)
    finally:
        dist.destroy_process_group()


Move = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, there: Move, back: Move) -> Tensor:
    """Returns `there(x)`, whose gradient is `back` of the incoming gradient. Neither may work in place."""
    return _Moved.apply(x, there, back)  # type: ignore[return-value]


def enter(x: Tensor, axis: World) -> Tensor:
    """x unchanged, the same on all ranks, as input of work that is divided among ranks; gradients are summed."""
    return with_gradient(x, lambda y: y.view_as(y), lambda grad: summed(grad, axis))


def leave(x: Tensor, axis: World) -> Tensor:
    """The sum of all ranks' parts; every rank's part gets the whole gradient."""
    return with_gradient(x, lambda y: summed(y, axis), lambda grad: grad)


def gather(x: Tensor, axis: World, dim: int) -> Tensor:
    """All ranks' slices, for work that is divided among ranks; backward sums the gradients and takes this slice."""
    return with_gradient(x, lambda y: gathered(y, axis, dim), lambda grad: summed_slice(grad, axis, dim))


def reduce_scatter(x: Tensor, axis: World, dim: int) -> Tensor:
    """This rank's slice of the sum of all ranks' parts; gradients are gathered."""
    return with_gradient(x, lambda y: summed_slice(y, axis, dim), lambda grad: gathered(grad, axis, dim))


def gather_replicated(x: Tensor, axis: World, dim: int) -> Tensor:
    """All ranks' slices, for work that all ranks do identically; each keeps its slice of the gradient, unsummed."""
    return with_gradient(
        x, lambda y: gathered(y, axis, dim), lambda grad: grad.chunk(axis.size, dim)[axis.rank].contiguous()
    )


def summed(x: Tensor, axis: World) -> Tensor:
    """The sum over the ranks, the same bits everywhere."""
    return axis.all_reduce_sum(_widened(x).clone(memory_format=torch.contiguous_format)).to(x.dtype)


def gathered(x: Tensor, axis: World, dim: int) -> Tensor:
    """The ranks' tensors, of one shape, concatenated along `dim`."""
    return torch.cat(axis.all_gather(x).unbind(0), dim)


def summed_slice(x: Tensor, axis: World, dim: int) -> Tensor:
    """This rank's slice along `dim`, which must divide evenly, of the sum over the ranks."""
    parts = [part.contiguous() for part in _widened(x).chunk(axis.size, dim)]
    local = torch.empty_like(parts[0])
    dist.reduce_scatter(local, parts, group=axis.group)
    return local.to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def gather_rows(x_PE: Tensor, axis: World) -> tuple[Tensor, int]:
    """Returns all ranks' rows concatenated [N, E], in rank order, and the index of this rank's first row, for losses
    that compare every row of a batch with every other. Ranks may hold different counts.

    Backward sums the gradients of all ranks and gives each rank those of its own rows. So where every rank
    differentiates its part of a sum over ranks, it gets the gradient of the whole sum.
    """
    if axis.size == 1:
        return x_PE, 0
    counts = axis.all_gather(torch.tensor(len(x_PE), device=x_PE.device)).tolist()
    first = sum(counts[: axis.rank])
    own = slice(first, first + counts[axis.rank])

    def there(own_PE: Tensor) -> Tensor:
        # An all-gather needs equal shapes.
        padded = own_PE.new_zeros(max(counts), *own_PE.shape[1:])
        padded[: len(own_PE)] = own_PE
        return torch.cat([rows[:count] for rows, count in zip(axis.all_gather(padded), counts, strict=True)])

    # The sum is in place, so it takes a copy; and the own rows another, or they would keep all of it alive.
    rows_NE = with_gradient(
        x_PE,
        there,
        lambda grad: axis.all_reduce_sum(grad.clone(memory_format=torch.contiguous_format))[own].clone(),
    )
    return rows_NE, first
