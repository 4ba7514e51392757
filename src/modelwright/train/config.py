"""What a person chooses about one training run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.config import dump
from modelwright.core.errors import ConfigError
from modelwright.memory.config import ActivationConfig
from modelwright.optim.build import PLAIN_ADAMW, OptimizerKind
from modelwright.optim.clip import AdaptiveClipConfig
from modelwright.optim.decay import DynamicDecayConfig
from modelwright.parallel.strategies.optimizer_in_backward import UpdateInBackward
from modelwright.optim.schedule import RateRuleConfig, ScheduleConfig
from modelwright.optim.sparse import SparseConfig
from modelwright.parallel.pipeline.rebalance import BalanceConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.strategies.config import TransportConfig
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.exchange import AsynchronousConfig, check_exchange
from modelwright.train.monitors.replica_check import QuarantineConfig
from modelwright.train.techniques.loss_spikes import SpikeConfig
from modelwright.train.monitors.build import GuardConfig
from modelwright.train.monitors.anomalies import WatchConfig

LENGTHS = ("num_steps", "num_tokens", "num_epochs")
"""The fields of which exactly one says how long a training is."""

_WITHOUT_EFFECT_ON_WEIGHTS = (
    "num_microbatches",
    "activations",
    "memory_arena",
    "offload_optimizer",
    "balance",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_last",
    "log_every_steps",
    "watch",
    "guards",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Length: exactly one of `num_steps`, `num_tokens` and `num_epochs` is above 0.
    batch_tokens: tokens of one update over all ranks, padding included; num_microbatches: parts into which each copy
    of the model cuts its share (memory, not mathematics); clip_norm: 0 leaves gradients alone; adaptive_clip: a limit
    above it that follows the gradients; dynamic_decay: less weight decay while gradients are large;
    offload_optimizer: its states wait in the host's memory, for models on an accelerator; update_in_backward: each
    parameter is updated as soon as its gradient is final, which frees the gradient (in every layout but a pipeline;
    without clipping, or clipped by the norm of the step before); activations: what forward keeps for backward;
    transport: how gradients cross between copies of the model; asynchronous: updates that do not wait for them;
    quarantine: gradients out of all proportion are left out; spikes: so are updates at which loss or gradients jump,
    and after several of them the run goes back to earlier weights; rate_rule: the learning rate follows from the rows
    of a batch, settled before the run; balance: layers and rows are moved so that all ranks and microbatches have equal
    work; sparse: units of the model and rows of a batch that teach little are left out; guards: what looks after runs
    of several processes, and after memory; eval_every_steps: 0 only at the end;
    checkpoint_every_steps and checkpoint_every_minutes: 0 switches that trigger off; keep_best: the checkpoint
    with the lowest held-out loss is saved and kept beside the last `keep_last`; max_skipped_steps: updates in a row
    that may be skipped for values that are not finite before the run gives up; memory_arena: what comes and goes within
    a step lies where a plan of an earlier step puts it, without the heap's gaps (Linux, CPU; needs a C++ compiler).
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_epochs: float = 0.0
    batch_tokens: int = 8192
    num_microbatches: int = 1
    optimizer: OptimizerKind = "adamw"
    learning_rate: float = 1e-3
    rate_rule: RateRuleConfig = field(default_factory=RateRuleConfig)
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    adaptive_clip: AdaptiveClipConfig = field(default_factory=AdaptiveClipConfig)
    dynamic_decay: DynamicDecayConfig = field(default_factory=DynamicDecayConfig)
    offload_optimizer: bool = False
    update_in_backward: UpdateInBackward = "none"
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: bool = False
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    memory_arena: bool = False
    transport: TransportConfig = field(default_factory=TransportConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    quarantine: QuarantineConfig = field(default_factory=QuarantineConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    eval_every_steps: int = 100
    checkpoint_every_steps: int = 0
    checkpoint_every_minutes: float = 5.0
    keep_last: int = 2
    keep_best: bool = True
    log_every_steps: int = 1
    max_skipped_steps: int = 20
    watch: WatchConfig = field(default_factory=WatchConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        lengths = {name: getattr(self, name) for name in LENGTHS}
        if any(value < 0 for value in lengths.values()) or sum(value > 0 for value in lengths.values()) != 1:
            given = ", ".join(f"{name}={value}" for name, value in lengths.items())
            raise ConfigError(f"num_steps: exactly one of the three lengths must be above 0, got {given}")
        for name in ("batch_tokens", "num_microbatches", "keep_last", "log_every_steps", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("weight_decay", "clip_norm", "eval_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 switches it off")
        for name in ("checkpoint_every_steps", "checkpoint_every_minutes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 switches it off")
        if self.adaptive_clip.kind != "none" and not self.clip_norm:
            raise ConfigError(f"adaptive_clip.kind: {self.adaptive_clip.kind} needs a clip_norm above 0 as its floor")
        if self.optimizer not in PLAIN_ADAMW:
            self._check_optimizer()
        if self.sparse.is_on:
            self._check_sparse()
        if self.updates_in_backward:
            self._check_update_in_backward()
        for name in ("learning_rate", "adam_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: must be in [0, 1), got {self.betas}; (0.9, 0.95) is usual")
        if self.precision.adaptive.kind != "none":
            self._check_adaptive()
        check_exchange(self.transport, self.asynchronous, ParallelConfig())
        if self.spikes.num_sigmas:
            self._check_spikes()
        every = self.transport.local_steps.every
        for name in ("eval_every_steps", "checkpoint_every_steps"):
            if every and getattr(self, name) % every:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} must be a multiple of transport.local_steps.every ({every}): "
                    "between meetings every rank has weights of its own"
                )

    @property
    def updates_in_backward(self) -> bool:
        return self.update_in_backward != "none"

    @property
    def is_plain(self) -> bool:
        """Whether every update is AdamW's, in memory, on exact sums that all processes make together, for good."""
        for_good = not self.spikes.rollback_after and self.precision.adaptive.kind == "none"
        for_good &= self.sparse.kind == "none"
        return self._is_together and for_good and self.optimizer in PLAIN_ADAMW and not self.offload_optimizer

    @property
    def _is_together(self) -> bool:
        exact = self.transport.kind == "exact" and not self.transport.local_steps.every
        return exact and self.asynchronous.mode == "none"

    @property
    def decay_in_force(self) -> DynamicDecayConfig:
        """`dynamic_decay`; of DeepSeekAdam the published one, unless another is set."""
        if self.optimizer == "deepseek_adam" and not self.dynamic_decay.above_norm:
            return DynamicDecayConfig.published()
        return self.dynamic_decay

    def _check_adaptive(self) -> None:
        """Formats change for all ranks at once, and in code that is not compiled for one of them."""
        wrong = {
            "compile": self.compile,
            "asynchronous.mode": self.asynchronous.mode == "hogwild",
            "precision.loss_scale.per_layer": self.precision.loss_scale.per_layer,
        }
        for name, is_set in wrong.items():
            if is_set:
                raise ConfigError(f"{name}: does not go with precision.adaptive; switch one of them off")

    def _check_spikes(self) -> None:
        if self.asynchronous.mode == "hogwild":
            raise ConfigError(
                "spikes.num_sigmas: in asynchronous.mode hogwild no process sees all updates; set it to 0, or the mode "
                "to none"
            )
        if not self.spikes.rollback_after:
            return
        if not self._is_together:
            raise ConfigError(
                "spikes.rollback_after: what a transport holds back and updates that ranks make apart cannot be taken "
                "back; set transport.kind to exact, without local steps, and asynchronous.mode to none"
            )
        if not self.checkpoint_every_steps:
            raise ConfigError("spikes.rollback_after: goes back to checkpoints; set checkpoint_every_steps above 0")

    def _check_optimizer(self) -> None:
        """What is made for AdamW's states in FP32."""
        needs = {
            "offload_optimizer": self.offload_optimizer,
            "asynchronous.mode": self.asynchronous.mode == "hogwild",
            "transport.local_steps.moment_every": self.transport.local_steps.moment_every > 0,
        }
        for name, is_wanted in needs.items():
            if is_wanted:
                raise ConfigError(f"{name}: goes with optimizer adamw, not with {self.optimizer}; change one of them")

    def _check_sparse(self) -> None:
        """What needs the same products, parameters and gradients in every step."""
        chooses_units = self.sparse.kind != "none"
        excludes = {
            "compile": self.compile,
            "asynchronous.mode": self.asynchronous.mode != "none",
            "precision.adaptive.kind": self.precision.adaptive.kind != "none",
            "spikes.rollback_after": self.spikes.rollback_after > 0,
            "optimizer": chooses_units and self.optimizer not in PLAIN_ADAMW,
            "offload_optimizer": chooses_units and self.offload_optimizer,
            "transport.kind": chooses_units and self.transport.kind != "exact",
            "transport.local_steps": chooses_units and self.transport.local_steps.every > 0,
        }
        for name, is_set in excludes.items():
            if is_set:
                raise ConfigError(
                    f"{name}: cannot be combined with the configured sparse updates; unset it or `sparse`"
                )

    @property
    def _uses_fp16(self) -> bool:
        return self.precision.policy != "fastest" and self.precision.uses_fp16

    def _check_update_in_backward(self) -> None:
        """What needs the whole gradient, or sends it, before a weight may change."""
        mode = self.update_in_backward
        if (mode == "clip_by_last_norm") != (self.clip_norm > 0):
            raise ConfigError(
                f"clip_norm: is {self.clip_norm:g}, and update_in_backward {mode} needs it "
                f"{'above 0' if mode == 'clip_by_last_norm' else 'at 0'}: the norm of a gradient that is not kept is "
                "known too late to clip by; set clip_norm to 0, or take clip_by_last_norm"
            )
        refused = {
            "adaptive_clip.kind": self.adaptive_clip.kind != "none",
            "dynamic_decay.above_norm": self.dynamic_decay.above_norm > 0,
            "quarantine.factor": self.quarantine.factor > 0,
            "spikes.num_sigmas": self.spikes.num_sigmas > 0,
            "sparse": self.sparse.is_on,
            "precision.loss_scale.use": self.precision.loss_scale.use == "always" or self._uses_fp16,
            "precision.adaptive.kind": self.precision.adaptive.kind != "none",
            "offload_optimizer": self.offload_optimizer,
            "optimizer": self.optimizer in ("muon", "deepseek_adam"),
            "asynchronous.mode": self.asynchronous.mode != "none",
            "transport.kind": self.transport.kind != "exact",
            "transport.local_steps": self.transport.local_steps.every > 0,
        }
        for name, is_wanted in refused.items():
            if is_wanted:
                given = f" ({self.optimizer})" if name == "optimizer" else ""
                raise ConfigError(
                    f"{name}: needs whole gradients after backward{given}; change it, or set update_in_backward to none"
                )

    def batch_rows(self, seq_len: int, *, num_copies: int = 1) -> int:
        """Rows of one global batch of rows of `seq_len` tokens.

        Raises `ConfigError` when the batch does not divide into rows, copies of the model and microbatches.
        """
        parts = num_copies * self.num_microbatches
        if self.batch_tokens % (seq_len * parts):
            below = self.batch_tokens // (seq_len * parts) * seq_len * parts
            nearest = " and ".join(str(near) for near in (below, below + seq_len * parts) if near)
            raise ConfigError(
                f"batch_tokens: {self.batch_tokens} must be a multiple of {seq_len * parts} "
                f"({seq_len} tokens a row x {num_copies} copies of the model x {self.num_microbatches} microbatches); "
                f"nearest: {nearest}"
            )
        return self.batch_tokens // seq_len

    def num_copies(self, axes: Mapping[str, int]) -> int:
        """Copies of the model that share the rows of each batch; axes: of the mesh. In mode hogwild every process takes
        whole batches."""
        return 1 if self.asynchronous.mode == "hogwild" else axes["replicate"] * axes["shard"]

    def resolve_num_steps(self, num_batches_per_epoch: int) -> int:
        """Updates of the whole run, at least 1; `num_batches_per_epoch` is the loader's."""
        if self.num_steps:
            return self.num_steps
        if self.num_tokens:
            return max(1, math.ceil(self.num_tokens / self.batch_tokens))
        return max(1, round(self.num_epochs * num_batches_per_epoch))

    def identity(self) -> dict[str, Any]:
        """The settings that decide the weights (up to rounding): what a digest of the run should cover.

        A run can be resumed with other values of the rest.
        """
        without = set(_WITHOUT_EFFECT_ON_WEIGHTS)
        if self.spikes.rollback_after:
            without.discard("checkpoint_every_steps")  # where the run may go back to
        if self.sparse.batch.signal != "none":
            without.discard("num_microbatches")  # which must share the chosen rows equally
        found = {name: value for name, value in dump(self).items() if name not in without}
        found["transport"] = {
            name: value for name, value in found["transport"].items() if name not in ("overlap", "collectives")
        }
        if self.update_in_backward != "clip_by_last_norm":
            del found["update_in_backward"]  # the same weights, to the last bit
        return found
