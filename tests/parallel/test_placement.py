"""Placement against brute force on small cases, and on layouts whose best order is known."""

import itertools
import math
import random

import pytest

from link_cases import uniform
from modelwright.parallel.topology.links import DEFAULT_TRAFFIC, AxisTraffic, Links, hops, place, step_seconds

AXES = [
    {"data": 4},
    {"pipeline": 5},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 3, "tensor": 2},
    {"pipeline": 2, "data": 3},
    {"pipeline": 6, "tensor": 1},
]
TRAFFIC = {**DEFAULT_TRAFFIC, "data": AxisTraffic(num_messages=2, num_bytes=2**24)}


def scattered(hosts, seed=0):
    """Ranks on hosts in that order: fast within a host, slow and of uneven speed between hosts."""
    draw = random.Random(seed)
    names = sorted(set(hosts))
    rate = [[1e10 if a == b else draw.uniform(0.5e8, 2e8) for b in names] for a in names]
    rate = [[rate[min(a, b)][max(a, b)] for b in range(len(names))] for a in range(len(names))]
    return Links(
        hosts=tuple(hosts),
        latency_s=tuple(tuple(1e-6 if a == b else 1e-4 for b in names) for a in names),
        bytes_per_s=tuple(tuple(row) for row in rate),
    )


def arbitrary(num_ranks, seed):
    return scattered([f"h{rank}" for rank in range(num_ranks)], seed)


def best_by_brute_force(links, axes):
    orders = itertools.permutations(range(links.num_ranks))
    return min(step_seconds(links, axes, order, TRAFFIC) for order in orders)


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_no_order_is_cheaper_by_brute_force(axes, seed):
    size = math.prod(axes.values())
    for links in (arbitrary(size, seed), scattered([f"h{seed * rank % 3}" for rank in range(1, size + 1)], seed)):
        order = place(links, axes, TRAFFIC)
        assert sorted(order) == list(range(size))
        assert step_seconds(links, axes, order, TRAFFIC) == pytest.approx(best_by_brute_force(links, axes))


def test_tensor_neighbors_sit_on_one_host():
    hosts = ["a", "b", "c", "d", "a", "b", "c", "d"]
    axes = {"pipeline": 2, "replicate": 2, "shard": 1, "context": 1, "tensor": 2}
    order = place(scattered(hosts), axes)
    assert all(hosts[order[a]] == hosts[order[b]] for a, b in hops(axes)["tensor"])


def test_pipeline_avoids_the_slow_cable():
    rates = [[1e9] * 4 for _ in range(4)]
    rates[1][2] = rates[2][1] = 1e6
    links = Links(
        hosts=("a", "b", "c", "d"), latency_s=((1e-5,) * 4,) * 4, bytes_per_s=tuple(tuple(row) for row in rates)
    )
    order = place(links, {"pipeline": 4})
    assert {1, 2} not in [{order[a], order[b]} for a, b in hops({"pipeline": 4})["pipeline"]]


def test_equal_links_keep_the_order():
    assert place(uniform(8, latency_s=1e-4, bytes_per_s=1e8), {"pipeline": 2, "replicate": 2, "tensor": 2}) == tuple(
        range(8)
    )


def test_same_answer_every_time_and_never_worse_than_given():
    hosts = [f"h{number % 8}" for number in range(32)]
    axes = {"pipeline": 2, "replicate": 4, "shard": 1, "context": 1, "tensor": 4}
    links = scattered(hosts, seed=3)
    order = place(links, axes)
    assert order == place(links, axes)
    given = step_seconds(links, axes, range(32))
    assert step_seconds(links, axes, order) < 0.3 * given
    assert all(hosts[order[a]] == hosts[order[b]] for a, b in hops(axes)["tensor"])


def test_rings_close_and_pipelines_do_not():
    assert hops({"pipeline": 3}) == {"pipeline": [(0, 1), (1, 2)]}
    assert hops({"tensor": 3}) == {"tensor": [(0, 1), (1, 2), (2, 0)]}
    assert hops({"pipeline": 2, "context": 1, "tensor": 2}) == {
        "pipeline": [(0, 2), (1, 3)],
        "tensor": [(0, 1), (2, 3)],
    }
