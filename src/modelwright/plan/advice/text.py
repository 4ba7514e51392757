"""The advice as text and as plain data."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from modelwright.plan.advice.ledger import LedgerRow, MachineKind, evidence
from modelwright.plan.advice.needs import StepNeeds
from modelwright.plan.advice.techniques import TechniqueAdvice
from modelwright.plan.advice.times import RESOURCES, StepTimes
from modelwright.plan.estimate import size


def limit_lines(needs: StepNeeds, times: StepTimes) -> list[str]:
    """What a step needs, how long each resource takes for it here, and which one limits it."""
    processes = "1 process" if needs.num_processes == 1 else f"{needs.num_processes} processes"
    amounts = {
        "compute": f"{needs.flops:.3g} FLOPs",
        "communication": f"{size(needs.link_bytes)} in {needs.link_messages:.0f} messages from each process",
        "memory": (
            f"{size(needs.memory_bytes)}: weights and gradients {size(needs.weight_bytes)}, activations "
            f"{size(needs.activation_bytes)}, optimizer {size(needs.optimizer_bytes)}"
        ),
        "disk": (
            f"{size(needs.row_bytes)} of rows in {needs.row_reads:.0f} reads, checkpoints of "
            f"{size(needs.checkpoint_bytes)} {_cadence(needs)}"
        ),
    }
    lines = [f"a step with {processes} here ({_layout(needs)}):"]
    for one in RESOURCES:
        seconds = f"{times.seconds[one]:>10.4f} s" if one in times.seconds else f"{'not measured':>12}"
        via = _via(times) if one == "communication" else ""
        lines.append(f"  {one:<15}{seconds}  {amounts[one]}{via}")
    return [
        *lines,
        f"  {times.ratio}",
        f"bottleneck: {times.bottleneck}, {times.share(times.bottleneck):.0%} of what all of them would take one after "
        "the other",
    ]


def technique_lines(
    advice: Sequence[TechniqueAdvice], ledger: Sequence[LedgerRow], *, here: MachineKind, today: datetime.date
) -> list[str]:
    """What to switch on, off or keep, each with its rows of the ledger; then what nothing asks for."""
    lines, idle = [], [one.switch.name for one in advice if one.action == "not now"]
    advised = [one for one in advice if one.action == "switch on"]
    for one in advice:
        if one.action == "not now":
            continue
        rivals = [other.switch.name for other in advised if _are_alternatives(one, other)]
        alternative = f"  (instead of: {', '.join(rivals)})" if one in advised and rivals else ""
        is_doubtful = one.action == "switch on" and not _is_supported(one, ledger, here)
        action, option = "try" if is_doubtful else one.action, f"  {one.option}" if one.option else ""
        lines.append(f"{action}: {one.switch.name}{option}{alternative}")
        lines.append(f"  why: {one.reason}")
        lines.append(f"  {support_of(one, ledger, here=here)}")
        lines += [f"  ledger: {row}" for row in evidence_of(one, ledger, here=here, today=today)]
    if idle:
        lines.append(f"nothing measured here asks for: {', '.join(idle)}")
    return lines


def support_of(advice: TechniqueAdvice, ledger: Sequence[LedgerRow], *, here: MachineKind) -> str:
    """Whether what was measured of a technique promises a gain on this machine."""
    rows, are_alike = _rows_about(advice, ledger, here)
    if not rows:
        return "expected gain: unknown; the ledger has no row for it (--results DIR)"
    where = "this kind of processor" if are_alike else "another kind of processor, and never on this one"
    if _is_supported(advice, ledger, here):
        return f"expected gain: as in the ledger; its target was met on {where}"
    named = " and ".join(sorted({row.verdict for row in rows}))
    return f"expected gain: DOUBTFUL; the verdict is {named} on {where}; measure before relying on it"


def _rows_about(
    advice: TechniqueAdvice, ledger: Sequence[LedgerRow], here: MachineKind
) -> tuple[list[LedgerRow], bool]:
    """The rows of this kind of processor and True; if there are none, those of others and False."""
    rows = [row for row in ledger if row.claim in dict(advice.switch.evidence)]
    alike = [row for row in rows if row.machine.is_like(here)]
    return alike or rows, bool(alike)


def _is_supported(advice: TechniqueAdvice, ledger: Sequence[LedgerRow], here: MachineKind) -> bool:
    """Whether every row that counts met its target."""
    rows, _ = _rows_about(advice, ledger, here)
    return bool(rows) and all(row.verdict == "met" for row in rows)


def _are_alternatives(one: TechniqueAdvice, other: TechniqueAdvice) -> bool:
    return one is not other and bool(one.switch.remedy_for) and one.switch.remedy_for == other.switch.remedy_for


def evidence_of(
    advice: TechniqueAdvice, ledger: Sequence[LedgerRow], *, here: MachineKind, today: datetime.date
) -> list[str]:
    """The rows of the ledger about a technique, those of this kind of processor first."""
    quoted = [
        (not row.machine.is_like(here), f"{claim}: {text}")
        for claim, names in advice.switch.evidence
        for row in ledger
        if row.claim == claim and (text := evidence(row, names, here=here, today=today))
    ]
    return [text for _, text in sorted(quoted, key=lambda one: one[0])]


def advice_data(
    needs: StepNeeds,
    times: StepTimes,
    advice: Sequence[TechniqueAdvice],
    ledger: Sequence[LedgerRow],
    *,
    here: MachineKind,
    today: datetime.date,
) -> dict[str, Any]:
    """Everything that `limit_lines` and `technique_lines` show, as JSON holds it."""
    return {
        "needs": asdict(needs),
        "times": {
            "seconds": dict(times.seconds),
            "checkpoint_s": times.checkpoint_s,
            "row_s": times.row_s,
            "tcp_s": times.tcp_s,
            "transport": times.transport,
            "ratio": times.ratio,
            "bottleneck": times.bottleneck,
        },
        "techniques": [
            {
                "name": one.switch.name,
                "action": one.action,
                "option": one.option,
                "reason": one.reason,
                "support": support_of(one, ledger, here=here),
                "ledger": evidence_of(one, ledger, here=here, today=today),
            }
            for one in advice
        ],
    }


def _via(times: StepTimes) -> str:
    """What messages go through, and how long bare TCP would take for them."""
    if times.transport == "none":
        return ""
    bare = f"; bare TCP over loopback would take {times.tcp_s:.4f} s" if times.tcp_s else ""
    return f", through {times.transport}{bare}"


def _layout(needs: StepNeeds) -> str:
    axes: Mapping[str, int] = {axis: number for axis, number in needs.axes.items() if number > 1}
    return ", ".join(f"{axis} {number}" for axis, number in axes.items()) or "no axis of more than one process"


def _cadence(needs: StepNeeds) -> str:
    words = []
    if needs.checkpoint_every_steps:
        words.append(f"every {needs.checkpoint_every_steps} steps")
    if needs.checkpoint_every_s:
        words.append(f"every {needs.checkpoint_every_s / 60:g} min")
    return " and ".join(words) or "at the end"
