"""Each button's command line is one that the installed commands take, and each screen reads what stages have left."""

import argparse
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import zstandard

from board_runs import make_run
from modelwright.cli.main import find_command
from modelwright.cli.parsers import Command
from modelwright.core.config import ConfigError
from modelwright_board.screen import Board
from modelwright_board.screens import SCREENS, cleaning, data, judge, loop, run, smaller

FORMS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("data", "look"): {"sources": "a.jsonl", "map_question": "q", "settings": "--data.ignore weather"},
    ("cleaning", "explain"): {"run_dir": "runs/a", "document": "a.jsonl:3"},
    ("cleaning", "clean"): {"sources": "a.jsonl 'b c.txt'", "out": "cleaned"},
    ("tokens", "look"): {"model": "runs/a", "sources": "a.jsonl", "rows": "2"},
    ("plan", "recipe"): {
        "recipe": "tiny",
        "name": "a",
        "sources": "a.txt",
        "stages": "clean",
        "minutes": "5",
        "dry": "1",
    },
    ("plan", "finetune"): {"model": "runs/a", "sources": "a.jsonl", "method": "--lora", "epochs": "2", "nproc": "2"},
    ("plan", "resume"): {"run_dir": "runs/a", "settings": "--seed 3"},
    ("plan", "cost"): {"target": "tiny"},
    ("judge", "compare"): {"first": "runs/a", "second": "runs/b", "sources": "a.jsonl", "records": "9"},
    ("judge", "tasks"): {"target": "runs/a", "tasks": "tasks", "limit": "5"},
    ("talk", "serve"): {"target": "runs/a", "port": "8001"},
    ("talk", "align"): {"model": "runs/a", "name": "aligned"},
    ("smaller", "export"): {"target": "runs/a", "form": "--dtype q8_0 --to gguf", "place": "a.gguf", "overwrite": "1"},
    ("smaller", "quantize"): {"target": "runs/a"},
    ("smaller", "distill"): {"recipe": "tiny", "name": "small", "layers": "2", "ffn": "64"},
    ("serve", "serve"): {"target": "runs/a", "port": "8000", "log": "l.sqlite", "ab_state": "ab.json", "int8": "1"},
    ("serve", "log"): {"log": "l.sqlite"},
    ("loop", "check"): {"requests": "r.jsonl", "reference": "drift/v1"},
    ("loop", "freeze"): {"requests": "r.jsonl", "reference": "drift/v1"},
    ("loop", "update"): {"model": "runs/a", "sources": "new.jsonl", "benchmark": "b.jsonl", "name": "updated"},
    ("loop", "lineage"): {"target": "runs/a"},
}


