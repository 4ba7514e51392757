"""`Technique`: anything that may happen in a training step besides forward, backward and the optimizer's own step.

A technique acts at four moments: on the batch before forward, on the gradients before the weights change, on the
finished step, and when a step is abandoned and repeated. `train/build.py` lists all techniques in the order in which
they act; each is one file under `techniques/` or `monitors/`, whose builder gets the parts of the run (`Runtime`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from modelwright.core.compatibility import UNDECLARED
from modelwright.model.decoder import Decoder
from modelwright.ops.dtensor import TensorView
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.strategy import Replica, Strategy
from modelwright.train.objective import Batch, Executor, Runner, TermSums
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import LossScale, LossScaleConfig

NOT_FINITE, EMPTY_BATCH, LOSS_SPIKE = "not_finite", "empty_batch", "loss_spike"
"""Reasons for which a step changes nothing."""


@dataclass(kw_only=True)
class Update:
    """An optimizer step after backward and before the weights change; techniques read and change it in order.

    The gradients of a parameter may be divided among the ranks, or be on some of them only; a view says which part this
    rank has. They are empty under `optimizer_in_backward`.
    """

    step: int
    """Number of the step, from 0."""
    num_steps: int
    gradients: Sequence[TensorView]
    """Gradients that this rank updates with: summed over ranks, normalized, unscaled."""
    sums: TermSums | None = None
    """Losses and metrics of the global batch while they are on the device; None once they are read."""
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    """Each term over the global batch; known with `grad_norm`."""
    weights: Mapping[str, float]
    """The normalizers of the terms."""
    model_flops: float = 0.0
    """FLOPs of forward and backward of the global batch."""
    grad_norm: float = math.nan
    """Norm of the whole model's gradient, before clipping; known once the finite check has acted, which is first."""
    skip_reason: str = ""
    """Reason why this step changes nothing, or ""; the first one counts."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Figures for the record."""

    def read(self, norm: Tensor | float) -> None:
        """Take over the gradient norm, and with it losses and metrics: in one transfer, because the host waits for the
        device in each.
        """
        parts = [] if self.sums is None else [self.sums.vector]
        if isinstance(norm, Tensor):
            parts = [norm.detach().double().reshape(1).to(parts[0].device if parts else norm.device), *parts]
        # PyTorch leaves the type of tolist open.
        found: list[float] = torch.cat(parts).tolist() if parts else []  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self.grad_norm = found.pop(0) if isinstance(norm, Tensor) else norm
        if self.sums is not None:
            self.losses, metrics = self.sums.read(found)
            self.metrics |= metrics
            self.sums = None

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients without their names."""
        return [view.tensor for view in self.gradients]

    @property
    def loss(self) -> float:
        """The sum of all terms."""
        return sum(self.losses.values())

    @property
    def is_empty(self) -> bool:
        """True if the global batch has no label that counts."""
        return not any(self.weights.values())

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    def skip(self, reason: str) -> None:
        """Leave weights and optimizer unchanged in this step."""
        self.skip_reason = self.skip_reason or reason


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """A finished step, as monitors and metrics see it.

    step: updates finished, from 1. losses: each term, normalized over the global batch; loss: their sum. grad_norm:
    before clipping. num_tokens: of all ranks, without padding. model_flops: of forward and backward. mfu: model FLOPs
    utilization in [0, 1], 0 when no peak rate is known; peak_flops: the rate of one rank that it refers to, raised when
    a step is faster. data_wait_s, compute_s, comm_s: seconds waiting for the batch, in forward and backward, and in
    communication of gradients and weights, including compression and waiting for other ranks; all are parts of
    step_time_s. skip_reason: why the update was skipped, or "". bytes_sent: by this rank since the start, over all of
    its connections and with their headers, None if the kernel does not count them. scalars: added by techniques.
    """

    step: int
    loss: float
    losses: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    num_tokens: int
    tokens_per_s: float
    mfu: float
    data_wait_s: float
    comm_s: float
    step_time_s: float
    bytes_sent: int | None
    skip_reason: str = ""
    compute_s: float = 0.0
    model_flops: float = 0.0
    peak_flops: float = 0.0
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    def as_record(self) -> dict[str, float | int | bool]:
        """The step's metrics, flat: loss terms as `loss/<name>` if there are several; values of None are omitted."""
        terms = {f"loss/{name}": value for name, value in self.losses.items()} if len(self.losses) > 1 else {}
        left_out = ("step", "losses", "scalars", "skip_reason", "compute_s", "model_flops")
        plain = {key: value for key, value in vars(self).items() if key not in left_out and value is not None}
        return {**plain, "skipped": self.skipped, **terms, **self.scalars}

    def as_json(self) -> dict[str, Any]:
        """Serialized for other processes; `StepInfo(**values)` reads it back."""
        return {**vars(self), "losses": dict(self.losses), "scalars": dict(self.scalars)}


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Asks the trainer to restore weights and optimizer of an earlier checkpoint. Steps and batches are never rewound.
    steps: of suitable checkpoints, best first. done: called on all ranks with the chosen step.
    """

    steps: Sequence[int]
    done: Callable[[int], None] = lambda step: None


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """Asks the trainer to save a checkpoint and to rebuild the run with other numbers of layers per pipeline stage."""

    layers_per_stage: tuple[int, ...]


Request = Rollback | Relayout | None


class Stateful(Protocol):
    """An object with state for the checkpoint: nested dicts and lists of tensors and JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


