"""Every all-reduce algorithm against the backend's sum, bits against bits across ranks, and plans proved on symbols."""

import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from distributed import hosts_of, run_distributed, start_distributed
from link_cases import renumbered, uniform
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError
from modelwright.parallel.mesh import World
from modelwright.parallel.topology import algorithms
from modelwright.parallel.topology.algorithms import (
    AllReducePlan,
    TransferStep,
    binomial,
    chunk_bounds,
    fastest_tree,
    plan_seconds,
)
from modelwright.parallel.topology.collectives import (
    Algorithm,
    Collectives,
    FlatCost,
    Planner,
    TopologyConfig,
    _Watch,
)
from modelwright.parallel.topology.links import Links, LinksConfig, measure_links
from modelwright_claims import netns
from tolerances import TOLERANCES

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
SIZES = (2, 3, 4, 5, 8)
SLOW_FLAT = FlatCost(latency_s=1.0, s_per_byte=1.0)


def check_plan(plan: AllReducePlan) -> None:
    """Raise `ValueError` unless the plan leaves the sum of all ranks on all ranks, with the same bits."""
    values: list[list[tuple[Any, ...]]] = [[(rank,) for _ in range(plan.num_chunks)] for rank in range(plan.num_ranks)]
    for steps in plan.rounds:
        before = [list(chunks) for chunks in values]
        written = set()
        for step in steps:
            for chunk in range(step.first, step.last):
                if (step.target, chunk) in written:
                    raise ValueError(f"{plan.name}: rank {step.target} receives chunk {chunk} twice in one round")
                written.add((step.target, chunk))
                sent = before[step.source][chunk]
                own = before[step.target][chunk]
                values[step.target][chunk] = tuple(sorted((own, sent), key=repr)) if step.adds else sent
    for chunk in range(plan.num_chunks):
        results = {chunks[chunk] for chunks in values}
        if len(results) > 1:
            raise ValueError(f"{plan.name}: ranks end with different sums of chunk {chunk}")
        if sorted(_leaves(results.pop())) != list(range(plan.num_ranks)):
            raise ValueError(f"{plan.name}: chunk {chunk} is not the sum of every rank's value once")


def _leaves(expression: tuple[Any, ...]) -> list[int]:
    if isinstance(expression[0], int):
        return [expression[0]]
    return [leaf for part in expression for leaf in _leaves(part)]


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


def sums(world: World) -> dict[str, torch.Tensor]:
    """Every algorithm on every tensor, in groups of the first 2 to 8 ranks."""
    found = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if world.rank < size:
            found |= sums_of(World(rank=world.rank, size=size, device=world.device, group=group))
    return found


def sums_of(world: World) -> dict[str, torch.Tensor]:
    found = {}
    for algorithm in ALGORITHMS:
        collectives = Collectives(
            world, two_racks(world.size), TopologyConfig(algorithm=algorithm, window_all_reduces=0)
        )
        for name, tensor in tensors(world.rank).items():
            assert collectives.all_reduce(tensor) is tensor
            found[f"{world.size}/{algorithm}/{name}"] = tensor
        many = tensors(world.rank)
        collectives.all_reduce_many(list(many.values()))
        found |= {f"{world.size}/{algorithm}/many-{name}": tensor for name, tensor in many.items()}
    return found


def watch(world: World, folder: Path, num_calls: int) -> dict[str, Any]:
    """Write down the tree's edges, wait until `folder/slowed` says that one is slow, and go on until it is left.

    Only what is many times slower than at first counts: other work on the machine must not change the tree.
    """
    config = TopologyConfig(
        algorithm="tree", window_all_reduces=8, degraded_ratio=4.0, changed_ratio=4.0, measure_s=0.5
    )
    collectives = Collectives(world, measure_links(world, LinksConfig(budget_s=0.5)), config)
    message = torch.ones(2**13)

    def edges() -> list[tuple[int, int]]:
        steps = [step for steps in collectives.plan_for(4 * message.numel()).plan.rounds for step in steps]
        return [(step.source, step.target) for step in steps if not step.adds]

    def call() -> None:
        collectives.all_reduce(message.fill_(1.0))
        assert bool((message == world.size).all())

    for _ in range(2 * config.window_all_reduces):
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
    return {
        "calls": calls,
        "before": before,
        "after": edges(),
        "num_plannings": collectives.num_plannings,
        "at_first": at_first,
        "bytes_per_s": collectives.links.bytes_per_s,
    }


