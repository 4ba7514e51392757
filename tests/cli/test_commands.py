"""Every command says what it takes, and the small ones do what they say."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import yaml

from modelwright.cli.main import COMMANDS, main
from modelwright_claims.ledger import listing


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert f"modelwright {name}" in capsys.readouterr().out


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 120
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_help_needs_no_torch() -> None:
    code = "import sys; from modelwright.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_recipes_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert main(["config", "tiny", "--pretrain.num_steps", "9", "--data.sources", "a.txt", "b.txt"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["pretrain"]["num_steps"] == 9
    assert shown["data"]["sources"] == ["a.txt", "b.txt"]


def test_claims_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name, _ in listing())


def test_without_the_claims_package_the_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **selected: ())
    assert main(["prove", "--list"]) == 2
    assert "modelwright-claims, which is not installed; in a checkout: pip install -e claims" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny", "--seconds", "0.05"]) == 0
    assert "recommended compute" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{sys.executable} -m modelwright.cli.main config tiny | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "Traceback" not in done.stderr
    assert done.stdout == "# Name of the run and of its folder under `runs/`.\n"