# Named functions, not lambdas: `Technique.hooks` tells by identity which hooks are set.
def _keep_batch(step: int, batch: Batch) -> Batch:
    return batch


def _ignore(value: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Technique:
    """The hooks of one technique, by which it acts in a step; those that it does not need are left out.

    All ranks call the hooks in the same order.
    """

    name: str
    """The key of its state in a checkpoint."""
    on_batch: Callable[[int, Batch], Batch] = _keep_batch
    """Takes the step (from 0) and this rank's rows; returns the rows to train on."""
    on_gradients: Callable[[Update], None] = _ignore
    """Called between gradients and weights."""
    on_step_end: Callable[[StepInfo], Request] = _ignore
    """Called after every `every`-th step."""
    on_retry: Callable[[], None] = lambda: None
    """Called when forward and backward are abandoned and repeated with the same batch: drops their partial results."""
    metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    """Returns figures for the record of the step; called once, after the weights have changed."""
    every: int = 1
    state: Stateful | None = None
    """State for checkpoints. Equal on all ranks, except for tensors that follow a parameter (`TensorView.laid_out`)."""
    belongs_to_weights: bool = False
    """True if a rollback restores the state together with the weights."""
    pinned_checkpoints: Callable[[], Sequence[int]] = tuple
    """Returns steps whose checkpoints must not be removed."""
    summary: Callable[[], Mapping[str, Any]] = dict[str, Any]
    """Returns the technique's report when the run ends."""
    needs: frozenset[str] = UNDECLARED
    """Properties of a run that it relies on (`core/compatibility.py`). The strategy is chosen so that it keeps them;
    a layout or a setting that breaks one of them is refused. A technique that can do with less declares it, by an empty
    set for example; docs/extending.md has all properties in a table."""
    breaks: frozenset[str] = frozenset()
    """Properties of a run that it removes."""

    @property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks that are set, of those that act within a step."""
        unused = {"on_batch": _keep_batch, "on_gradients": _ignore, "on_step_end": _ignore}
        return frozenset(moment for moment, hook in unused.items() if getattr(self, moment) is not hook)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict() if self.state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.state:
            self.state.load_state_dict(state)


@dataclass(kw_only=True)
class Runtime:
    """The parts of a run that a builder of a technique may use. It may replace `runner` and `scaler`.

    The strategy is chosen after all techniques are built, because it follows from what they need: `strategy` is for
    their hooks, not for their builders.
    """

    replica: Replica
    executor: Executor
    runner: Runner
    formats: ModelPrecision
    scaler: LossScale = field(default_factory=lambda: LossScale(LossScaleConfig(dynamic=False, init_scale=1.0), 0))
    """Scales losses and unscales gradients; by 1 unless the technique `loss_scaling` sets another one."""
    global_mesh: Mesh
    microbatch_tokens: int
    """Tokens of one microbatch on one rank."""
    num_steps: int
    seed: int
    folder: Path
    """The folder of the stage."""
    note: Callable[[str], None]
    """Shows a line to the user."""
    log_event: Callable[[int, str, float, float, str], None] | None
    """`AnomalyLog.report`, for events that a person should look at; on the first rank only, and None for a step that is
    traced."""
    alive: Callable[[], None]
    """Resets the watchdog's timer; for techniques that work for long between two steps."""
    on_exit: ExitStack
    """Closed when the run under this layout ends, also after an error."""
    chosen: list[Strategy] = field(default_factory=list[Strategy])
    """Holds the strategy, once it is chosen."""

    @property
    def strategy(self) -> Strategy:
        assert self.chosen, (
            "a builder used the strategy, which is chosen after all techniques are built; use it in hooks"
        )
        return self.chosen[0]

    @property
    def model(self) -> Decoder:
        """This rank's part of the model."""
        return self.executor.model

    @property
    def mesh(self) -> Mesh:
        """The processes that make one update together."""
        return self.replica.mesh

    @property
    def world(self) -> World:
        """All processes."""
        return self.global_mesh.world

    @property
    def is_first(self) -> bool:
        """True for the first of the processes that make one update together."""
        return self.mesh.world.is_first

    def parameters(self) -> list[TensorView]:
        """Returns this rank's part of every trained weight, with its present values. Under a pipeline each rank has
        those of its stages; ranks that hold the same part hold the same values, unless `EQUAL_REPLICAS` is broken.
        """
        return self.replica.parameters()

    def max_over_ranks(self, value: float) -> float:
        """The maximum over the processes that make one update together."""
        return self.mesh.world.maxima(value)[0]

    def report(self, step: int, kind: str, value: float, limit: float, text: str) -> None:
        """Record an event that a person should look at; only the first rank does."""
        if self.log_event is not None:
            self.log_event(step, kind, value, limit, text)


TechniqueBuilder = Callable[[Runtime], Technique | None]
"""Builds a technique for one layout; None where it has nothing to do. Called on all ranks alike, and again whenever a
run is laid out anew."""


def observer(name: str, observe: Callable[[StepInfo], None]) -> TechniqueBuilder:
    """Returns the builder of a technique that only observes finished steps and has no state."""
    return lambda run: Technique(name=name, on_step_end=observe, needs=frozenset())
