"""The techniques that advice covers: the conditions under which to switch each on or off, its options, and the claims
of the ledger that measured its gain. `SWITCHES` is the only list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.data.rows.cache.row_cache import RowCacheConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.estimate.cost import size
from modelwright.train.config import TrainConfig
from modelwright_plan.advice.needs import StepNeeds, StepTimes

SHARED = "training."
"""Section whose settings a stage may override."""
MATTERS = 0.1
"""Least share of a step's time at which a resource is worth a technique."""
FASTER = 1.05
"""Least speedup at which another format is advised; less is within the noise of the measured rates."""
Action = Literal["switch on", "switch off", "keep", "impossible here", "not now"]
Refusal = Callable[[Sequence[str]], str]
"""Returns why a run with settings such as `pretrain.precision.policy=bf16_mixed` is refused; "" if it is not."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Facts that decide the advice."""

    training: TrainConfig
    parallel: ParallelConfig
    cache: RowCacheConfig
    rows_at: str
    """Address of the store that rows are read from, "" for this machine's disk."""
    needs: StepNeeds
    times: StepTimes
    rates: Mapping[str, float]
    """FLOP/s of the model's products by format."""
    available_bytes: float
    """Memory available to all processes of this training together."""
    on_cpu: bool

    @property
    def communication_reason(self) -> str:
        share = self.times.share("communication")
        return f"communication takes {share:.0%}, through {self.times.transport}" if share >= MATTERS else ""


@dataclass(frozen=True, kw_only=True)
class TechniqueSwitch:
    """A technique with its settings."""

    name: str
    on: Sequence[str]
    """The settings that switch it on, as `training.precision.policy=bf16_mixed`."""
    off: Sequence[str]
    is_on: Callable[[Situation], bool]
    reason: Callable[[Situation], str]
    """Returns why the situation calls for the technique; "" if it does not."""
    claims: Sequence[str]
    """Claims of the ledger that measured the gain or cost of the technique."""
    only_if_needed: bool = True
    """True for a technique with a cost, which is switched off if nothing calls for it."""
    remedy_for: str = ""
    """Problem for which the technique is one of several alternatives; use one of them at a time."""


@dataclass(frozen=True, kw_only=True)
class TechniqueAdvice:
    """Recommended action on a technique, and the reason."""

    switch: TechniqueSwitch
    action: Action
    reason: str
    option: str = ""
    """Exact command-line options; "" if nothing changes."""


def advise(
    situation: Situation, switches: Sequence[TechniqueSwitch], refusal: Refusal, *, stage: str
) -> list[TechniqueAdvice]:
    """Decides on an action for each technique. stage: stage under which settings are named, because a stage's settings
    override the shared ones.
    """
    result = []
    for switch in switches:
        reason, is_on = switch.reason(situation), switch.is_on(situation)
        action: Action = "not now"
        if reason:
            action = "keep" if is_on else "switch on"
        elif is_on:
            action = "switch off" if switch.only_if_needed else "keep"
        changes = {"switch on": switch.on, "switch off": switch.off}.get(action, ())
        settings = [f"{stage}.{one.removeprefix(SHARED)}" if one.startswith(SHARED) else one for one in changes]
        if settings and (why := refusal(settings)):
            action, reason = "impossible here", f"{reason}; but {why}"
        option = " ".join(f"--{one.replace('=', ' ')}" for one in settings)
        reason = reason or "nothing measured here asks for it"
        result.append(TechniqueAdvice(switch=switch, action=action, reason=reason, option=option))
    return result


def _narrow_reason(situation: Situation) -> str:
    rates = situation.rates
    if "bf16" not in rates or rates["bf16"] < FASTER * rates["fp32"] or situation.times.share("compute") < MATTERS:
        return ""
    return f"bf16 products run at {rates['bf16'] / rates['fp32']:.1f} times the rate of fp32 here"


def _latency_reason(situation: Situation) -> str:
    times = situation.times
    waits = times.latency_s / times.seconds["communication"] if times.latency_s else 0.0
    if situation.needs.num_processes < 3 or waits < 0.5 or not situation.communication_reason:
        return ""
    return f"{situation.communication_reason}, {waits:.0%} of it latency of messages"


def _sparse_reason(situation: Situation) -> str:
    optimizer = situation.needs.optimizer_bytes / situation.needs.memory_bytes * situation.times.share("memory")
    return f"the optimizer's passes take {optimizer:.0%}" if optimizer >= MATTERS else ""


