"""After `pip install modelwright` every command works, or ends with one line that names the extra that it needs."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from every_command import command_lines, fault_of, write_inputs
from modelwright.cli.main import COMMANDS, DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_command_works_or_names_its_extra(tmp_path: Path) -> None:
    tried = command_lines(tmp_path)
    assert {words[0] for words, _ in tried.values()} == {*COMMANDS, *DISTRIBUTIONS}, "what help lists"
    assert {one for _, extra in tried.values() for one in extra.split(",") if one} <= {*EXTRAS}
    write_inputs(tmp_path)
    (tmp_path / "words.json").write_text(json.dumps([words for words, _ in tried.values()]))
    command = [sys.executable, str(ROOT / "tests/without_extras.py"), str(tmp_path / "words.json")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    problems = []
    for (name, (_, extra)), (code, errors) in zip(tried.items(), json.loads(ended.stdout), strict=True):
        if fault := fault_of(extra, code, errors):
            problems.append(f"{name} {fault}")
    assert not problems, "\n\n".join(problems)
    assert not list((tmp_path / "all").glob("*/")), "a run that is refused has not begun"
