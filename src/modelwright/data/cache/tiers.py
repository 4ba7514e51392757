"""Blocks from the nearest tier that has them: memory, the local disk, or the place that the rows are kept at.

Every block that is read, from any tier, is compared with the checksum from when it was packed. A block gets a slot that
is free, or that of a block which was read less often before: so it moves towards memory when it is read more than
others, and the other one moves away.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelwright.core.errors import ArtifactError
from modelwright.data.cache.access import AccessCounts
from modelwright.data.cache.blocks import BlockLayout, BlockPart
from modelwright.data.cache.cold import ColdStore
from modelwright.data.cache.slots import Displaced, SlotTier

MEMORY, DISK, SOURCE = "memory", "disk", "source"


@dataclass
class TierFigures:
    """What this process read. blocks, bytes: by tier; promoted, demoted: moves towards memory and away from it;
    num_damaged: blocks of the cache that were damaged and read again from the source.
    """

    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MEMORY, DISK, SOURCE), 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MEMORY, DISK, SOURCE), 0))
    num_promoted: int = 0
    num_demoted: int = 0
    num_damaged: int = 0


class Tiers:
    """The tiers of a host, nearest first, before the source. note: shows a line to the user. Used by many threads."""

    def __init__(
        self,
        layout: BlockLayout,
        source: ColdStore,
        tiers: Sequence[tuple[str, SlotTier]] = (),
        counts: AccessCounts | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        assert counts is not None or not tiers
        self.layout = layout
        self.source = source
        self.figures = TierFigures()
        self._tiers = list(tiers)
        self._counts = counts
        self._note = note
        self._lock = threading.Lock()
        self._full: set[str] = set()
        """Tiers that a disk had no more room for."""

    def read(self, block: int) -> bytes:
        """The content of a block. Raises `ArtifactError` that names the bytes that are damaged at the source, and
        `StorageError` if the source cannot be read.
        """
        score = self._counts.count(block) if self._counts else 0.0
        for place, (name, tier) in enumerate(self._tiers):
            content = self._checked(name, tier, block)
            if content is not None:
                self._count(name, len(content))
                if place and self._settle(block, content, score, self._tiers[:place]):
                    with self._lock:
                        self.figures.num_promoted += 1
                return content
        content = self._from_source(block)
        self._count(SOURCE, len(content))
        self._settle(block, content, score, self._tiers)
        return content

    def places(self) -> dict[str, list[int]]:
        """The blocks that each tier has."""
        return {name: tier.blocks() for name, tier in self._tiers}

    def _settle(self, block: int, content: bytes, score: float, tiers: Sequence[tuple[str, SlotTier]]) -> bool:
        """Put a block into the first of the tiers that takes it, and what it displaces into the ones behind."""
        for place, (name, tier) in enumerate(tiers):
            taken = self._write(name, tier, block, content, score)
            if taken is False:
                continue
            behind = self._tiers[place + 1 :]
            for _, other in behind:
                other.drop(block)
            if isinstance(taken, Displaced):
                self._demote(taken, behind)
            return True
        return False

    def _demote(self, displaced: Displaced, tiers: Sequence[tuple[str, SlotTier]]) -> None:
        assert self._counts is not None
        with self._lock:
            self.figures.num_demoted += 1
        if self.layout.damaged(*displaced) is None:
            score = float(self._counts.scores(np.array([displaced.block]))[0])
            any(self._write(name, tier, *displaced, score) is not False for name, tier in tiers)

    def _write(self, name: str, tier: SlotTier, block: int, content: bytes, score: float) -> bool | Displaced:
        assert self._counts is not None
        if name in self._full:
            return False
        try:
            return tier.write(block, content, score, self._counts.scores)
        except OSError as error:
            self._full.add(name)
            self._note(f"cache: the {name} takes no more rows ({error.strerror}); what it has goes on being read")
            return False

    def _checked(self, name: str, tier: SlotTier, block: int) -> bytes | None:
        """What a tier has of a block, None if it has not got it whole."""
        content = tier.read(block)
        if content is None or self.layout.damaged(block, content) is None:
            return content
        content = tier.read_alone(block)  # another process may have written while this one read
        damage = None if content is None else self.layout.damaged(block, content)
        if damage is None:
            return content
        tier.drop(block)
        with self._lock:
            self.figures.num_damaged += 1
        self._note(f"cache: the copy of {damage} in the {name} is damaged; it is read again from {self.source.url}")
        return None

    def _from_source(self, block: int) -> bytes:
        """Read twice before it counts as damaged: a byte may have been flipped on the way."""
        damage: BlockPart | None = None
        for _ in range(2):
            parts = self.layout.parts(block)
            content = b"".join(self.source.read(part.file, part.offset, part.num_bytes) for part in parts)
            damage = self.layout.damaged(block, content)
            if damage is None:
                return content
        raise ArtifactError(
            f"{self.source.url}: {damage} are damaged: they are not what was packed (CRC-32); put the file back, or "
            "run the pack stage again"
        )

    def _count(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self.figures.blocks[name] += 1
            self.figures.bytes[name] += num_bytes
