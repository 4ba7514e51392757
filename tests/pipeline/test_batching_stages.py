"""Runs whose rows are chunked, bucketed by length, ordered by a curriculum and mixed from sources."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from modelwright.core.artifacts import RunDir
from modelwright.core.records import column, read_records
from modelwright.data.rows.loader import PackedRows, read_index
from modelwright.pipeline.stages.pack import with_labels
from modelwright.pipeline.stages.pretrain import PRETRAIN
from modelwright.recipes.load import load
from refusals import config_error

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_sources_with_scores_train_from_records_to_a_model(
    inside: Command, tmp_path: Path, small_words: tuple[str, ...]
) -> None:
    dice = np.random.default_rng(0)
    words = [
        "the",
        "cat",
        "of",
        "a",
        "house",
        "and",
        "this",
        "is",
        "that",
        "dog",
        "by",
        "the",
        "river",
        "in",
        "an",
        "old",
        "town",
        "with",
        "many",
        "people",
    ]
    for source in ("a", "b"):
        lines = []
        for number in range(120):
            text = " ".join(dice.choice(words, int(dice.integers(60, 400))))
            lines.append(json.dumps({"text": f"{source} {number}. {text}", "level": number}))
        (tmp_path / f"{source}.jsonl").write_text("\n".join(lines))
    place = small_words.index("--data.sources") + 1
    run = inside(
        *small_words[:place], str(tmp_path / "*.jsonl"), *small_words[place + 1 :], "--run-dir", str(tmp_path / "run"),
        "--stages", "clean,tokenize,pack,pretrain", "--data.keep_fields", "level", "--data.validation_fraction=0.2",
        "--pack.mode", "length_buckets", "--pack.long_documents", "chunk", "--pack.seq_len", "128",
        "--model.max_seq_len", "256", "--pretrain.batch_tokens", "1024", "--pretrain.batching.curriculum.by", "level",
        "--pretrain.batching.mixture.update", "heldout_loss", "--pretrain.eval_every_steps", "2",
        "--clean.quality.limits.max_top_ngram_fraction", "1", "--clean.quality.limits.min_stop_word_fraction", "0",
        "--clean.quality.limits.max_compression_ratio", "1", "--clean.quality.limits.max_misordered_fraction", "1",
        "--clean.duplicates.min_jaccard", "0.99", "--augmentation.methods", "random_swap", "case_noise",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.search(r"pretrain: [1-9]\d* copies of documents \(.*made in [\d.]+ CPU seconds", run.stderr)
    rows = PackedRows(tmp_path / "run" / "pack" / "artifact" / "pretrain" / "train")
    assert [name.rpartition("/")[2] for name in rows.sources] == ["a.jsonl", "b.jsonl"]
    assert rows.group_scores().max() == 119
    packing = read_index(rows.folder)
    assert packing["num_cut"] > 50
    assert packing["num_targets"] < packing["num_tokens"] - packing["num_pieces"], "repeated tokens count once"
    losses = [value for _, value in column(read_records(tmp_path / "run" / "pretrain" / "metrics.jsonl"), "loss")]
    assert losses[-1] < losses[0]
    strengths = column(read_records(tmp_path / "run" / "pretrain" / "metrics.jsonl"), "augmentation_strength")
    assert [strength for _, strength in strengths] == pytest.approx([0.3] * 9 + [0.45] * (len(losses) - 9))


def test_trainings_that_need_different_rows_are_refused(tmp_path: Path) -> None:
    def config(**batching: dict):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"recipe": "tiny", **{name: {"batching": b} for name, b in batching.items()}}))
        return load(str(path), {}).config

    both = with_labels(
        config(pretrain={"mixture": {"weights": {"code": 2.0}}}, sft={"curriculum": {"by": "compression_ratio"}})
    )
    assert (both.group_by, both.score) == ("kind", "compression_ratio")
    with config_error(
        "batching.mixture.weights", match=r"batching\.mixture\.weights: the training stages need rows by kind"
    ):
        with_labels(
            config(pretrain={"mixture": {"weights": {"code": 2.0}}}, sft={"mixture": {"weights": {"a.txt": 2.0}}})
        )


def test_the_weights_that_judge_difficulty_are_in_the_digest(tmp_path: Path) -> None:
    """So a stage that was cut off never goes on with an order by other losses."""
    judge = tmp_path / "judge"
    config = load("tiny", {"pretrain": {"batching": {"curriculum": {"by": f"loss:{judge}"}}}}).config
    with config_error("pretrain.batching.curriculum.by"):
        PRETRAIN.build(config, RunDir(tmp_path / "run"), ())
    judge.mkdir()
    settings = []
    for weights in (b"first", b"the second"):
        (judge / "model.safetensors").write_bytes(weights)
        settings.append(PRETRAIN.build(config, RunDir(tmp_path / "run"), ()).settings)
    assert settings[0] != settings[1]
