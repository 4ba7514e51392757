"""The commands of docs/continual.md, run as they stand there."""

import json
import shlex
from pathlib import Path

import pytest

from continual_update import QUICK
from continual_world import World
from modelwright.cli.main import main
from modelwright_continual.benchmark import Use, load_benchmark

GUIDE = Path(__file__).parents[3] / "docs" / "continual.md"


def commands() -> list[list[str]]:
    """The lines of the first block, and the one in the text about the gate."""
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    modelwright"))
    block = []
    while lines[first].startswith("    "):
        block.append(lines[first].strip())
        first += 1
    block += [line.split("`")[1] for line in lines if line.startswith("`modelwright continual gate")]
    return [shlex.split(line)[1:] for line in block]


@pytest.mark.slow
def test_the_commands_work(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old-heldout.jsonl", "new-heldout.jsonl", "new.jsonl"):
        (tmp_path / name).symlink_to(world.folder / name)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/support").symlink_to(world.base)
    monkeypatch.chdir(tmp_path)
    names = []
    for words in commands():
        settings = QUICK if words[:2] == ["continual", "run"] else ()
        assert main([*words, *settings]) == 0, capsys.readouterr()
        names.append(words[:2])
    assert names == [["continual", "freeze"], ["continual", "run"], ["lineage", "runs/support-2/release"], names[-1]]
    assert names[-1] == ["continual", "gate"]
    shown = capsys.readouterr().out
    verdict = json.loads(shown[shown.index("{") :])
    assert verdict["passed"]
    assert verdict == json.loads(Path("runs/support-2/gate/verdict.json").read_text())
    assert load_benchmark(Path("bench")).uses == [Use(1, verdict["candidate"], verdict["champion"])]
