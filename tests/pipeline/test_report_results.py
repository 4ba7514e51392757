"""What the report's sections on results say about the files that the stages leave behind."""

import json
import re
from pathlib import Path

import pytest

from modelwright.core.artifacts import RunDir
from modelwright.pipeline.report.blocks import Chart, Note, Samples, Section, Table, percent
from modelwright.pipeline.report.page import figures
from modelwright.pipeline.report.results import (
    evaluation_facts,
    evaluation_lines,
    evaluation_section,
    int8_facts,
    int8_section,
    serving_section,
)
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stages.evaluate import headline
from modelwright.recipes.load import recipe

SPEEDS = [(1, 1, 2431.0, 1343.3), (8, 1, 18006.5, 11016.2), (32, 1, 58786.6, 43935.1), (1, 128, 154745.6, 114531.3)]
CHOICE = {"questions": 15, "accuracy": 0.2}
QUANTIZED = {
    "backend": "int_mm",
    "bits": 8,
    "grid": "Weights are quantized per output channel, activations per token at run time.",
    "layer_errors": {},
    "comparison": {
        "reference_bytes": 493056,
        "int8_bytes": 131584,
        "speed": [
            {"num_streams": streams, "num_tokens": tokens, "reference_tokens_per_s": fp32, "int8_tokens_per_s": int8}
            for streams, tokens, fp32, int8 in SPEEDS
        ],
        "agreement": {
            "num_tokens": 2032, "reference_loss": 5.779, "int8_loss": 5.7793, "divergence": 1.7e-05,
            "same_first": 0.96, "max_logit_gap": 0.1,
        },
    },
    "fp32": {"bits_per_byte": {"prose": {"bits_per_byte": 4.1481, "documents": 5}}, "multiple_choice": CHOICE},
    "int8": {"bits_per_byte": {"prose": {"bits_per_byte": 4.1479}}, "multiple_choice": CHOICE},
    "change": {
        "bits_per_byte": {"prose": {"difference": -0.0002, "low": -0.0007, "high": 0.0003}},
        "multiple_choice": {"won": 2, "lost": 1},
    },
}  # fmt: skip


def run_data(folder: Path, name: str, files: dict[str, object]) -> tuple[RunData, StageData]:
    """A run of the small recipe in which only the stage `name` has finished, with these JSON files; and the stage."""
    run = RunDir(folder)
    stage = StageData(name, run.stage(name), {}, [], True)
    stage.folder.artifact.mkdir(parents=True)
    for file, content in files.items():
        (stage.folder.artifact / file).write_text(json.dumps(content))
    return RunData(recipe("tiny"), run, {}, {name: stage}), stage


def only_table(section: Section | None) -> Table:
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


@pytest.fixture
def int8(tmp_path: Path) -> Section:
    section = int8_section(*run_data(tmp_path, "quantize", {"results.json": QUANTIZED}))
    assert section is not None
    return section


def test_weights_of_four_bits_are_not_called_int8(tmp_path: Path) -> None:
    data, stage = run_data(tmp_path, "quantize", {"results.json": {**QUANTIZED, "bits": 4}})
    section = int8_section(data, stage)
    assert section is not None
    assert section.title == "INT4 beside FP32"
    assert only_table(section).header[2] == "INT4"
    assert [fact.label for fact in int8_facts(data, stage)] == ["INT4"]


def test_rows_of_the_int8_table_name_sequences_and_tokens(int8: Section) -> None:
    labels = [row[0] for row in only_table(int8).rows]
    assert len(set(labels)) == len(labels)
    assert labels[1:5] == [
        "tokens/s, decode, 1 sequence",
        "tokens/s, decode, 8 sequences",
        "tokens/s, decode, 32 sequences",
        "tokens/s, prefill, 1 sequence of 128 tokens",
    ]


def test_intervals_of_the_int8_table_have_a_column_of_their_own(int8: Section) -> None:
    table = only_table(int8)
    assert list(table.header[3:]) == ["change", "95% interval"]
    (prose,) = (row for row in table.rows if row[0] == "bits per byte, prose")
    assert list(prose[1:]) == ["4.1481", "4.1479", "-0.0002", "-0.0007 to +0.0003"]
    assert {len(row) for row in table.rows} == {5}


def answer(question: str, reference: str) -> dict[str, object]:
    return {
        "question": question, "reference": reference, "answer": " 7 apples ", "finish_reason": "stop",
        "num_tokens": 4, "latency_s": 0.25,
    }  # fmt: skip


def served(tmp_path: Path, streamed: str) -> Section:
    answers = {
        "answers": [answer("Hello!", ""), answer("Anna has 3 apples and buys 4. How many?", "3 + 4 = 7")],
        "streamed": {"answer": streamed, "first_text_s": 0.084 if streamed else 0.0},
        "start_s": 5.2,
    }
    section = serving_section(*run_data(tmp_path, "serve_check", {"answers.json": answers}))
    assert section is not None
    return section


def test_reference_answers_are_called_so_whatever_the_data(tmp_path: Path) -> None:
    hint, samples = served(tmp_path, "7").blocks[:2]
    assert isinstance(hint, Note)
    assert "it has learned what answers look like, not facts" in hint.text
    assert isinstance(samples, Samples)
    plain, with_reference = (item.detail for item in samples.items)
    assert plain == "4 tokens in 0.25 s (stop)"
    assert with_reference == "4 tokens in 0.25 s (stop). Reference answer: 3 + 4 = 7"


