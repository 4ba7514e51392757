"""`Technique`: anything that may happen in a training step besides forward, backward and the optimizer's own step.

A technique acts at three moments: on the batch before forward, on the gradients before the weights change, and on the
finished step. `train/build.py` lists all techniques in the order in which they act; each is one file under
`techniques/` or `monitors/`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from modelwright.train.objective import Batch

NOT_FINITE, EMPTY_BATCH, LOSS_SPIKE = "not_finite", "empty_batch", "loss_spike"
"""Reasons for which a step changes nothing."""


@dataclass(kw_only=True)
class Update:
    """One optimizer step between gradients and weights; techniques read and change it in order.

    step: from 0. gradients: those that this rank updates with, summed over ranks, normalized, unscaled. losses: each
    term over the global batch; weights: the normalizers of these terms. model_flops: of forward and backward of the
    global batch. skip_reason: why this step changes nothing; the first reason counts. metrics: figures for the record.
    """

    step: int
    num_steps: int
    gradients: list[Tensor]
    losses: Mapping[str, float]
    weights: Mapping[str, float]
    model_flops: float = 0.0
    grad_norm: float = math.nan
    skip_reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def loss(self) -> float:
        """The sum of all terms."""
        return sum(self.losses.values())

    @property
    def is_empty(self) -> bool:
        """Whether no label in the global batch counts."""
        return not any(self.weights.values())

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    def skip(self, reason: str) -> None:
        """Leave weights and optimizer unchanged in this step."""
        self.skip_reason = self.skip_reason or reason


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One finished step, as monitors and metrics see it.

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
        """Serialized for other processes."""
        return {**vars(self), "losses": dict(self.losses), "scalars": dict(self.scalars)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "StepInfo":
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Asks the trainer to restore weights and optimizer of an earlier checkpoint. Steps and batches are never rewound.
    steps: suitable checkpoints, best first. done: called on all ranks with the chosen step.
    """

    steps: Sequence[int]
    done: Callable[[int], None] = lambda step: None


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """Asks the trainer to save a checkpoint and to rebuild the run with other numbers of layers per pipeline stage."""

    layers_per_stage: tuple[int, ...]


Request = Rollback | Relayout | None


class Stateful(Protocol):
    """Has state for the checkpoint: nested dicts and lists of tensors and JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


def _keep_batch(step: int, batch: Batch) -> Batch:
    return batch


def _ignore(value: Any) -> None:
    """A hook that a technique does not use."""


def _no_state() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Technique:
    """What one technique does in a step; hooks that it does not need are left out.

    name: the key of its state in a checkpoint. on_step_end is called after every `every`-th step, on all ranks alike.
    belongs_to_weights: a rollback restores its state together with the weights. pinned_checkpoints: steps whose
    checkpoints must not be removed. summary: its report when the run ends. needs, breaks: properties of a run that it
    relies on and removes; a run in which one technique breaks what another needs is refused.
    """

    name: str
    on_batch: Callable[[int, Batch], Batch] = _keep_batch
    on_gradients: Callable[[Update], None] = _ignore
    on_step_end: Callable[[StepInfo], Request] = _ignore
    every: int = 1
    state: Stateful | None = None
    belongs_to_weights: bool = False
    pinned_checkpoints: Callable[[], Sequence[int]] = tuple
    summary: Callable[[], Mapping[str, Any]] = _no_state
    needs: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict() if self.state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.state:
            self.state.load_state_dict(state)