def split(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Returns the words that the parser takes, and the names of the settings: options that it does not have."""
    options = parser._option_string_actions
    has_subcommands = any(isinstance(one, argparse._SubParsersAction) for one in parser._actions)
    rest: list[str] = []
    names: list[str] = []
    is_value = False
    for word in words:
        if word.startswith("--"):
            is_value = word not in options and not has_subcommands
            names += [word.removeprefix("--").replace("-", "_")] if is_value else []
        if not is_value:
            rest.append(word)
    return rest, names


def check(words: Sequence[str]) -> None:
    command: Command = find_command(words[0])
    parser: argparse.ArgumentParser = command.parser()
    rest, names = split(words[1:], parser)
    parser.parse_args(rest)
    known = set(command.settings())
    assert [name for name in names if name not in known] == [], words


def test_every_button_is_tried() -> None:
    assert set(FORMS) == {(screen.name, action.name) for screen in SCREENS for action in screen.actions}


@pytest.mark.parametrize(("screen", "name"), list(FORMS))
def test_a_button_is_a_command_that_exists(tmp_path: Path, screen: str, name: str) -> None:
    action = next(one for page in SCREENS if page.name == screen for one in page.actions if one.name == name)
    board = Board(tmp_path)
    words = action.words(board.root, board.own, FORMS[screen, name])
    check(words)
    assert all(value in shlex.join(words) for value in FORMS[screen, name].values() if value != "1")
    needed = [key for key in FORMS[screen, name] if key not in ("settings", "place", "name")]
    with pytest.raises(ConfigError):
        action.words(board.root, board.own, {**FORMS[screen, name], **dict.fromkeys(needed, "")})


def test_a_choice_is_one_of_the_list_and_a_run_stays_below_the_folder(tmp_path: Path) -> None:
    forms = {(screen.name, action.name): action for screen in SCREENS for action in screen.actions}
    wrong = [
        (("smaller", "export"), {"form": "--to gguf --overwrite"}), (("plan", "finetune"), {"method": "; rm"}),
        (("plan", "recipe"), {"name": "../x"}), (("plan", "recipe"), {"name": ".board"}),
        (("plan", "recipe"), {"name": "--x"}), (("plan", "recipe"), {"settings": "'"}),
    ]  # fmt: skip
    for key, values in wrong:
        with pytest.raises(ConfigError):
            forms[key].words(tmp_path, tmp_path, {**FORMS[key], **values})
    # A path with a space stays one word, and an empty name is made of the other fields.
    words = forms["plan", "resume"].words(tmp_path, tmp_path, {"run_dir": "runs/a b"})
    assert words == ["run", "runs/a b"]
    values = {"model": "runs/a-3.1", "sources": "x/b.jsonl.gz y"}
    assert forms["plan", "finetune"].run_name(tmp_path, values) == "a-3.1-b"
    assert forms["plan", "finetune"].run_name(tmp_path, {**values, "dry": "1"}) == ""


def test_a_wrong_option_is_noticed() -> None:
    with pytest.raises(SystemExit):
        check(["drift", "check", "a.jsonl", "--nonsense", "1"])
    for words in (["clean", "a.jsonl", "--nonsense", "1"], ["run", "tiny", "--pretrain.nonsense", "1"]):
        with pytest.raises(AssertionError):
            check(words)


def test_fields_that_were_not_used_come_first(tmp_path: Path) -> None:
    made = make_run(tmp_path, "a")
    use = {
        "x.jsonl": {"records": 4, "fields": {"q": {"records": 4, "used": 4}, "weather": {"records": 4, "used": 0}}},
        "y.jsonl": {
            "records": 2,
            "fields": {"weather": {"records": 1, "used": 1}, "bad": {"records": "x", "used": None}},
        },
    }
    facts = {"documents": {"qa": 5}, "bytes": {"qa": 900}, "field_use": use}
    (made / "clean" / "artifact" / "sources.json").write_text(json.dumps(facts))
    (made / "clean" / "artifact" / "report.json").write_text(json.dumps({"kept_lengths": {"64": 2, "8": 3, "x": 1}}))
    shown = data.read_by(Board(tmp_path).runs.get("a"))
    assert shown["field_use"][0] == ["weather", 1, 4]
    assert ["q", 4, 0] in shown["field_use"]
    assert shown["read"] == [["qa", 5.0, 900.0]]
    assert shown["lengths"] == [(8, 3.0), (64, 2.0)]


def test_the_funnel_of_cleaning(tmp_path: Path) -> None:
    made = make_run(tmp_path, "a")
    dropped = {
        "quality": {"too short": {"documents": 3}, "symbols": {"documents": 1}},
        "duplicates": {"near": {"documents": 4}},
    }
    report = {"num_documents": 20, "steps": ["format", "quality", "duplicates"], "dropped": dropped}
    rows = cleaning.funnel(report, {"too short": "--clean.quality.min_chars 1"})
    assert [(row["step"], row["reached"], row["gone"]) for row in rows] == [
        ("format", 20, 0), ("quality", 20, 4), ("duplicates", 16, 4)
    ]  # fmt: skip
    assert ("too short", 3.0, "--clean.quality.min_chars 1") in rows[1]["reasons"]
    near = [
        {"id": f"d{n}", "step": "duplicates", "reason": "near", "detail": "0.9 with first", "text": "x"}
        for n in range(3)
    ]
    near.append({"id": "e", "step": "quality", "reason": "too short", "text": "mail a@example.org or 0170 1234567"})
    text = "".join(json.dumps(one) + "\n" for one in near)
    (made / "clean" / "artifact" / "dropped.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    found = Board(tmp_path).runs.get("a")
    assert found is not None
    shown = cleaning.examples(found, {"reason": ["too short"]})
    assert [one["id"] for one in shown["examples"]] == ["e"]
    assert "@" not in shown["examples"][0]["text"]
    assert "1234567" not in shown["examples"][0]["text"]
    assert shown["clusters"] == [("first", 4, ["d0", "d1", "d2"])]
    assert [one["id"] for one in cleaning.examples(found, {"word": ["MAIL"]})["examples"]] == ["e"]


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", seed=1)
    board = Board(tmp_path)
    board.own.mkdir()
    shown = run.show(board, {"run": ["a", "b"]})
    assert [row for row in shown["differences"] if row[0] == "pretrain.learning_rate"] == [
        ["pretrain.learning_rate", "0.001", "0.002"]
    ]
    assert len(run.show(board, {"run": [f"no{n}" for n in range(9)] + ["a"]})["runs"]) == 1


def test_a_comparison_is_shown_with_its_interval(tmp_path: Path) -> None:
    board = Board(tmp_path)
    job = board.jobs.start(["--version"], screen="judge", action="compare")
    board.jobs._children[job.id].wait(60)
    measure = {
        "name": "bits",
        "low": -0.3,
        "difference": -0.2,
        "high": -0.1,
        "first": 1.5,
        "second": 1.3,
        "p_value": 0.01,
    }
    measures = [{**measure, "lower_is_better": True, "num_records": 9}, {**measure, "name": "even", "high": 0.1}]
    (board.own / "jobs" / job.id / "out").write_text(json.dumps({"models": ["a", "b"], "measures": measures}))
    (shown,) = judge.comparisons(board)
    assert shown["intervals"][0] == ["bits", -0.3, -0.2, -0.1]
    assert shown["verdicts"] == ["bits: better", "even: no difference shown"]


def test_models_and_drift_of_a_run(tmp_path: Path) -> None:
    made = make_run(tmp_path, "a")
    place = made / "pretrain" / "artifact"
    (place / "config.json").write_text("{}")
    (place / "manifest.json").write_text(json.dumps({"facts": {"heldout_loss": 2.5}}))
    (place / "model.safetensors").write_bytes(b"x" * 1000)
    feature = {"name": "length", "effect": 0.4, "adjusted_p": 0.001, "alarm": True, "cause": "longer"}
    feature |= {"window_examples": ["call +49 170 1234567"], "reference_examples": ["short"]}
    report = {"alarm": True, "num_requests": 90, "features": [feature], "notes": ["n"]}
    (made / "drift.json").write_text(json.dumps([report]))
    found = Board(tmp_path).runs.get("a")
    assert found is not None
    assert [(row[0], row[2]) for row in smaller.models_of(found)] == [("pretrain", 2.5)]
    assert smaller.models_of(found)[0][1] >= 1000
    (shown,) = loop.drift_reports(Board(tmp_path), found)
    assert shown["features"][0]["reference"] == ["short"]
    assert "1234567" not in shown["features"][0]["window"][0]


def test_the_commands_of_the_guide_exist() -> None:
    text = (Path(__file__).parents[3] / "docs" / "board.md").read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.split("\n")
    ]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("modelwright ")]
    assert len(commands) >= 4
    for words in commands:
        check(words)
