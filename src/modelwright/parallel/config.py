"""Settings of the layout of training over processes."""

from dataclasses import dataclass
from typing import Literal

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