@pytest.mark.parametrize(
    ("streamed", "words"),
    [
        (" 7 apples ", "the same answer; its first text arrived after 84 ms."),
        ("8 apples", "a different answer; its first text arrived after 84 ms."),
        ("", "a different answer, which was empty."),
    ],
)
def test_the_streamed_answer_is_compared_with_the_plain_one(tmp_path: Path, streamed: str, words: str) -> None:
    assert served(tmp_path, streamed).lead.endswith(f"As a stream, the first question got {words}")


def scores(documents: int) -> dict[str, object]:
    return {
        "bits_per_byte": 2.0, "bits_per_byte_low": 1.9, "bits_per_byte_high": 2.1, "nats_per_token": 3.0,
        "documents": documents, "bytes": 1000,
    }  # fmt: skip


def evaluated(tmp_path: Path, documents: int, kind: str = "prose") -> Section:
    choice = {
        **CHOICE, "correct": 3, "accuracy_low": 0.1, "accuracy_high": 0.4, "log10_p_value": -0.1, "chance": 0.25,
        "cues": {"longest": 0.2, "shortest": 0.3, "shared_words": 1.0}, "score": "byte",
        "by_score": {"byte": 0.2, "without_question": 0.31},
    }  # fmt: skip
    model = {"bits_per_byte": {kind: scores(documents)}, "multiple_choice": choice, "lossless": True}
    results = {"models": {"pretrain": model}, "final": "pretrain", "baselines": {}}
    section = evaluation_section(*run_data(tmp_path, "evaluate", {"results.json": results}))
    assert section is not None
    return section


def test_words_on_the_benchmarks_fit_any_data(tmp_path: Path) -> None:
    section = evaluated(tmp_path, documents=5)
    charts = [block for block in section.blocks if isinstance(block, Chart)]
    words = " ".join([section.lead, *(chart.title + chart.caption for chart in charts)])
    assert not re.findall("module|description|documentation|library", words)
    assert "which answer belongs to the question" in words


def test_one_document_has_no_interval(tmp_path: Path) -> None:
    table = next(block for block in evaluated(tmp_path / "five", 5).blocks if isinstance(block, Table))
    assert table.rows[0][3] == "1.900 to 2.100"
    table = next(block for block in evaluated(tmp_path / "one", 1).blocks if isinstance(block, Table))
    assert table.rows[0][3] == "needs 2 documents"


def test_pairs_are_called_so_in_chart_and_table(tmp_path: Path) -> None:
    table = next(block for block in evaluated(tmp_path, 5, kind="qa").blocks if isinstance(block, Table))
    assert table.rows[0][1] == "question-answer pairs"


def test_the_accuracy_axis_ends_at_100_percent(tmp_path: Path) -> None:
    chart = next(block for block in evaluated(tmp_path, 5).blocks if isinstance(block, Chart) and "choice" in block.svg)
    ticks = [float(text) for text in re.findall(r">([\d.]+)</text>", chart.svg)]
    assert max(ticks) == 100


def test_what_needs_no_question_stands_beside_the_accuracy(tmp_path: Path) -> None:
    """A run from before there was such a figure shows the rest."""
    chart = next(block for block in evaluated(tmp_path, 5).blocks if isinstance(block, Chart) and "choice" in block.svg)
    assert all(words in chart.svg for words in ("without the question", "31.0%", "cue: shared words", "100.0%"))
    run = RunDir(tmp_path)
    stage = StageData("evaluate", run.stage("evaluate"), {}, [], True)
    data = RunData(recipe("tiny"), run, {}, {"evaluate": stage})
    results = json.loads((stage.folder.artifact / "results.json").read_text())
    facts = {fact.label: fact for fact in evaluation_facts(data, stage)}
    assert facts["Multiple choice"].hint.startswith("below the best rival, shared words, 100.0%; chance 25%, p = ")
    del results["models"]["pretrain"]["multiple_choice"]["by_score"]["without_question"]
    (stage.folder.artifact / "results.json").write_text(json.dumps(results))
    section = evaluation_section(data, stage)
    assert not any("without the question" in block.svg for block in section.blocks if isinstance(block, Chart))
    assert evaluation_facts(data, stage)


@pytest.mark.parametrize(
    ("rivals", "words"),
    [
        ({"shared_words": 0.33, "shared_parts_of_words": 0.443}, "below the best rival, shared parts of words, 44.3%"),
        ({"shared_words": 0.33}, "above the best rival, shared words, 33.0%"),
        ({"without_question": 0.38}, "below the best rival, the model without the question, 38.0%"),
        ({"longest": 0.371}, "equal to the best rival, longest, 37.1%"),
        ({}, "above the best rival, chance, 25.0%"),
    ],
)
def test_the_best_rival_is_named_wherever_the_accuracy_is(rivals: dict[str, float], words: str, tmp_path: Path) -> None:
    """In the report's facts, which the model card and the closing lines have, and in the stage's own line."""
    cues = {name: value for name, value in rivals.items() if name != "without_question"}
    choice = {
        **CHOICE, "questions": 429, "accuracy": 0.371, "log10_p_value": -5.0, "chance": 0.25, "cues": cues,
        "by_score": {"pmi": 0.371, **{name: rivals[name] for name in rivals if name not in cues}},
    }  # fmt: skip
    model = {"bits_per_byte": {"prose": scores(5)}, "multiple_choice": choice, "lossless": True}
    data, stage = run_data(tmp_path, "evaluate", {"results.json": {"models": {"sft": model}, "final": "sft"}})
    (line,) = (line for line in figures(data) if line.startswith("Multiple choice"))
    assert "37.1%" in line
    assert words in line
    assert words in evaluation_lines(data, stage)[-1]
    assert words in headline(model)


def test_percentages_are_written_as_in_american_english() -> None:
    assert [percent(0.261), percent(0.25, 0)] == ["26.1%", "25%"]
