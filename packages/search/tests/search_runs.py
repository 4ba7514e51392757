"""A small run to search in: rows of random words, packed once, and spaces of a few candidates."""

import random
import shutil
from pathlib import Path
from typing import Any

from modelwright.cli.main import main
from modelwright.core.artifacts import RunDir
from modelwright.core.progress import SilentProgress
from modelwright.core.records import read_records
from modelwright.recipes.load import load
from modelwright_search.result import SearchResult
from modelwright_search.run import SearchConfig, search

SHAPES = "layers: [1, 2]\nwidth: [32, 48]\nheads: [2, 4]\nattention: [mha, mqa]\nffn: [64, 96]\n"
"""96 shapes, with the gates."""
NO_LIMIT = {"max_latency_ms": 1e6, "max_parameters": 10**9}
"""Limits that no candidate exceeds, so that comparisons in tests do not depend on times."""


def pack_rows(folder: Path) -> Path:
    """A run with finished rows of 64 tokens."""
    dice, run = random.Random(3), folder / "packed"
    words = [a + b for a in ("ka", "lo", "mi", "ru") for b in ("na", "ri", "sto", "va", "len")] + ["the", "of", "and"]
    (folder / "text").mkdir()
    for number in range(16):
        lines = [" ".join(dice.choice(words) for _ in range(12)).capitalize() + "." for _ in range(12)]
        (folder / "text" / f"{number}.txt").write_text("\n".join(lines))
    settings = ["--data.sources", str(folder / "text"), "--data.validation_fraction=0.2", "--tokenizer.vocab_size=300"]
    settings += ["--pack.seq_len=64", "--model.max_seq_len=64", "--model.vocab_size=304"]
    settings += ["--pretrain.batch_tokens=256"]
    settings += ["--pretrain.num_steps=1", "--pretrain.eval_every_steps=0", "--validation_tokens=512"]
    stages = "clean,tokenize,pack,pretrain"
    assert main(["run", "tiny", "--run-dir", str(run), "--stages", stages, *settings]) == 0
    (folder / "shapes.yaml").write_text(SHAPES)
    return run


def copied(run: Path, folder: Path) -> Path:
    """Copies the run to another folder, to search in it."""
    return Path(shutil.copytree(run, folder / "run"))


def wish(run: Path, **changes: Any) -> SearchConfig:
    """Returns a search of a second or two without limits. run: run of `pack_rows`, next to the file of the space."""
    settings: dict[str, Any] = {"budget": 2.0, "num_steps": 4, "strategies": ("random",), "num_repetitions": 0}
    settings |= {"space": str(run.parent / "shapes.yaml"), **NO_LIMIT}
    return SearchConfig(**{**settings, **changes})


def search_in(run: Path, wishes: SearchConfig, *, restart: bool = False) -> SearchResult:
    config = load(str(run), {}).config
    return search(config, RunDir(run), wishes, words=[], progress=SilentProgress(), restart=restart)


def trials_of(run: Path) -> list[tuple[Any, ...]]:
    """Returns the trials of a search, in order, without times."""
    records = [record for record in read_records(run / "search" / "journal.jsonl") if record["kind"] == "trial"]
    return [(one["strategy"], one["number"], one["choices"], one["share"], one["loss"], one["cost"]) for one in records]
