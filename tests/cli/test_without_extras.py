"""After `pip install modelwright` every command works, or ends with one line that names the extra that it needs."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from every_command import command_lines, fault_of, write_inputs
from modelwright.cli.main import COMMANDS, DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "clean by Ray": "tests/data/test_ray_tasks.py",
    "clean a store": "tests/pipeline/test_result_store.py",
    "evaluate": "tests/pipeline/test_harness.py",
    "requests": "tests/serve/test_request_log.py",
}
"""Commands that need a cluster, a store, data or a database beforehand, and the tests that have one."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def outcomes(lines: Iterable[list[str]], folder: Path, *options: str) -> list[tuple[int, str]]:
    (folder / "words.json").write_text(json.dumps(list(lines)))
    command = [sys.executable, str(ROOT / "tests/without_extras.py"), str(folder / "words.json"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_command_works_or_names_its_extra(tmp_path: Path) -> None:
    tried = command_lines(tmp_path)
    assert {words[0] for words, _ in tried.values()} == {*COMMANDS, *DISTRIBUTIONS}, "what help lists"
    assert {one for _, extra in tried.values() for one in extra.split(",") if one} <= {*EXTRAS}
    write_inputs(tmp_path)
    ended = outcomes([words for words, _ in tried.values()], tmp_path)
    problems = []
    for (name, (_, extra)), (code, errors) in zip(tried.items(), ended, strict=True):
        if fault := fault_of(extra, code, errors):
            problems.append(f"{name} {fault}")
    assert not problems, "\n\n".join(problems)
    assert not list((tmp_path / "all").glob("*/")), "a run that is refused has not begun"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_all_extras_the_commands_that_were_refused_begin(tmp_path: Path) -> None:
    """What would take minutes or never end is asked for its plan or its help; stores and clusters have other tests."""
    tried = command_lines(tmp_path)
    tried["run all"][0].append("--dry-run")
    tried["run on images"][0].append("--dry-run")
    for name in (*DISTRIBUTIONS, "serve"):
        tried[name][0].append("--help")
    needing = {name: words for name, (words, extra) in tried.items() if extra and name not in ELSEWHERE}
    assert {*DISTRIBUTIONS} <= {*needing}
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
    write_inputs(tmp_path)
    # The run that they work on comes first.
    ended = outcomes([tried["run"][0], *needing.values()], tmp_path, "--all")[1:]
    problems = [f"{name} {code} {errors[-600:]}" for name, (code, errors) in zip(needing, ended, strict=True) if code]
    assert not problems, "\n\n".join(problems)
