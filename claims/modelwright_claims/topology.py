"""Claim: knowing the network's topology makes small messages between uneven hosts four times as fast."""

from collections.abc import Callable, Mapping
from typing import Any

from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.netns import missing
from modelwright_claims.topology_probe import Effort, measure_degraded, measure_racks

TARGET = 4.0
BEFORE, AFTER = "arrival, flat, 4 KiB", "placed, chosen, 4 KiB"
SETTINGS: dict[str, Callable[[Effort], dict[str, Any]]] = {
    "racks": lambda effort: measure_racks(effort, delay_ms=0.5),
    "shaped": lambda effort: measure_racks(effort, delay_ms=0.0),
    "degraded": measure_degraded,
}


def measure(setting: Setting) -> Result:
    """Hosts in network namespaces; quick: the racks without delay alone."""
    if reason := missing():
        return Result(kind="cannot be tested here", reason=reason, figures={})
    effort = Effort(repeats=1, calls=2) if setting.quick else Effort()
    found = {}
    for name in ["shaped"] if setting.quick else SETTINGS:
        setting.progress.note(f"topology: {name}")
        found[name] = SETTINGS[name](effort)
    return judge(found)


def judge(found: Mapping[str, Mapping[str, Any]]) -> Result:
    """Met when the smallest message between delayed racks is `TARGET` times as fast, placed and by a chosen algorithm.

    found: what each of `SETTINGS` has measured; without `racks` the racks without delay decide.
    """
    deciding = "racks" if "racks" in found else "shaped"
    ratio = _median(found[deciding], BEFORE) / _median(found[deciding], AFTER)
    figures = {"all-reduce of 4 KiB shorter": Figure(value=ratio, unit="x")}
    conditions: dict[str, str | int | float | bool] = {"threads of each host": 1}
    for name, measured in found.items():
        for arm, times in measured["ms"].items():
            figures[f"{name}: {arm}"] = Figure(value=times["median"], unit="ms")
        links = {f"{link['mbit']:g} Mbit/s" + f", {link['delay_ms']:g} ms" * bool(link["delay_ms"]) for link in
                 measured["network"]}  # fmt: skip
        conditions[f"links, {name}"] = "; ".join(sorted(links))
        if "plans" in measured:
            conditions[f"algorithms, {name}"] = ", ".join(f"{size}: {plan}" for size, plan in measured["plans"].items())
        if "calls_to_notice" in measured:
            conditions["all-reduces until a slow link was noticed"] = measured["calls_to_notice"]
            conditions["its recovery was noticed"] = measured["recovery_noticed"]
    before, after = _median(found[deciding], BEFORE), _median(found[deciding], AFTER)
    return Result(
        kind="met" if ratio >= TARGET else "short",
        reason=f"a 4 KiB all-reduce over eight hosts in two racks takes {after:.3g} ms instead of {before:.3g} ms: "
        f"{ratio:.1f}x (target {TARGET:g}x); the algorithm decides for small messages, the placement for large ones",
        figures=figures,
        conditions=conditions,
        samples={},
    )


def _median(measured: Mapping[str, Any], arm: str) -> float:
    return measured["ms"][arm]["median"]


CLAIM = Claim(
    name="topology",
    statement="Placing ranks and choosing routes by the measured topology cuts communication latency to a quarter.",
    source="published guides to DeepSeek-style training; algorithms: Thakur, Rabenseifner and Gropp 2005, Optimization "
    "of Collective Communication Operations in MPICH",
    published="latency 3.2 ms -> 0.8 ms, network and message not told",
    compared="all-reduces over eight hosts in two racks, by the backend in the order in which ranks arrived against "
    "placed ranks, algorithms chosen by message size and small messages joined; and a link that degrades during a run",
    target=f"a 4 KiB all-reduce at least {TARGET:g} times shorter than the backend's own in the order of arrival",
    measure=measure,
)
