from pathlib import Path

import pytest

from modelwright.core.config import did_you_mean, hub_hint, nearest


def test_the_nearest_name_or_none():
    known = ["learning_rate", "num_steps", "sft"]
    assert nearest("learing_rate", known) == "learning_rate"
    assert nearest("lr", known) == "learning_rate"
    assert nearest("foo", known) == ""
    assert did_you_mean("foo", known) == ""
    assert did_you_mean("num_stepz", known) == "; did you mean 'num_steps'?"


def test_the_name_of_a_hub_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert "nothing is downloaded" in hub_hint("Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B" in hub_hint("Qwen/Qwen3-0.6B")
    for path in ("runs/tiny", "./model", "../model", "/data/model", "model", "a/b/c", "~/model"):
        assert hub_hint(path) == "", path
