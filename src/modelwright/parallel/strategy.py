"""Strategies by which the ranks of a run share gradients and updates: `Strategy`, and `AllReduce`, which most runs use.

The training step computes this rank's share of the gradient and passes it to its strategy; the strategy decides when
ranks communicate, which rank updates which weights, and when the ranks wait for each other. Each other strategy is one
file under `strategies/`. Gradients arrive already divided by the global normalizer, so every strategy sums and none
averages. A gradient is a plain tensor, equal on all ranks of the mesh that hold its parameter, or a DTensor of which
each rank holds a shard.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from modelwright.core import compatibility as traits
from modelwright.core.extensions import NoSettings
from modelwright.ops.dtensor import TensorView, local, view_of
from modelwright.parallel.gradient_sync import GradientSync
from modelwright.parallel.mesh import Mesh, World

_PIECE = 2**16
"""Elements that the CPU adds up in one go: over millions of them FP32's own norm is too small by up to 2e-4."""
STRATEGIES_GROUP = "modelwright.strategies"
"""Entry points of other packages: each a `StrategySpec`."""

Done = TypeVar("Done")
Unscale = Callable[[list[Tensor]], None]
"""Divides gradients by the loss scale, in place."""
Compensate = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]
"""Corrects stale gradients in place: `(gradients, weights now, weights that the gradients belong to)`."""


class Strategy(Protocol):
    """Protocol of strategies. All ranks call the same methods in the same order. Methods with a body are optional."""

    mesh: Mesh
    """The processes that make one update together."""
    is_synchronous: ClassVar[bool] = True
    """True if every update waits for all ranks."""
    needs: ClassVar[frozenset[str]] = frozenset(
        {traits.WHOLE_MODEL, traits.WHOLE_GRADIENTS, traits.PROMPT_GRADIENTS, traits.SYNCHRONOUS_UPDATES}
    )
    """Properties of a run that it relies on (`core/compatibility.py`); a setting or a layout that breaks one of them is
    refused. A strategy that needs less declares less."""
    breaks: ClassVar[frozenset[str]] = frozenset({traits.EXACT_SUMS, traits.EQUAL_REPLICAS})
    """Properties of a run that it removes; a strategy that keeps these declares so."""

    def begin(self, step: int, num_steps: int) -> None:
        """Called once, when weights, optimizer and this strategy are as they were after `step` updates."""

    def steps(
        self, one_step: Callable[[int], Done], first: int, last: int, interrupted: Callable[[], bool]
    ) -> Iterator[Done]:
        """Makes this rank's share of the updates `first`, ..., `last - 1`, or of fewer, but at least one.

        Yields the results of `one_step` for all updates in order, whichever rank made them. At the end all of them are
        applied to the weights, which are equal on all replicas. interrupted: whether this rank asks to stop early.
        """
        yield one_step(first)

    def before_last_backward(self, loss_sums: Tensor, *, is_empty: bool) -> None:
        """Called after the last forward of a step: from then on each gradient that backward finishes is final.
        loss_sums: this rank's loss terms; is_empty: no label in the global batch counts.
        """

    @abstractmethod
    def reduce_gradients(self, unscale: Unscale) -> list[TensorView]:
        """Sums the gradients over the ranks. Returns, unscaled, those that this rank's optimizer step uses, each with
        its parameter's name and the part of the parameter that it belongs to.
        """

    @abstractmethod
    def grad_norm(self, gradients: list[Tensor]) -> Tensor | float:
        """The L2 norm of the whole model's gradient, from the tensors that `reduce_gradients` returned. The same on all
        ranks, to the bit: they skip an update for a norm that is not finite without asking each other.
        """

    @abstractmethod
    def optimizer_step(self) -> None:
        """Updates the weights; afterwards every rank sees all of them."""

    def after_step(self, step: int) -> None:
        """Called after update `step` (from 0), which may have been skipped."""

    def abandon_step(self) -> None:
        """Discards the gradients of this step so far: all ranks compute it again."""

    @property
    def retry_blocker(self) -> str:
        """Reason for which a rank cannot abandon forward and backward and compute a step again, or ""."""
        return layout_blocker(self.mesh)

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Tensors that must be equal on all replicas, by name; None if nothing is replicated."""
        return None

    def send_only_rows(self, rows: Sequence[Tensor | None]) -> None:
        """Announces the rows of each gradient (int64 [S]; None for all) that may be other than zero from now on."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the newest step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State of this rank; `train/checkpoint/state_tree.py` has the rules for other numbers of ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`."""

    def close(self) -> None:
        """Called at the end of a run under one layout, also after an error."""


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """A strategy that a training names in its setting `gradient_sync.strategy`."""

    strategy: type[Any]
    """A `Strategy`, made from its settings, the `Replica` of this rank, and the `World` of all processes."""
    config: type = NoSettings
    """The dataclass of its settings."""


