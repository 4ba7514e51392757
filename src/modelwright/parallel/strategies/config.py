"""The configuration of strategies, and `build_strategy`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from modelwright.core import compatibility as traits
from modelwright.core.compatibility import Feature, feature
from modelwright.core.config import ConfigError, constant, dump, only_for
from modelwright.core.extensions import configured
from modelwright.ops.dtensor import local
from modelwright.parallel.codecs.bucketed import BucketedSync
from modelwright.parallel.codecs.powersgd import PowerSgdSync
from modelwright.parallel.codecs.quantized import Bf16Codec, Int8Codec, QuantizedSync
from modelwright.parallel.codecs.topk_quantized import TopKQuantizedConfig, TopKQuantizedSync
from modelwright.parallel.gradient_sync import MANY_BUCKETS, AllReduceSync, GradientSync
from modelwright.parallel.mesh import World, duplicate_group
from modelwright.parallel.strategies import optimizer_in_backward as in_backward
from modelwright.parallel.strategies.delayed import DelayedSync
from modelwright.parallel.strategies.hogwild import Hogwild
from modelwright.parallel.strategies.local_sgd import LocalSgd, LocalSgdConfig, OuterStep
from modelwright.parallel.strategies.shared_memory import SharedMemory, fits
from modelwright.parallel.strategy import STRATEGIES_GROUP, AllReduce, Compensate, Replica, Strategy, StrategySpec
from modelwright.parallel.topology.collectives import TopologyAwareSync, TopologyConfig


@dataclass(frozen=True, kw_only=True)
class GradientSyncConfig:
    """Settings of the sums of gradients, or of local SGD's pseudo-gradients, over replicas of the model.

    Replicas are the data-parallel ranks; under hybrid sharding, the groups. Only this traffic is compressed or sent
    less often, not that of FSDP, tensor, context and pipeline parallelism. Where one shard group holds all replicas,
    only `allreduce` is possible.
    """

    kind: Literal["allreduce", "topology_aware", "bf16", "int8", "powersgd", "topk_quantized"] = "allreduce"
    """`allreduce`: exact, by the backend; `topology_aware`: exact, by algorithms chosen for the measured links;
    `bf16`; `int8`; `powersgd` (Vogels et al. 2019); `topk_quantized`."""
    overlap: bool = True
    """Start sums during backward, in buckets of at most 25 MB (not for `topology_aware`)."""
    powersgd_rank: int = constant(8)
    """Rank of PowerSGD's approximation."""
    topk_quantized: TopKQuantizedConfig = field(
        default_factory=TopKQuantizedConfig, metadata=only_for("kind", "topk_quantized")
    )
    topology: TopologyConfig = field(default_factory=TopologyConfig, metadata=only_for("kind", "topology_aware"))
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    strategy: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Strategy of another installed package, by its entry-point name, with its settings, which replaces the other
    settings here (docs/extending.md): `{elastic_averaging: {rate: 0.1}}`."""

    def __post_init__(self) -> None:
        if len(self.strategy) > 1:
            raise ConfigError(f"strategy: names {', '.join(self.strategy)}; a training has one strategy")
        object.__setattr__(self, "strategy", {name: dump(settings) for name, (_, settings) in self.named().items()})
        if self.powersgd_rank < 1:
            raise ConfigError(f"powersgd_rank: must be at least 1, got {self.powersgd_rank}; 8 is usual")

    def named(self) -> dict[str, tuple[StrategySpec, Any]]:
        """The strategy of another package and its settings, by its name; empty if settings name none."""
        return configured(STRATEGIES_GROUP, StrategySpec, self.strategy, "strategy")

    def features(self) -> list[Feature]:
        """Returns the features of gradient synchronization, with the properties of a run that each needs and breaks."""
        result, needs = [], {traits.WHOLE_GRADIENTS, traits.GRADIENT_SUMS}
        for name, (spec, _) in self.named().items():
            # The settings that choose another strategy would have no effect.
            replaced = {traits.WHOLE_GRADIENTS, traits.PROMPT_GRADIENTS, traits.SYNCHRONOUS_UPDATES}
            breaks = spec.strategy.breaks | {traits.GRADIENT_SUMS}
            result.append(feature("strategy", name, needs=spec.strategy.needs | replaced, breaks=breaks))
        if self.kind != "allreduce":
            breaks = [] if self.kind == "topology_aware" else [traits.EXACT_SUMS]
            result.append(feature("kind", self.kind, needs=needs, breaks=breaks, only_with=[traits.SEVERAL_REPLICAS]))
        if self.local_sgd.sync_every_steps:
            needs = needs | {traits.SYNCHRONOUS_UPDATES, traits.PROMPT_GRADIENTS, traits.WHOLE_ROWS}
            result.append(
                feature("local_sgd.sync_every_steps", needs=needs, breaks=[traits.EXACT_SUMS, traits.EQUAL_REPLICAS])
            )
        if self.local_sgd.sync_second_moment_every:
            result.append(feature("local_sgd.sync_second_moment_every", needs=[traits.ADAMW_STATES]))
        return result


@dataclass(frozen=True, kw_only=True)
class AsyncUpdatesConfig:
    """Settings of updates that do not wait for other ranks."""

    mode: Literal["none", "hogwild", "delayed"] = "none"
    """`hogwild`: every process updates weights that all processes of one host share (Recht et al. 2011); `delayed`:
    gradients are summed while the next `delay_steps` steps are computed; `none`."""
    delay_steps: int = constant(1)
    """Steps by which gradients are late, with `delayed`."""
    delay_compensation: float = constant(0.0)
    """Strength of the correction for stale gradients (DC-ASGD, Zheng et al. 2017); 0 for none."""

    def __post_init__(self) -> None:
        if self.delay_steps < 1:
            raise ConfigError(
                f"delay_steps: must be at least 1 step, got {self.delay_steps}; mode none waits for every sum"
            )
        if self.delay_compensation < 0:
            raise ConfigError(f"delay_compensation: must not be negative, got {self.delay_compensation}; 0 disables it")

    def features(self) -> list[Feature]:
        """Returns the feature of asynchronous updates, with the properties of a run that it needs and breaks."""
        if self.mode == "delayed":
            return [feature("mode", self.mode, needs=[traits.WHOLE_GRADIENTS], breaks=[traits.PROMPT_GRADIENTS])]
        if self.mode == "hogwild":
            needs = [traits.WHOLE_GRADIENTS, traits.WHOLE_MODEL, traits.ONE_COPY]
            needs += [traits.ADAMW_STATES, traits.RESIDENT_STATES]
            return [feature("mode", self.mode, needs=needs, breaks=Hogwild.breaks)]
        return []


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Everything that determines the strategy of a run. update_in_backward: parameters are updated during backward,
    clipped by `clip_norm` with the norm of the last step if above 0. shares_memory: processes of one host keep one copy
    of the weights if possible. scales_losses: losses are scaled.
    """

    transport: GradientSyncConfig
    asynchronous: AsyncUpdatesConfig
    update_in_backward: bool = False
    clip_norm: float = 0.0
    shares_memory: bool = False
    scales_losses: bool = False


