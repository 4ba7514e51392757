"""Commands on pages about techniques are valid runs, every technique has a page, and pages name files that exist."""

import argparse
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from doc_pages import commands_of
from modelwright.cli.main import main, usable_commands
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


TECHNIQUES = sorted(path.stem for path in (DOCS / "techniques").glob("*.md"))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_page_of_a_technique_switches_it_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command is a valid run that differs from the recipe, and its figures are of claims that exist."""
    page = (DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8")
    for line in re.findall(r"^modelwright run (.*)$", page, flags=re.MULTILINE):
        recipe, *settings = shlex.split(re.sub(r" --nproc \d+", "", line))  # of the command, not of the run
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
    named = "".join((DOCS / "techniques" / f"{name}.md").read_text(encoding="utf-8") for name in TECHNIQUES)
    modules = {path.stem for path in (PACKAGE / "train" / "techniques").glob("*.py")} - {"__init__"} - parts
    assert {module for module in modules if f"train/techniques/{module}.py" not in named} == set()


@cache  # the settings of `run` take 0.2 s to list, and more than a hundred lines have them
def parser_and_settings(name: str) -> tuple[argparse.ArgumentParser, frozenset[str]]:
    command = usable_commands()[name]
    return command.parser(), frozenset(command.settings())


def objections(line: str) -> str:
    """What a command's parser has against a line, "" for nothing. Settings are known by their names alone."""
    words = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line), comments=True)
    if words[1] not in usable_commands():
        return f"no command {words[1]}"
    parser, known = parser_and_settings(words[1])
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            _, rest = parser.parse_known_args([word for word in words[2:] if word != "&"])
    except SystemExit as end:
        return errors.getvalue() if end.code else ""  # --help
    return " ".join(word for word in rest if word.startswith("--") and word[2:].partition("=")[0] not in known)


def test_a_command_that_could_not_begin_is_found() -> None:
    assert objections("modelwright nothing")
    assert objections("modelwright export runs/x --too gguf")
    assert objections("modelwright run quickstart --pretrain.no_such_setting 3") == "--pretrain.no_such_setting"
    assert not objections("A=1 modelwright run quickstart --pretrain.num_steps 3  # three steps")


PAGES = sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in ("claims", "log"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_command_of_a_page_could_begin(page: Path) -> None:
    """By its parser and the names of its settings. Those of tutorials and of many guides also run, in other tests."""
    lines = [line for line in commands_of(page) if re.match(r"(?:[A-Z_]+=\S+ )*modelwright ", line)]
    assert [f"{line}: {objection}" for line in lines if (objection := objections(line))] == []
