"""The suite may be started in a folder that is in use: no test, and no process of one, sees what is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.cli.main import main

ROOT = Path(__file__).parents[1]
PRINT_FOLDER = "import os; print(os.getcwd(), os.listdir())"


@pytest.fixture(scope="module")
def folder_of_a_module() -> Path:
    return Path.cwd()


def test_a_test_and_its_processes_begin_in_an_empty_folder(folder_of_a_module: Path) -> None:
    here = Path.cwd()
    assert not here.is_relative_to(ROOT)
    assert not folder_of_a_module.is_relative_to(ROOT)
    done = subprocess.run([sys.executable, "-c", PRINT_FOLDER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(here), "[]"]


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_name_means_the_recipe_whatever_earlier_runs_are_called(
    time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of the same name are not those of another test, nor of the folder in which the suite was started."""
    assert main(["config", "quickstart", "--plain"]) == 0, f"{time}: {capsys.readouterr().err}"
    assert "name: quickstart" in capsys.readouterr().out
    finished = Path("runs/quickstart")
    finished.mkdir(parents=True)
    (finished / "config.yaml").write_text("name: other\n")
