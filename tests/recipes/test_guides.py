"""Every `modelwright run` in the guides is a valid run: its settings are known, its stages fit together."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from modelwright.cli.main import main
from modelwright.pipeline.run_config import parse_run

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "smaller.md"


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
