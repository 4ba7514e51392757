"""What passes between the ranks of a run, and when: the parts that the configuration asks for, ready for the loop.

`turns_for` says who makes which update, `transport_for` how gradients cross, `Meeting` lets local steps meet after an
update. The techniques themselves lie in `parallel/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from modelwright.core.errors import ConfigError
from modelwright.ops.pieces import local
from modelwright.optim.delay import DelayConfig, compensation
from modelwright.optim.update import Context
from modelwright.parallel.bounded_staleness import DelayedTransport, StalenessConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.hogwild import Hogwild
from modelwright.parallel.mesh import Mesh, World, world_apart
from modelwright.parallel.one_copy import OneCopy, fits
from modelwright.parallel.transport import GradientTransport
from modelwright.parallel.transports.bucketed import BucketedTransport
from modelwright.parallel.transports.build import TransportConfig, build_transport
from modelwright.parallel.transports.local_steps import LocalSteps
from modelwright.parallel.turns import Together, Turns

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What an AdamW keeps for each parameter, in the parameter's shape."""


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


def check_exchange(transport: TransportConfig, asynchronous: AsynchronousConfig, parallel: ParallelConfig) -> None:
    """Raise `ConfigError` when these do not go together."""
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


@contextmanager
def turns_for(config: AsynchronousConfig, everyone: Mesh, model: nn.Module, *, shares_memory: bool) -> Iterator[Turns]:
    """Who makes which update; shares_memory: where they can, processes keep one copy of the weights.

    Raises `ConfigError` for `hogwild` on several hosts.
    """
    if config.mode == "hogwild":
        with Hogwild(everyone.world, compensate=_compensation(config)) as hogwild:
            yield hogwild
    elif shares_memory and fits(everyone, [p for p in model.parameters() if p.requires_grad]):
        with OneCopy(everyone) as one_copy:
            yield one_copy
    else:
        yield Together(everyone)


@contextmanager
def transport_for(
    transport: TransportConfig, asynchronous: AsynchronousConfig, turns: Turns, parameters: Sequence[Tensor]
) -> Iterator[GradientTransport]:
    """How gradients cross. parameters: what the updates change, in the gradients' order, this rank's parts."""
    if isinstance(turns, Hogwild | OneCopy):
        yield turns
    elif asynchronous.mode == "delayed":
        with _built(transport, world_apart(turns.mesh.reduce)) as inner:
            delay = StalenessConfig(delay=asynchronous.delay)
            with DelayedTransport(inner, delay, weights=parameters, compensate=_compensation(asynchronous)) as late:
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
        if isinstance(transport, BucketedTransport):
            transport.close()


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
        self.transport.begin(self._locals(), num_steps=num_steps, private=self._moments)

    def apply(self, context: Context) -> None:
        self.transport.after_update(self._locals(), context.step + 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def _locals(self) -> list[Tensor]:
        return [local(parameter.detach()) for parameter in self.parameters]

    def _moments(self) -> Mapping[str, Sequence[Tensor]]:
        """Empty before the first step."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {
            name: [local(state[name]) for state in states] for name in MOMENTS if all(name in state for state in states)
        }
