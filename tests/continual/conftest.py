"""A first model, trained once for all tests of this package, and the benchmark of its updates."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from continual_update import QUICK, write_world
from modelwright.cli.main import main
from modelwright.continual.benchmark import Benchmark, load_benchmark

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


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = write_world(tmp_path_factory.mktemp("continual"))
    settings = [word for word in QUICK if not word.startswith("--average")]
    words = ["run", "finetune", "--init-from", folder / "model", "--data.sources", folder / "old.jsonl"]
    words += ["--stages", "clean,pack,sft,quantize", "--run-dir", folder / "base", *settings, *BASE]
    assert main([str(word) for word in words]) == 0
    frozen = ["continual", "freeze", folder / "bench", "--old", folder / "old-heldout.jsonl"]
    assert main([str(word) for word in [*frozen, "--new", folder / "new-heldout.jsonl"]]) == 0
    return World(folder, folder / "base", load_benchmark(folder / "bench"))


@pytest.fixture(scope="session")
def released(world: World) -> Path:
    """The run of a clean update that nobody disturbed, up to its release."""
    run = world.folder / "runs" / "next"
    assert main(words_of(world, run)) == 0
    return run
