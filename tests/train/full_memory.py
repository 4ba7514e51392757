"""Runs that meet the end of their memory, for `test_out_of_memory`.

As a script, `full_memory.py FOLDER MARGIN_BYTES MICROBATCHES ROWS` runs `under_limit` and prints what it returns.
"""

import json
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_run
import torch

from modelwright.core.config import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.technique import StepInfo
from modelwright_claims.memory_probe import RandomRows

BATCH_TOKENS = 4096
SHAPE = ModelConfig(
    vocab_size=64, num_layers=4, model_dim=64, num_heads=4, num_kv_heads=4, ffn_dim=256, head_dim=16,
    max_seq_len=BATCH_TOKENS,
)  # fmt: skip


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@dataclass
class LiftLimit:
    """Controller that lifts the limit after the first step: what writes checkpoints aborts where it gets no memory."""

    every: int = 1

    def observe(self, info: StepInfo) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def under_limit(folder: Path, margin: int, num_microbatches: int, num_rows: int) -> dict[str, list[float]]:
    """Train two steps; return the losses, and the numbers of microbatches that were not the one asked for.

    margin: bytes by which the address space may grow once the model stands; 0 means no limit. A step of a small model
    comes first, because libraries make buffers and threads of their own.
    """
    tiny_run.run(folder / "warm", tiny_run.settings(num_steps=1))
    model = Decoder(SHAPE)
    model.init_weights(0)
    if margin:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + margin, hard))
    config = tiny_run.settings(
        num_steps=2,
        batch_tokens=BATCH_TOKENS,
        gradient_accumulation_steps=num_microbatches,
        eval_every_steps=0,
        checkpoint_every_steps=0,
        keep_best=False,
    )
    rows = RandomRows(num_rows, BATCH_TOKENS // num_rows, SHAPE.vocab_size)
    arguments = {"objective": NextToken(rows), "model": model, "heldout": [], "world": single()}
    tiny_run.run(folder, config, techniques=tiny_run.watching(lift=LiftLimit()), **arguments)
    records = read_records(folder / "metrics.jsonl")
    parts = [value for _, value in column(records, "num_microbatches")]
    return {"losses": [value for _, value in column(records, "loss")], "parts": parts}


@dataclass(frozen=True)
class Ended:
    """How a rank's run ended."""

    weights: dict[str, torch.Tensor]
    error: str = ""
    notes: list[str] = field(default_factory=list)
    """What was said about the retry of steps."""


def on_ranks(world: World, folder: Path) -> dict[str, Ended]:
    """Where the second start of `twice` has room for all, its number of microbatches comes from the checkpoint."""
    ended = {}
    rigid = {"overlap": (ParallelConfig(shared_memory=False), True), "tensor": (ParallelConfig(tensor=2), False)}
    for name, (layout, overlap) in rigid.items():
        full = tiny_run.Full(NextToken(tiny_run.Rows()), 0, 100, 1)
        ended[f"{name}-full"] = run_on_rank(folder / f"{name}-full", full, layout, world, 0, overlap=overlap)
    cases = [("whole", 100, 0), ("full", 1, 0), ("never", 0, 0), ("twice", 1, 8), ("twice", 100, 0)]
    for name, layout in {"one-copy": ParallelConfig(), "copies": ParallelConfig(shared_memory=False)}.items():
        for what, most_rows, stop in cases:
            full = tiny_run.Full(NextToken(tiny_run.Rows()), 5, 100, most_rows if world.rank == 1 else 100)
            ended[f"{name}-{what}"] = run_on_rank(folder / f"{name}-{what}", full, layout, world, stop)
    return ended


@dataclass
class Notes(SilentProgress):
    """Keeps what it is told."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run_on_rank(
    folder: Path,
    objective: tiny_run.Full,
    parallel: ParallelConfig,
    world: World,
    stop: int,
    *,
    overlap: bool = False,
) -> Ended:
    model, progress, problem = tiny_run.tiny_model(), Notes(), ""
    config = tiny_run.settings(eval_every_steps=0, gradient_sync={"overlap": overlap})
    arguments = {"objective": objective, "model": model, "parallel": parallel, "heldout": [], "world": world}
    arguments["progress"] = progress
    try:
        tiny_run.run(folder, config, techniques=tiny_run.watching(stop=tiny_run.StopAfter(stop)), **arguments)
    except ModelwrightError as error:
        problem = str(error)
    notes = [note for note in progress.notes if "out-of-memory retry" in note]
    # A model that was laid out has no values after an error.
    weights = {} if problem else {key: value.clone() for key, value in model.state_dict().items()}
    return Ended(weights, problem, notes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    margin, num_microbatches, num_rows = map(int, sys.argv[2:])
    print(json.dumps(under_limit(Path(sys.argv[1]), margin, num_microbatches, num_rows)))
