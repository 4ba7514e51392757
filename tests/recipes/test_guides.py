"""Commands on pages about techniques are valid runs, every technique has a page, and pages name files that exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from modelwright.cli.main import main
from modelwright.pipeline.run_config import parse_run
from modelwright_claims import published

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "modelwright"
GUIDE = DOCS / "guides" / "smaller.md"


def commands() -> list[str]:
    """The commands of the guide's shell blocks."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_guide_is_a_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, verb, recipe, option, _, *settings = shlex.split(command)
    assert (program, verb, option) == ("modelwright", "run", "--run-dir")
    place = settings.index("--stages") + 1
    named, settings[place] = settings[place], f"[{settings[place]}]"  # a list, where `run` takes plain names, too
    assert main(["config", recipe, "--plain", *settings]) == 0, capsys.readouterr().err
    config = parse_run(yaml.safe_load(capsys.readouterr().out))
    assert config.stage_names == named.split(",")


def test_the_guide_has_commands() -> None:
    assert len(commands()) >= 8


def test_the_architecture_answers_every_question_of_the_log() -> None:
    """Twenty symptoms, each with the file that explains it, which the table of symptoms has to name."""
    questions, _, answers = (DOCS / "log" / "questions.md").read_text(encoding="utf-8").partition("## Answers")
    table = (
        (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## From a symptom")[2].partition("\n## ")[0]
    )
    files = dict(re.findall(r"^\| (\d+) \| `([^`]+)` \|$", answers, flags=re.MULTILINE))
    assert list(files) == re.findall(r"^(\d+)\. ", questions, flags=re.MULTILINE) == [str(n) for n in range(1, 21)]
    for path in files.values():
        assert (PACKAGE / path).is_file()
        folder, _, name = path.rpartition("/")
        (row, *_) = [row for row in table.splitlines() if folder in row and f"{name}`" in row]
        assert row.startswith("| ")


PAGES = sorted(path.stem for path in (DOCS / "techniques").glob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_technique_switches_it_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command is a valid run that differs from the recipe, and its figures are of claims that exist."""
    page = (DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8")
    for line in re.findall(r"^modelwright run (.*)$", page, flags=re.MULTILINE):
        recipe, *settings = shlex.split(line)
        if "--stages" in settings:
            place = settings.index("--stages") + 1
            settings[place] = f"[{settings[place]}]"
        assert main(["config", recipe, "--plain", *settings]) == 0, capsys.readouterr().err
        assert yaml.safe_load(capsys.readouterr().out)["name"] == name
    measured = {claim for names in re.findall(r"<!-- measured: (.*) -->", page) for claim in names.split()}
    assert measured - {row.name for row in published.read()} == set()


def test_every_technique_of_the_training_loop_has_a_page() -> None:
    """The modules of train/techniques are named on a page, but for those that others need to work."""
    parts = {"amax_history", "base_weights", "auxiliary_losses", "finite_check", "score_mixture"}
    named = "".join((DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
    modules = {path.stem for path in (PACKAGE / "train" / "techniques").glob("*.py")} - {"__init__"} - parts
    assert {module for module in modules if f"train/techniques/{module}.py" not in named} == set()
