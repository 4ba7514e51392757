"""A checkout of an earlier commit runs with its own entry points, whatever this environment has installed."""

import os
import subprocess
import sys
from pathlib import Path

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
