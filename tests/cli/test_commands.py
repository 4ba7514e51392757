"""Every command says what it takes, and the small ones do what they say."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from added_package import add_package
from modelwright.cli.main import DISTRIBUTIONS, main, usable_commands
from modelwright.core import extensions
from modelwright_claims.ledger import NAMES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(usable_commands()))
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert f"modelwright {name}" in capsys.readouterr().out


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in usable_commands())
    assert max(map(len, shown.splitlines())) <= 120
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.slow
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
    assert all(name in shown for name in NAMES)


def test_without_the_claims_package_the_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda **selected: ())
    assert main(["prove", "--list"]) == 2
    assert capsys.readouterr().err == (
        "modelwright: prove: is a command of modelwright-claims, which is not installed; "
        "pip install 'modelwright[claims]'\n"
    )
    assert main(["--help"]) == 0
    assert "\n  prove       not installed: pip install 'modelwright[claims]'\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_extra_that_an_error_names_exists_and_brings_the_distribution(name: str) -> None:
    distribution, extra = DISTRIBUTIONS[name]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(re.match(rf"{distribution}(\[|$)", wanted) for wanted in extras[extra])


GREETING = """
from modelwright.cli.parsers import Command, new_parser
def parser():
    return new_parser("greet", "Greet.", example="modelwright greet")
def run(words):
    parser().parse_args(words)
    print("good day")
    return 7
COMMAND = Command(name="greet", summary="greet whoever is there", run=run, parser=parser)
"""


@pytest.mark.slow
def test_another_package_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(tmp_path, monkeypatch, "greeting_words", GREETING, {"modelwright.commands": {"greet": "COMMAND"}})
    assert main(["greet"]) == 7
    assert capsys.readouterr().out == "good day\n"
    assert main(["gret"]) == 2
    assert "did you mean 'greet'?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "\n  greet       greet whoever is there\n" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    assert "greet" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "entry", "problem"),
    [
        ("1 / 0", "greet", "(ZeroDivisionError: division by zero); reinstall or remove bad_words"),
        ("COMMAND = 3", "greet", "must be a Command, got 3"),
        (GREETING, "recipes", "the name 'recipes' is taken"),
    ],
)
def test_only_help_and_a_broken_command_itself_name_its_problem(
    source: str,
    entry: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_package(tmp_path, monkeypatch, "bad_words", source, {"modelwright.commands": {entry: "COMMAND"}})
    assert main(["recipes"]) == 0
    assert main(["completion", "bash"]) == 0
    assert problem not in "".join(capsys.readouterr())
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len([line for line in shown if problem in line]) == 1
    assert [line for line in shown if line.startswith("  run ")]
    if entry == "greet":
        assert main(["greet"]) == 2
        assert problem in capsys.readouterr().err


def test_own_commands_import_no_other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path, monkeypatch, "far_words", GREETING, {"modelwright.commands": {"greet": "COMMAND"}})
    assert main(["recipes"]) == 0
    assert "far_words" not in sys.modules
    assert main(["greet"]) == 7, "the broken one of the same distribution does not matter"


@pytest.mark.slow
def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny", "--seconds", "0.05"]) == 0
    assert "recommended compute" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{sys.executable} -m modelwright.cli.main config tiny | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "Traceback" not in done.stderr
    assert done.stdout == "# Name of the run and of its folder under `runs/`.\n"
