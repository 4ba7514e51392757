"""The advice as text and as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from modelwright.pipeline.estimate.cost import size
from modelwright_plan.advice.ledger import LedgerRow
from modelwright_plan.advice.needs import StepNeeds
from modelwright_plan.advice.techniques import TechniqueAdvice
from modelwright_plan.advice.times import RESOURCES, StepTimes


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


def technique_lines(advice: Sequence[TechniqueAdvice], ledger: Sequence[LedgerRow], *, here: str) -> list[str]:
    """What to switch on, off or keep, each with its rows of the ledger; then what nothing asks for.

    here: the kind of this machine
    """
    lines, idle = [], [one.switch.name for one in advice if one.action == "not now"]
    advised = [one for one in advice if one.action == "switch on"]
    for one in advice:
        if one.action == "not now":
            continue
        rivals = [other.switch.name for other in advised if _are_alternatives(one, other)]
        alternative = f"  (instead of: {', '.join(rivals)})" if one in advised and rivals else ""
        gain, rows = expected_gain(one, ledger, here=here)
        action = "try" if one in advised and gain != "likely" else one.action
        option = f"  {one.option}" if one.option else ""
        lines.append(f"{action}: {one.switch.name}{option}{alternative}")
        lines.append(f"  why: {one.reason}")
        lines.append(f"  expected gain: {gain}; {rows}")
    if idle:
        lines.append(f"nothing measured here asks for: {', '.join(idle)}")
    return lines


def expected_gain(advice: TechniqueAdvice, ledger: Sequence[LedgerRow], *, here: str) -> tuple[str, str]:
    """Whether stored results promise a gain on this machine, and the results that say so: those of this kind of
    processor, or where there are none those of others. The gain is DOUBTFUL if one of them missed its target.
    """
    rows = [row for row in ledger if row.claim in advice.switch.claims]
    rows = [row for row in rows if row.machine == here] or rows
    if not rows:
        return "unknown", "the ledger has no row for it (--results DIR)"
    where = "this kind of processor" if rows[0].machine == here else "ANOTHER KIND OF PROCESSOR"
    named = ", ".join(f"{row.claim} {row.verdict} ({row.date}, {row.file})" for row in rows)
    return "likely" if all(row.verdict == "met" for row in rows) else "DOUBTFUL", f"on {where}: {named}"


def _are_alternatives(one: TechniqueAdvice, other: TechniqueAdvice) -> bool:
    return one is not other and bool(one.switch.remedy_for) and one.switch.remedy_for == other.switch.remedy_for


def advice_data(
    needs: StepNeeds, times: StepTimes, advice: Sequence[TechniqueAdvice], ledger: Sequence[LedgerRow], *, here: str
) -> dict[str, Any]:
    """Everything that `limit_lines` and `technique_lines` show, as JSON holds it."""
    techniques = []
    for one in advice:
        gain, rows = expected_gain(one, ledger, here=here)
        facts = {"name": one.switch.name, "action": one.action, "option": one.option, "reason": one.reason}
        techniques.append({**facts, "expected_gain": gain, "ledger": rows})
    return {
        "needs": asdict(needs),
        "times": {**asdict(times), "ratio": times.ratio, "bottleneck": times.bottleneck},
        "techniques": techniques,
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
