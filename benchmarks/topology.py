"""All-reduce over uneven links: as the ranks arrived, placed, by chosen algorithms, with small messages joined, and
when a link degrades. Needs root (see `netns.py`).

    python benchmarks/topology.py [--repeats N] [--calls N] [--only racks shaped degraded]

Published: latency 3.2 ms -> 0.8 ms through topology. Target, fixed beforehand: a 4 KiB all-reduce at least 4 times
shorter than the backend's own in the order of arrival, on eight hosts in two racks whose ranks arrived alternately.

Settings: `racks`: 1 Gbit/s inside, 100 Mbit/s and 1 ms one way between the racks (the delay is made by a user-space
process, see `netns.py`); `shaped`: the same without delay; `degraded`: four hosts, a 100 Mbit/s cable between every
two, one of which drops to 5 Mbit/s and recovers. Times are the mean of calls in a row on the slowest rank, median over
repeats; arms take turns within each repeat, except that order of arrival and placed order are two halves of it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelwright.claims.results import circumstances, machine_slug
from modelwright.core.artifacts import write_atomic
from modelwright.parallel.collectives import Collectives, CollectivesConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.links import Links, LinksConfig, measure_links
from modelwright.parallel.mesh import World, join_world, lay_out
from modelwright.parallel.placement import place, take_places
from netns import Network, Topology, free_port, full_mesh, missing, racks

RESULTS = Path(__file__).parent / "results"
KIB = 1024
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB)
NUM_SMALL, SMALL_BYTES = 64, 4 * KIB
LAYOUT = ParallelConfig(pipeline=2, data=2, tensor=2)
PUBLISHED = {"statement": "Latency 3.2 ms -> 0.8 ms through topology", "ratio": 4.0}


def main() -> int:
    options = parse()
    if options.worker:
        torch.set_num_threads(1)
        with join_world(torch.device("cpu")) as world:
            (follow if options.worker == "degraded" else compare)(world, options)
        return 0
    if reason := missing():
        print(f"cannot build networks: {reason}", file=sys.stderr)
        return 2
    around = circumstances()
    settings = {name: SETTINGS[name](options) for name in options.only}
    record = {"benchmark": "topology", "published": PUBLISHED, "settings": settings, **around, "threads": 1}
    show(settings)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"topology-{machine_slug(around['machine'])}.json"
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print(path)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="All-reduce over uneven links, with and without a plan for them.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="all-reduces in a row for one figure")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", choices=("compare", "degraded"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_ranks(
    net: Network, order: Sequence[str], worker: str, out: Path, options: argparse.Namespace
) -> list[subprocess.Popen[Any]]:
    """One rank on each host; rank i is the host order[i]."""
    port = free_port(net, order[0])
    command = [sys.executable, __file__, "--worker", worker, "--out", str(out)]
    command += ["--repeats", str(options.repeats), "--calls", str(options.calls)]
    size = {"WORLD_SIZE": str(len(order)), "PYTHONPATH": os.pathsep.join(sys.path)}
    return [
        net.popen(host, command, env={**net.torch_environment(host, order[0], port), **size, "RANK": str(rank)})
        for rank, host in enumerate(order)
    ]


def finish(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    codes = [rank.wait(timeout=1200) for rank in ranks]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")


def measure_racks(options: argparse.Namespace, *, delay_ms: float) -> dict[str, Any]:
    """Eight hosts in two racks, ranks alternating between them."""
    topology = racks([4, 4], mbit=1000, across_mbit=100, across_delay_ms=delay_ms, mtu=9000)
    order = [f"h{number}" for pair in zip(range(4), range(4, 8), strict=True) for number in pair]
    with tempfile.TemporaryDirectory() as folder, Network(topology) as net:
        out = Path(folder) / "found.json"
        finish(run_ranks(net, order, "compare", out, options))
        return {"network": described(topology), "order_of_arrival": order, **json.loads(out.read_text())}


def measure_degraded(options: argparse.Namespace) -> dict[str, Any]:
    """A cable of the tree slows down and recovers while the ranks go on."""
    topology = full_mesh([[100.0] * 4] * 4)
    with tempfile.TemporaryDirectory() as folder, Network(topology) as net:
        out = Path(folder) / "found.json"
        ranks = run_ranks(net, net.hosts, "degraded", out, options)
        tree = out.with_suffix(".tree")
        await_file(tree, ranks)
        a, b = json.loads(tree.read_text())
        net.shape(f"h{a}", f"h{b}", 5)
        out.with_suffix(".slowed").touch()
        await_file(out.with_suffix(".around"), ranks)
        net.shape(f"h{a}", f"h{b}", 100)
        finish(ranks)
        return {"network": described(topology), "slowed_link": [a, b], **json.loads(out.read_text())}


SETTINGS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "racks": lambda options: measure_racks(options, delay_ms=0.5),
    "shaped": lambda options: measure_racks(options, delay_ms=0.0),
    "degraded": measure_degraded,
}


def await_file(path: Path, ranks: Sequence[subprocess.Popen[Any]]) -> None:
    while not path.exists():
        if any(rank.poll() for rank in ranks):
            raise RuntimeError("a rank has failed; its error is above")
        time.sleep(0.01)


def described(topology: Topology) -> list[dict[str, Any]]:
    return [{"ends": link.ends, "mbit": link.mbit, "delay_ms": link.delay_ms} for link in topology.links]


def compare(world: World, options: argparse.Namespace) -> None:
    """Worker: all arms in the order of arrival, then in the placed order."""
    links = measure_links(world, LinksConfig(budget_s=6.0))
    axes = LAYOUT.axes(world.size)
    order = place(links, axes)
    arms: dict[str, list[float]] = {}
    plans = measure_arms(world, links, "arrival", arms, options)
    world = take_places(world, order)
    plans |= measure_arms(world, links.renumbered(order), "placed", arms, options)
    if world.is_first:
        found = {
            "measured_links": {"latency_ms": scaled(links.latency_s, 1e3), "mbit": scaled(links.bytes_per_s, 8e-6)},
            "placed_order": order,
            "plans": plans,
            "ms": {arm: summary(times) for arm, times in arms.items()},
        }
        write_atomic(options.out, json.dumps(found))


def measure_arms(
    world: World, links: Links, order: str, times: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, str]:
    """Adds each arm's milliseconds per repeat to `times`; returns which algorithm was chosen per message size."""
    chosen = Collectives(world, links, CollectivesConfig(window=0))
    mesh = lay_out(world, LAYOUT)
    arms: dict[str, Callable[[], object]] = {}
    for num_bytes in SIZES:
        message = torch.zeros(num_bytes // 4)
        arms[f"{order}, flat, {num_bytes // KIB} KiB"] = lambda message=message: world.all_reduce_sum(message)
        arms[f"{order}, chosen, {num_bytes // KIB} KiB"] = lambda message=message: chosen.all_reduce(message)
    small = [torch.zeros(SMALL_BYTES // 4) for _ in range(NUM_SMALL)]
    arms[f"{order}, flat, 64 x 4 KiB"] = lambda: [world.all_reduce_sum(tensor) for tensor in small]
    arms[f"{order}, chosen, 64 x 4 KiB"] = lambda: [chosen.all_reduce(tensor) for tensor in small]
    arms[f"{order}, chosen and joined, 64 x 4 KiB"] = lambda: chosen.all_reduce_many(small)
    shared = torch.zeros(SIZES[1] // 4)
    arms[f"{order}, flat, tensor axis, 64 KiB"] = lambda: mesh.tensor.all_reduce_sum(shared)
    for arm in arms.values():
        arm()
    for _ in range(options.repeats):
        for name, arm in arms.items():
            num_calls = 1 + options.calls // 10 if "64 x" in name else options.calls
            times.setdefault(name, []).append(1e3 * timed(world, arm, num_calls))
    return {f"{order}, {num_bytes // KIB} KiB": chosen.plan_for(num_bytes).name for num_bytes in SIZES}


def timed(world: World, call: Callable[[], object], num_calls: int) -> float:
    """Seconds per call of calls in a row, on the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return world.maxima((time.perf_counter() - start) / num_calls)[0]


def follow(world: World, options: argparse.Namespace) -> None:
    """Worker: times of a 64 KiB all-reduce by a tree, before, after a link of the tree slowed down, and around it."""
    config = CollectivesConfig(algorithm="tree", window=16, recheck_windows=2, measure_s=1.0)
    collectives = Collectives(world, measure_links(world, LinksConfig(budget_s=2.0)), config)
    message = torch.zeros(64 * KIB // 4)

    def edges() -> list[tuple[int, int]]:
        steps = [step for steps in collectives.plan_for(64 * KIB).rounds for step in steps]
        return [(step.source, step.target) for step in steps if not step.adds]

    def one() -> float:
        return 1e3 * timed(world, lambda: collectives.all_reduce(message), 1)

    phases: dict[str, list[float]] = {"before": [], "slowed": [], "around": [], "recovered": []}
    first_tree = edges()
    phases["before"] = [one() for _ in range(3 * config.window)]
    if world.is_first:
        write_atomic(options.out.with_suffix(".tree"), json.dumps(first_tree[0]))
    while not any_rank(world, options.out.with_suffix(".slowed").exists()):
        one()
    calls_to_notice, plannings = 0, collectives.num_plannings
    while collectives.num_plannings == plannings:
        phases["slowed"].append(one())
        calls_to_notice += 1
    second_tree = edges()
    phases["around"] = [one() for _ in range(2 * config.window)]
    if world.is_first:
        options.out.with_suffix(".around").touch()
    plannings = collectives.num_plannings
    deadline = 20 * config.window
    while collectives.num_plannings == plannings and deadline:
        one()
        deadline -= 1
    phases["recovered"] = [one() for _ in range(2 * config.window)]
    if world.is_first:
        found = {
            "first_tree": first_tree,
            "second_tree": second_tree,
            "third_tree": edges(),
            "recovery_noticed": deadline > 0,
            "calls_to_notice": calls_to_notice,
            "ms": {phase: summary(times) for phase, times in phases.items()},
        }
        write_atomic(options.out, json.dumps(found))


def any_rank(world: World, value: bool) -> bool:
    return world.maxima(float(value))[0] > 0


def scaled(matrix: Sequence[Sequence[float]], factor: float) -> list[list[float]]:
    return [[round(value * factor, 4) for value in row] for row in matrix]


def summary(times: Sequence[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(times), 4),
        "least": round(min(times), 4),
        "most": round(max(times), 4),
        "repeats": len(times),
    }


def show(settings: Mapping[str, Mapping[str, Any]]) -> None:
    for name, found in settings.items():
        print(f"\n{name}: milliseconds, median (least to most)")
        for arm, times in found["ms"].items():
            print(f"  {arm:45s} {times['median']:9.3f} ({times['least']:.3f} to {times['most']:.3f})")
        for extra in ("plans", "placed_order", "first_tree", "second_tree", "third_tree", "calls_to_notice"):
            if extra in found:
                print(f"  {extra}: {found[extra]}")


if __name__ == "__main__":
    sys.exit(main())
