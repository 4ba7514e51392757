"""One rank that exchanges JSON values: json_ranks.py FOLDER; a script for `test_gather_json`.

Writes what it received to FOLDER/<rank>.json. Then the last rank ends, and the others write the error that they get.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelwright.parallel.control_plane import ControlPlane, LostRankError
from modelwright.parallel.mesh import World, join_world


def values(rank: int) -> list[Any]:
    """Values of very different lengths on the ranks and of every type that JSON has."""
    return [
        None,
        {"rank": rank, "text": "später" * 10_000 * rank, "numbers": [rank / 3, float("inf"), -(2**62)]},
        (rank, "tuple"),
        "" if rank else ["deep", {"nested": [True, None]}],
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    with join_world(torch.device("cpu")) as world:
        pair = dist.new_group([0, 2])
        channel = ControlPlane(world)
        received = {
            "world": [world.gather_json(value) for value in values(world.rank)],
            "channel": [channel.exchange(value) for value in values(world.rank)],
        }
        if world.rank != 1:
            assert isinstance(pair, dist.ProcessGroup)
            two = World(rank=pair.rank(), size=2, device=world.device, group=pair)
            received["pair"] = two.gather_json(f"rank {world.rank}")
        world.barrier()
        if world.rank == world.size - 1:
            os._exit(0)
        try:
            channel.exchange("who is there?", what="roll call")
        except LostRankError as error:
            received["error"] = str(error)
        (folder / f"{world.rank}.json").write_text(json.dumps(received))
        os._exit(0)  # the process group cannot be taken down with one of it gone


if __name__ == "__main__":
    main()
