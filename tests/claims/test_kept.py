"""What a long measurement keeps for later calls."""

from pathlib import Path

import pytest

from modelwright.core.errors import ArtifactError
from modelwright_claims import kept
from modelwright_claims.kept import Kept, setup_digest


def test_values_are_there_for_the_next_call(tmp_path: Path) -> None:
    first = Kept(tmp_path / "new" / "found.json")
    assert "one" not in first
    first["one"] = {"loss": 2.5}
    first["two"] = [1, 2]
    again = Kept(tmp_path / "new" / "found.json")
    assert again["one"] == {"loss": 2.5}
    assert "two" in again
    Kept(None)["one"] = 1


@pytest.mark.parametrize("text", ["[1, 2]", '{"one": 1', ""])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "found.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=r"found\.json: is no record of a measurement .*delete it"):
        Kept(path)
    assert path.read_text() == text


def test_other_code_or_versions_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup_digest() == setup_digest()
    (tmp_path / "inner").mkdir()
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(kept.modelwright, "__file__", str(tmp_path / "__init__.py"))
    found = [setup_digest()]
    for name, text in (("inner/a.py", "1"), ("inner/a.py", "2"), ("inner/b.cpp", "2")):
        (tmp_path / name).write_text(text)
        found.append(setup_digest())
    (tmp_path / "notes.md").write_text("3")
    found.append(setup_digest())
    assert len(set(found[:-1])) == 4
    assert found[-1] == found[-2]
    monkeypatch.setattr(kept, "versions", lambda *names: {"torch": "1.0"})
    assert setup_digest() != found[-1]
