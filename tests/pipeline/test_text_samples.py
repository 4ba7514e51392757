"""The samples that a training stage shows while it trains, and what the terminal shows at the end."""

from collections.abc import Sequence
from pathlib import Path

import torch

from modelwright.core.records import json_line, read_records
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.pipeline.text_samples import FILE, NUM_SHOWN, _keep, first_prompt, sample_block


def one_row(labels: Sequence[int], segments: Sequence[int]) -> TokenBatch:
    count = len(labels)
    return TokenBatch(
        input_ids_BT=torch.arange(100, 100 + count)[None],
        labels_BT=torch.tensor([labels]),
        positions_BT=torch.arange(count)[None],
        segments_BT=torch.tensor([segments], dtype=torch.int32),
    )


def test_a_prompt_is_what_precedes_the_first_target() -> None:
    row = one_row([IGNORED, IGNORED, 7, 8, 9], [0] * 5)
    assert first_prompt([row]) == [100, 101, 102]


def test_text_is_continued_from_its_first_tokens_within_one_document() -> None:
    assert first_prompt([one_row([1] * 40, [0] * 40)]) == list(range(100, 116))
    assert first_prompt([one_row([1] * 40, [0] * 5 + [1] * 35)]) == list(range(100, 105))
    assert first_prompt([]) == []


def test_the_report_shows_samples_from_the_first_to_the_last(tmp_path: Path) -> None:
    assert not sample_block(tmp_path)
    for step in range(0, 90, 10):
        _keep(tmp_path / FILE, {"step": step, "loss": 2.0, "text": f"text {step}"})
    (block,) = sample_block(tmp_path)
    assert [one.question for one in block.items] == ["Step 0", "Step 20", "Step 40", "Step 50", "Step 70", "Step 80"]
    assert len(block.items) == NUM_SHOWN
    assert block.items[-1].answer == "text 80"


def test_samples_that_a_crash_left_are_made_again(tmp_path: Path) -> None:
    """The last line was cut off, and training goes on from an earlier step."""
    path = tmp_path / FILE
    path.write_text(json_line({"step": 10, "text": "a"}) + json_line({"step": 30, "text": "b"}) + '{"step": 40, "te')
    _keep(path, {"step": 20, "text": "c"})
    assert [(one["step"], one["text"]) for one in read_records(path)] == [(10, "a"), (20, "c")]
