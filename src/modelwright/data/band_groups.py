"""Groups of documents that have one value of a band in common, made band by band by an engine.

The candidates of a group stand in *slots* that are counted beforehand, one fewer than it has documents and at most a
given number. So a document takes at most 4 bytes of memory for each band that it shares with another one; which groups
it is in is read from files, in the order in which documents are taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from modelwright.data.disk_file import DiskFile
from modelwright.data.duplicate_corpus import NO_NUMBER, BandFiles, no_numbers
from modelwright.data.workers import InProcess, ShardEngine

_FILL_BITS = 16
_FILL = 2**_FILL_BITS - 1
"""The first slot of a group counts its slots (upper bits) and how many of them hold a candidate."""
_READ_AT_ONCE = 8192
_FEWEST_IN_WORKERS = 250_000
"""Fewer documents are grouped in this process, because starting others takes longer."""


@dataclass(frozen=True)
class GroupJob:
    """A band whose documents are to be grouped. The file `order.bin` beside those of the bands holds the numbers of the
    documents, uint32, in the order in which they are taken. most: slots of a group.
    """

    bands: BandFiles
    band: int
    most: int


def group_band(job: GroupJob) -> int:
    """Write the place of each document's group in the slots of a band, by its position in the order, and the empty
    slots; returns the number of the band. Runs in worker processes, and takes less than 50 bytes a document.
    """
    folder = job.bands.folder
    hashes = job.bands.column(job.band)[np.fromfile(_order_file(folder), np.uint32)]
    places, ranked = no_numbers(len(hashes)), np.argsort(hashes, kind="stable")
    hashes = hashes[ranked]
    is_shared = np.zeros(len(hashes), np.bool_)
    is_shared[1:] = hashes[1:] == hashes[:-1]
    del hashes
    is_first = ~is_shared
    is_shared[:-1] |= is_shared[1:]
    starts = np.flatnonzero(is_first[is_shared])
    sizes = np.diff(starts, append=int(is_shared.sum()))
    capacities = np.minimum(sizes - 1, min(job.most, _FILL))
    firsts = np.cumsum(capacities + 1) - capacities - 1
    places[ranked[is_shared]] = np.repeat(firsts.astype(np.uint32), sizes)
    slots = np.zeros(int((capacities + 1).sum()), np.uint32)
    slots[firsts] = capacities << _FILL_BITS
    _write(places, _places_file(folder, job.band))
    _write(slots, _slots_file(folder, job.band))
    return job.band


class BandGroups:
    """The groups of each band, and the documents that are in any, from the best to the worst."""

    def __init__(self, order: NDArray[np.uint32], folder: Path, num_bands: int) -> None:
        """order: the documents; folder: with the files of `group_band`."""
        self.order = order
        slots = [np.fromfile(_slots_file(folder, band), np.uint32) for band in range(num_bands)]
        self.slots = [one.data for one in slots]  # single values are read much faster than from an array
        self._places = [DiskFile(_places_file(folder, band)) for band in range(num_bands)]

    @classmethod
    def of(
        cls, order: NDArray[np.uint32], bands: BandFiles, engine: ShardEngine, *, num_bands: int, most: int
    ) -> "BandGroups":
        """The groups of some documents, in the order in which they are taken. most: candidates of a group, at most
        65,535.
        """
        _write(order, _order_file(bands.folder))
        jobs = [GroupJob(bands, band, most) for band in range(num_bands)]
        for _ in (engine if len(order) >= _FEWEST_IN_WORKERS else InProcess()).map(group_band, jobs):
            pass  # the results are files
        return cls(order, bands.folder, num_bands)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Each document with the places of its groups, in order."""
        for start in range(0, len(self.order), _READ_AT_ONCE):
            stop = min(len(self.order), start + _READ_AT_ONCE)
            rows = np.stack([places.read(np.uint32, start, stop) for places in self._places], axis=1)
            in_group = np.flatnonzero((rows != NO_NUMBER).any(axis=1))
            yield from zip(self.order[start + in_group].tolist(), rows[in_group].tolist(), strict=True)

    def at(self, position: int) -> list[int]:
        """The places of the groups of one document, by its position in the order."""
        return [int(places.read(np.uint32, position, position + 1)[0]) for places in self._places]

    def groups(self, places: Sequence[int]) -> list[tuple[memoryview, int]]:
        """The slots of each band in which a document shares a group, with the place of the group."""
        return [(self.slots[band], place) for band, place in enumerate(places) if place != NO_NUMBER]


def kept_in(band: memoryview, place: int) -> memoryview:
    """The documents of a group that are kept, as far as there was room for them."""
    return band[place + 1 : place + 1 + (band[place] & _FILL)]


def keep_in(groups: Sequence[tuple[memoryview, int]], number: int) -> None:
    """Put a document that is kept into its groups, where there is room."""
    for band, place in groups:
        head = band[place]
        if head & _FILL < head >> _FILL_BITS:
            band[place + 1 + (head & _FILL)] = number
            band[place] = head + 1


def _order_file(folder: Path) -> Path:
    return folder / "order.bin"


def _places_file(folder: Path, band: int) -> Path:
    return folder / f"places{band:02d}.bin"


def _slots_file(folder: Path, band: int) -> Path:
    return folder / f"slots{band:02d}.bin"


def _write(values: NDArray[Any], path: Path) -> None:
    """A worker that was given up may still be at work on the same band, so a file is replaced as a whole."""
    partial = path.with_suffix(f".{uuid4().hex}")
    values.tofile(partial)
    partial.replace(path)
