"""The page of symptoms, causes and commands is made of the texts that exist, and is current."""

import ast
import re
from pathlib import Path

import pytest

import modelwright
from modelwright.cli.main import main
from modelwright.cli.troubleshooting import INSERTED, error_names, explained, known_errors, markdown
from modelwright.pipeline.report.watch import EVENT_KINDS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(modelwright.__file__).parent


def test_the_page_is_current() -> None:
    """python -m modelwright.cli.troubleshooting > docs/troubleshooting.md"""
    assert (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8") == markdown()


def reported_kinds() -> set[str]:
    """The kinds with which monitors and techniques report events: the second argument of each call of `report`."""
    kinds: set[str] = set()
    for path in (PACKAGE / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) >= 4:
                kind = node.args[1]
                if node.func.attr in ("report", "_judge") and isinstance(kind, ast.Constant):
                    kinds.add(kind.value)
    return kinds


def test_every_kind_of_event_has_its_advice() -> None:
    from modelwright.train.monitors.anomalies import SKIPPED

    kinds = reported_kinds() | {kind for kind, _ in SKIPPED.values()}
    assert {"straggler", "rollback", "loss_spike", "data_stall", "out_of_memory"} <= kinds
    assert kinds == set(EVENT_KINDS)


def test_errors_are_found_with_those_that_derive_from_others() -> None:
    source = "class A(ModelwrightError): pass\nclass B(A, ValueError): pass\nclass C(Exception): pass"
    assert error_names([ast.parse(source)]) == {"ModelwrightError", "A", "B"}


def test_an_error_that_a_user_meets_is_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["lr-find", "tiny", "--out", str(tmp_path / "file")]) == 2
    line = capsys.readouterr().err.strip().removeprefix("modelwright: ")
    fitting = [
        error
        for error in known_errors()
        if re.fullmatch(re.escape(f"{error.symptom}; {error.remedy}").replace(INSERTED, ".+"), line)
        and error.symptom != INSERTED
    ]
    assert any(error.symptom == f"--out: {INSERTED} is a file" and "--out" in error.commands for error in fitting)


def test_settings_in_advice_become_commands() -> None:
    assert explained("lower learning_rate (precision.policy)") == [
        "modelwright explain pretrain.learning_rate",
        "modelwright explain training.precision.policy",
    ]
    assert explained("look at the disk and at other_processes") == []
