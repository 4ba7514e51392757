"""Training with its tensors in an arena: the bits of training without, whatever happens between and amid steps."""

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.core.errors import ConfigError, Stopped
from modelwright.core.records import column, read_records
from modelwright.memory import step_arena_build, step_arena_runtime
from modelwright.memory.step_arena_runtime import StepAllocator
from modelwright.objectives.next_token import NextToken
from wired_cases import COPIES, Runs, case, values, weights

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None, reason="is built on Linux, by g++"
)
LEAST_BYTES = 1024
"""Nearly all tensors of the tiny run; its rows differ so much that much of them is missed at times."""
STEPS = {"num_steps": 16}
CASES = {
    "plain": {},
    "microbatches": {"gradient_accumulation_steps": 4},
    "recomputed": {"activation_checkpointing": {"mode": "full", "layers_per_segment": 1}},
    "in-backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "int8": {"optimizer": "adamw_8bit"},
    "bf16": {"precision": {"policy": "bf16_mixed"}},
    "sparse": {"sparse_updates": {"kind": "columns"}, "batch_selection": {"signal": "loss", "probe_tokens": 4}},
    "rows within a limit": {"batch_selection": {"signal": "loss", "probe_tokens": 4, "max_initial_loss": 0.99}},
}


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(step_arena_runtime, "LEAST_BYTES", LEAST_BYTES)
    monkeypatch.setattr(step_arena_runtime, "MOST_MISSED", 0.9)
    yield
    assert StepAllocator().living_bytes() == 0


def served(folder: Path) -> list[tuple[int, float]]:
    return column(read_records(folder / "metrics.jsonl"), "arena_hit_rate")


def assert_same(tiny, one: Path, other: Path, step: int = 16) -> None:
    left, right = (tiny.final_weights(folder, step) for folder in (one, other))
    assert all(torch.equal(left[name], right[name]) for name in left)
    for metric in ("loss", "grad_norm", "heldout_loss"):
        recorded = [column(read_records(folder / "metrics.jsonl"), metric) for folder in (one, other)]
        assert recorded[0] == recorded[1]


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(tiny, tmp_path, name):
    """Evaluations and checkpoints amid them."""
    changes: dict[str, Any] = {**STEPS, **CASES[name]}
    for folder, arena in (("without", False), ("with", True)):
        tiny.run(tmp_path / folder, tiny.settings(step_arena=arena, **changes))
    assert_same(tiny, tmp_path / "without", tmp_path / "with")
    assert served(tmp_path / "without") == []
    found = served(tmp_path / "with")
    assert [step for step, _ in found] == list(range(4, 17))
    assert min(share for _, share in found) > 0.2


def test_a_run_that_stops_and_goes_on(tiny, tmp_path):
    config = tiny.settings(step_arena=True, **STEPS)
    with pytest.raises(Stopped):
        tiny.run(tmp_path / "twice", config, techniques=tiny.watching(stop=tiny.StopAfter(7)))
    tiny.run(tmp_path / "twice", config)
    tiny.run(tmp_path / "once", tiny.settings(**STEPS))
    assert_same(tiny, tmp_path / "once", tmp_path / "twice")
    assert [step for step, _ in served(tmp_path / "twice")] == [4, 5, 6, 7, *range(11, 17)]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_made_again_in_smaller_microbatches(tiny, tmp_path, batch):
    """While steps are recorded, and while they are replayed; new records follow."""
    for folder, arena in (("without", False), ("with", True)):
        objective = tiny.Full(NextToken(tiny.Rows()), batch, batch, most_rows=2)
        tiny.run(tmp_path / folder, tiny.settings(step_arena=arena, **STEPS), objective=objective)
    assert_same(tiny, tmp_path / "without", tmp_path / "with")
    replayed = [step for step, _ in served(tmp_path / "with")]
    assert replayed == [*range(4, batch + 1), *range(batch + 4, 17)]
    parts = [value for _, value in column(read_records(tmp_path / "with" / "metrics.jsonl"), "num_microbatches")]
    assert set(parts) == {4.0}


def test_a_run_without_a_compiler_ends_early(tiny, tmp_path, monkeypatch):
    step_arena_build.allocator.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(ConfigError, match=r"step_arena: .*'no-such-compiler'; set step_arena to false"):
        tiny.run(tmp_path / "run", tiny.settings(step_arena=True))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    monkeypatch.undo()


WIDE = {"num_layers": 2, "ffn_dim": 1024}


def test_two_processes(tmp_path):
    """Copies of the model, whose sums begin in backward; parts of one; and Hogwild, whose bits nothing repeats."""
    layouts = {"copies": COPIES, "sharded": {"parallel": {"zero_stage": 3}}}
    cases = [
        case(f"{name}-{arena}", settings={"step_arena": arena == "with"}, shape=WIDE, **layout)
        for name, layout in layouts.items()
        for arena in ("without", "with")
    ]
    hogwild = {"step_arena": True, "async_updates": {"mode": "hogwild"}}
    runs = Runs(tmp_path, [*cases, case("hogwild", settings=hogwild, shape=WIDE)])
    assert values(runs, "hogwild", "arena_hit_rate")
    for name in layouts:
        assert values(runs, f"{name}-with", "arena_hit_rate")
        for rank in range(2):
            left, right = (weights(runs, f"{name}-{arena}", rank) for arena in ("without", "with"))
            assert all(torch.equal(left[key], right[key]) for key in left)
