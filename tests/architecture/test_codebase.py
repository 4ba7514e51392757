"""The size and shape of the main package against limits.

**A limit may only ever be lowered.** Where one bites, the design gives way: code is removed, merged or moved into a
package that is built onto this one. Nobody raises a limit to let a change in. `python tests/architecture/codebase.py`
prints all figures, also of other checkouts side by side.
"""

import json
from pathlib import Path

import pytest
from codebase import ROOT, Walker, line_kinds, measure, read_modules

import cpu_budget

MOST = json.loads(Path(__file__).with_name("limits.json").read_text(encoding="utf-8"))
del MOST[cpu_budget.NAME]  # which a run of the fast tests is held to at its end
FURTHER = MOST.pop("lines that these subjects may add")
"""The one exception: these subjects were not begun when the limit on lines was set. No other subject joins them."""
LEAST = ("comments, % of lines",)
"""Figures whose limit is a lower one, which may only be raised."""


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return measure(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_a_limit_holds_and_may_only_be_lowered(name: str, figures: dict[str, float]) -> None:
    value, limit = figures[name], MOST[name] + (sum(FURTHER.values()) if name == "lines" else 0)
    holds = value >= limit if name in LEAST else value <= limit
    assert holds, f"{name}: {value:,} against {limit:,}; change the design, never the limit"


def test_the_kinds_of_lines_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text('"""One\ntwo."""\n\nimport os\n\n# why\nx = "a # b"  # not a line\n')
    (module,) = read_modules(tmp_path).values()
    assert line_kinds(module) == {"docstrings": 2, "blank": 2, "imports": 1, "comments": 1, "code": 1}


def test_a_value_is_followed_through_calls_in_their_order(tmp_path: Path) -> None:
    """From `top` to `low`, back up to `mid` and down again: one climb. What does not carry the value is not walked."""
    package = tmp_path / "package"
    for name, text in {
        "top/a.py": "from package.low.b import read\nfrom package.mid.c import check\n\n\n"
        "def run(words):\n    first = read(words)\n    check(first)\n    other(3)\n\n\ndef other(x):\n    check(x)\n",
        "low/b.py": "def read(words):\n    return words\n",
        "mid/__init__.py": "",
        "low/__init__.py": "",
        "mid/c.py": "from package.low import b\n\n\ndef check(first):\n    return b.read(first)\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    journey = Walker(read_modules(package), {"low": 1, "mid": 2, "top": 3}).walk("package.top.a", "run", "words")
    assert (journey.stays, journey.files, journey.climbs) == (4, 3, 1)
