"""Updates each parameter as soon as its gradient is final in the last backward of a step, and frees the gradient.

The gradients never exist all at once (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with
Limited Resources", section 3.1). Optimizers that update every parameter independently give the same bits as after
backward. Techniques that need the norm of the whole gradient first are impossible: the loss is checked before backward,
and a non-finite gradient within it ends the run, because other weights have already changed.

A `GradientReady` decides when a gradient is final, and which shard of it this process updates: `LocalGradients`,
`ReducedInBackward` or `SharedInBackward`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from modelwright.core.compatibility import OWN_WEIGHTS, UNDIVIDED_GRADIENTS, WHOLE_GRADIENTS
from modelwright.core.config import ModelwrightError
from modelwright.ops.dtensor import TensorView, as_dtensor_like, local
from modelwright.parallel import strategy
from modelwright.parallel.gradient_sync import BUCKET_BYTES, MANY_BUCKETS, Buckets, cut_into_buckets
from modelwright.parallel.mesh import World
from modelwright.parallel.strategies.shared_memory import SharedModel, shard_range, starts_of

Then = Callable[[Tensor, Tensor], None]
"""`(a parameter whose gradient is final, the parameter itself or its shard to update, with that gradient)`."""
MOST_IN_FLIGHT = 2
"""Buckets that wait for their sums: more hide more of a link's latency, and hold more gradients."""
SHARED_BUCKET_BYTES = 4 * 2**20
"""Bytes of a bucket in shared memory. Processes wait for each other once per bucket, which costs about 0.1 ms: far less
than the backward of that many weights."""


class GradientReady(Protocol):
    """Decides when gradients are final while backward runs."""

    updates_shards: bool = False
    """True if each process updates shards of parameters, so that nothing is replicated."""

    def begin(self, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer for this process's shards. Called once, when weights and optimizer are in place."""
        return optimizer

    def arm(self, parameters: Sequence[Tensor], then: Then) -> None:
        """Called before the last backward. then: called for each parameter with a final gradient, which it frees."""
        ...

    def finish(self) -> None:
        """Called after that backward: handles the remaining parameters, with zeros where no gradient flowed."""
        ...

    def close(self) -> None: ...


class LocalGradients(GradientReady):
    """Gradients are final as soon as they exist: in one process, or where FSDP's backward reduces them."""

    def __init__(self) -> None:
        self._waiting: dict[Tensor, None] = {}
        self._hooks: list[RemovableHandle] = []
        self._then: Then = lambda parameter, shard: None

    def arm(self, parameters: Sequence[Tensor], then: Then) -> None:
        self.close()
        self._waiting, self._then = dict.fromkeys(parameters), then
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._finished) for parameter in parameters]

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in list(self._waiting):
            parameter.grad = torch.zeros_like(parameter)
            self._finished(parameter)
        self.close()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _finished(self, parameter: Tensor) -> None:
        self._waiting.pop(parameter, None)
        self._then(parameter, parameter)