def layout_blocker(mesh: Mesh) -> str:
    """Names the axes of the layout whose ranks communicate within forward and backward, as a reason, or ""."""
    if mesh.world.size == 1 or mesh.is_only_data_parallel:
        return ""
    sizes = {name: getattr(mesh, name).size for name in ("pipeline", "shard", "context", "tensor")}
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"the layout (parallel: {layout}), in which ranks wait for one another amid forward and backward"


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of all tensors together, a scalar; 0 for no tensors, not finite if any value is not."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return get_total_norm(tensors, foreach=True)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return get_total_norm([piece for tensor in tensors for piece in tensor.reshape(-1).split(_PIECE)], foreach=True)
    norms = []
    for tensor in tensors:
        # All whole pieces in one call, with the bits of one call for each: a matrix of 175B has 9,216 of them.
        flat = tensor.reshape(-1)
        whole = flat.numel() // _PIECE * _PIECE
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _PIECE), dim=1))
        if whole < flat.numel():
            norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return torch.linalg.vector_norm(torch.cat(norms)) if norms else torch.zeros(())


def redistribute_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Places a gradient like its parameter: pending partial sums over the mesh are reduced."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def combine_norms(norms: Mapping[int, float], world: World) -> float:
    """The L2 norm of the gradients of the whole model, from the norms on this rank; not finite if any is not. norms: by
    the number of ranks that hold the same elements.
    """
    # The sum over all ranks counts each square once per copy.
    square = sum(norm * norm / copies for copies, norm in norms.items())
    return math.sqrt(world.sums([square])[0])


