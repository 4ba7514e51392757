"""Texts small enough for every test run, and ranks that start fast."""

import json
import random
from pathlib import Path

import pytest

from forked_ranks import fork_ranks

VOCAB_SIZE = 64


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked instead of started as interpreters."""
    fork_ranks(monkeypatch)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A folder with tokenized text as `workbench.prepare_text` leaves it; code has other tokens than prose."""
    draw = random.Random(0)
    for kind, first in (("prose", 1), ("code", 32)):
        documents = [[draw.randrange(first, first + 32) for _ in range(draw.randrange(2, 40))] for _ in range(240)]
        splits = {"train": documents[:200], "validation": documents[200:220], "test": documents[220:]}
        text = {"vocab_size": VOCAB_SIZE, "eos_id": 0, **splits}
        (tmp_path / f"{kind}.json").write_text(json.dumps(text))
    return tmp_path
