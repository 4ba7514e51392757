"""The kernels that a run computes with: in its run.json, of the first rank, and the same when it goes on."""

import os
from pathlib import Path
from typing import Any

import pytest

from distributed import run_distributed
from modelwright.core.artifacts import RunDir
from modelwright.ops import cpu_kernels
from modelwright.parallel.mesh import World, single
from modelwright.pipeline.process_group import kernels_of_run


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, name: str, total: float, unit: str) -> None: ...

    def advance(self, done: float, **fields: float | str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """On a machine with AVX2, without a setting of the user."""
    monkeypatch.setattr(cpu_kernels, "instruction_set", lambda: "avx2")
    monkeypatch.delenv(cpu_kernels.SWITCH, raising=False)
    run = RunDir(tmp_path)
    run.create()
    return run


def choice_of(run: RunDir) -> tuple[dict[str, Any], list[str]]:
    """That of the next invocation, which is written, and what it said."""
    shown = Notes()
    with kernels_of_run(run, single(), shown) as choice:
        assert cpu_kernels.used() == set(choice["used"])
    info = run.read_info() if run.info.exists() else {"invocations": [], "stages": {}}
    info["invocations"].append({"kernels": dict(choice)})
    run.write_info(info)
    return dict(choice), shown.notes


def test_a_new_run_takes_what_is_faster_here_and_leaves_the_process_as_it_was(run: RunDir):
    choice, notes = choice_of(run)
    assert choice == {"instruction_set": "avx2", "used": sorted(cpu_kernels.used())}
    assert "attention" in choice["used"]
    assert (notes, cpu_kernels.SWITCH in os.environ) == ([], False)


def test_a_run_that_goes_on_keeps_its_kernels_whatever_is_faster_by_now(run: RunDir, monkeypatch):
    first, _ = choice_of(run)
    monkeypatch.setattr(cpu_kernels, "kernels_for", lambda name: frozenset())
    cpu_kernels._selected.cache_clear()
    try:
        assert not cpu_kernels.used()
        assert choice_of(run) == (first, [])
    finally:
        cpu_kernels._selected.cache_clear()


def test_another_instruction_set_and_the_users_setting_are_told(run: RunDir, monkeypatch):
    choice_of(run)
    monkeypatch.setenv(cpu_kernels.SWITCH, "norm")
    choice, (note,) = choice_of(run)
    assert choice["used"] == ["norm"]
    assert "MODELWRIGHT_CPU_KERNELS differs from what the run used" in note
    assert os.environ[cpu_kernels.SWITCH] == "norm"
    monkeypatch.delenv(cpu_kernels.SWITCH)
    assert choice_of(run)[0]["used"] == ["norm"]
    monkeypatch.setattr(cpu_kernels, "instruction_set", lambda: "")
    choice, (note,) = choice_of(run)
    assert choice == {"instruction_set": "", "used": []}
    assert "the run began with avx2 and continues with no kernels" in note


def used_by_rank(world: World, folder: Path) -> tuple[list[str], list[str]]:
    os.environ[cpu_kernels.SWITCH] = "norm,int8" if world.is_first else "0"
    if not world.is_first:
        cpu_kernels.instruction_set = lambda: "x86-64"
    shown = Notes()
    with kernels_of_run(RunDir(folder), world, shown):
        return sorted(cpu_kernels.used()), shown.notes


@pytest.mark.skipif(not cpu_kernels.instruction_set(), reason="needs a C++ compiler")
def test_all_ranks_take_the_first_ones(tmp_path: Path):
    (first, notes), (second, _) = run_distributed(used_by_rank, 2, tmp_path)
    assert first == second == ["int8", "norm"]
    assert notes == [f"kernels: ranks compute with {cpu_kernels.instruction_set()} and x86-64"]
