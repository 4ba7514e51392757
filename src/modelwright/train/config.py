"""What a person chooses about one training run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright.core.compatibility import (
    ADAMW_STATES,
    EAGER_BLOCKS,
    EQUAL_REPLICAS,
    EXACT_SUMS,
    GRADIENT_SUMS,
    PROMPT_GRADIENTS,
    RESIDENT_STATES,
    REVERSIBLE_UPDATES,
    SAME_MATMULS,
    SAME_UNITS,
    SYNCHRONOUS_UPDATES,
    WHOLE_GRADIENTS,
    WHOLE_MATRICES,
    Feature,
    check_compatible,
    conflict,
    feature,
)
from modelwright.core.config import dump
from modelwright.core.errors import ConfigError
from modelwright.memory.config import ActivationConfig
from modelwright.optim.build import PLAIN_ADAMW, OptimizerKind
from modelwright.optim.clip import AdaptiveClipConfig
from modelwright.optim.decay import DynamicDecayConfig
from modelwright.optim.schedule import RateRuleConfig, ScheduleConfig
from modelwright.optim.sparse import SparseConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.pipeline.rebalance import BalanceConfig
from modelwright.parallel.strategies.config import AsynchronousConfig, StrategyConfig, TransportConfig
from modelwright.parallel.strategies.optimizer_in_backward import UpdateInBackward
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.monitors.anomalies import WatchConfig
from modelwright.train.monitors.build import GuardConfig
from modelwright.train.technique import Technique
from modelwright.train.techniques.loss_spikes import SpikeConfig

LENGTHS = ("num_steps", "num_tokens", "num_epochs")
"""The fields of which exactly one says how long a training is."""

SHARED_MEMORY = feature(
    "parallel.share_memory",
    needs=[
        ADAMW_STATES,
        RESIDENT_STATES,
        EXACT_SUMS,
        EQUAL_REPLICAS,
        PROMPT_GRADIENTS,
        SYNCHRONOUS_UPDATES,
        SAME_MATMULS,
        SAME_UNITS,
    ],
    breaks=[GRADIENT_SUMS, REVERSIBLE_UPDATES],
)
"""One copy of weights and states for the processes of a host; where it conflicts, they keep copies."""

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
    spikes: updates at which loss or gradients jump are left out, and after several of them the run goes back to earlier
    weights; rate_rule: the learning rate follows from the rows
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
        if self.updates_in_backward and (self.update_in_backward == "clip_by_last_norm") != (self.clip_norm > 0):
            raise ConfigError(
                f"clip_norm: is {self.clip_norm:g}, and update_in_backward {self.update_in_backward} needs it "
                f"{'above 0' if self.update_in_backward == 'clip_by_last_norm' else 'at 0'}: the norm of a gradient "
                "that is not kept is known too late to clip by; set clip_norm to 0, or take clip_by_last_norm"
            )
        if self.spikes.rollback_after and not self.checkpoint_every_steps:
            raise ConfigError("spikes.rollback_after: goes back to checkpoints; set checkpoint_every_steps above 0")
        for name in ("learning_rate", "adam_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: must be in [0, 1), got {self.betas}; (0.9, 0.95) is usual")
        check_compatible(self.features())
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

    def features(self) -> list[Feature]:
        """Everything that is switched on, with what it needs of the run and takes away."""
        found: list[Feature] = []
        if self.compile:
            found.append(feature("compile", breaks=[EAGER_BLOCKS]))
        if self.optimizer != "adamw":
            whole = [WHOLE_GRADIENTS] if self.optimizer in ("muon", "deepseek_adam") else []
            matrices = [WHOLE_MATRICES] if self.optimizer == "muon" else []
            breaks = [] if self.optimizer in PLAIN_ADAMW else [ADAMW_STATES]
            found.append(feature("optimizer", self.optimizer, needs=[*whole, *matrices], breaks=breaks))
        if self.offload_optimizer:
            needs = [ADAMW_STATES, WHOLE_GRADIENTS]
            found.append(feature("offload_optimizer", needs=needs, breaks=[RESIDENT_STATES]))
        if self.updates_in_backward:
            found.append(feature("update_in_backward", breaks=[WHOLE_GRADIENTS]))
        for name in ("adaptive_clip", "dynamic_decay", "precision", "transport", "asynchronous", "spikes", "sparse"):
            found += [replace(one, key=f"{name}.{one.key}") for one in getattr(self, name).features()]
        return found

    def strategy(self, *, shares_memory: bool) -> StrategyConfig:
        """How ranks share gradients and updates. shares_memory: whether processes of a host may keep one copy."""
        scaling = self.precision.loss_scale
        scales_losses = scaling.use == "always" or (scaling.use == "auto" and self.precision.uses_fp16)
        return StrategyConfig(
            transport=self.transport,
            asynchronous=self.asynchronous,
            update_in_backward=self.updates_in_backward,
            clip_norm=self.clip_norm,
            shares_memory=shares_memory and not conflict([*self.features(), SHARED_MEMORY]),
            scales_losses=scales_losses,
            scales_layers=scales_losses and scaling.per_layer,
        )

    @property
    def decay_in_force(self) -> DynamicDecayConfig:
        """`dynamic_decay`; of DeepSeekAdam the published one, unless another is set."""
        if self.optimizer == "deepseek_adam" and not self.dynamic_decay.above_norm:
            return DynamicDecayConfig.published()
        return self.dynamic_decay

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


def check_layout(
    config: TrainConfig,
    parallel: ParallelConfig,
    *,
    num_processes: int = 1,
    techniques: Sequence[Technique] = (),
) -> None:
    """Raise `ConfigError` when a training, its layout over so many processes and further techniques conflict."""
    layout = [replace(one, key=f"parallel.{one.key}") for one in parallel.features(num_processes)]
    if config.asynchronous.mode == "hogwild" and parallel.data > 1:
        raise ConfigError("parallel.data: in asynchronous.mode hogwild every process takes whole batches; leave it out")
    further = [feature(one.name, needs=one.needs, breaks=one.breaks) for one in techniques]
    check_compatible([*config.features(), *layout, *further])
