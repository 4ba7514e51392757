"""Claim: knowing the network's topology makes small messages between uneven hosts four times as fast."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, join_world
from modelwright.parallel.topology.collectives import Collectives, TopologyConfig
from modelwright.parallel.topology.links import Links, LinksConfig, measure_links, place, take_places
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, untestable
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.launch import run_ranks
from modelwright_claims.netns import Network, missing, racks
from modelwright_claims.statistics import ratios

KIB = 1024
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB)
NUM_SMALL, SMALL_BYTES = 64, 4 * KIB
LAYOUT = ParallelConfig(pipeline=2, data=2, tensor=2)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """repeats: of every figure; calls: all-reduces in a row for one of them."""

    repeats: int = 5
    calls: int = 20


def measure_racks(effort: Effort, *, delay_ms: float) -> dict[str, Any]:
    """Eight hosts in two racks, ranks alternating between them."""
    topology = racks([4, 4], mbit=1000, across_mbit=100, across_delay_ms=delay_ms, mtu=9000)
    order = [f"h{number}" for pair in zip(range(4), range(4, 8), strict=True) for number in pair]
    with tempfile.TemporaryDirectory() as folder, Network(topology) as net:
        out = Path(folder) / "found.json"
        words = [str(out), str(effort.repeats), str(effort.calls)]
        run_ranks(__name__, words, num_ranks=len(order), network=net, hosts=order)
        return {"network": topology.links, **json.loads(out.read_text())}


def compare(world: World, out: Path, effort: Effort) -> None:
    """Worker: all arms in the order of arrival, then in the placed order."""
    links = measure_links(world, LinksConfig(budget_s=6.0))
    axes = LAYOUT.axes(world.size)
    order = place(links, axes)
    arms: dict[str, list[float]] = {}
    plans = measure_arms(world, links, "arrival", arms, effort)
    world = take_places(world, order)
    placed = replace(links, hosts=tuple(links.hosts[rank] for rank in order))
    plans |= measure_arms(world, placed, "placed", arms, effort)
    if world.is_first:
        write_atomic(out, json.dumps({"plans": plans, "ms": {arm: rounded(times) for arm, times in arms.items()}}))


def measure_arms(
    world: World, links: Links, order: str, times: dict[str, list[float]], effort: Effort
) -> dict[str, str]:
    """Adds each arm's milliseconds per repeat to `times`; returns which algorithm was chosen per message size."""
    chosen = Collectives(world, links, TopologyConfig(window_all_reduces=0))
    doubling = Collectives(world, alike(links), TopologyConfig(algorithm="doubling", window_all_reduces=0))
    mesh = build_mesh(world, LAYOUT)
    arms: dict[str, Callable[[], object]] = {}
    for num_bytes in SIZES:
        message = torch.zeros(num_bytes // 4)
        arms[f"{order}, flat, {num_bytes // KIB} KiB"] = lambda message=message: world.all_reduce_sum(message)
        arms[f"{order}, doubling, {num_bytes // KIB} KiB"] = lambda message=message: doubling.all_reduce(message)
        arms[f"{order}, chosen, {num_bytes // KIB} KiB"] = lambda message=message: chosen.all_reduce(message)
    small = [torch.zeros(SMALL_BYTES // 4) for _ in range(NUM_SMALL)]
    arms[f"{order}, flat, 64 x 4 KiB"] = lambda: [world.all_reduce_sum(tensor) for tensor in small]
    arms[f"{order}, chosen, 64 x 4 KiB"] = lambda: [chosen.all_reduce(tensor) for tensor in small]
    arms[f"{order}, chosen and joined, 64 x 4 KiB"] = lambda: chosen.all_reduce_many(small)
    shared = torch.zeros(SIZES[1] // 4)
    arms[f"{order}, flat, tensor axis, 64 KiB"] = lambda: mesh.tensor.all_reduce_sum(shared)
    for arm in arms.values():
        arm()
    for _ in range(effort.repeats):
        for name, arm in arms.items():
            num_calls = 1 + effort.calls // 10 if "64 x" in name else effort.calls
            times.setdefault(name, []).append(1e3 * timed(world, arm, num_calls))
    return {f"{order}, {num_bytes // KIB} KiB": chosen.plan_for(num_bytes).plan.name for num_bytes in SIZES}


def alike(links: Links) -> Links:
    """Return links of the same hosts that are all the same: an algorithm planned on them knows no topology."""
    latency_s, bytes_per_s = (
        statistics.fmean(value for row, line in enumerate(matrix) for column, value in enumerate(line) if row != column)
        for matrix in (links.latency_s, links.bytes_per_s)
    )
    hosts = range(len(links.host_names))
    return Links(
        hosts=links.hosts,
        latency_s=tuple(tuple(latency_s if a != b else links.latency_s[a][a] for b in hosts) for a in hosts),
        bytes_per_s=tuple(tuple(bytes_per_s if a != b else links.bytes_per_s[a][a] for b in hosts) for a in hosts),
    )


def timed(world: World, call: Callable[[], object], num_calls: int) -> float:
    """Seconds per call of calls in a row, on the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return world.maxima((time.perf_counter() - start) / num_calls)[0]


def rounded(times: Sequence[float]) -> list[float]:
    """Return milliseconds to a tenth of a microsecond."""
    return [round(time, 4) for time in times]


def main() -> None:
    out, repeats, calls = sys.argv[1:]
    torch.set_num_threads(1)
    effort = Effort(repeats=int(repeats), calls=int(calls))
    with join_world(torch.device("cpu")) as world:
        compare(world, Path(out), effort)


TARGET = 4.0
METHOD = "placed, chosen, 4 KiB"
UNINFORMED = ("arrival, flat, 4 KiB", "arrival, doubling, 4 KiB")
"""Algorithms that ignore the topology: that of the backend, and recursive doubling in the order of arrival."""
SETTINGS: dict[str, Callable[[Effort], dict[str, Any]]] = {
    "racks": lambda effort: measure_racks(effort, delay_ms=0.5),
    "shaped": lambda effort: measure_racks(effort, delay_ms=0.0),
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
        links = {
            f"{link.mbit:g} Mbit/s" + f", {link.delay_ms:g} ms" * bool(link.delay_ms) for link in measured["network"]
        }
        conditions[f"links, {name}"] = "; ".join(sorted(links))
        conditions[f"algorithms, {name}"] = ", ".join(f"{size}: {plan}" for size, plan in measured["plans"].items())
    return Measurement(
        samples={f"ms, {name}: {arm}": times for name, one in found.items() for arm, times in one["ms"].items()},
        conditions=conditions,
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Without the delayed racks, those without delay decide."""
    judgment = Judgment()
    deciding = "racks" if names_between(samples, "ms, racks: ") else "shaped"
    method = samples[f"ms, {deciding}: {METHOD}"]
    uninformed = {name: samples[f"ms, {deciding}: {name}"] for name in UNINFORMED}
    fastest = min(uninformed, key=lambda name: statistics.fmean(uninformed[name]))
    for name, times in uninformed.items():
        limit = (">=", TARGET) if name == fastest else ()
        what = f"shorter than by {fastest}"
        judgment.ask(f"4 KiB shorter than by {name}", ratios(times, method), "x", *limit, what=what)
    many = [f"ms, {deciding}: arrival, {how}, {NUM_SMALL} x {SMALL_BYTES // KIB} KiB" for how in ("flat", "chosen")]
    with judgment.beside():
        judgment.ask(f"{NUM_SMALL} x 4 KiB shorter than by arrival, flat", ratios(*(samples[one] for one in many)), "x")
    for name in names_between(samples, "ms, "):
        judgment.ask(name, statistics.median(samples[f"ms, {name}"]), "ms")
    judgment.said.append(
        f"a 4 KiB all-reduce over eight hosts in two racks takes {statistics.fmean(method):.3g} ms, placed and by a "
        "chosen algorithm, instead of "
        + " and ".join(f"{statistics.fmean(times):.3g} ms ({name})" for name, times in uninformed.items())
    )
    return judgment.verdict()


CLAIM = declared(__name__)


if __name__ == "__main__":
    main()
