"""Which transport a run uses: one config, one function."""

from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.parallel.topology.collectives import CollectivesConfig
from modelwright.parallel.mesh import World, world_apart
from modelwright.parallel.gradient_sync import MANY_BUCKETS, ExactTransport, GradientTransport
from modelwright.parallel.codecs.bucketed import BucketedTransport
from modelwright.parallel.strategies.local_sgd import LocalSteps, LocalStepsConfig
from modelwright.parallel.topology.gradient_sync import PlannedTransport
from modelwright.parallel.codecs.powersgd import PowerSgdTransport
from modelwright.parallel.codecs.quantized import Bf16, Int8, RoundedTransport
from modelwright.parallel.codecs.topk_quantized import ThreeLevelConfig, ThreeLevelTransport


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """How gradients, or with local steps the pseudo-gradients, cross between copies of the model.

    Copies are the replicate axis of the layout, joined with `parallel.context` where nothing is sharded: all data
    parallel ranks without `parallel.shard`; under hybrid sharding (`parallel.shard_group`) the groups, each rank with
    those that hold the same shard in other groups. Only these bytes are compressed, or sent less often. What FSDP
    gathers and scatters within a shard group, and what tensor, context and pipeline parallelism send, is not; where one
    shard group holds all copies a transport other than `exact` is refused.

    kind: `exact`, by the backend; `planned`, exact by the algorithms of `collectives` for the measured links; `bf16`;
    `int8`; `powersgd` of rank `powersgd_rank`; `three_level`.
    overlap: sums of whole gradients begin while backward still runs, in buckets of 25 MB at most (not those by plans).
    """

    kind: Literal["exact", "planned", "bf16", "int8", "powersgd", "three_level"] = "exact"
    overlap: bool = True
    powersgd_rank: int = 8
    three_level: ThreeLevelConfig = field(default_factory=ThreeLevelConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    local_steps: LocalStepsConfig = field(default_factory=LocalStepsConfig)

    def __post_init__(self) -> None:
        if self.powersgd_rank < 1:
            raise ConfigError(f"powersgd_rank: must be at least 1, got {self.powersgd_rank}; 8 is usual")


def build_transport(config: TransportConfig, world: World) -> GradientTransport:
    """The transport for the ranks of `world`; a `LocalSteps` if these take local steps. Called on all of them."""
    if config.local_steps.every:
        return LocalSteps(world, _codec(config, world), config.local_steps)
    if config.kind in ("exact", "planned"):
        return _codec(config, world)
    many = MANY_BUCKETS if config.kind in ("bf16", "int8") else 1  # for the others messages are short, and cost calls
    return BucketedTransport(world_apart(world), lambda apart: _codec(config, apart), many=many)


def _codec(config: TransportConfig, world: World) -> GradientTransport:
    match config.kind:
        case "exact":
            return ExactTransport(world)
        case "planned":
            return PlannedTransport(world, config.collectives)
        case "bf16":
            return RoundedTransport(world, Bf16())
        case "int8":
            return RoundedTransport(world, Int8())
        case "powersgd":
            return PowerSgdTransport(world, rank=config.powersgd_rank)
        case "three_level":
            return ThreeLevelTransport(world, config.three_level)
