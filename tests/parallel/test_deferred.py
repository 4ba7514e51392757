"""Weights that each rank reads for itself: its own part of the files, and the same training as with a loaded model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import LENGTH, VOCABULARY

from distributed import run_distributed
from hf_folders import write_folder
from modelwright.model.hf import deferred_model
from modelwright.parallel.sharded_weights import is_deferred
from parallel.deferred_run import train_from, train_in_turn

pytest.importorskip("transformers")

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_stage": 3},
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 78}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Phi-3, whose projections are parts of larger tensors, with an odd number of rows in some."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {**SIZES, "vocab_size": VOCABULARY + 3, "max_position_embeddings": LENGTH}
    write_folder("phi3", folder, shard_size="20KB", **sizes)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, list[str]]]]:
    return run_distributed(train_in_turn, 2, folder, tmp_path_factory.mktemp("ranks"), LAYOUTS)


@pytest.mark.slow
def test_one_process_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    model = deferred_model(folder)
    assert is_deferred(model)
    weights, num_read = train_from(folder, tmp_path / "deferred", {})
    loaded, _ = train_from(folder, tmp_path / "loaded", {}, deferred=False)
    assert num_read == model.config.num_parameters == sum(weight.numel() for weight in weights.values())
    assert all(torch.equal(weights[name], weight) for name, weight in loaded.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_own_part(folder: Path, runs: Any, layout: str) -> None:
    total = deferred_model(folder).config.num_parameters
    for num_read, different in (found[layout] for found in runs):
        assert 0.3 * total < num_read < 0.7 * total
        assert different == []
