"""docs/troubleshooting.md: every kind of event is on the page, and its errors are texts of the code."""

import ast
import re
from pathlib import Path
from typing import get_args

import modelwright
from modelwright.pipeline.report.results import EVENT_KINDS
from modelwright.serve.ab.experiment import GUARDS, REASONS
from modelwright.serve.engines.client import ENGINE_LOSSES, EngineEnd
from modelwright_continual.drift.features import ALARMS, EMBEDDING, FEATURES

ROOT = Path(__file__).parents[2]
PACKAGE = Path(modelwright.__file__ or "").parent
SOURCES = (*PACKAGE.rglob("*.py"), *ROOT.glob("packages/*/modelwright_*/**/*.py"))
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


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


def test_the_alarms_of_all_monitors_are_on_the_page() -> None:
    assert set(ALARMS) == {*(feature.name for feature in FEATURES), EMBEDDING}
    assert set(REASONS) == {*GUARDS, "sample_ratio"}
    assert set(ENGINE_LOSSES) == {*get_args(EngineEnd)} - {"stopped"}
    for kinds in (EVENT_KINDS, ALARMS, REASONS, ENGINE_LOSSES):
        for name, kind in kinds.items():
            assert f"| {kind.name} | `{name}` | {kind.advice} |" in PAGE


def test_the_errors_of_the_page_are_texts_of_the_code() -> None:
    """A text that was rewritten has to be rewritten on the page, too: people search it for what they see."""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # literals that continue on the next line
    errors = re.findall(r"^\| `([^`]+)` \| [^|]+ \|$", PAGE, flags=re.MULTILINE)
    assert len(errors) > 25
    assert [text for text in errors if text not in code] == []
