"""Claim: knowing the network's topology makes small messages between uneven hosts four times as fast."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from modelwright_claims.claim import Claim, Conditions, Figure, Measurement, Samples, Setting, Verdict, untestable
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.netns import missing
from modelwright_claims.statistics import ratios
from modelwright_claims.topology_probe import Effort, measure_degraded, measure_racks

TARGET = 4.0
METHOD = "placed, chosen, 4 KiB"
UNINFORMED = ("arrival, flat, 4 KiB", "arrival, doubling, 4 KiB")
"""What takes no notice of the topology: the backend's own algorithm and recursive doubling, in the order of arrival."""
SETTINGS: dict[str, Callable[[Effort], dict[str, Any]]] = {
    "racks": lambda effort: measure_racks(effort, delay_ms=0.5),
    "shaped": lambda effort: measure_racks(effort, delay_ms=0.0),
    "degraded": measure_degraded,
}


def measure(setting: Setting) -> Measurement:
    """Hosts in network namespaces; quick: the racks without delay alone."""
    if reason := missing():
        return untestable(reason)
    effort = Effort(repeats=1, calls=2) if setting.quick else Effort()
    result = {}
    for name in ["shaped"] if setting.quick else SETTINGS:
        setting.progress.note(f"topology: {name}")
        result[name] = SETTINGS[name](effort)
    return measurement(result)


def measurement(found: Mapping[str, Mapping[str, Any]]) -> Measurement:
    """Return the milliseconds of every arm by repeat. found: what each of `SETTINGS` has measured."""
    conditions: dict[str, str | int | float | bool] = {"threads of each host": 1}
    for name, measured in found.items():
        links = {f"{link['mbit']:g} Mbit/s" + f", {link['delay_ms']:g} ms" * bool(link["delay_ms"]) for link in
                 measured["network"]}  # fmt: skip
        conditions[f"links, {name}"] = "; ".join(sorted(links))
        if "plans" in measured:
            conditions[f"algorithms, {name}"] = ", ".join(f"{size}: {plan}" for size, plan in measured["plans"].items())
        if "calls_to_notice" in measured:
            conditions["all-reduces until a slow link was noticed"] = measured["calls_to_notice"]
            conditions["its recovery was noticed"] = measured["recovery_noticed"]
    return Measurement(
        samples={f"ms, {name}: {arm}": times for name, one in found.items() for arm, times in one["ms"].items()},
        conditions=conditions,
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when the smallest message between delayed racks is `TARGET` times as fast, placed and by a chosen algorithm,
    as by the faster of the algorithms that know no topology. Without the delayed racks, those without delay decide."""
    judgment = Judgment()
    deciding = "racks" if names_between(samples, "ms, racks: ") else "shaped"
    method = samples[f"ms, {deciding}: {METHOD}"]
    uninformed = {name: samples[f"ms, {deciding}: {name}"] for name in UNINFORMED}
    for name in names_between(samples, "ms, "):
        judgment.figures[name] = Figure(value=statistics.median(samples[f"ms, {name}"]), unit="ms")
    fastest = min(uninformed, key=lambda name: statistics.fmean(uninformed[name]))
    shorter = {name: ratios(times, method) for name, times in uninformed.items()}
    judgment.figures = {
        f"4 KiB shorter than by {name}": ratio.figure("x") for name, ratio in shorter.items()
    } | judgment.figures
    judgment.said.append(
        f"a 4 KiB all-reduce over eight hosts in two racks takes {statistics.fmean(method):.3g} ms, placed and by a "
        "chosen algorithm, instead of "
        + " and ".join(f"{statistics.fmean(times):.3g} ms ({name})" for name, times in uninformed.items())
    )
    judgment.at_least(f"shorter than by {fastest}", shorter[fastest], TARGET, "x")
    return judgment.verdict()


CLAIM = Claim(
    name="topology",
    statement="Placing ranks and choosing routes by the measured topology cuts communication latency to a quarter.",
    source="published guides to DeepSeek-style training; algorithms: Thakur, Rabenseifner and Gropp 2005, Optimization "
    "of Collective Communication Operations in MPICH",
    published="latency 3.2 ms -> 0.8 ms, network and message not told",
    compared="all-reduces over eight hosts in two racks, by the backend and by recursive doubling in the order in "
    "which ranks arrived, neither of which knows a topology, against placed ranks, algorithms chosen by message size "
    "and small messages joined; and a link that degrades during a run",
    target=f"a 4 KiB all-reduce at least {TARGET:g} times shorter than the faster of the backend's own and recursive "
    "doubling in the order of arrival",
    measure=measure,
    judge=judge,
)
