"""`LookaheadLoader`: has the rows of the batches to come read, in the order that the plan of batches knows."""

from modelwright.data.batch import TokenBatch
from modelwright.data.batching.augmented import PlannedRows
from modelwright.data.cache.reader import BlockReader
from modelwright.data.loader import RowShare


class LookaheadLoader:
    """The batches of `loader`, whose rows `reader` reads. num_ahead: batches that are read before they are needed."""

    def __init__(self, loader: PlannedRows, reader: BlockReader, *, num_ahead: int) -> None:
        self.loader = loader
        self.rows = loader.rows
        self.reader = reader
        self.num_ahead = num_ahead
        self._fork = loader.fork()
        self._plan = (loader.plan_version, 0, 1)
        self._coming: dict[int, list[int]] = {}
        """Rows of the batches to come, by the number of the batch."""

    @property
    def num_batches_per_epoch(self) -> int:
        return self.loader.num_batches_per_epoch

    @property
    def plan_version(self) -> tuple[int, int]:
        return self.loader.plan_version

    def fork(self) -> PlannedRows:
        """A loader with the same plan. It is asked for plans of other batches and has nothing read."""
        return self.loader.fork()

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """The rows of `batch`, which is read next."""
        share = self.loader.share(index, rank=rank, world_size=world_size)
        self._look_ahead(index, rank, world_size)
        return share

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """This rank's share of global batch `index`, as the loader's."""
        share = self.share(index, rank=rank, world_size=world_size)
        return self.rows.gather(share.groups, share.num_tokens).padded(1)

    def _look_ahead(self, index: int, rank: int, world_size: int) -> None:
        plan = (self.loader.plan_version, rank, world_size)
        if plan != self._plan:
            self._fork, self._plan, self._coming = self.loader.fork(), plan, {}
        coming = range(index, index + 1 + self.num_ahead)
        for number in coming:
            if number not in self._coming:
                share = self._fork.share(number, rank=rank, world_size=world_size)
                self._coming[number] = self.rows.rows_of(share.groups).tolist()
        self._coming = {number: self._coming[number] for number in coming}
        self.reader.expect(row for rows in self._coming.values() for row in rows)