def build_strategy(
    config: StrategyConfig,
    replica: Replica,
    world: World,
    *,
    compensate: Compensate | None = None,
    encode: Callable[[Any], Any],
    decode: Callable[[Any], Any],
) -> Strategy:
    """Builds the strategy for one rank; called on all ranks of `world` alike. compensate, encode, decode: see
    `Hogwild`. Raises `ConfigError` for `hogwild` on several hosts.
    """
    if named := list(config.transport.named().values()):
        spec, settings = named[0]
        return spec.strategy(settings, replica, world)
    mesh, parameters = replica.mesh, list(replica.names)
    # `fits` is a collective: all ranks ask, before any of them builds its strategy.
    shares_memory = config.shares_memory and fits(
        mesh, parameters, gradient_room=in_backward.room_of_two_buckets(parameters) if config.update_in_backward else 0
    )
    if config.asynchronous.mode == "hogwild":
        return Hogwild(replica, world, compensate=compensate, encode=encode, decode=decode)
    if config.update_in_backward:
        ready: in_backward.GradientReady = in_backward.LocalGradients()
        if shares_memory:
            ready = in_backward.SharedInBackward(mesh.world, parameters)
        elif mesh.reduce.size * mesh.tensor.size > 1:
            ready = in_backward.ReducedInBackward(mesh.reduce)
        return in_backward.OptimizerInBackward(replica, ready, clip_norm=config.clip_norm)
    overlap = config.transport.overlap and mesh.is_only_data_parallel
    if shares_memory:
        return SharedMemory(replica, overlap=overlap)
    if config.transport.local_sgd.sync_every_steps:
        return LocalSgd(replica, build_outer_step(config.transport, mesh.reduce))
    if config.asynchronous.mode == "delayed":
        # The sums run in a thread next to the trainer's collectives, so they need their own group.
        built = build_sync(config.transport, duplicate_group(mesh.reduce))
        weights = [local(parameter.detach()) for parameter in replica.names]
        late = DelayedSync(built.sync, delay=config.asynchronous.delay_steps, weights=weights, compensate=compensate)

        def close() -> None:
            late.close()
            built.close()

        return AllReduce(replica, late, unscale_first=True, close=close)
    built = build_sync(config.transport, mesh.reduce)
    # Under loss scaling a sync that rounds cannot start during backward, where gradients still carry the scale.
    unscale_first = not built.is_exact
    return AllReduce(
        replica,
        built.sync,
        start=built.start if overlap and not (config.scales_losses and unscale_first) else None,
        send_rows=built.send_rows,
        unscale_first=unscale_first,
        close=built.close,
    )