@pytest.fixture(scope="module")
def ranks():
    """By rank, the tensors that every algorithm left in every size of group."""
    return run_distributed(sums, 8)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_is_the_backends(ranks, size, algorithm):
    names = [name for name in ranks[0] if name.startswith(f"{size}/{algorithm}/")]
    assert len(names) == 2 * 10
    for name in names:
        tensor = name.split("/")[2]
        found, flat = ranks[0][name], ranks[0][f"{size}/backend/{tensor.removeprefix('many-')}"]
        assert found.shape == flat.shape
        # The last rank's values are the largest; what is left where values cancel is rounded relative to them.
        scale = 2.0 ** (size - 1)
        row = "bf16_op" if tensor.endswith("bf16") else "fp32_op"
        torch.testing.assert_close(found / scale, flat / scale, **TOLERANCES[row])


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_have_the_same_bits(ranks, size):
    names = [name for name in ranks[0] if name.startswith(f"{size}/")]
    assert len(names) == 2 * 10 * len(ALGORITHMS)
    for other in ranks[1:size]:
        for name in names:
            assert torch.equal(bits(ranks[0][name]), bits(other[name])), name


@pytest.mark.parametrize("num_ranks", range(2, 18))
def test_plans_sum_every_rank_once_and_alike(num_ranks):
    ranks = list(range(num_ranks))
    shuffled = ranks[::2] + ranks[1::2][::-1]
    links = random_links(num_ranks, seed=num_ranks)
    made = [algorithms.ring(shuffled), algorithms.doubling(shuffled), algorithms.tree(binomial(shuffled), num_ranks)]
    made.append(algorithms.tree(fastest_tree(links, 1e4), num_ranks))
    for groups in (
        [ranks[:1], ranks[1:]],
        [shuffled[: num_ranks // 2], shuffled[num_ranks // 2 :]],
        [[r] for r in ranks],
    ):
        made += [algorithms.hierarchical(groups, across) for across in ("ring", "doubling")]
        if len({len(group) for group in groups}) == 1:
            made.append(algorithms.sharded(groups))
    for plan in made:
        check_plan(plan)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((TransferStep(0, 1, 0, 1, True),), "different sums"),
        ((TransferStep(0, 1, 0, 1, False), TransferStep(1, 0, 0, 1, False)), "different sums"),
        ((TransferStep(0, 1, 0, 1, True), TransferStep(0, 1, 0, 1, True)), "twice in one round"),
    ],
)
def test_wrong_plans_are_found(steps, message):
    with pytest.raises(ValueError, match=message):
        check_plan(AllReducePlan("wrong", 2, 1, (steps,)))


def test_a_value_that_counts_twice_is_found():
    with pytest.raises(ValueError, match="once"):
        check_plan(
            AllReducePlan(
                "wrong",
                2,
                1,
                (
                    (TransferStep(0, 1, 0, 1, True),),
                    (TransferStep(1, 0, 0, 1, True),),
                    (TransferStep(0, 1, 0, 1, False),),
                ),
            )
        )


def test_chunks_cover_the_vector():
    for length in (0, 1, 3, 10, 17):
        bounds = chunk_bounds(length, 4)
        assert bounds[0] == 0
        assert bounds[-1] == length
        assert bounds == sorted(bounds)


def random_links(num_ranks, seed):
    draw = torch.Generator().manual_seed(seed)
    half = torch.rand(num_ranks, num_ranks, generator=draw, dtype=torch.float64).triu(1)
    whole = (half + half.T).tolist()
    return Links(
        hosts=tuple(f"{rank:03d}" for rank in range(num_ranks)),
        latency_s=tuple(tuple(1e-4 + 1e-3 * value for value in row) for row in whole),
        bytes_per_s=tuple(tuple(1e7 + 1e8 * value for value in row) for row in whole),
    )


def racks(sizes, latency_s, bytes_per_s, *, across_latency_s, across_bytes_per_s):
    rack = [number for number, size in enumerate(sizes) for _ in range(size)]
    same = [[a == b for b in rack] for a in rack]
    return Links(
        hosts=tuple(f"{rank:03d}" for rank in range(len(rack))),
        latency_s=tuple(tuple(latency_s if near else across_latency_s for near in row) for row in same),
        bytes_per_s=tuple(tuple(bytes_per_s if near else across_bytes_per_s for near in row) for row in same),
    )


def test_costs_of_plans_are_the_formulas_of_the_model():
    latency, rate, size, num_bytes = 1e-4, 1e8, 8, 8e5
    links, ranks = uniform(size, latency_s=latency, bytes_per_s=rate), list(range(8))
    ring_s = 2 * (size - 1) * (latency + num_bytes / size / rate)
    assert plan_seconds(algorithms.ring(ranks), links, num_bytes) == pytest.approx(ring_s)
    assert plan_seconds(algorithms.doubling(ranks), links, num_bytes) == pytest.approx(3 * (latency + num_bytes / rate))
    binary = algorithms.tree(binomial(ranks), size)
    assert plan_seconds(binary, links, num_bytes) == pytest.approx(6 * (latency + num_bytes / rate))


