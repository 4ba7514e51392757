"""Exact sums by plans for the measured links: each message by the cheapest algorithm, small ones coalesced, and new
plans when a link's speed changes during the run. Measures the links when it is made.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from modelwright.parallel.mesh import World
from modelwright.parallel.topology.collectives import Collectives, TopologyConfig
from modelwright.parallel.topology.link_costs import LinksConfig, measure_links


class TopologyAwareSync:
    """Gradient sync by `Collectives`, created on all ranks alike. `bytes_sent` excludes measuring."""

    def __init__(self, world: World, config: TopologyConfig) -> None:
        self.collectives: Collectives | None = None
        if world.size > 1:
            links = measure_links(world, LinksConfig(budget_s=config.measure_s))
            self.collectives = Collectives(world, links, config)

    @property
    def bytes_sent(self) -> int:
        return self.collectives.bytes_sent if self.collectives else 0

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.collectives:
            self.collectives.all_reduce_many(gradients)

    def state_dict(self) -> dict[str, Any]:
        """Empty: links and ranks may differ after a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
