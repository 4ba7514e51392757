"""What passes between the ranks of a run, and when: the parts that the configuration asks for, ready for the loop.

`turns_for` says who makes which update, `transport_for` how gradients cross, `Meeting` lets local steps meet after an
update. The techniques themselves lie in `parallel/`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modelwright.core.errors import ConfigError
from modelwright.ops.pieces import local
from modelwright.optim.delay import DelayConfig, compensation
from modelwright.parallel.strategies.optimizer_in_backward import AsTheyCome, Finals, InBackward
from modelwright.optim.update import Context
from modelwright.parallel.strategies.delayed import DelayedTransport, StalenessConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.grad_norm import joined_norm
from modelwright.parallel.strategies.hogwild import Hogwild
from modelwright.parallel.mesh import Mesh, World, world_apart
from modelwright.parallel.strategies.shared_memory import OneCopy, fits
from modelwright.parallel.strategies.shared_memory_in_backward import OneCopyInBackward, room
from modelwright.parallel.strategies.sums_in_backward import SumsInBackward
from modelwright.parallel.gradient_sync import ExactTransport, GradientTransport
from modelwright.parallel.codecs.bucketed import BucketedTransport
from modelwright.parallel.strategies.config import TransportConfig, build_transport
from modelwright.parallel.strategies.local_sgd import LocalSteps
from modelwright.parallel.strategy import Together, Turns

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What AdamW, Lion and Muon keep for a parameter, in its shape."""


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig:
    """Updates that do not wait for each other.

    mode: `none`; `hogwild`: every process makes whole updates of its own on weights that all processes of one host
    share; `delayed`: gradients are summed over the ranks while the next `delay` steps are computed. compensation:
    strength of the correction for stale gradients (`optim.delay`), 0 for none.
    """

    mode: Literal["none", "hogwild", "delayed"] = "none"
    delay: int = 1
    compensation: float = 0.0

    def __post_init__(self) -> None:
        if self.delay < 1:
            raise ConfigError(f"delay: must be at least 1 step, got {self.delay}; mode none waits for every sum")
        if self.compensation < 0:
            raise ConfigError(f"compensation: must not be negative, got {self.compensation}; 0 switches it off")


def check_exchange(
    transport: TransportConfig,
    asynchronous: AsynchronousConfig,
    parallel: ParallelConfig,
    *,
    num_processes: int = 1,
    in_backward: bool = False,
) -> None:
    """Raise `ConfigError` when these do not go together.

    num_processes: that `parallel` lays out; in_backward: weights change there.
    """
    if in_backward and parallel.pipeline > 1:
        raise ConfigError(
            "update_in_backward: the stages of a pipeline are amid several microbatches at a time, each of which still "
            "needs the weights; leave one of the two out"
        )
    local_steps, mode = transport.local_steps.every > 0, asynchronous.mode
    if local_steps and mode != "none":
        raise ConfigError(
            f"transport.local_steps: every rank trains by itself already, which asynchronous.mode {mode} cannot share; "
            "leave one of them out"
        )
    if local_steps and parallel.context > 1:
        raise ConfigError(
            "transport.local_steps: ranks that share the tokens of a row (parallel.context) cannot train on them one "
            "by one; set parallel.context to 1"
        )
    if mode == "hogwild" and transport.kind != "exact":
        raise ConfigError(f"transport.kind: asynchronous.mode hogwild sends nothing that {transport.kind} could change")
    if mode == "hogwild" and (
        parallel.pipeline * parallel.context * parallel.tensor > 1 or parallel.shard != "none" or parallel.data > 1
    ):
        raise ConfigError(
            "asynchronous.mode: in hogwild all processes share one whole model; leave the axes of `parallel` as they "
            "are by default"
        )
    _check_transport_is_used(transport, parallel, num_processes)


def _check_transport_is_used(transport: TransportConfig, parallel: ParallelConfig, num_processes: int) -> None:
    """Refuse a transport in a layout in which FSDP sums all gradients itself."""
    names = [f"transport.kind {transport.kind}"] if transport.kind != "exact" else []
    if transport.local_steps.every:
        names.append(f"transport.local_steps.every {transport.local_steps.every}")
    if not names or parallel.shard == "none":
        return
    axes = parallel.axes(num_processes)
    num_sharing = axes["shard"] * axes["context"]
    if axes["replicate"] == 1 and num_sharing > 1:
        raise ConfigError(
            f"{names[0].split()[0]}: {' and '.join(names)} would have no effect: parallel.shard {parallel.shard} "
            f"divides one model among {num_sharing} processes, and FSDP sums their gradients exactly. Set "
            "parallel.shard_group to a part of the copies (hybrid sharding: the transport then carries gradients "
            "between the groups) or parallel.shard to none; or take transport.kind exact without local steps"
        )


@contextmanager
def turns_for(
    config: AsynchronousConfig, everyone: Mesh, model: nn.Module, *, shares_memory: bool, in_backward: bool = False
) -> Iterator[Turns]:
    """Who makes which update; shares_memory: where they can, processes keep one copy of the weights; in_backward:
    weights change there.

    Raises `ConfigError` for `hogwild` on several hosts.
    """
    if config.mode == "hogwild":
        with Hogwild(everyone.world, compensate=_compensation(config)) as hogwild:
            yield hogwild
    elif shares_memory and (one_copy := _one_copy(everyone, model, in_backward=in_backward)):
        with one_copy:
            yield one_copy
    else:
        yield Together(everyone)


