"""Ranks of a gloo world that all-reduce, measure links and change places; what each found goes to its own file.

collective_job.py sums FOLDER           as one of 8 ranks: every algorithm on every tensor, in groups of 2 to 8
collective_job.py links FOLDER          fork 4 ranks on two made-up hosts: measure, cache, change places
collective_job.py measure FILE BUDGET   as one rank of the environment's world: measure its links
collective_job.py watch FOLDER CALLS    as one rank of the environment's world: all-reduce until a slowed link is left
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from modelwright.core.artifacts import write_atomic
from modelwright.parallel.mesh import World, join_world
from modelwright.parallel.topology.collectives import Algorithm, Collectives, CollectivesConfig
from modelwright.parallel.topology.link_costs import Links, LinksConfig, measure_links
from modelwright.parallel.topology.rank_mapping import take_places

CPU = torch.device("cpu")
ALGORITHMS = get_args(Algorithm)
SIZES = (2, 3, 4, 5, 8)


def two_racks(size: int) -> Links:
    """Ranks on hosts of their own, even numbers in one rack and odd ones in the other."""
    ranks = range(size)
    near = [[(a - b) % 2 == 0 for b in ranks] for a in ranks]
    return Links(
        hosts=tuple(f"h{rank}" for rank in ranks),
        latency_s=tuple(tuple(1e-5 if close else 1e-3 for close in row) for row in near),
        bytes_per_s=tuple(tuple(1e9 if close else 1e7 for close in row) for row in near),
    )


def tensors(rank: int) -> dict[str, torch.Tensor]:
    """Odd sizes, none at all, fewer elements than ranks, a transposed one, other dtypes; values differ in scale."""
    draw = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 2.0**rank

    return {
        "vector": normal(10_007),
        "matrix": normal(33, 17),
        "transposed": normal(12, 31).T,
        "one": normal(1),
        "few": normal(3),
        "scalar": normal(1)[0],
        "empty": normal(0, 5),
        "double": normal(257).double(),
        "bf16": normal(1001).bfloat16(),
        "integers": torch.randint(-100, 100, (77,), generator=draw),
    }


def sums(world: World, folder: Path) -> None:
    found = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if world.rank < size:
            found |= sums_of(World(rank=world.rank, size=size, device=CPU, group=group))
    save_file(found, folder / f"rank{world.rank}.safetensors")


def sums_of(world: World) -> dict[str, torch.Tensor]:
    found = {}
    for algorithm in ALGORITHMS:
        collectives = Collectives(world, two_racks(world.size), CollectivesConfig(algorithm=algorithm, window=0))
        for name, tensor in tensors(world.rank).items():
            assert collectives.all_reduce(tensor) is tensor
            found[f"{world.size}/{algorithm}/{name}"] = tensor.contiguous()
        many = tensors(world.rank)
        collectives.all_reduce_many(list(many.values()))
        found |= {f"{world.size}/{algorithm}/many-{name}": tensor.contiguous() for name, tensor in many.items()}
    return found


def links(world: World, folder: Path) -> None:
    hosts = ["b", "a", "b", "a"]
    cache = folder / "links.json"
    config = LinksConfig(budget_s=0.4, cache=str(cache))
    start = time.monotonic()
    found = {"measured": measure_links(world, config, host=hosts[world.rank])}
    taken_s = time.monotonic() - start
    world.barrier()  # the first rank has written the file
    known = json.loads(cache.read_text())
    found["cached"] = measure_links(world, config, host=hosts[world.rank])
    found["others"] = measure_links(world, config, host=["b", "b", "b", "c"][world.rank])
    if world.is_first:
        cache.write_text("{")
    world.barrier()
    found["broken"] = measure_links(world, config, host=hosts[world.rank])
    world = take_places(world, (2, 0, 3, 1))
    total = world.all_reduce_sum(torch.tensor([1.0 * world.rank]))
    first = world.broadcast(torch.tensor([world.rank, hosts.index("a")]))
    shown = {name: [of.hosts, of.latency_s, of.bytes_per_s] for name, of in found.items()}
    facts = {"taken_s": taken_s, "known": known, "rank": world.rank, "sum": total.item(), "first": first.tolist()}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps({**shown, **facts}))


def measure(world: World, file: Path, budget_s: float) -> None:
    start = time.monotonic()
    found = measure_links(world, LinksConfig(budget_s=budget_s))
    if world.is_first:
        taken_s = time.monotonic() - start
        record = {"latency_s": found.latency_s, "bytes_per_s": found.bytes_per_s, "taken_s": taken_s}
        file.write_text(json.dumps(record))


def watch(world: World, folder: Path, num_calls: int) -> None:
    """Writes down an edge of its tree, waits until FOLDER/slowed says that it is slow, and goes on until it is left.

    Only what is many times slower than at first counts: other work on the machine must not change the tree.
    """
    config = CollectivesConfig(algorithm="tree", window=8, degraded_ratio=4.0, changed_ratio=4.0, measure_s=0.5)
    collectives = Collectives(world, measure_links(world, LinksConfig(budget_s=0.5)), config)
    message = torch.ones(2**13)

    def edges() -> list[tuple[int, int]]:
        steps = [step for steps in collectives.plan_for(4 * message.numel()).rounds for step in steps]
        return [(step.source, step.target) for step in steps if not step.adds]

    def call() -> None:
        collectives.all_reduce(message.fill_(1.0))
        assert bool((message == world.size).all())

    for _ in range(2 * config.window):
        call()
    while collectives._watch._usual is None:  # it has just measured, and takes its next window for the usual one
        call()
    before, at_first = edges(), collectives.links.bytes_per_s
    if world.is_first:
        write_atomic(folder / "tree.json", json.dumps(before))
        while not (folder / "slowed").exists():
            time.sleep(0.01)
    world.barrier()
    calls = 0
    while calls < num_calls and edges() == before:
        call()
        calls += 1
    record = {
        "calls": calls,
        "before": before,
        "after": edges(),
        "num_plannings": collectives.num_plannings,
        "at_first": at_first,
        "bytes_per_s": collectives.links.bytes_per_s,
    }
    (folder / f"rank{world.rank}.json").write_text(json.dumps(record))


def fork_ranks(size: int, work, folder: Path) -> int:
    """Ranks as children of this process, which has imported everything and started no thread. Returns failures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            with join_world(CPU) as world:
                work(world, folder)
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def main() -> int:
    torch.set_num_threads(1)
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "links":
        return fork_ranks(4, links, path)
    with join_world(CPU) as world:
        if command == "sums":
            sums(world, path)
        elif command == "measure":
            measure(world, path, float(sys.argv[3]))
        else:
            watch(world, path, int(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
