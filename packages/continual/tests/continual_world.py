"""A first model with the benchmark of its updates, and the command line of an update."""

from dataclasses import dataclass
from pathlib import Path

from continual_update import QUICK
from modelwright_continual.benchmark import Benchmark

ADMIN = {"Authorization": "Bearer root"}
LOG = "requests.sqlite"
"""The server's log, in the folder of the test."""
KILLER = Path(__file__).parent / "killed_loop.py"
BASE = ("--sft.num_steps=20", "--sft.learning_rate=5e-3", "--sft.gradient_accumulation_steps=1")


@dataclass(frozen=True)
class World:
    """`folder` has the texts; base: the run of the first model, quantized and served."""

    folder: Path
    base: Path
    benchmark: Benchmark

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


def words_of(world: World, run: Path, *more: object, new: Path | None = None, model: Path | None = None) -> list[str]:
    """The command line of an update."""
    words = ["continual", "run", model or world.base, new or world.file("new"), "--benchmark", world.benchmark.folder]
    return [str(word) for word in [*words, "--run-dir", run, "--replay", "0.25", "--max-uses", "50", *more, *QUICK]]
