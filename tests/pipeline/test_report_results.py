"""What the report's sections on results say about the files that the stages leave behind."""

import json
from pathlib import Path

import pytest

from modelwright.core.rundir import RunDir
from modelwright.pipeline.report.blocks import Section, Table
from modelwright.pipeline.report.results import int8_section
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.recipes.load import RECIPES

SPEEDS = [(1, 1, 2431.0, 1343.3), (8, 1, 18006.5, 11016.2), (32, 1, 58786.6, 43935.1), (1, 128, 154745.6, 114531.3)]
CHOICE = {"questions": 15, "accuracy": 0.2}
QUANTIZED = {
    "backend": "int_mm",
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
    "fp32": {"bits_per_byte": {"prose": {"bits_per_byte": 4.1481}}, "multiple_choice": CHOICE},
    "int8": {"bits_per_byte": {"prose": {"bits_per_byte": 4.1479}}, "multiple_choice": CHOICE},
    "change": {
        "bits_per_byte": {"prose": {"difference": -0.0002, "low": -0.0007, "high": 0.0003}},
        "multiple_choice": {"won": 2, "lost": 1},
    },
}  # fmt: skip


def run_data(folder: Path, name: str, files: dict[str, object]) -> RunData:
    """A run of the small recipe in which only the stage `name` has finished, with these JSON files."""
    run = RunDir(folder)
    stage = StageData(name, run.stage(name), {}, [], True)
    stage.folder.artifact.mkdir(parents=True)
    for file, content in files.items():
        (stage.folder.artifact / file).write_text(json.dumps(content))
    return RunData(RECIPES["tiny"](), run, {}, {name: stage})


def only_table(section: Section | None) -> Table:
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


@pytest.fixture
def int8(tmp_path: Path) -> Section:
    section = int8_section(run_data(tmp_path, "quantize", {"results.json": QUANTIZED}))
    assert section is not None
    return section


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
