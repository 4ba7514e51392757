"""Links for tests: equal ones, and the same ones under other numbers of the ranks."""

from collections.abc import Sequence
from dataclasses import replace

from modelwright.parallel.topology.links import Links


def uniform(num_ranks: int, *, latency_s: float, bytes_per_s: float) -> Links:
    """Equal links between ranks on hosts of their own."""
    hosts = tuple(f"{rank:05d}" for rank in range(num_ranks))
    return Links(
        hosts=hosts,
        latency_s=((latency_s,) * num_ranks,) * num_ranks,
        bytes_per_s=((bytes_per_s,) * num_ranks,) * num_ranks,
    )


def renumbered(links: Links, permutation: Sequence[int]) -> Links:
    """The same links when position i is held by rank permutation[i]."""
    return replace(links, hosts=tuple(links.hosts[rank] for rank in permutation))
