"""JSON values of all ranks reach all ranks, through a world, a part of it and a channel; a lost rank is an error."""

import json
from pathlib import Path

import pytest
import torch

from modelwright.parallel.control_plane import ControlPlane
from modelwright.parallel.mesh import single
from parallel import json_ranks
from rank_processes import run_ranks

SCRIPT = Path(__file__).with_name("json_ranks.py")
SIZE = 3


@pytest.fixture(scope="module")
def received(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    run_ranks(SCRIPT, folder, size=SIZE)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE - 1)]


def test_every_rank_receives_the_values_of_all_in_their_order(received):
    sent = json.loads(json.dumps(list(zip(*map(json_ranks.values, range(SIZE)), strict=True))))
    for own in received:
        assert own["world"] == own["channel"] == sent


def test_a_group_exchanges_among_its_own_ranks(received):
    assert received[0]["pair"] == ["rank 0", "rank 2"]
    assert "pair" not in received[1]


def test_a_rank_that_has_ended_is_one_clear_error(received):
    for own in received:
        assert own["error"].startswith(
            "roll call: another process of the run has exited or did not answer within 600 s"
        )


def test_one_process_receives_what_several_would():
    for exchange in (single().gather_json, ControlPlane(single()).exchange):
        assert exchange((1, {"a": (2.5, None)})) == [[1, {"a": [2.5, None]}]]
        with pytest.raises(TypeError, match="not JSON serializable"):
            exchange(torch.float32)


def test_bytes_of_any_length():
    world = single()
    for message in (torch.arange(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        [found] = world.gather_bytes(message)
        assert torch.equal(found, message)
