"""What a reader of the report's figures is told to do, and that nothing of it breaks or hides on a phone."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from modelwright.core.artifacts import RunDir
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.suite import is_lossless
from modelwright.pipeline.report.blocks import Note, number
from modelwright.pipeline.report.page import _evaluation_sets, _funnel, corpus_charts
from modelwright.pipeline.report.results import power, watch_blocks
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stages.evaluate import EVALUATE, headline
from modelwright.serve.load import SMALLEST_CHAT_MODEL, expectation


def notes(folder: Path, *kinds: str) -> list[Note]:
    stage = StageData("pretrain", RunDir(folder).stage("pretrain"), {}, [], True)
    stage.folder.path.mkdir(parents=True)
    events = [{"step": step, "kind": kind, "value": 1.0, "limit": 0.5, "text": "x"} for step, kind in enumerate(kinds)]
    (stage.folder.path / "anomalies.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return [block for block in watch_blocks(stage) if isinstance(block, Note)]


def test_outliers_alone_are_no_warning_and_say_what_to_do(tmp_path: Path):
    (note,) = notes(tmp_path, *["gradient_outlier"] * 26)
    assert note.level == "plain"
    assert "gradient-norm outliers: 26" in note.text
    assert "Nothing needs to be done as long as the loss goes on falling" in note.text


@pytest.mark.parametrize("kind", ["loss_spike", "nonfinite_step", "data_stall", "out_of_memory", "something_new"])
def test_what_needs_a_look_is_a_warning_with_advice(tmp_path: Path, kind: str):
    first, second = notes(tmp_path, "gradient_outlier", "gradient_outlier", kind)
    assert (first.level, second.level) == ("plain", "warning")
    assert len(second.text.partition(": 1. ")[2]) > 10


def test_no_line_breaks_inside_a_small_number():
    assert power(-4.0862) == "8.2×10⁻⁵"
    assert power(-1.0) == "0.100"
    assert number(1.7e-05, 3) == "1.7×10⁻⁵"
    assert number(-2.5e12, 3) == "-2.5×10¹²"


def test_the_cleaning_table_has_no_column_of_text_that_lies_off_a_phones_screen():
    clean = {
        "num_documents": 10, "num_bytes": 1000, "kept": {"prose": {"train": {"documents": 8, "bytes": 700}}},
        "steps": ["format", "quality", "privacy"], "replaced": {"email": 4, "phone": 2},
        "dropped": {"quality": {"too short": {"documents": 2, "bytes": 300}}},
    }  # fmt: skip
    table = _funnel(clean)
    assert [row[:3] for row in table.rows] == [
        ["format", "10", "0"], ["quality", "10", "2"], ["privacy", "8", "0"], ["kept", "8", ""]
    ], "a step that is switched off is not listed"  # fmt: skip
    assert table.header[-1] == "bytes"
    assert "70.0% of the bytes read" in table.caption
    assert "replaced 4 email, 2 phone" in table.caption


def test_the_funnel_is_a_chart_and_evaluation_sets_a_table():
    clean = {
        "num_documents": 1000,
        "dropped": {"format": {"x": {"documents": 10}}, "mine": {"a": {"documents": 40}, "b": {"documents": 50}}},
        "figures": {"decontamination": {"exam.jsonl": {"documents": 8, "found": 0.25, "passages_found": 0.1}}},
    }  # fmt: skip
    (chart,) = corpus_charts(clean)
    for words in ("read", "after format", "after mine", "990 (−10)", "900 (−90)"):
        assert f">{words}<" in chart.svg
    assert corpus_charts({"num_documents": 5, "dropped": {}}) == []
    (table,) = _evaluation_sets(clean)
    assert table.rows == [["exam.jsonl", "8", "25.0%", "10.0%"]]
    assert _evaluation_sets({"dropped": {}}) == []


def test_small_models_are_announced_as_such():
    assert "9.2 million parameters" in expectation(9_200_000)
    assert "most of what it says is wrong" in expectation(SMALLEST_CHAT_MODEL - 1)
    assert expectation(SMALLEST_CHAT_MODEL) == ""


def test_a_tokenizer_that_does_not_keep_the_text_is_a_warning_on_terminal_and_page(tmp_path: Path):
    words = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[SEP]"])
    words.train_from_iterator(["the quick brown fox"], trainer)
    tokenizer = Tokenizer(words, special_tokens={"eos_token": "[SEP]"})
    assert is_lossless(tokenizer, ["the quick brown fox"])
    assert not is_lossless(tokenizer, ["The  quick brown fox"])

    choice = {"questions": 0}
    result = {
        "bits_per_byte": {"prose": {"bits_per_byte": 2.0}},
        "multiple_choice": choice | {"accuracy": 0.0, "chance": 0.25},
    }
    assert "does not keep the text" in headline(result | {"lossless": False})
    assert "warning" not in headline(result | {"lossless": True})

    run = RunDir(tmp_path)
    stage = StageData("evaluate", run.stage("evaluate"), {}, [], True)
    stage.folder.artifact.mkdir(parents=True)
    for is_kept, num_warnings in ((False, 1), (True, 0)):
        results = {"models": {"pretrain": {"lossless": is_kept}}, "final": "pretrain"}
        (stage.folder.artifact / "results.json").write_text(json.dumps(results))
        assert len(EVALUATE.warnings(stage)) == num_warnings