class ReducedInBackward(GradientReady):
    """Sums gradients over the ranks of `world` while backward runs, bucket by bucket. Buckets and sums equal those of
    `AllReduceSync`. A gradient's own memory is freed when its bucket starts.
    """

    def __init__(self, world: World, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world = world
        self._parameters: list[Tensor] = []
        self._then: Then = lambda parameter, shard: None
        self._buckets = Buckets(
            self._begin, bucket_bytes=bucket_bytes, many=MANY_BUCKETS, of=lambda parameter: parameter
        )
        self._in_flight: list[tuple[Sequence[Tensor], Tensor, Callable[[], object]]] = []

    def arm(self, parameters: Sequence[Tensor], then: Then) -> None:
        self._parameters, self._then = list(parameters), then
        self._buckets.arm(parameters)

    def finish(self) -> None:
        self._buckets.finish(self._parameters)
        self._complete(most_left=0)

    def close(self) -> None:
        self._buckets.close()

    @torch.no_grad()
    def _begin(self, parameters: Sequence[Tensor]) -> None:
        # Before this bucket's copy is made, or one more bucket of gradients would exist.
        self._complete(most_left=MOST_IN_FLIGHT - 1)
        shards = []
        for parameter in parameters:
            # Zeros where no gradient flowed; partial sums over the tensor axis are reduced here.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            shards.append(local(strategy.redistribute_like(gradient, parameter)).reshape(-1))
        flat = torch.cat(shards) if len(shards) > 1 else shards[0]
        for parameter in parameters:
            parameter.grad = None
        self._in_flight.append((parameters, flat, self.world.start_sum(flat)))

    @torch.no_grad()
    def _complete(self, *, most_left: int) -> None:
        """Waits for the oldest sums and passes their parameters to `then`."""
        while len(self._in_flight) > most_left:
            parameters, flat, wait = self._in_flight.pop(0)
            wait()
            sums = flat.split([local(parameter).numel() for parameter in parameters])
            for parameter, summed in zip(parameters, sums, strict=True):
                parameter.grad = as_dtensor_like(parameter, summed.view_as(local(parameter)))
                self._then(parameter, parameter)


class SharedInBackward(GradientReady):
    """Keeps one copy of the weights for all processes of a host (`SharedModel`), and gradients only in two buckets.

    While one bucket is summed and used, the next is filled. Each process updates a shard of every parameter, so that
    all have work at every bucket. parameters: all trained ones in the model's order, of which backward is the reverse.
    """

    updates_shards = True

    def __init__(self, world: World, parameters: Sequence[Tensor], *, bucket_bytes: int = SHARED_BUCKET_BYTES) -> None:
        self.world = world
        self.parameters = list(parameters)
        self.shared: SharedModel | None = None
        self._buckets = Buckets(self._sum, bucket_bytes=bucket_bytes, of=lambda parameter: parameter)
        self._then: Then = lambda parameter, shard: None

    def begin(self, optimizer: Optimizer) -> Optimizer:
        def places(room: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
            # In the two halves of `room`, with neighboring buckets in different halves.
            halves, by_parameter = room.chunk(2), dict[Tensor, Tensor]()
            for number, bucket in enumerate(self._buckets.cut(self.parameters)):
                for parameter, start in zip(bucket, starts_of(bucket), strict=False):
                    place = halves[number % 2][start : start + parameter.numel()]
                    by_parameter[parameter] = place.view_as(parameter)
            return [by_parameter[parameter] for parameter in parameters]

        room = room_of_two_buckets(self.parameters, bucket_bytes=self._buckets.bucket_bytes)
        self.shared = SharedModel(
            self.world,
            optimizer,
            room=room,
            places=places,
            own_range=lambda parameter, start, total: shard_range(self.world, parameter.numel()),
        )
        return self.shared.shard_optimizer or optimizer

    def arm(self, parameters: Sequence[Tensor], then: Then) -> None:
        self._then = then
        self._buckets.arm(self.parameters)

    @torch.no_grad()
    def finish(self) -> None:
        assert self.shared is not None
        self._buckets.finish(self.parameters)
        self.shared.count_step()

    def close(self) -> None:
        self._buckets.close()
        if self.shared is not None:
            self.shared.close()

    @torch.no_grad()
    def _sum(self, bucket: Sequence[Tensor]) -> None:
        assert self.shared is not None
        for parameter in bucket:
            if parameter.grad is None:
                self.shared.slots[parameter].zero_()
            else:
                self.shared.slots[parameter].copy_(parameter.grad)
            parameter.grad = None
        # One barrier per bucket suffices with two halves: whoever fills this half again has passed the next barrier,
        # which every process reaches only after it has read this half.
        self.world.barrier()
        for parameter in bucket:
            if shard := self.shared.shards.get(parameter):
                shard.weight.grad = own = shard.slots[self.world.rank]
                for rank, slot in enumerate(shard.slots):
                    if rank != self.world.rank:
                        own.add_(slot)
                self._then(parameter, shard.weight)


def room_of_two_buckets(parameters: Sequence[Tensor], *, bucket_bytes: int = SHARED_BUCKET_BYTES) -> int:
    """Returns the number of elements of two of the largest buckets."""
    return 2 * max(starts_of(bucket)[-1] for bucket in cut_into_buckets(parameters, bucket_bytes))


class OptimizerInBackward(strategy.Strategy):
    """Updates parameters during backward, unless a loss is not finite or no label in the batch counts. ready: see
    `GradientReady`; clip_norm: limit for the norm of the last step, 0 for none.
    """

    needs = frozenset[str]()
    # Own weights, because processes of a host may share them.
    breaks = frozenset({WHOLE_GRADIENTS, UNDIVIDED_GRADIENTS, OWN_WEIGHTS})

    def __init__(self, replica: strategy.Replica, ready: GradientReady, *, clip_norm: float = 0.0) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self.ready = ready
        self.clip_norm = clip_norm
        self.optimizer = replica.optimizer
        """The optimizer of the parameters that this process updates."""
        self.last_norm = 0.0
        self._group_of = {p: group for group in replica.optimizer.param_groups for p in group["params"]}
        self._armed = False
        self._norms: dict[Tensor, float] | None = None
        self._not_finite = ""
        self._norm = math.nan

    def begin(self, step: int, num_steps: int) -> None:
        self.optimizer = self.ready.begin(self.replica.optimizer)

    def before_last_backward(self, loss_sums: Tensor, *, is_empty: bool) -> None:
        cannot = is_empty or not math.isfinite(float(loss_sums.sum()))
        # All ranks agree before the first update, because updates in backward cannot be taken back.
        if self.mesh.world.maxima(cannot)[0] == 0:
            self._armed, self._norms, self._not_finite = True, {}, ""
            self.ready.arm([p for p in self.replica.names if p in self._group_of], self._update)

    def abandon_step(self) -> None:
        self._armed, self._norms = False, None

    @property
    def retry_blocker(self) -> str:
        if self._norms:
            return "optimizer_in_backward has changed weights in this step already"
        if self.mesh.world.size > 1 and self.mesh.is_only_data_parallel:
            return "optimizer_in_backward, for which ranks agree amid backward; set it to false"
        return strategy.layout_blocker(self.mesh)

    def reduce_gradients(self, unscale: strategy.Unscale) -> list[TensorView]:
        """Finishes the updates that backward has started; no gradient is left afterwards."""
        if self._armed:
            self.ready.finish()
            self._armed = False
            if late := [name for parameter, name in self.replica.names.items() if parameter.grad is not None]:
                raise ModelwrightError(
                    f"optimizer_in_backward: {late[0]} received a second gradient after it was updated in backward"
                )
        return []

    def grad_norm(self, gradients: list[Tensor]) -> float:
        """The norm before scaling, once per step; nan if nothing was updated. Raises `ModelwrightError` if a gradient
        was not finite: some weights are updated and others are not.
        """
        norms, self._norms = self._norms, None
        if norms is None:
            self._norm = math.nan
            return math.nan
        if self.mesh.world.size == 1:
            self._norm = math.hypot(*norms.values())
        else:
            # Norms of gradients that equally many ranks hold are joined first, so that each is counted once.
            by_holders: dict[int, list[float]] = {}
            for parameter, num_holders in zip(self.replica.names, self.replica.num_holders, strict=True):
                copies = 1 if self.ready.updates_shards else num_holders
                by_holders.setdefault(copies, []).append(norms.get(parameter, 0.0))
            joined = {copies: math.hypot(*held) for copies, held in by_holders.items()}
            self._norm = strategy.combine_norms(joined, self.mesh.world)
        if not math.isfinite(self._norm):
            raise ModelwrightError(
                f"the gradient of {self._not_finite or 'a parameter'} was not finite after other weights had been "
                "updated; run again to resume from the last checkpoint; without optimizer_in_backward such steps are "
                "skipped"
            )
        return self._norm

    def optimizer_step(self) -> None:
        """The weights have already changed; the next step clips by this norm."""
        self.last_norm = self._norm

    def replicated(self) -> Mapping[str, Tensor] | None:
        return None if self.ready.updates_shards else self.replica.model.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"shared": {"last_norm": self.last_norm}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_norm = state["shared"]["last_norm"]

    def close(self) -> None:
        self.ready.close()

    @torch.no_grad()
    def _update(self, parameter: Tensor, shard: Tensor) -> None:
        if self._norms is None:
            return  # an earlier attempt at this step was abandoned
        assert shard.grad is not None
        assert parameter not in self._norms, f"the gradient of {self.replica.names[parameter]} came twice"
        self._norms[parameter] = norm = float(strategy.total_norm([local(shard.grad)]))
        if not math.isfinite(norm):
            self._not_finite = self._not_finite or self.replica.names[parameter]
        if not self._not_finite:
            if 0 < self.clip_norm < self.last_norm:
                shard.grad.mul_(self.clip_norm / (self.last_norm + 1e-6))
            # The optimizer's own step, made for this one parameter or shard by hiding all others from it.
            groups = self.optimizer.param_groups
            self.optimizer.param_groups = [{**self._group_of[parameter], "params": [shard]}]
            try:
                self.optimizer.step()
            finally:
                self.optimizer.param_groups = groups
        shard.grad = None
