"""Size and coupling of the training core: what keeps a new technique or objective from touching it."""

import ast
import inspect
from pathlib import Path

import pytest

import modelwright
from modelwright.core.sinks import SINKS
from modelwright.pipeline.stages.specs import known_stages

PACKAGE = Path(modelwright.__file__).parent
MOST_STEP_LINES = 120
MOST_CLASS_LINES = 250
MOST_FUNCTION_LINES = 80
MOST_SINK_LINES = 50


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_step_is_short_and_names_no_technique() -> None:
    path = PACKAGE / "train" / "step.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_STEP_LINES
    imported = [node.module or "" for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    named = ("train.techniques", "train.monitors", "parallel.strategies", "parallel.codecs")
    assert not [module for module in imported if any(part in module for part in named)]


@pytest.mark.parametrize("name", ["step", "trainer", "build"])
def test_the_training_core_asks_for_no_type(name: str) -> None:
    calls = [node for node in ast.walk(tree_of(PACKAGE / "train" / f"{name}.py")) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance"]


@pytest.mark.slow
def test_no_class_is_long() -> None:
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_CLASS_LINES}


def test_a_sink_of_another_tracker_is_short() -> None:
    """What it takes to add one: a class and a line of the list."""
    lengths = {spec.name: len(inspect.getsource(spec.open).splitlines()) for spec in SINKS}
    assert {"mlflow", "wandb"} <= lengths.keys()
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_SINK_LINES}


def test_techniques_are_listed_once() -> None:
    """Only `train/build.py` and a technique's own file import what builds it."""
    techniques = {path.stem for path in (PACKAGE / "train" / "techniques").glob("*.py")} - {"__init__"}
    core = [PACKAGE / "train" / f"{name}.py" for name in ("step", "technique", "objective", "work")]
    for path in core:
        imported = [node.module or "" for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in imported if module.rpartition(".")[2] in techniques], path.name


def test_no_function_of_the_pipeline_is_long() -> None:
    lengths = {
        f"{path.name}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in (PACKAGE / "pipeline").rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
    }
    assert len(lengths) > 200
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES}


def test_stages_are_listed_once() -> None:
    """Only the folder of the stages knows their names; everything else asks a `StageSpec`."""
    names = {stage.name for stage in known_stages()} - {"clean", "report"}  # these two are keys of facts, too
    named = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for package in ("pipeline", "recipes")
        for path in (PACKAGE / package).rglob("*.py")
        if "stages" not in path.parts
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert named == set()
