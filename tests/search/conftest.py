"""The rows that all searches of these tests train on."""

from pathlib import Path

import pytest
import torch
from search_runs import pack_rows


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return pack_rows(tmp_path_factory.mktemp("search"))