def _one_copy(everyone: Mesh, model: nn.Module, *, in_backward: bool) -> OneCopy | None:
    """None where it does not fit. A function of its own, for nothing else may hold weights that are laid out later."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not fits(everyone, trained, gradient_room=room(trained) if in_backward else 0):
        return None
    return OneCopyInBackward(everyone, trained) if in_backward else OneCopy(everyone)


@contextmanager
def transport_for(
    transport: TransportConfig,
    asynchronous: AsynchronousConfig,
    turns: Turns,
    model: nn.Module,
    *,
    in_backward: bool = False,
) -> Iterator[GradientTransport]:
    """How gradients cross. model: what this rank holds of it; in_backward: weights change there."""
    if isinstance(turns, Hogwild | OneCopy):
        yield turns
    elif in_backward and turns.mesh.reduce.size * turns.mesh.tensor.size > 1:
        with closing(SumsInBackward(turns.mesh.reduce)) as sums:
            yield sums
    elif asynchronous.mode == "delayed":
        with _built(transport, world_apart(turns.mesh.reduce)) as inner:
            delay = StalenessConfig(delay=asynchronous.delay)
            weights = [local(p.detach()) for p in model.parameters() if p.requires_grad]
            with DelayedTransport(inner, delay, weights=weights, compensate=_compensation(asynchronous)) as late:
                yield late
    else:
        with _built(transport, turns.mesh.reduce) as built:
            yield built


@contextmanager
def _built(config: TransportConfig, world: World) -> Iterator[GradientTransport]:
    transport = build_transport(config, world)
    try:
        yield transport
    finally:
        if isinstance(transport, ExactTransport | BucketedTransport):
            transport.close()


def updates_in_backward(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    *,
    clip_norm: float,
    num_holders: Sequence[int],
    turns: Turns,
    transport: GradientTransport,
) -> InBackward:
    """What updates this rank's parameters, or its part of them. names, num_holders: of all trainable ones.

    Raises `ConfigError` where gradients are not final in backward.
    """
    if turns.divides:
        num_holders = [1] * len(names)
    return InBackward(
        optimizer,
        names,
        clip_norm=clip_norm,
        finals=_finals(transport, turns.mesh),
        joined=lambda norms: _norm_over_ranks(norms, list(names), num_holders, turns.mesh),
    )


def _finals(transport: GradientTransport, mesh: Mesh) -> Finals:
    if isinstance(transport, Finals):
        return transport
    if mesh.reduce.size * mesh.tensor.size > 1:
        raise ConfigError("update_in_backward: goes with the run's own exact sums; hand no transport in")
    return AsTheyCome()


def _norm_over_ranks(
    norms: Mapping[Tensor, float], parameters: Sequence[Tensor], num_holders: Sequence[int], mesh: Mesh
) -> float:
    """Of the whole gradient, from the norm of each gradient on this rank, or of this rank's part of it."""
    if mesh.world.size == 1:
        return math.hypot(*norms.values())
    by_holders: dict[int, list[float]] = {}
    for parameter, number in zip(parameters, num_holders, strict=True):
        by_holders.setdefault(number, []).append(norms.get(parameter, 0.0))
    return joined_norm({number: math.hypot(*held) for number, held in by_holders.items()}, mesh.world)


def _compensation(config: AsynchronousConfig):
    return compensation(DelayConfig(strength=config.compensation))


class Meeting:
    """Update that comes last: after so many steps of their own the ranks meet. The transport keeps the state."""

    def __init__(self, transport: LocalSteps, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.transport = transport
        self.parameters = parameters
        self.optimizer = optimizer

    def begin(self, num_steps: int) -> None:
        """Once, when weights, optimizer and transport are as they were after the last step."""
        self.transport.begin(self._locals(), num_steps=num_steps, private=self._moments, restore=self._restore_moments)

    def apply(self, context: Context) -> None:
        self.transport.after_update(self._locals(), context.step + 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def _locals(self) -> list[Tensor]:
        return [local(parameter.detach()) for parameter in self.parameters]

    def _moments(self) -> dict[str, list[Tensor]]:
        """By name, in the order and shapes of the parameters: zeros for one whose update keeps no such moment. Empty
        before the first step."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {
            name: [
                local(state[name]) if name in state else torch.zeros_like(weight)
                for state, weight in zip(states, self._locals(), strict=True)
            ]
            for name in MOMENTS
            if any(name in state for state in states)
        }

    def _restore_moments(self, moments: Mapping[str, Sequence[Tensor]]) -> None:
        for i, parameter in enumerate(self.parameters):
            state = dict(self.optimizer.state.get(parameter, {}))
            for name, values in moments.items():
                if name in state:
                    local(state[name]).copy_(values[i])
            if state:
                self.optimizer.state[parameter] = state  # states in fewer bits are packed anew
