"""Settings of the cache of packed rows and images."""

from dataclasses import dataclass

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RowCacheConfig:
    """Keeps packed rows, and the images that belong to them, near while a stage trains, where they lie on a slow disk
    or on a store (docs/data.md)."""

    enabled: bool = False
    """Read training rows and images through the cache, and before they are needed. Batches are the same without it."""
    memory_bytes: int = 0
    """Bytes of memory on each host for the rows and images that are read most, shared by its processes; 0 is a tenth of
    all."""
    disk_bytes: int = 0
    """Bytes in `folder` for the rows and images that are read next most; 0 is three tenths of all."""
    folder: str = ""
    """Folder on a fast disk of each host; "" keeps rows and images in memory only."""
    num_batches_ahead: int = constant(8)
    """Batches whose rows and images are read before they are needed."""
    num_readers: int = constant(16)
    """Reads of rows at a time, and of images, of each process."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must be 0 or more, got {getattr(self, name)}")
        if self.disk_bytes and not self.folder:
            raise ConfigError("folder: is empty, but disk_bytes is set; name a folder on a fast local disk")
        if self.num_batches_ahead < 0 or self.num_readers < 1:
            raise ConfigError("num_batches_ahead, num_readers: must be 0 or more, and 1 or more")
