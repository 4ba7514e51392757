"""What a person chooses about how training is spread over processes."""

from dataclasses import dataclass
from typing import Literal

from modelwright.core.compatibility import (
    GRADIENT_SUMS,
    WHOLE_GRADIENTS,
    WHOLE_MATRICES,
    WHOLE_MODEL,
    WHOLE_ROWS,
    Feature,
    feature,
)
from modelwright.core.errors import ConfigError

Shard = Literal["none", "optimizer", "gradients", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
ContextAttention = Literal["all_gather", "ring"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout of one training run; the product of the axes is the number of processes.

    pipeline: stages of consecutive layers, with `schedule` over the run's microbatches and `stages_per_rank` stages on
    each rank (above 1 for interleaved schedules); 1 microbatch makes it a plain layer-to-device map; layers_per_stage:
    how many layers each stage holds, in order, empty for a balanced split.
    data: copies that take rows of their own, 0 for all processes that the other axes leave.
    shard: what is divided among copies instead of kept by each: nothing (ZeRO-0), optimizer states (1), gradients too
    (2), parameters too (3). Weights are FP32; those of projections that compute in BF16 or FP16 are gathered in that
    format, all others in FP32, and gradients are summed in FP32. shard_group: copies that share one whole model, 0 for
    all of them; fewer is hybrid sharding: sharded within groups of neighboring ranks, replicated across groups.
    context: processes that share the tokens of each row. context_attention: how they attend to each other's tokens:
    `all_gather` collects the keys and values of whole rows in every layer; `ring` passes them from rank to rank, in
    less memory. tensor: processes that share each layer's heads, FFN columns and the vocabulary; with
    sequence_parallel the norms and the residual stream between them are shared too.
    share_memory: processes of one host that share out rows and nothing else keep one copy of weights and optimizer
    states in its memory, and each makes its part of every update (on the CPU). Where the
    host's shared memory has no room they keep copies; a run repeats to the last bit where that is the same each time.
    lost_after_s: a process of which nothing was heard for so long is taken for lost, and the others end with status 3,
    so that a launcher can start the run again; 0 never. Not only in training: while data is prepared, too.
    placement: the links between the hosts are measured at the start (kept per set of hosts in the run directory), and
    the ranks numbered anew so that the axes that talk most sit on the fastest links.
    """

    pipeline: int = 1
    data: int = 0
    context: int = 1
    context_attention: ContextAttention = "all_gather"
    tensor: int = 1
    shard: Shard = "none"
    shard_group: int = 0
    sequence_parallel: bool = True
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    layers_per_stage: tuple[int, ...] = ()
    share_memory: bool = True
    lost_after_s: float = 120.0
    placement: bool = False

    def __post_init__(self) -> None:
        for name in ("pipeline", "context", "tensor", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("data", "shard_group"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 takes what is left")
        if self.lost_after_s < 0:
            raise ConfigError(f"lost_after_s: must not be negative, got {self.lost_after_s}; 0 switches it off")
        if self.shard == "none" and self.shard_group:
            raise ConfigError("shard_group: has no meaning while nothing is sharded; choose what with `shard`")
        many = self.stages_per_rank > 1
        if many and (self.pipeline == 1 or self.schedule in ("gpipe", "1f1b")):
            raise ConfigError("stages_per_rank: above 1 needs a pipeline and an interleaved or zero_bubble schedule")
        if self.schedule == "interleaved" and self.pipeline > 1 and not many:
            raise ConfigError("stages_per_rank: an interleaved schedule needs at least 2")
        stages = self.pipeline * self.stages_per_rank
        if self.layers_per_stage and (len(self.layers_per_stage) != stages or min(self.layers_per_stage) < 0):
            raise ConfigError(f"layers_per_stage: needs {stages} numbers of layers, got {self.layers_per_stage}")

    def axes(self, num_processes: int) -> dict[str, int]:
        """Ranks along each axis of the mesh, slowest first: pipeline, replicate, shard, context, tensor.

        Neighboring ranks are the ones that talk most. Raises `ConfigError` when the product cannot be
        `num_processes`.
        """
        others = self.pipeline * self.context * self.tensor
        data = self.data or num_processes // others
        if data * others != num_processes:
            raise ConfigError(
                f"data: pipeline {self.pipeline} x data {self.data or 'rest'} x context {self.context} x tensor "
                f"{self.tensor} does not make {num_processes} processes; start {self._usable(num_processes)} (--nproc)"
            )
        shard = 1 if self.shard == "none" else self.shard_group or data
        if data % shard:
            raise ConfigError(f"shard_group: {shard} does not divide the {data} copies")
        return {
            "pipeline": self.pipeline,
            "replicate": data // shard,
            "shard": shard,
            "context": self.context,
            "tensor": self.tensor,
        }

    def features(self, num_processes: int) -> list[Feature]:
        """What this layout needs of a run, and takes away."""
        found = []
        if self.pipeline > 1:
            found.append(feature("pipeline", self.pipeline, needs=[WHOLE_GRADIENTS], breaks=[WHOLE_MODEL]))
        if self.context > 1:
            found.append(feature("context", self.context, breaks=[WHOLE_MODEL, WHOLE_ROWS]))
        if self.tensor > 1:
            found.append(feature("tensor", self.tensor, breaks=[WHOLE_MODEL, WHOLE_MATRICES]))
        if self.shard != "none":
            axes = self.axes(num_processes)
            num_sharing = axes["shard"] * axes["context"]
            # One shard group that holds all copies: FSDP sums their gradients itself, in backward, exactly.
            breaks = {GRADIENT_SUMS} if axes["replicate"] == 1 and num_sharing > 1 else set()
            breaks |= {WHOLE_MODEL, WHOLE_MATRICES} if num_sharing > 1 else set()
            found.append(feature("shard", self.shard, breaks=breaks))
        return found

    def _usable(self, num_processes: int) -> int:
        """The number of processes nearest to the given one that the axes can make."""
        others = self.pipeline * self.context * self.tensor
        return others * (self.data or max(1, round(num_processes / others)))
