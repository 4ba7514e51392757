"""Records show their age, and are marked once the code that they measured has changed."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright_claims.age import Age, age_of, measured_files
from modelwright_claims.ledger import CLAIMS
from modelwright_claims.page import render, render_claim

MODULE = """
from modelwright.core import records
from modelwright_claims.claim import Claim, Measurement, Verdict
from modelwright_claims.statistics import estimate

def measure(setting):
    return Measurement()

CLAIM = Claim(name="doubling", statement="s", source="s", published="2x", compared="c", target="2x", measure=measure,
              judge=lambda samples, conditions: Verdict(kind="met", reason=""))
"""


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a file of a repository, commits it and returns the commit."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        git("add", "-A")
        git("commit", "-qm", "m")
        return git("rev-parse", "--short=12", "HEAD").strip()

    return write


def test_a_record_is_marked_once_the_measured_code_has_changed(commit, tmp_path: Path, monkeypatch):
    first = commit("aged_claim.py", MODULE)
    spec = importlib.util.spec_from_file_location("aged_claim", tmp_path / "aged_claim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "aged_claim", module)
    spec.loader.exec_module(module)
    only_claim = [tmp_path / "aged_claim.py"]
    monkeypatch.setattr("modelwright_claims.age.measured_files", lambda claim: iter(only_claim))
    assert age_of(module.CLAIM, first) == Age(num_commits=0, num_files=1, changed=[])
    commit("README.md", "unrelated")
    assert age_of(module.CLAIM, first) == Age(num_commits=1, num_files=1, changed=[])
    commit("aged_claim.py", MODULE + "# another measurement\n")
    assert age_of(module.CLAIM, f"{first}-dirty") == Age(num_commits=2, num_files=1, changed=["aged_claim.py"])
    commit("aged_claim.py", MODULE)
    assert age_of(module.CLAIM, first) == Age(num_commits=3, num_files=1, changed=[]), "changed back"
    assert age_of(module.CLAIM, "0123456789ab") is None
    assert age_of(module.CLAIM, "") is None


def test_measured_code_is_what_the_claim_imports_without_its_judging():
    claim = next(claim for claim in CLAIMS if claim.name == "bf16_mixed")
    names = {"/".join(file.parts[-2:]) for file in measured_files(claim)}
    assert {"modelwright_claims/bf16_mixed.py", "modelwright_claims/workbench.py", "precision/policy.py"} <= names
    assert not {"modelwright_claims/judging.py", "modelwright_claims/statistics.py"} & names


def test_the_page_shows_age_and_change():
    claim = CLAIMS[0]
    record = {
        "name": claim.name, "statement": claim.statement, "compared": claim.compared, "target": claim.target,
        "kind": "met", "reason": "r", "figures": {}, "conditions": {}, "samples": {}, "quick": False, "wall_s": 1.0,
        "machine": {"processor": "p", "cores": 2, "instruction_set": "i"}, "threads": 2, "load_at_start": [0.1],
        "versions": {}, "commit": "0123456789ab", "date": "2026-01-01", "file": "r.json",
    }  # fmt: skip
    ages = {(claim.name, "0123456789ab"): Age(num_commits=188, num_files=9, changed=[f"{x}.py" for x in "abcdef"])}
    assert "| met | 2026-01-01, 188 commits, code |" in render([claim], [record], [], ages)
    page = render_claim(claim, [record], ages)
    assert "188 commits old (**code changed since**: a.py, b.py, c.py, d.py and 2 more)" in page
    fresh = {(claim.name, "0123456789ab"): Age(num_commits=3, num_files=9, changed=[])}
    assert "| met | 2026-01-01, 3 commits |" in render([claim], [record], [], fresh)
    assert "| met | 2026-01-01 |" in render([claim], [record], [])


def test_a_file_that_only_moved_has_not_changed(commit, tmp_path: Path, monkeypatch):
    first = commit("old_name.py", MODULE)
    (tmp_path / "old_name.py").rename(tmp_path / "new_name.py")
    commit("README.md", "moved")
    monkeypatch.setattr("modelwright_claims.age.measured_files", lambda claim: iter([tmp_path / "new_name.py"]))
    assert age_of(CLAIMS[0], first) == Age(num_commits=1, num_files=1, changed=[])
    commit("new_name.py", MODULE + "# edited\n")
    assert age_of(CLAIMS[0], first) == Age(num_commits=2, num_files=1, changed=["new_name.py"])