@dataclass(kw_only=True)
class Replica:
    """The part of the model that this rank holds, and its optimizer, for a strategy."""

    mesh: Mesh
    model: nn.Module
    optimizer: Optimizer
    num_stages_with: Callable[[str], int] = lambda name: 1
    """Number of pipeline stages that have a parameter (2 for a tied head)."""
    finish_gradients: Callable[[], None] = lambda: None
    """Called when all gradients are ready, to sum those of a parameter that several pipeline stages hold."""
    names: dict[Tensor, str] = field(init=False)
    """Names of the trainable parameters, in the model's order."""
    num_holders: list[int] = field(init=False)
    """For each parameter, the number of ranks that hold each of its elements."""
    views: dict[Tensor, TensorView] = field(init=False)
    """This rank's part of each parameter; the tensors are those at the beginning."""

    def __post_init__(self) -> None:
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        self.num_holders = []
        for parameter, name in self.names.items():
            pieces = 1
            if isinstance(parameter, DTensor):
                for axis, placement in enumerate(parameter.placements):
                    # Not `is_shard`: FSDP's pieces of a tensor-parallel piece are not a plain `Shard`.
                    if not placement.is_replicate():
                        pieces *= parameter.device_mesh.size(axis)
            num_copies = self.mesh.world.size // self.mesh.pipeline.size * self.num_stages_with(name)
            self.num_holders.append(num_copies // pieces)
        self.views = {p: view_of(name, p.detach()) for p, name in self.names.items()}

    def trained_weights(self) -> dict[str, Tensor]:
        """The model's part of a checkpoint: every tensor but the parameters that are never trained."""
        frozen = {name for name, _ in self.model.named_parameters()} - set(self.names.values())
        return {name: weight for name, weight in self.model.state_dict().items() if name not in frozen}

    def parameters(self) -> list[TensorView]:
        """This rank's part of every trainable parameter, with its present values."""
        return [self.view(parameter, parameter.detach()) for parameter in self.names]

    def view(self, parameter: Tensor, tensor: Tensor) -> TensorView:
        """The view of a tensor that is laid out like this parameter, such as its gradient."""
        return replace(self.views[parameter], tensor=local(tensor), source=tensor)

    def views_of(self, gradients: Sequence[Tensor]) -> list[TensorView]:
        """The views of the gradients that `gradients` returned."""
        holders = [parameter for parameter in self.names if parameter.grad is not None]
        return [self.view(parameter, gradient) for parameter, gradient in zip(holders, gradients, strict=True)]

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters that the present step trains."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    def gradients(self) -> list[Tensor]:
        """This rank's gradients in one order on all ranks that hold them: zeros where no gradient flowed, none for
        parameters that the step does not train.
        """
        # Ranks may differ in which gradients flowed, but every collective must see the same tensors.
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = redistribute_like(parameter.grad, parameter)
        self.finish_gradients()
        return [parameter.grad for parameter in self.names if parameter.grad is not None]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor | float:
        """The L2 norm of the whole model's gradient; not finite if any shard is not. A tensor where nothing needs it on
        the host yet.
        """
        if self.mesh.world.size == 1 or self.mesh.is_only_data_parallel:
            total = total_norm(gradients)
            return total.full_tensor() if isinstance(total, DTensor) else total
        norms = {}
        for copies in set(self.num_holders):
            pairs = zip(gradients, self.num_holders, strict=True)
            norms[copies] = float(total_norm([local(one) for one, number in pairs if number == copies]))
        return combine_norms(norms, self.mesh.world)


class AllReduce(Strategy):
    """All ranks make every update together from summed gradients, whole or, under FSDP, sharded.

    sync: sums gradients over `mesh.reduce`. start: starts sums while backward runs (`Buckets.arm`), None if it cannot.
    unscale_first: the loss scale is removed before gradients are sent, as needed by a `sync` that keeps state or
    rounds. close: called at the end.
    """

    needs, breaks = frozenset[str](), frozenset[str]()  # those of its `sync`, which settings choose, are declared there

    def __init__(
        self,
        replica: Replica,
        sync: GradientSync,
        *,
        start: Callable[[Sequence[Tensor]], None] | None = None,
        send_rows: Callable[[Sequence[Tensor | None]], None] | None = None,
        unscale_first: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self.sync = sync
        self.start = start
        self.send_rows = send_rows
        self.unscale_first = unscale_first
        self.close_sync = close

    def before_last_backward(self, loss_sums: Tensor, *, is_empty: bool) -> None:
        if self.start is not None:
            self.start(self.replica.trainable)

    def reduce_gradients(self, unscale: Unscale) -> list[TensorView]:
        gradients = self.replica.gradients()
        shards = [local(gradient) for gradient in gradients]
        if self.unscale_first:
            unscale(shards)
        self.sync.reduce(shards)
        if not self.unscale_first:
            unscale(shards)
        return self.replica.views_of(gradients)

    def grad_norm(self, gradients: list[Tensor]) -> Tensor | float:
        return self.replica.norm(gradients)

    def optimizer_step(self) -> None:
        self.replica.optimizer.step()

    @property
    def retry_blocker(self) -> str:
        if self.start is not None and self.mesh.world.size > 1 and self.mesh.is_only_data_parallel:
            return "gradient_sync.overlap, which sends gradients amid backward; set it to false"
        return layout_blocker(self.mesh)

    def replicated(self) -> Mapping[str, Tensor]:
        return self.replica.model.state_dict()

    def send_only_rows(self, rows: Sequence[Tensor | None]) -> None:
        if self.send_rows is not None:
            self.send_rows(rows)

    def state_dict(self) -> dict[str, Any]:
        return self.sync.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sync.load_state_dict(state)

    def close(self) -> None:
        self.close_sync()
