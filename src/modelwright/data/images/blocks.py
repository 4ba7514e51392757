"""`ImageLayout`: the blocks of the images of a store. They have equal sizes; an image may span several."""

from collections.abc import Sequence

from modelwright.data.cache.cold import ColdStore
from modelwright.data.cache.layout import BlockPart
from modelwright.data.images.index import FILE, ImageIndex


class ImageLayout:
    """`BlockLayout` of the images of an index, whose file `store` has."""

    title = "images"

    def __init__(self, index: ImageIndex, store: ColdStore) -> None:
        self._index = index
        self._store = store
        self.num_items = len(index)
        self.num_blocks = len(index.block_checksums)
        self.block_bytes = index.block_bytes
        self.total_bytes = index.num_bytes

    @property
    def identity(self) -> bytes:
        return self._index.block_checksums.tobytes() + self._store.url.encode()

    def blocks_of(self, item: int) -> Sequence[int]:
        first, last = self._index.span(item)
        return range(first // self.block_bytes, -(-last // self.block_bytes))

    def num_bytes_of(self, block: int) -> int:
        return min(self.block_bytes, self.total_bytes - block * self.block_bytes)

    def parts(self, block: int) -> list[BlockPart]:
        checksum = int(self._index.block_checksums[block])
        return [BlockPart(self._store, FILE, block * self.block_bytes, self.num_bytes_of(block), checksum)]

    def cut(self, item: int, block: int, content: bytes) -> bytes:
        first, last = self._index.span(item)
        start = block * self.block_bytes
        return content[max(0, first - start) : last - start]

    def join(self, cuts: Sequence[Sequence[bytes]]) -> list[bytes]:
        """The file of each image."""
        return [b"".join(of_image) for of_image in cuts]
