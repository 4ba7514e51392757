"""The techniques that can be advised: when each is worth switching on or off, with which option, and which claims of
the ledger say what it gained. `SWITCHES` is the only list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.data.rows.cache.row_cache import RowCacheConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.estimate.cost import size
from modelwright.train.config import TrainConfig
from modelwright_plan.advice.needs import StepNeeds, StepTimes

SHARED = "training."
"""The section whose settings a stage may have of its own."""
MATTERS = 0.1
"""A resource that takes less than this share is not worth a technique."""
FASTER = 1.05
"""A format must be so much faster to be worth a change: less is within the noise of the measured rates."""
Action = Literal["switch on", "switch off", "keep", "impossible here", "not now"]
Refusal = Callable[[Sequence[str]], str]
"""Why a run with these settings, as `pretrain.precision.policy=bf16_mixed`, is refused; "" if it is not."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What advice is decided by."""

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
    """Memory that the processes of this training may take together."""
    on_cpu: bool

    @property
    def lacks_memory(self) -> bool:
        return self.needs.peak_bytes > self.available_bytes

    @property
    def memory_reason(self) -> str:
        return (
            f"{size(self.needs.peak_bytes)} are planned and {size(self.available_bytes)} available"
            if self.lacks_memory
            else ""
        )

    @property
    def communication_reason(self) -> str:
        share = self.times.share("communication")
        return f"communication takes {share:.0%}, through {self.times.transport}" if share >= MATTERS else ""


@dataclass(frozen=True, kw_only=True)
class TechniqueSwitch:
    """One technique. `reason` says why the situation asks for it, "" if it does not."""

    name: str
    on: Sequence[str]
    """The settings that switch it on, as `training.precision.policy=bf16_mixed`."""
    off: Sequence[str]
    is_on: Callable[[Situation], bool]
    reason: Callable[[Situation], str]
    claims: Sequence[str]
    """Claims of the ledger that say what the technique gained or cost."""
    only_if_needed: bool = True
    """Whether it costs something, so that it is switched off where nothing asks for it."""
    remedy_for: str = ""
    """What it and others are alternatives for: one of them at a time."""


@dataclass(frozen=True, kw_only=True)
class TechniqueAdvice:
    """What to do about a technique here, and why."""

    switch: TechniqueSwitch
    action: Action
    reason: str
    option: str = ""
    """The exact options of the command line, "" where there is nothing to change."""


def advise(
    situation: Situation, switches: Sequence[TechniqueSwitch], refusal: Refusal, *, stage: str
) -> list[TechniqueAdvice]:
    """What to do about each technique. stage: whose own settings are named, as they go before the shared ones."""
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


def _rows_reason(situation: Situation) -> str:
    if situation.rows_at:
        return f"rows are read from {situation.rows_at}"
    times, needs = situation.times, situation.needs
    share = times.row_s / sum(times.seconds.values())
    return f"reading {needs.row_reads:.0f} shuffled rows takes {share:.0%}" if share >= MATTERS else ""


def _several(situation: Situation, reason: str) -> str:
    return reason if situation.needs.num_processes > 1 else ""


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
        reason=lambda now: _several(now, now.memory_reason),
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
