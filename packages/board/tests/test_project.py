"""Names that the board knows without loading the main package match the main package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from board_runs import wait_for
from modelwright.cli.main import usable_commands
from modelwright.cli.recipes import recipe_names
from modelwright.data.clean.config import STEPS
from modelwright.pipeline.exports import EXPORTS
from modelwright_board import project
from modelwright_board.forms import forms_of
from modelwright_board.screens import SCREENS


def test_formats_recipes_and_commands_are_those_of_the_package(tmp_path: Path) -> None:
    (form,) = (one.fields["form"] for one in forms_of("smaller") if one.name == "export")
    offered = {word for word, _ in form.choices}
    formats = {name: export for name, export in EXPORTS.items() if name != "hub"}  # an upload is no button
    dtypes = {f"--dtype {dtype} --to {name}" for name, export in formats.items() for dtype in export.dtypes}
    assert offered == {f"--to {name}" for name in formats} | dtypes
    assert sorted(project.recipe_names()) == sorted(recipe_names())
    needed = {action.needs for screen in SCREENS for action in screen.actions if action.needs}
    assert {"drift", "plan", "show"} <= needed
    assert {name for name in needed if project.has_command(name)} == needed & set(usable_commands())
    assert not project.has_command("nonsense")


@pytest.mark.slow  # on a busy machine, the command waits before it measures
def test_settings_and_remedies_are_asked_once(tmp_path: Path) -> None:
    text = wait_for(lambda: project.recipe_settings("tiny", tmp_path), 240)
    assert yaml.safe_load(text)["name"] == "tiny"
    remedies = wait_for(lambda: project.cleaning_remedies(tmp_path))
    assert remedies == {reason: option for step in STEPS for reason, option in step.remedies.items()}
    assert project.recipe_settings("../tiny", tmp_path) == ""


LIMITS = {"Python": 2730, "templates, styles, tables and script": 840, "script": 241}
"""Most lines of the board; a number here may only be lowered."""


def test_the_board_does_not_grow() -> None:
    kinds = {
        "Python": (".py",), "script": (".js",),
        "templates, styles, tables and script": (".jinja", ".css", ".yaml", ".js"),
    }  # fmt: skip
    paths = [path for path in Path(project.__file__).parent.rglob("*") if path.is_file()]
    lines = {
        kind: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths if path.suffix in suffixes)
        for kind, suffixes in kinds.items()
    }
    assert {kind: number for kind, number in lines.items() if number > LIMITS[kind]} == {}


def test_the_board_loads_no_torch() -> None:
    code = "import sys, json, modelwright_board.server; print(json.dumps(sorted(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(shown.stdout)}
    assert loaded.isdisjoint({"torch", "transformers", "matplotlib", "pandas", "plotly"})
