"""The rows that all searches of these tests train on, and short measurements of latency."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from search_runs import pack_rows


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return pack_rows(tmp_path_factory.mktemp("search"))


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """No test depends on how well latency is measured."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATIENCE_ROUNDS", "MAX_ROUNDS", "ROUND_TOKENS", "WARMUP_TOKENS"):
            patch.setattr(f"modelwright_search.candidates.{name}", 1)
        yield
