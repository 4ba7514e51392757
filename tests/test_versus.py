"""A checkout of an earlier commit runs with its own entry points, whatever this environment has installed, and decodes
in turn with this one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import versus

PROJECT = """
[project]
name = "modelwright-claims"
version = "0.0.1"

[project.entry-points."modelwright.commands"]
prove = "modelwright_claims.earlier:prove"
"""
PRINTED = """
from importlib.metadata import entry_points
print(*(one.value for one in entry_points(group="modelwright.commands", name="prove")))
"""


def test_entry_points_of_a_checkout_come_before_installed_ones(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (project,) = versus.project_files(tmp_path)
    versus.declare_entry_points(project)
    environment = {**os.environ, "PYTHONPATH": str(project.parent)}
    done = subprocess.run([sys.executable, "-c", PRINTED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["modelwright_claims.earlier:prove"]


def decoders(tasks: Mapping[str, Sequence[str]], asked: list[str]) -> Any:
    """A stand-in for `versus.decoder`: the n-th word of all is answered with the speed n."""

    @contextmanager
    def decoder(checkout: Path, folder: Path) -> Iterator[Callable[[str], Any]]:
        names = iter([*tasks[checkout.name], ""])

        def ask(word: str) -> Any:
            if word == "next":
                return next(names)
            asked.append(checkout.name)
            return float(len(asked))

        yield ask

    return decoder


def test_each_pair_of_decoding_is_measured_without_a_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(versus, "decoder", decoders({"a": ["x", "y"], "b": ["x", "y"]}, asked))
    found = list(versus.decoding({versus.NOW: Path("a"), versus.BEFORE: Path("b")}, tmp_path))
    assert [(side, *of) for side, of in found] == [
        (versus.NOW, "x"), (versus.BEFORE, "x"), (versus.NOW, "y"), (versus.BEFORE, "y")
    ]  # fmt: skip
    assert asked == ["a", "b", "b", "a"] * versus.NUM_TURNS
    now, before = found[0][1]["x"]["speed"], found[1][1]["x"]["speed"]
    assert [abs(one - other) for one, other in zip(now, before, strict=True)] == [1] * versus.NUM_TURNS


def test_commits_that_decode_different_things_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(versus, "decoder", decoders({"a": ["x"], "b": ["y"]}, []))
    with pytest.raises(SystemExit, match="x and y"):
        list(versus.decoding({versus.NOW: Path("a"), versus.BEFORE: Path("b")}, tmp_path))


def test_what_a_decoder_that_ends_wrote_is_shown(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "decode.py").write_text("raise RuntimeError('no engine here')\n")
    with versus.decoder(tmp_path, tmp_path) as ask, pytest.raises(SystemExit, match="no engine here"):
        ask("next")
