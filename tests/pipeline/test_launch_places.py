"""Ranks are numbered anew by the links between their hosts before anything is built on the numbers."""

import json
from pathlib import Path
from typing import Any

from rank_processes import run_ranks

SCRIPT = Path(__file__).with_name("places_run.py")


def seats(folder: Path, hosts: str, *fields: str) -> list[dict[str, Any]]:
    run_ranks(SCRIPT, folder, hosts, *fields, size=len(hosts))
    return [json.loads((folder / f"seat-{rank}.json").read_text()) for rank in range(len(hosts))]


def test_tensor_neighbors_come_to_sit_on_one_host(tmp_path: Path) -> None:
    """The hosts take turns in the numbers that the processes come with."""
    hosts = "abab"
    found = seats(tmp_path, hosts, "tensor=2")
    assert len({tuple(seat["order"]) for seat in found}) == 1
    assert [found[0]["order"].index(rank) for rank in range(4)] == [seat["rank"] for seat in found]
    assert all(seat["sum"] == 4 for seat in found)
    for came_as, seat in enumerate(found):
        assert came_as in seat["tensor"]
        assert len({hosts[rank] for rank in seat["tensor"]}) == 1
        assert {hosts[rank] for rank in seat["replicate"]} == {"a", "b"}
        assert seat["won"] > 2


def test_two_ranks_have_one_link_and_stay(tmp_path: Path) -> None:
    found = seats(tmp_path, "ba", "tensor=2")
    assert [seat["rank"] for seat in found] == [0, 1]
    assert [seat["won"] for seat in found] == [1.0, 1.0]
