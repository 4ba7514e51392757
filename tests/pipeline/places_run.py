"""One process on a made-up host, started by test_launch_places.py: `places_run.py FOLDER HOSTS [key=value ...]`.

HOSTS: the host of each rank, one letter each; the rest are fields of `parallel`. The links come from a cache in which
every two hosts are far apart. Writes down where this process came to sit.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import parse_scalar
from modelwright.parallel.mesh import ParallelConfig, build_mesh
from modelwright.parallel.topology.links import Links, _write_cache
from modelwright.pipeline.process_group import join_ranks
from modelwright.recipes.load import recipe


def far_apart(hosts: str) -> Links:
    names = sorted(set(hosts))
    return Links(
        hosts=tuple(hosts),
        latency_s=tuple(tuple(1e-5 if a == b else 1e-3 for b in names) for a in names),
        bytes_per_s=tuple(tuple(1e10 if a == b else 1e7 for b in names) for a in names),
    )


def main() -> None:
    folder, hosts = Path(sys.argv[1]), sys.argv[2]
    fields = {name: parse_scalar(value) for name, value in (word.split("=") for word in sys.argv[3:])}
    came_as = int(os.environ["RANK"])
    cache = folder / f"links-{came_as}.json"  # only the first rank's is read
    _write_cache(cache, far_apart(hosts))
    config = replace(recipe("tiny"), parallel=ParallelConfig(reorder_ranks=True, **fields))
    with join_ranks(config, links=cache, host=hosts[came_as]) as ranks:
        assert ranks is not None
        assert ranks.placement is not None
        mesh = build_mesh(ranks.world, ranks.layout)
        numbers = {
            "rank": ranks.rank,
            "order": ranks.placement.order,
            "won": ranks.placement.seconds_before / ranks.placement.seconds_after,
            "sum": float(ranks.world.all_reduce_sum(torch.ones(1))),
            "tensor": mesh.tensor.all_gather(torch.tensor([came_as])).flatten().tolist(),
            "replicate": mesh.replicate.all_gather(torch.tensor([came_as])).flatten().tolist(),
        }
        ranks.barrier()
        write_atomic(folder / f"seat-{came_as}.json", json.dumps(numbers))


if __name__ == "__main__":
    main()