def test_ranks_of_one_rack_share_the_way_out():
    links = racks([2, 2], 1e-5, 1e9, across_latency_s=1e-3, across_bytes_per_s=1e6)
    crossing = AllReducePlan("crossing", 4, 1, ((TransferStep(0, 2, 0, 1, True), TransferStep(1, 3, 0, 1, True)),))
    assert plan_seconds(crossing, links, 1e6) == pytest.approx(2 + 1e-3)


def test_choice_follows_the_message_size():
    planner = Planner(uniform(8, latency_s=1e-3, bytes_per_s=1e8), SLOW_FLAT)
    assert planner.choose(100).name == "doubling"
    assert planner.choose(1e8).name == "ring"
    assert Planner(planner.links, FlatCost(latency_s=0.0, s_per_byte=0.0)).choose(100).name == "backend"


def test_choice_crosses_slow_links_least():
    """Interleaved racks: the plans that are chosen cross the uplink as seldom as can be, small and large."""
    near = racks([4, 4], 1e-5, 1e9, across_latency_s=5e-3, across_bytes_per_s=1e7)
    links = renumbered(near, [0, 4, 1, 5, 2, 6, 3, 7])
    planner = Planner(links, SLOW_FLAT)
    assert [sorted(group) for group in planner.groups] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    naive = algorithms.ring(range(8))
    for num_bytes in (100, 1e5, 1e8):
        plan = planner.choose(num_bytes)
        check_plan(plan)
        assert plan_seconds(plan, links, num_bytes) < 0.5 * plan_seconds(naive, links, num_bytes)
    assert planner.choose(100).name in ("tree", "hierarchical_doubling")
    assert planner.choose(1e8).name == "sharded"


def test_tree_goes_around_a_slow_link():
    rates = [[1e8] * 4 for _ in range(4)]
    rates[0][1] = rates[1][0] = 1e5
    links = Links(
        hosts=("a", "b", "c", "d"), latency_s=((1e-4,) * 4,) * 4, bytes_per_s=tuple(tuple(row) for row in rates)
    )
    assert not {(0, 1), (1, 0)} & set(fastest_tree(links, 1e5))


def test_small_messages_are_joined_until_bandwidth_counts():
    slow_start = Planner(uniform(2, latency_s=1e-2, bytes_per_s=1e8), SLOW_FLAT)
    quick = Planner(uniform(2, latency_s=1e-6, bytes_per_s=1e8), SLOW_FLAT)
    assert slow_start.coalesce_bytes() == 8_000_000
    assert quick.coalesce_bytes() == 2**16


def test_watch_tells_a_slow_window_from_a_few_slow_calls():
    watch = _Watch(TopologyConfig(window_all_reduces=4, recheck_windows=3))

    def window(*taken, is_as_at_first=True):
        full = [watch.add(seconds, 1.0) for seconds in taken]
        assert full == [False, False, False, True]
        return watch.is_suspicious(list(watch.elapsed_s), is_as_at_first)

    assert not window(3, 3, 3, 3)  # the first says what is usual
    assert not window(3, 3, 4, 90)
    assert window(7, 7, 7, 3)
    watch.forget()
    assert not window(7, 7, 7, 7)
    assert not window(7, 7, 7, 7, is_as_at_first=False)
    assert window(7, 7, 7, 7, is_as_at_first=False)  # time to look whether the links have recovered


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("algorithm", "star"),
        ("window_all_reduces", -1),
        ("degraded_ratio", 1.0),
        ("recheck_windows", 0),
        ("measure_s", 0.0),
    ],
)
def test_config_names_the_field(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        TopologyConfig(**{field: value})


@pytest.mark.slow
def test_a_link_that_degrades_leaves_the_tree(tmp_path):
    """Four hosts, a cable between every two; one that the tree uses drops from 100 to 5 Mbit/s while it runs."""
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Network(netns.full_mesh([[100.0] * 4] * 4)) as network:
        ranks = start_distributed(watch, 4, tmp_path, 200, hosts=hosts_of(network))
        while not (tmp_path / "tree.json").exists():
            assert all(map(ranks.is_alive, range(4)))
            time.sleep(0.02)
        a, b = json.loads((tmp_path / "tree.json").read_text())[0]
        network.shape(f"h{a}", f"h{b}", 5)
        (tmp_path / "slowed").touch()
        found = ranks.results()
    assert all(other == found[0] for other in found[1:])
    assert found[0]["num_plannings"] > 1
    assert (a, b) in found[0]["before"]
    assert not {(a, b), (b, a)} & set(found[0]["after"])
    # Not 20 times: what the shaper lets through in one burst is much of a short message.
    assert found[0]["bytes_per_s"][a][b] < 0.25 * found[0]["at_first"][a][b]
