"""The tiers of a cache that a test has to itself, whatever runs on the host besides."""

import os
from pathlib import Path
from typing import Any

import pytest

from modelwright.data.rows.cache import row_cache
from modelwright.data.rows.cache.reader import BlockReader


def use_own_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give caches of this process a folder in place of the host's folder in memory."""
    folder.mkdir()
    monkeypatch.setattr(row_cache, "memory_folder", lambda: folder)
    return folder


def open_tiers(pid: int) -> set[Path]:
    """The folders of the tiers that a process is using."""
    try:
        links = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:  # it ended, or a file was closed meanwhile
        return set()
    return {Path(link).parent for link in links if link.endswith("/slots.bin")}


def wait_for_expected(reader: BlockReader[Any]) -> None:
    """Wait until everything is there that a reader was told to expect."""
    reader.background.submit(lambda: None).result(60)
    for cuts in reader._expected.values():
        for cut in cuts:
            cut.result(60)
