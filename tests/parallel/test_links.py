"""Links: the cost model, what is measured among real processes, the cache, and shaped links between hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.core.errors import ConfigError
from modelwright.parallel.mesh import single
from modelwright.parallel.topology.link_costs import Links, LinksConfig, _tournament, measure_links, uniform

JOB = Path(__file__).with_name("collective_job.py")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert (
        subprocess.run([sys.executable, str(JOB), "links", str(folder)], env=environment, timeout=120).returncode == 0
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def test_all_ranks_have_the_same_figures_of_every_pair(four_ranks):
    hosts, latency, rate = four_ranks[0]["measured"]
    assert hosts == ["b", "a", "b", "a"]
    for matrix in (latency, rate):
        assert matrix[0][1] == matrix[1][0]
        assert all(value > 0 for row in matrix for value in row)
    assert all(1e-6 < value < 0.1 for row in latency for value in row)
    for rank in four_ranks[1:]:
        for name in ("measured", "cached", "others", "broken"):
            assert rank[name] == four_ranks[0][name]


def test_measuring_keeps_to_its_budget(four_ranks):
    assert four_ranks[0]["taken_s"] < 100 * 0.4  # far more than asked for, because the machine may be busy


def test_cache_is_by_set_of_hosts(four_ranks):
    (entry,) = four_ranks[0]["known"].values()
    assert entry["hosts"] == ["a", "b"]
    assert four_ranks[0]["cached"] == four_ranks[0]["measured"]
    assert four_ranks[0]["others"][0] == ["b", "b", "b", "c"]
    assert four_ranks[0]["others"] != four_ranks[0]["measured"]
    assert four_ranks[0]["broken"] != four_ranks[0]["measured"]


def test_processes_take_their_places(four_ranks):
    assert [rank["rank"] for rank in four_ranks] == [1, 3, 0, 2]
    assert all(rank["sum"] == 6.0 for rank in four_ranks)
    assert all(rank["first"] == [0, 1] for rank in four_ranks)


def test_message_takes_latency_and_bytes():
    links = Links(hosts=("b", "a", "a"), latency_s=((1.0, 2.0), (2.0, 3.0)), bytes_per_s=((10.0, 20.0), (20.0, 40.0)))
    assert links.seconds(1, 2, 100) == 1.0 + 10.0
    assert links.seconds(0, 2, 100) == 2.0 + 5.0
    assert links.seconds(0, 2, 100, sharing=3) == 2.0 + 15.0
    assert links.costs(100)[2] == (7.0, 11.0, 0.0)
    assert links.renumbered([2, 0, 1]).hosts == ("a", "b", "a")
    assert links.renumbered([2, 0, 1]).seconds(0, 2, 100) == links.seconds(2, 1, 100)


def test_one_rank_on_each_host_leaves_the_diagonal_unused():
    alone = measure_links(single(), host="here")
    assert alone.hosts == ("here",)
    assert alone.costs(100) == ((0.0,),)


def test_groups_are_cut_at_the_widest_gap():
    even = uniform(6, latency_s=1e-4, bytes_per_s=1e8)
    assert even.groups() == ((0, 1, 2, 3, 4, 5),)
    rack = [0, 1, 0, 1, 0, 2]
    latency = tuple(tuple(1e-4 * (1.5 if a < b else 1.0) if a == b else 1e-2 for b in rack) for a in rack)
    parted = Links(hosts=even.hosts, latency_s=latency, bytes_per_s=even.bytes_per_s)
    assert parted.groups() == ((0, 2, 4), (1, 3), (5,))


def test_change_is_the_worst_pairs():
    links = uniform(3, latency_s=1e-3, bytes_per_s=1e8)
    rates = ((1e8, 1e8, 1e6), (1e8, 1e8, 1e8), (1e6, 1e8, 1e8))
    slowed = Links(hosts=links.hosts, latency_s=links.latency_s, bytes_per_s=rates)
    message_s, slow_s = 1e-3 + 2**16 / 1e8, 1e-3 + 2**16 / 1e6
    assert links.worst_change(slowed) == pytest.approx(slow_s / message_s)
    assert slowed.worst_change(links) == pytest.approx(slow_s / message_s)
    assert links.worst_change(links) == 1.0


@pytest.mark.parametrize("num_players", [2, 3, 4, 7, 8])
def test_everyone_meets_everyone_once(num_players):
    rounds = list(_tournament(num_players))
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == num_players * (num_players - 1) // 2
    for pairs in rounds:
        assert len({player for pair in pairs for player in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("field", ["budget_s", "max_age_days"])
def test_config_names_the_field(field):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        LinksConfig(**{field: 0.0})


def test_shaped_and_delayed_links_are_measured_as_they_are(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(JOB.parents[2] / "benchmarks"))
    from modelwright_claims import netns

    if reason := netns.missing():
        pytest.skip(reason)
    mbit = [[0, 100, 20], [0, 0, 50], [0, 0, 0]]
    delay_ms = [[0, 0, 0], [0, 0, 5], [0, 0, 0]]
    with netns.Network(netns.full_mesh(mbit, delay_ms)) as net:
        port = netns.free_port(net, "h0")
        ranks = [
            net.popen(
                host,
                [sys.executable, str(JOB), "measure", str(tmp_path / "links.json"), "1.5"],
                env={**net.torch_environment(host, "h0", port), "RANK": str(rank), "WORLD_SIZE": "3"},
            )
            for rank, host in enumerate(net.hosts)
        ]
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * 3
    found = json.loads((tmp_path / "links.json").read_text())
    rate_mbit = [[8e-6 * value for value in row] for row in found["bytes_per_s"]]
    # A busy machine makes a link look slower, never faster than its shape; their order must show all the same.
    assert 50 < rate_mbit[0][1] < 125
    assert 10 < rate_mbit[0][2] < 25
    assert rate_mbit[0][1] > 2.5 * rate_mbit[0][2]
    assert found["latency_s"][1][2] > 0.005
    assert found["latency_s"][0][1] < found["latency_s"][1][2]
    # Three links, and a doubling probe on a slow one may go over its share by its last message.
    assert found["taken_s"] < 60