@dataclass(frozen=True, kw_only=True)
class BuiltSync:
    """A gradient sync. is_exact: sums of scaled gradients are scaled sums; start, send_rows, close: see `AllReduce`."""

    sync: GradientSync
    is_exact: bool
    start: Callable[[Sequence[Tensor]], None] | None = None
    send_rows: Callable[[Sequence[Tensor | None]], None] | None = None
    close: Callable[[], None] = lambda: None


def build_outer_step(config: GradientSyncConfig, world: World) -> OuterStep:
    """Builds the synchronization of the weights of ranks that take local steps."""
    return OuterStep(world, _codec(config, world), config.local_sgd)


def build_sync(config: GradientSyncConfig, world: World) -> BuiltSync:
    """Builds the gradient sync over the ranks of `world`. Called on all of them."""
    if config.kind == "allreduce":
        exact = AllReduceSync(world)
        return BuiltSync(sync=exact, is_exact=True, start=exact.arm, send_rows=exact.send_rows, close=exact.close)
    if config.kind == "topology_aware":
        return BuiltSync(sync=_codec(config, world), is_exact=True)
    # The messages of the others are short: more buckets would only cost more calls.
    many = MANY_BUCKETS if config.kind in ("bf16", "int8") else 1
    bucketed = BucketedSync(duplicate_group(world), lambda apart: _codec(config, apart), many=many)
    return BuiltSync(sync=bucketed, is_exact=False, start=bucketed.arm, close=bucketed.close)


def _codec(config: GradientSyncConfig, world: World) -> GradientSync:
    match config.kind:
        case "allreduce":
            return AllReduceSync(world)
        case "topology_aware":
            return TopologyAwareSync(world, config.topology)
        case "bf16":
            return QuantizedSync(world, Bf16Codec())
        case "int8":
            return QuantizedSync(world, Int8Codec())
        case "powersgd":
            return PowerSgdSync(world, rank=config.powersgd_rank)
        case "topk_quantized":
            return TopKQuantizedSync(world, config.topk_quantized)
