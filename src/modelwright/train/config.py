"""Settings of training."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from modelwright.core import compatibility as traits
from modelwright.core.compatibility import Feature, check_compatible, conflict, feature, idle
from modelwright.core.config import ConfigError, constant, dump, only_for, prefix_errors, unused_settings
from modelwright.data.rows.order import BatchingConfig
from modelwright.model.low_rank import AdapterConfig
from modelwright.ops.matmul import triton_compiles
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.balance import LoadBalanceConfig
from modelwright.parallel.strategies.config import AsyncUpdatesConfig, GradientSyncConfig, StrategyConfig
from modelwright.parallel.strategies.shared_memory import SharedMemory
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright.train.monitors.anomalies import AnomalyConfig
from modelwright.train.monitors.energy import EnergyConfig
from modelwright.train.monitors.stragglers import StragglerConfig
from modelwright.train.optim.build import OptimizerKind
from modelwright.train.outside import named_features, named_objectives, named_settings
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.techniques.batch_selection import BatchSelectionConfig
from modelwright.train.techniques.ewc import EwcConfig
from modelwright.train.techniques.gradient_clipping import AdaptiveClipConfig
from modelwright.train.techniques.learning_rate import ScheduleConfig
from modelwright.train.techniques.loss_spikes import LossSpikeConfig
from modelwright.train.techniques.out_of_memory import WhenOutOfMemory
from modelwright.train.techniques.sparse_updates import SparseUpdateConfig, sparsity_features
from modelwright.train.techniques.weight_decay import WeightDecayScheduleConfig


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """Fault detection and tolerance."""

    replica_check_every_steps: int = constant(500)
    """Steps between bitwise comparisons of what several ranks hold; 0 for none."""
    watchdog_timeout_s: float = 1800.0
    """A process that finishes no step for this long writes its threads' stacks to `hang-<rank>.txt` and exits, so that
    a launcher can restart the run; 0 never."""
    in_memory_checkpoint_every_steps: int = 0
    """Steps between copies of the state in the hosts' memory (Gemini, Wang et al. 2023), from which a run recovers
    when they are newer than the checkpoint on disk; 0 for none."""
    on_out_of_memory: WhenOutOfMemory = constant("halve_microbatch")
    """`halve_microbatch` retries the step with half as many rows per microbatch and continues with those, where a
    failed step leaves no rank waiting; `fail` ends the run."""
    stragglers: StragglerConfig = field(default_factory=StragglerConfig)

    def __post_init__(self) -> None:
        for name in ("replica_check_every_steps", "watchdog_timeout_s", "in_memory_checkpoint_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")


LENGTHS = ("num_steps", "num_tokens", "num_epochs")
"""The fields that give the length of a training, at most one of them; without one it is one pass over the data."""

SHARED_MEMORY = feature(
    "parallel.shared_memory",
    needs=[
        *(traits.ADAMW_STATES, traits.RESIDENT_STATES, traits.EXACT_SUMS, traits.EQUAL_REPLICAS),
        *(traits.PROMPT_GRADIENTS, traits.SYNCHRONOUS_UPDATES, traits.SAME_MATMULS, traits.SAME_UNITS),
    ],
    breaks=SharedMemory.breaks,
)
"""The sharing of weights and states among the processes of a host; where it conflicts, each keeps its own copy."""

COMPILED = feature("compile", breaks=[traits.EAGER_BLOCKS])
"""Compiled blocks; where `compile` is `auto` they give way to whatever they conflict with."""

_WITHOUT_EFFECT_ON_WEIGHTS = (
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "optimizer_cpu_offload",
    "load_balance",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_last",
    "log_every_steps",
    "anomalies",
    "energy",
    "fault_tolerance",
)


@dataclass(frozen=True, kw_only=True)
class SharedTrainConfig:
    """Settings that all training stages of a run share, unless a stage sets its own value."""

    compile: Literal["auto", True, False] = "auto"
    """Compile the blocks with `torch.compile`, each by itself. `auto`: on CUDA, unless another setting needs blocks
    that are not compiled."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    optimizer_cpu_offload: bool = False
    """Keep optimizer states in host memory and update there, for an accelerator (ZeRO-Offload, Ren et al. 2021)."""
    optimizer_in_backward: bool = False
    """Update each parameter as soon as its gradient is complete, which frees the gradient (not with a pipeline). The
    norm comes too late to clip by: where `max_grad_norm` is above 0, gradients are clipped by the last step's norm."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Rule by which the peak rate follows the batch size: `linear` (Goyal et al. 2017, for SGD), `sqrt` (Malladi et al.
    2022, for Adam) or `none`, which takes `learning_rate` itself."""
    lr_reference_batch_tokens: int = field(default=524_288, metadata=only_for("lr_scaling", "linear", "sqrt"))
    """Tokens of the batch that `learning_rate` belongs to, for `lr_scaling`."""
    adaptive_clip: AdaptiveClipConfig = field(default_factory=AdaptiveClipConfig)
    weight_decay_schedule: WeightDecayScheduleConfig = field(default_factory=WeightDecayScheduleConfig)
    sparse_updates: SparseUpdateConfig = field(default_factory=SparseUpdateConfig)
    batch_selection: BatchSelectionConfig = field(default_factory=BatchSelectionConfig)
    gradient_sync: GradientSyncConfig = field(default_factory=GradientSyncConfig)
    async_updates: AsyncUpdatesConfig = field(default_factory=AsyncUpdatesConfig)
    load_balance: LoadBalanceConfig = field(default_factory=LoadBalanceConfig)
    loss_spikes: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    techniques: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Techniques of other installed packages (docs/extending.md) by their entry-point names, each with its settings, in
    the order in which they act: `{gradient_noise: {scale: 0.01}}`. A stage adds to those of `training`."""
    neftune_noise_alpha: float = 0.0
    """Strength of the noise on the embeddings of training batches (NEFTune, Jain et al. 2023); the paper takes 5 to 15,
    and 0 adds none."""
    l2_sp: float = 0.0
    """Decoupled pull of every weight toward its value at the start of training (L2-SP, Li et al. 2018), in the unit of
    `weight_decay`: alone it would undo a share of 1 - exp(-`l2_sp` x the sum of all learning rates), a fifth at 20
    after 1,000 updates at 1e-5. 0 disables it. It needs the memory of another copy of the weights."""
    max_skipped_steps: int = constant(20)
    """Updates in a row that may be skipped for values that are not finite before the run fails."""
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    log_every_steps: int = constant(1)
    """Steps between lines of `metrics.jsonl`."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints; 0 for none by steps."""
    checkpoint_every_minutes: float = 5.0
    """Minutes between checkpoints; 0 for none by time."""
    keep_last: int = 2
    """Checkpoints that are kept."""
    keep_best: bool = True
    """Also save and keep the checkpoint with the lowest validation loss."""

    def __post_init__(self) -> None:
        for name in ("lr_reference_batch_tokens", "keep_last", "log_every_steps", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("checkpoint_every_steps", "checkpoint_every_minutes", "neftune_noise_alpha", "l2_sp"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")
        # Completed with defaults, so that a later version of the other package cannot change the settings of this run.
        object.__setattr__(self, "techniques", named_settings(self.techniques))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(SharedTrainConfig):
    """Settings of one training stage. At most one of `num_steps`, `num_tokens` and `num_epochs` is above 0; if none is,
    training takes one pass over the data.
    """

    num_steps: int = 0
    """Length in updates."""
    num_tokens: int = 0
    """Length in tokens, padding included."""
    num_epochs: float = 0.0
    """Length in passes over the data. One pass if all three lengths are 0."""
    batch_tokens: int = 8192
    """Tokens of one update over all ranks and microbatches, padding included."""
    gradient_accumulation_steps: int = 1
    """Microbatches of one update. They change memory, not results; a pipeline runs them through its stages."""
    optimizer: OptimizerKind = "adamw"
    """`adamw` (Loshchilov and Hutter 2019), fused; `adamw_8bit` and `adamw_bf16_states`: with smaller states; `lion`
    (Chen et al. 2023); `muon` (Jordan et al. 2024) for the blocks' matrices and AdamW for the rest; `sgd`: plain, for
    federated averaging."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the optimizer's moments."""
    adam_eps: float = constant(1e-8)
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms do not decay."""
    max_grad_norm: float = 1.0
    """Norm to which gradients are clipped (Pascanu et al. 2013); 0 leaves them alone."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval_every_steps: int = 100
    """Steps between validations; 0 only at the end."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    ewc: EwcConfig = field(default_factory=EwcConfig)
    energy: EnergyConfig = field(default_factory=EnergyConfig)
    objective: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """An objective of another installed package (docs/extending.md) that a stage for the next token learns instead, by
    its entry-point name, with its settings: `{label_smoothing: {epsilon: 0.1}}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.objective) > 1:
            raise ConfigError(f"objective: names {', '.join(self.objective)}; a training has one objective")
        named = named_objectives(self.objective)
        object.__setattr__(self, "objective", {name: dump(settings) for name, (_, settings) in named.items()})
        lengths = {name: getattr(self, name) for name in LENGTHS}
        if any(value < 0 for value in lengths.values()) or sum(value > 0 for value in lengths.values()) > 1:
            given = ", ".join(f"{name}={value}" for name, value in lengths.items())
            raise ConfigError(f"num_steps: at most one of the three lengths may be above 0 and none below, got {given}")
        for name in ("batch_tokens", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("weight_decay", "max_grad_norm", "eval_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")
        if self.batching.mixture.is_measured and not self.eval_every_steps:
            raise ConfigError("batching.mixture.update: acts at evaluations; set eval_every_steps above 0")
        if self.adaptive_clip.kind != "none" and not self.max_grad_norm:
            raise ConfigError(
                f"adaptive_clip.kind: {self.adaptive_clip.kind} needs a max_grad_norm above 0 as its floor"
            )
        if self.loss_spikes.rollback_after and not self.checkpoint_every_steps:
            raise ConfigError("loss_spikes.rollback_after: restores checkpoints; set checkpoint_every_steps above 0")
        for name in ("learning_rate", "adam_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: must be in [0, 1), got {self.betas}; (0.9, 0.95) is usual")
        check_compatible(self.features())
        # Local SGD: only synchronized weights are evaluated and saved.
        every = self.gradient_sync.local_sgd.sync_every_steps
        for name in ("eval_every_steps", "checkpoint_every_steps"):
            if every and getattr(self, name) % every:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} must be a multiple of gradient_sync.local_sgd.sync_every_steps "
                    f"({every}): between synchronizations ranks have different weights"
                )

    @property
    def peak_learning_rate(self) -> float:
        """`learning_rate`, scaled to the batch according to `lr_scaling`."""
        exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_scaling]
        return self.learning_rate * (self.batch_tokens / self.lr_reference_batch_tokens) ** exponent

    def features(self) -> list[Feature]:
        """Returns all enabled features, with the properties of the run that they need and break."""
        result: list[Feature] = []
        if self.compile is True:
            result.append(COMPILED)
        if self.optimizer != "adamw":
            needs = [traits.WHOLE_GRADIENTS, traits.WHOLE_MATRICES] if self.optimizer == "muon" else []
            result.append(feature("optimizer", self.optimizer, needs=needs, breaks=[traits.ADAMW_STATES]))
        if self.optimizer_cpu_offload:
            needs = [traits.ADAMW_STATES, traits.WHOLE_GRADIENTS]
            result.append(
                feature(
                    "optimizer_cpu_offload",
                    needs=needs,
                    breaks=[traits.RESIDENT_STATES],
                    only_with=[traits.ACCELERATOR],
                )
            )
        if self.optimizer_in_backward:
            result.append(feature("optimizer_in_backward", breaks=[traits.WHOLE_GRADIENTS, traits.UNDIVIDED_GRADIENTS]))
        if self.neftune_noise_alpha:  # its strength follows from the lengths of documents
            result.append(feature("neftune_noise_alpha", self.neftune_noise_alpha, needs=[traits.WHOLE_ROWS]))
        if self.l2_sp:
            # Weights that processes share would be pulled once by each of them, and a second layout of the run would
            # take its present weights for the starting ones.
            needs = [traits.TRAINED_WEIGHTS, traits.SYNCHRONOUS_UPDATES, traits.OWN_WEIGHTS, traits.LASTING_LAYOUT]
            result.append(feature("l2_sp", self.l2_sp, needs=needs))
        for name in (
            *("adaptive_clip", "weight_decay_schedule", "precision", "gradient_sync", "async_updates"),
            *("load_balance", "loss_spikes", "lora", "ewc"),
        ):
            result += [replace(one, key=f"{name}.{one.key}") for one in getattr(self, name).features()]
        if self.batching.mixture.is_measured:
            needs = [traits.SYNCHRONOUS_UPDATES, traits.EQUAL_REPLICAS]
            result.append(feature("batching.mixture.update", self.batching.mixture.update, needs=needs))
        result += named_features(self.techniques)
        for name, (spec, _) in named_objectives(self.objective).items():
            result.append(feature("objective", name, needs=spec.needs))
        return result + sparsity_features(self.sparse_updates, self.batch_selection)

    def compiles(self, device_type: str, parallel: ParallelConfig, further: Sequence[Feature] = ()) -> bool:
        """Returns whether blocks are compiled. further: features of the objective."""
        if self.compile != "auto":
            return self.compile
        # Zero-bubble schedules split the backward of blocks, which a compiled graph does not allow.
        can_compile = device_type == "cuda" and triton_compiles() and parallel.schedule != "zero_bubble"
        return can_compile and not conflict([*self.features(), *further, COMPILED])

    def strategy(self, *, shares_memory: bool, further: Sequence[Feature] = ()) -> StrategyConfig:
        """Returns the strategy by which ranks share gradients and updates. shares_memory: allows the processes of a
        host to keep one copy, which they do unless a setting, the objective or a technique (`further`) conflicts.
        """
        # Shared memory gives way silently: it only saves memory, and every feature works without it.
        active = [*self.features(), *further, SHARED_MEMORY]
        return StrategyConfig(
            transport=self.gradient_sync,
            asynchronous=self.async_updates,
            update_in_backward=self.optimizer_in_backward,
            clip_norm=self.max_grad_norm,
            shares_memory=shares_memory and not conflict(active),
            scales_losses=self.precision.loss_scale.scales(uses_fp16=self.precision.uses_fp16),
        )

    def batch_rows(self, seq_len: int, *, num_copies: int = 1) -> int:
        """Rows of one global batch of rows of `seq_len` tokens.

        Raises `ConfigError` if the batch does not divide into rows, replicas and microbatches.
        """
        parts = num_copies * self.gradient_accumulation_steps
        if self.batch_tokens % (seq_len * parts):
            below = self.batch_tokens // (seq_len * parts) * seq_len * parts
            nearest = " and ".join(str(near) for near in (below, below + seq_len * parts) if near)
            raise ConfigError(
                f"batch_tokens: {self.batch_tokens} must be a multiple of {seq_len * parts} "
                f"({seq_len} tokens per row x {num_copies} replicas x {self.gradient_accumulation_steps} "
                f"microbatches); nearest: {nearest}"
            )
        return self.batch_tokens // seq_len

    def num_copies(self, axes: Mapping[str, int]) -> int:
        """Number of replicas of the model that share the rows of each batch; axes: of the mesh."""
        # In mode hogwild every process takes whole batches.
        return 1 if self.async_updates.mode == "hogwild" else axes["replicate"] * axes["shard"]

    def resolve_num_steps(self, num_batches_per_epoch: int) -> int:
        """Updates of the whole run, at least 1; `num_batches_per_epoch` is the loader's."""
        if self.num_steps:
            return self.num_steps
        if self.num_tokens:
            return max(1, math.ceil(self.num_tokens / self.batch_tokens))
        return max(1, round((self.num_epochs or 1.0) * num_batches_per_epoch))

    def identity(self) -> dict[str, Any]:
        """The settings that determine the weights (up to rounding), which a digest of the run should cover. A run can
        be resumed with other values of the rest.
        """
        without = set(_WITHOUT_EFFECT_ON_WEIGHTS)
        if self.loss_spikes.rollback_after:
            without.discard("checkpoint_every_steps")  # it decides the steps that the run may roll back to
        if self.batch_selection.signal != "none":
            without.discard("gradient_accumulation_steps")  # microbatches must share the selected rows equally
        result = {name: value for name, value in dump(self, constants=True).items() if name not in without}
        result["gradient_sync"] = {
            name: value
            for name, value in result["gradient_sync"].items()
            if name not in ("overlap", "topology") and (value or name != "strategy")
        }
        result["compile"] = False  # it changes rounding alone, and digests of older runs have the key
        result["techniques"] = list(result["techniques"].items())  # a digest sorts mappings, and the order matters
        # Settings that are off are left out, so that the digests of older runs stay valid. Updates in backward give the
        # same weights to the last bit, unless they clip, by the norm of the step before.
        for name, is_on in (
            ("techniques", self.techniques),
            ("objective", self.objective),
            ("optimizer_in_backward", self.optimizer_in_backward and self.max_grad_norm),
            ("neftune_noise_alpha", self.neftune_noise_alpha),
            ("l2_sp", self.l2_sp),
            ("batching", self.batching != BatchingConfig()),
            ("lora", self.lora != AdapterConfig()),
            ("ewc", self.ewc.strength),
        ):
            if not is_on:
                del result[name]
        return result


def check_layout(
    config: TrainConfig,
    parallel: ParallelConfig,
    *,
    num_processes: int = 1,
    further: Sequence[Feature] = (),
    section: str = "",
) -> None:
    """Raise `ConfigError` if a training, its layout over this many processes and further features conflict. section:
    that of the training, before the names of its settings.
    """
    layout = [replace(one, key=f"parallel.{one.key}") for one in parallel.features(num_processes)]
    features = [*config.features(), *layout]
    with prefix_errors(section) if section else nullcontext():
        if config.async_updates.mode == "hogwild" and parallel.data > 1:
            raise ConfigError(
                "parallel.data: in async_updates.mode hogwild every process takes whole batches; remove it"
            )
        check_compatible(features)
    if further:
        check_compatible([*features, *further])


def without_effect(
    config: TrainConfig, parallel: ParallelConfig, *, num_processes: int, on_accelerator: bool
) -> list[str]:
    """The settings that change nothing in this run, each with the missing condition."""
    offered = set(parallel.offers(num_processes))
    if on_accelerator:
        offered.add(traits.ACCELERATOR)
    return idle(config.features(), offered) + unused_settings(config)
