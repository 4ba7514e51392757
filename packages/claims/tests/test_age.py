"""Records show their age, and are marked once a definition that they measured has changed."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelwright_claims import age
from modelwright_claims.age import Age, age_of, measured_definitions
from modelwright_claims.claim import Claim
from modelwright_claims.ledger import CLAIMS
from modelwright_claims.page import render, render_claim

TOY = "modelwright_toy"
"""A package of the product, as `age` sees it."""
CLAIM = """
from modelwright_claims.claim import Claim, Measurement, Verdict
from modelwright_toy import harness
from modelwright_toy.method import double as method

SIZE = 3

def measure(setting):
    return Measurement(samples={"speed": [run(harness.timed)]})

def run(timed):
    return timed(method, SIZE)

def judge(samples, conditions):
    return Verdict(kind="met", reason="")

CLAIM = Claim(name="doubling", statement="s", source="s", published="2x", compared="c", target="2x", measure=measure,
              judge=judge)
"""
METHOD = """
'''Doubles.'''

FACTOR = 2
'''The factor.'''

def double(value):
    '''Return it twice.'''
    return FACTOR * value

def halve(value):
    return value / 2
"""
HARNESS = """
from modelwright_toy.method import halve

def timed(call, value):
    return call(value)

def other(value):
    return halve(value)
"""
Commit = Callable[[str, str], str]


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Writes a file of a repository, commits it and returns the commit."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")

    def write(name: str, text: str) -> str:
        file = tmp_path / TOY / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        git("add", "-A")
        git("commit", "-qm", "m", "--allow-empty")
        age._git.cache_clear()
        return git("rev-parse", "--short=12", "HEAD").strip()

    return write


@pytest.fixture
def toy(commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Claim, str]]:
    """A claim in a package of its own, and the commit of its first measurement."""
    for name, text in {"__init__": "", "claim": CLAIM, "method": METHOD, "harness": HARNESS, "unused": METHOD}.items():
        first = commit(f"{name}.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    age._source.cache_clear()
    yield importlib.import_module(f"{TOY}.claim").CLAIM, first
    for name in [name for name in sys.modules if name.startswith(TOY)]:
        del sys.modules[name]
    age._source.cache_clear()


UNCHANGED = {
    "a comment": ("method.py", METHOD.replace("return FACTOR", "# twice\n    return FACTOR")),
    "docstrings": ("method.py", METHOD.replace("Return it", "Gives it").replace("The factor.", "By what.")),
    "layout": ("method.py", METHOD.replace("FACTOR * value", "(\n        FACTOR\n        * value\n    )")),
    "a function that is not used": ("method.py", METHOD.replace("value / 2", "value / 4")),
    "the rule": ("claim.py", CLAIM.replace('kind="met"', 'kind="short"')),
    "a module that is not imported": ("unused.py", METHOD.replace("FACTOR = 2", "FACTOR = 3")),
}
CHANGED = {
    "an imported function": ("method.py", METHOD.replace("FACTOR * value", "value * FACTOR")),
    "a constant that it uses": ("method.py", METHOD.replace("FACTOR = 2", "FACTOR = 3")),
    "an attribute of an imported module": ("harness.py", HARNESS.replace("call(value)", "call(call(value))")),
    "the claim's own setting": ("claim.py", CLAIM.replace("SIZE = 3", "SIZE = 4")),
    "a function that measure calls": ("claim.py", CLAIM.replace("timed(method, SIZE)", "timed(method, 1 + SIZE)")),
    "an import": ("claim.py", CLAIM.replace("import double as", "import halve as")),
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_what_measures_nothing_does_not_age_a_record(what: str, toy: tuple[Claim, str], commit: Commit) -> None:
    claim, first = toy
    assert age_of(claim, first) == Age(num_commits=0, changed=[])
    commit(*UNCHANGED[what])
    assert age_of(claim, first) == Age(num_commits=1, changed=[])


@pytest.mark.parametrize("what", CHANGED)
def test_a_change_of_a_measured_definition_ages_a_record(what: str, toy: tuple[Claim, str], commit: Commit) -> None:
    claim, first = toy
    name, text = CHANGED[what]
    before = {"claim.py": CLAIM, "method.py": METHOD, "harness.py": HARNESS}[name]
    commit(name, text)
    aged = age_of(claim, f"{first}-dirty")
    assert aged is not None
    assert f"{TOY}/{name}" in aged.changed
    commit(name, before)
    assert age_of(claim, first) == Age(num_commits=2, changed=[]), "changed back"


def test_a_module_that_only_moved_has_not_changed(toy: tuple[Claim, str], commit: Commit, tmp_path: Path) -> None:
    claim, first = toy
    (tmp_path / TOY / "method.py").rename(tmp_path / TOY / "moved.py")
    age._source.cache_clear()
    commit("claim.py", CLAIM.replace(f"{TOY}.method", f"{TOY}.moved"))
    assert age_of(claim, first) == Age(num_commits=1, changed=[])
    commit("moved.py", METHOD.replace("FACTOR = 2", "FACTOR = 3"))
    assert age_of(claim, first) == Age(num_commits=2, changed=[f"{TOY}/moved.py"])


def test_a_commit_that_git_does_not_know_has_no_age(toy: tuple[Claim, str]) -> None:
    claim, _ = toy
    assert age_of(claim, "0123456789ab") is None
    assert age_of(claim, "") is None


def test_measured_code_is_what_the_claim_uses_without_its_judging() -> None:
    claim = next(claim for claim in CLAIMS if claim.name == "bf16_mixed")
    names = {"/".join(file.parts[-2:]): of_file for file, of_file in measured_definitions(claim).items()}
    assert {"modelwright_claims/bf16_mixed.py", "modelwright_claims/workbench.py"} <= set(names)
    assert "train" in names["train/build.py"]
    assert not {"modelwright_claims/judging.py", "modelwright_claims/statistics.py"} & set(names)
    assert "judge" not in names["modelwright_claims/bf16_mixed.py"]
    serving = next(claim for claim in CLAIMS if claim.name == "serving_qps")
    started = {file.name for file in measured_definitions(serving)}
    assert {"naive_server.py", "open_loop.py"} <= started, "programs that are started, not imported"


def test_the_page_shows_age_and_change():
    claim = CLAIMS[0]
    record = {
        "name": claim.name, "statement": claim.statement, "compared": claim.compared, "target": claim.target,
        "kind": "met", "reason": "r", "figures": {}, "conditions": {}, "samples": {}, "quick": False, "wall_s": 1.0,
        "machine": {"processor": "p", "cores": 2, "instruction_set": "i"}, "threads": 2, "load_at_start": [0.1],
        "versions": {}, "commit": "0123456789ab", "date": "2026-01-01", "file": "r.json",
    }  # fmt: skip
    ages = {(claim.name, "0123456789ab"): Age(num_commits=188, changed=[f"{x}.py" for x in "abcdef"])}
    assert ": met | | 2026-01-01, 188 commits, code |" in render([claim], [record], [], ages)
    page = render_claim(claim, [record], ages)
    assert "188 commits old (**code changed since**: a.py, b.py, c.py, d.py and 2 more)" in page
    fresh = {(claim.name, "0123456789ab"): Age(num_commits=3, changed=[])}
    assert ": met | | 2026-01-01, 3 commits |" in render([claim], [record], [], fresh)
    assert ": met | | 2026-01-01 |" in render([claim], [record], [])
