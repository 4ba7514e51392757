"""The results that a long measurement keeps for later calls."""

from pathlib import Path
from types import ModuleType

import pytest

from modelwright.core.artifacts import ArtifactError
from modelwright_claims import experiment as run_cache
from modelwright_claims.experiment import RunCache, setup_digest
from modelwright_claims.training_run import Processes, Run
from modelwright_claims.workbench import Size


def test_values_are_there_for_the_next_call(tmp_path: Path) -> None:
    size = Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=6)
    first = RunCache(tmp_path / "new")
    assert Run(size=size) not in first
    first[Run(size=size)] = {"loss": float("inf"), "steps": [1.0, 2.0]}
    again = RunCache(tmp_path / "new")
    assert again[Run(size=size)] == {"loss": float("inf"), "steps": [1.0, 2.0]}
    for other in (Run(size=size, seed=1), Run(size=size, processes=Processes(threads=1)), Run(size=size, mode="pad")):
        assert other not in again
    made = []
    for _ in range(2):
        assert again.get({"peak": 1}, lambda: made.append(1) or 5) == 5
    assert made == [1]


@pytest.mark.parametrize("text", ["[1, 2]", '{"value": 1', "", '{"key": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    cache = RunCache(tmp_path)
    cache.path("key").write_text(text)
    with pytest.raises(ArtifactError, match=r"\.json: is not the result of a run .*delete it"):
        cache["key"]
    assert cache.path("key").read_text() == text


def test_other_sources_or_versions_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "product").mkdir()
    (tmp_path / "product" / "__init__.py").write_text("")
    monkeypatch.setattr(run_cache.modelwright, "__file__", str(tmp_path / "product" / "__init__.py"))
    module = ModuleType("claims")
    module.__file__ = str(tmp_path / "claims.py")
    changes = {"claims.py": "1", "product/a.py": "1", "product/b.cpp": "2"}
    digests = []
    for path, text in changes.items():
        (tmp_path / path).write_text(text)
        digests.append(setup_digest([module]))
    (tmp_path / "claims.py").write_text("2")
    digests.append(setup_digest([module]))
    assert len(set(digests)) == 4
    (tmp_path / "product" / "notes.md").write_text("3")
    assert setup_digest([module]) == digests[-1]
    monkeypatch.setattr(run_cache, "versions", lambda *names: {"torch": "1.0"})
    assert setup_digest([module]) != digests[-1]