def _checkpointing_reason(situation: Situation) -> str:
    without = situation.needs.peak_without_checkpointing_bytes
    if without <= situation.available_bytes:
        return ""
    return f"saving all activations needs {size(without)}, {size(situation.available_bytes)} are available"


def _sharding_reason(situation: Situation) -> str:
    planned, available = situation.needs.peak_bytes, situation.available_bytes
    if situation.needs.num_processes == 1 or planned <= available:
        return ""
    return f"{size(planned)} are planned and {size(available)} available"


def _rows_reason(situation: Situation) -> str:
    if situation.rows_at:
        return f"rows are read from {situation.rows_at}"
    times, needs = situation.times, situation.needs
    share = times.row_s / sum(times.seconds.values())
    return f"reading {needs.row_reads:.0f} shuffled rows takes {share:.0%}" if share >= MATTERS else ""


def _sends_rarely(situation: Situation) -> bool:
    return situation.training.gradient_sync.local_sgd.sync_every_steps > 0


_CODECS = ("bf16", "int8", "powersgd", "topk_quantized")

SWITCHES: tuple[TechniqueSwitch, ...] = (
    TechniqueSwitch(
        name="BF16 products",
        on=["training.precision.policy=bf16_mixed"],
        off=["training.precision.policy=fp32"],
        is_on=lambda now: now.training.precision.policy == "bf16_mixed",
        reason=_narrow_reason,
        claims=["bf16_mixed"],
    ),
    TechniqueSwitch(
        name="activation checkpointing",
        on=["training.activation_checkpointing.mode=full"],
        off=["training.activation_checkpointing.mode=none"],
        is_on=lambda now: now.training.activation_checkpointing.mode != "none",
        reason=_checkpointing_reason,
        claims=["activation_checkpointing"],
    ),
    TechniqueSwitch(
        name="ZeRO",
        on=["parallel.zero_stage=3"],
        off=["parallel.zero_stage=0"],
        is_on=lambda now: now.parallel.zero_stage > 0,
        reason=_sharding_reason,
        claims=["zero_memory"],
        only_if_needed=False,
    ),
    TechniqueSwitch(
        name="compressed gradients",
        remedy_for="communication",
        on=["training.gradient_sync.kind=powersgd"],
        off=["training.gradient_sync.kind=allreduce"],
        is_on=lambda now: now.training.gradient_sync.kind in _CODECS and not _sends_rarely(now),
        reason=lambda now: now.communication_reason if now.times.transport != "shared memory" else "",
        claims=["compressed_links", "gradient_compression"],
    ),
    TechniqueSwitch(
        name="local SGD with INT8",
        remedy_for="communication",
        on=["training.gradient_sync.kind=int8", "training.gradient_sync.local_sgd.sync_every_steps=20"],
        off=["training.gradient_sync.kind=allreduce", "training.gradient_sync.local_sgd.sync_every_steps=0"],
        is_on=_sends_rarely,
        reason=lambda now: now.communication_reason if now.times.transport != "shared memory" else "",
        claims=["compressed_links", "gradient_compression"],
    ),
    TechniqueSwitch(
        name="all-reduces chosen by the topology",
        on=["training.gradient_sync.kind=topology_aware"],
        off=["training.gradient_sync.kind=allreduce"],
        is_on=lambda now: now.training.gradient_sync.kind == "topology_aware",
        reason=_latency_reason,
        claims=["topology"],
        only_if_needed=False,
    ),
    TechniqueSwitch(
        name="Hogwild",
        remedy_for="communication",
        on=["training.async_updates.mode=hogwild"],
        off=["training.async_updates.mode=none"],
        is_on=lambda now: now.training.async_updates.mode == "hogwild",
        reason=lambda now: now.communication_reason if now.on_cpu else "",
        claims=["hogwild"],
    ),
    TechniqueSwitch(
        name="sparse updates",
        on=["training.sparse_updates.kind=rows"],
        off=["training.sparse_updates.kind=none"],
        is_on=lambda now: now.training.sparse_updates.kind != "none",
        reason=_sparse_reason,
        claims=["sparse_updates"],
    ),
    TechniqueSwitch(
        name="row cache",
        on=["cache.enabled=true"],
        off=["cache.enabled=false"],
        is_on=lambda now: now.cache.enabled,
        reason=_rows_reason,
        claims=["loading_latency"],
        only_if_needed=False,
    ),
)  # fmt: skip
