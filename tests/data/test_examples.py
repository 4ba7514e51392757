"""Cleaning of examples for fine-tuning: compared by what is learned of them, and not rewritten."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.config import DataError, parse
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.config import CleanConfig
from modelwright.data.clean.folder import REPORT, read_kept
from modelwright.data.sources.sources import SourceConfig
from modelwright.pipeline.cleaning import clean_sources

LONG = "The market opens at dawn near the old harbor and sells mostly fish, bread and wool to people from the hills."


def cleaned(tmp_path: Path, records: list[dict[str, Any]], **clean: Any) -> list[str]:
    """Returns the lines that the command prints."""
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    data = SourceConfig(sources=(str(path),), validation_fraction=0.0)
    config = parse(CleanConfig, {"num_workers": 1, **clean})
    return clean_sources(data, config, str(tmp_path / "out"), SilentProgress())


@pytest.mark.parametrize("by", ["answer", "conversation"])
def test_preferences_are_compared_by_both_sides_and_the_label(tmp_path: Path, by: str) -> None:
    rejected = ["It is a market.", "I do not know this market at all.", f"{LONG} Or so."]
    pairs = [{"prompt": "Describe the market.", "chosen": LONG, "rejected": text} for text in rejected]
    prompts = [
        {"prompt": f"Describe the market of town {number}.", "chosen": LONG, "rejected": "No."} for number in (1, 2)
    ]
    labels = [{"prompt": "Describe the market.", "completion": LONG, "label": label} for label in (True, False)]
    cleaned(tmp_path, [*pairs, *prompts, *labels, *pairs], duplicates={"pairs_by": by})
    kept = list(read_kept(tmp_path / "out"))
    assert [document.rejected[0]["content"] for document in kept if document.rejected] == [*rejected, "No.", "No."]
    assert [document.meta["desirable"] for document in kept if "desirable" in document.meta] == [True, False]


def answers(number: int, text: str = "The {} team takes it.") -> list[dict[str, str]]:
    teams = ("network", "building", "security", "night")
    return [
        {"question": f"Ticket {n}: the door of room {100 + n} does not open. Who?", "answer": text.format(teams[n % 4])}
        for n in range(number)
    ]


@pytest.mark.parametrize("text", ["The {} team takes it.", f"The {{}} team. {LONG}", "Ask the {} team first, please."])
def test_the_run_stops_before_most_pairs_are_dropped_for_their_answers(tmp_path: Path, text: str) -> None:
    records = answers(60, text)
    with pytest.raises(
        DataError, match=r"9\d% of the question/answer pairs .*--clean\.duplicates\.pairs_by conversation"
    ):
        cleaned(tmp_path, records)
    cleaned(tmp_path, records, duplicates={"pairs_by": "answer_always"})
    assert len(list(read_kept(tmp_path / "out"))) <= 4
    cleaned(tmp_path, records, duplicates={"pairs_by": "conversation", "near": False})
    assert len(list(read_kept(tmp_path / "out"))) == 60


def test_pairs_that_repeat_themselves_do_not_stop_the_run(tmp_path: Path) -> None:
    cleaned(
        tmp_path, [{"question": f"What is {n} + 1?", "answer": f"It is the number {n + 1}."} for n in range(30)] * 3
    )
    assert len(list(read_kept(tmp_path / "out"))) == 30


TURNS = [
    ("user", "Why does my page show cafÃ© and itâ€™s?  "),
    ("assistant", "\n\tThe bytes are UTF-8: é becomes Ã©.\r\nSend charset=utf-8.\n\n\n\n\n"),
]


def test_examples_stay_as_they_are_and_a_repair_is_counted(tmp_path: Path) -> None:
    records = [{"messages": [{"role": role, "content": text} for role, text in TURNS]}]
    cleaned(tmp_path, records)
    (kept,) = read_kept(tmp_path / "out")
    assert [(turn["role"], turn["content"]) for turn in kept.messages] == TURNS
    assert "changed_examples" not in json.loads((tmp_path / "out" / REPORT).read_text())
    lines = cleaned(tmp_path, records, format={"examples": "repair"})
    (kept,) = read_kept(tmp_path / "out")
    assert "café and it’s?" in kept.messages[0]["content"]
    assert any(line.startswith("examples whose text was changed: 1 by format") for line in lines)


def test_the_command_says_which_fields_it_used(tmp_path: Path) -> None:
    lines = cleaned(tmp_path, [{"question": "What is it?", "answer": LONG, "topic": "sea"}])
    assert lines[0] == "fields used: question, answer; not used in 1 of 1 records: topic"
    facts = json.loads((tmp_path / "out" / "sources.json").read_text())["field_use"]
    assert facts[str(tmp_path / "r.jsonl")]["fields"]["topic"] == {"records": 1, "used": 0}
