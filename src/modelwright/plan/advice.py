"""What limits a training of a model on this machine, and which techniques help, with what they gained in the ledger.

Estimates of one step: products at their measured rate, gradients at gloo's, the optimizer's states at the memory's, a
checkpoint at the disk's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.memory.activations import FP32_BYTES
from modelwright.model.config import ModelConfig
from modelwright.plan.estimate import ASSUMED_TRAIN_MFU
from modelwright.plan.probes import Probes

STATES = 2
"""Optimizer states of AdamW per weight."""
OPTIMIZER_PASSES = 7
"""FP32 values that an AdamW step moves per weight: it reads and writes the weight and both moments, and reads the
gradient."""
MATTERS = 0.1
"""A part of a step below this share is not worth a technique."""


@dataclass(frozen=True, kw_only=True)
class StepNeeds:
    """A step of data-parallel training on this host, in seconds by part, and what it needs of memory."""

    compute_s: float
    communication_s: float
    optimizer_s: float
    checkpoint_s: float
    """A checkpoint's share of a step."""
    memory_bytes: float
    num_processes: int

    @property
    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "optimizer (memory)": self.optimizer_s,
            "checkpoints (disk)": self.checkpoint_s,
        }

    def share(self, part: str) -> float:
        return self.parts[part] / sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A setting to switch on, why, and what it gained where it was measured."""

    setting: str
    reason: str
    gain: str


def step_needs(
    model: ModelConfig,
    probes: Probes,
    *,
    batch_tokens: int,
    mean_context: float,
    flops_per_s: float,
    num_processes: int,
    checkpoint_every_s: float,
    memory_bytes: float,
) -> StepNeeds:
    """Estimate one step.

    flops_per_s: measured rate of the model's products with all threads of the host, which the processes share
    checkpoint_every_s: seconds between checkpoints, 0 for none
    memory_bytes: peak of one process, as planned
    """
    weight_bytes = FP32_BYTES * model.num_parameters
    compute_s = 3 * batch_tokens * model.flops_per_token(mean_context) / (flops_per_s * ASSUMED_TRAIN_MFU)
    # Measured between two ranks, each of which sends the tensor once; n ranks send 2 (n - 1) / n of it.
    sent = 2 * (num_processes - 1) / num_processes
    communication_s = sent * weight_bytes / probes.gloo_bytes_per_s + probes.gloo_s if num_processes > 1 else 0.0
    optimizer_s = OPTIMIZER_PASSES * weight_bytes / probes.memory_bytes_per_s
    step_s = compute_s + communication_s + optimizer_s
    saving_s = (1 + STATES) * weight_bytes / probes.disk_write_bytes_per_s + probes.fsync_s
    return StepNeeds(
        compute_s=compute_s,
        communication_s=communication_s,
        optimizer_s=optimizer_s,
        checkpoint_s=saving_s * step_s / checkpoint_every_s if checkpoint_every_s else 0.0,
        memory_bytes=memory_bytes * num_processes,
        num_processes=num_processes,
    )


def recommend_techniques(
    needs: StepNeeds, rates: Mapping[str, float], *, memory_bytes: float, ledger: Sequence[Mapping[str, Any]]
) -> list[Recommendation]:
    """The techniques that act on what limits the training; rates: FLOP/s by format; memory_bytes: available."""
    result = []
    fastest = max(rates, key=rates.__getitem__)
    if fastest != "fp32" and needs.share("compute") >= MATTERS:
        reason = f"{fastest} products run at {rates[fastest] / rates['fp32']:.1f} times the rate of fp32 here"
        result.append(_recommend("training.precision.policy: bf16_mixed", reason, "bf16_mixed", ledger))
    if needs.share("communication") >= MATTERS:
        reason = f"communication takes {needs.share('communication'):.0%} of a step"
        result += [
            _recommend("training.gradient_sync.kind: int8 or powersgd", reason, "gradient_compression", ledger),
            _recommend("training.gradient_sync.local_sgd.sync_every_steps", reason, "compressed_links", ledger),
        ]
    if needs.share("optimizer (memory)") >= MATTERS:
        reason = f"the optimizer takes {needs.share('optimizer (memory)'):.0%} of a step, limited by memory"
        result.append(_recommend("training.sparse_updates.kind", reason, "sparse_updates", ledger))
    if needs.memory_bytes > memory_bytes:
        reason = f"training needs {needs.memory_bytes / 1e9:.1f} GB, {memory_bytes / 1e9:.1f} GB are available"
        result.append(
            _recommend("training.activation_checkpointing.mode: full", reason, "activation_checkpointing", ledger)
        )
        if needs.num_processes > 1:
            result.append(_recommend("parallel.zero_stage: 3", reason, "zero_memory", ledger))
    return result


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """The records of measured claims in a folder; none if there is no such folder. Damaged files are passed over."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if (
            isinstance(record, dict)
            and {"name", "kind", "figures", "machine"} <= record.keys()
            and not record.get("quick")
        ):
            records.append(record)
    return records


def ledger_gain(ledger: Sequence[Mapping[str, Any]], claim: str) -> str:
    """What a claim's measurements found, machine by machine: the verdict and its first figures."""
    lines = []
    for record in ledger:
        if record["name"] == claim:
            names = list(record.get("headline") or record["figures"])[:2]
            figures = [f"{name} {_figure(record['figures'][name])}" for name in names if name in record["figures"]]
            machine = record["machine"]
            where = f"{machine.get('processor', '?')}, {machine.get('instruction_set', '?')}"
            lines.append(f"{', '.join(figures)} ({record['kind']}; {where}, {record.get('date', '?')})")
    return "; ".join(lines)


def advice_lines(needs: StepNeeds, recommendations: Sequence[Recommendation]) -> list[str]:
    """The bottleneck, the shares, and what to do."""
    ratio = f"{needs.compute_s / needs.communication_s:.1f} : 1" if needs.communication_s else "no communication"
    processes = "1 process" if needs.num_processes == 1 else f"{needs.num_processes} processes"
    lines = [
        f"bottleneck with {processes} here: {needs.bottleneck} (compute : communication {ratio})",
        *(f"  {name:<20}{seconds:>10.3f} s a step {needs.share(name):>6.0%}" for name, seconds in needs.parts.items()),
    ]
    for one in recommendations:
        lines.append(f"consider {one.setting}: {one.reason}")
        lines.append(f"  measured: {one.gain or 'no result of this technique here (--results DIR)'}")
    return lines if recommendations else [*lines, "no technique stands out: nothing but compute limits this training"]


def _recommend(setting: str, reason: str, claim: str, ledger: Sequence[Mapping[str, Any]]) -> Recommendation:
    return Recommendation(setting=setting, reason=reason, gain=ledger_gain(ledger, claim))


def _figure(figure: Mapping[str, Any]) -> str:
    unit = figure.get("unit", "")
    return f"{figure['value']:.3g}{unit}" if unit in ("x", "%") else f"{figure['value']:.3g} {unit}".rstrip()
