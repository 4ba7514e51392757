"""Event logs and robust statistics have one implementation each: in `core.records` and `techniques.loss_spikes`."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import modelwright

PACKAGE = Path(modelwright.__file__).parent
LINE_WRITERS = {
    "core/records.py": "metrics of every step, and events",
    "core/artifacts.py": "the lock of a run",
    "evaluate/suite.py": "results for each document and question, written once",
    "pipeline/cleaning.py": "the quarantine of records, written anew by every reading",
    "pipeline/runner.py": "log.txt, which is not JSON",
    "train/interruption.py": "stacks of threads, by faulthandler",
}
"""Files that may append to a file or write lines of JSON, and what they write."""
DEVIATIONS = {
    "train/techniques/loss_spikes.py": "limits for outliers",
    "train/techniques/gradient_clipping.py": "the published limit of adaptive clipping, by mean and deviation",
    "train/precision/indicators.py": "the variation of gradient norms, which is no limit",
}
"""Files that may compute standard deviations and median absolute deviations of plain numbers."""
STATISTICS = {"stdev", "pstdev", "variance", "pvariance", "quantiles"}
MAD_TO_SIGMA = 1.4826


def name_of(call: ast.Call) -> str:
    """`statistics.median(...)` and `median(...)` -> median."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def constants(call: ast.Call) -> Iterator[object]:
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        yield from (node.value for node in ast.walk(value) if isinstance(node, ast.Constant))


def is_append(node: ast.AST) -> bool:
    """`open(path, "a")`, `path.open("ab")`: with a mode that begins with an a, where only b, t and + may follow."""
    if not (isinstance(node, ast.Call) and name_of(node) == "open"):
        return False
    return any(isinstance(mode, str) and mode[:1] == "a" and set(mode[1:]) <= set("bt+") for mode in constants(node))


def is_json_line(node: ast.AST) -> bool:
    """`json.dumps(value) + "\\n"` and f"{json.dumps(value)}\\n", without indentation."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [node.left, node.right]
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
    else:
        return False
    ends = any(isinstance(part, ast.Constant) and str(part.value).endswith("\n") for part in parts)
    calls = [part for part in parts if isinstance(part, ast.Call) and name_of(part) == "dumps"]
    return ends and any("indent" not in {keyword.arg for keyword in call.keywords} for call in calls)


def is_deviation(node: ast.AST) -> bool:
    """`statistics.pstdev(values)`, `median(abs(x - middle) for x in values)` and the factor of the MAD."""
    if isinstance(node, ast.Constant):
        return node.value == MAD_TO_SIGMA
    if not isinstance(node, ast.Call):
        return False
    if name_of(node) in STATISTICS:
        return isinstance(node.func, ast.Name) or ast.unparse(node.func).startswith("statistics.")
    inner = [one for value in node.args for one in ast.walk(value) if isinstance(one, ast.Call)]
    differences = [one for one in inner if name_of(one) == "abs" and any(isinstance(x, ast.BinOp) for x in one.args)]
    return name_of(node) == "median" and bool(differences)


def violations(source: str, rules: tuple[Callable[[ast.AST], bool], ...]) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if any(rule(node) for rule in rules)]
    return [f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}" for node in nodes]


WRITING, JUDGING = (is_append, is_json_line), (is_deviation,)


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ("open(path, 'a')", WRITING),
        ("self.path.open('a', encoding='utf-8')", WRITING),
        ("open(path, mode='ab')", WRITING),
        ("open(path, 'a' if resumed else 'w')", WRITING),
        ("''.join(json.dumps(event) + '\\n' for event in events)", WRITING),
        ("f'{json.dumps(event)}\\n'", WRITING),
        ("1.4826 * spread", JUDGING),
        ("median(abs(x - middle) for x in values)", JUDGING),
        ("statistics.median([abs(x - middle) for x in values])", JUDGING),
        ("mean + 3 * statistics.pstdev(values)", JUDGING),
    ],
)
def test_each_form_is_found(source: str, rules: tuple[Callable[[ast.AST], bool], ...]) -> None:
    assert violations(source, rules)


@pytest.mark.parametrize(
    "source",
    [
        "open(path, encoding='utf-8')",
        "write_atomic(path, json.dumps(settings, indent=1) + '\\n')",
        "median(times)",
        "tensor.quantile(0.5)",
    ],
)
def test_similar_code_is_no_violation(source: str) -> None:
    assert not violations(source, WRITING + JUDGING)


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "allowed"), [(WRITING, LINE_WRITERS), (JUDGING, DEVIATIONS)])
def test_the_package_has_one_implementation(
    rules: tuple[Callable[[ast.AST], bool], ...], allowed: dict[str, str]
) -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {name: violations(source, rules) for name, source in sources.items()}
    assert {name: lines for name, lines in found.items() if lines and name not in allowed} == {}
    assert [name for name in allowed if not found[name]] == [], "take it out of the list"
