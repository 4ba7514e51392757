"""The stage qat, and what quantize makes of its model."""

import json
from pathlib import Path

import pytest
import torch

from modelwright.cli.main import main
from modelwright.compress.int8 import GridLinear, Int8WeightsConfig, TrainedGrid, load_int8
from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError
from modelwright.core.records import column, read_records
from modelwright.data.rows.loader import PackedRows
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.hf import load_model
from modelwright.pipeline.stages.qat import QatConfig
from modelwright.train.objective import forward


@pytest.mark.slow
def test_quantize_takes_over_the_trained_grid(small_words: tuple[str, ...], tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    _quantize_without_training(run, small_words)
    words = [
        *small_words, "--run-dir", str(run.path), "--stages=clean,tokenize,pack,pretrain,qat,quantize,report",
        "--qat.num_steps=6", "--qat.batch_tokens=512", "--qat.eval_every_steps=3", "--qat.start_step=2",
        "--qat.learned_steps=true", "--qat.activations=tensor_moving_average", "--training.keep_best=false",
        "--validation_tokens=0", "--qat.fold_norms=true", "--qat.learning_rate=1e-4",
    ]  # fmt: skip
    assert main(words) == 0
    grid = TrainedGrid.load(run.stage("qat").artifact)
    assert grid is not None
    assert grid.activations == "tensor"
    assert len(grid.steps) == len(grid.ranges) > 0
    before, after = (load_model(run.stage(stage).artifact) for stage in ("pretrain", "qat"))
    distances = [float((model.blocks["0"].ffn_norm.weight.detach() - 1).abs().max()) for model in (before, after)]
    assert distances[1] < 2e-3 < distances[0], "training went on from neutral norms"
    integers = load_int8(run.stage("quantize").artifact, Int8WeightsConfig())
    assert isinstance(integers.blocks["0"].ffn.up_proj, GridLinear)
    assert torch.equal(integers.blocks["0"].ffn.up_proj.scale, grid.steps["blocks.0.ffn.up_proj"])
    rows = PackedRows(run.stage("pack").artifact / "all" / "heldout")
    total, num_targets = 0.0, 0
    with torch.no_grad():
        for batch in rows.batches(8):
            total += float(integers.cross_entropy(forward(integers, batch), batch.labels_BT, chunk_tokens=512))
            num_targets += batch.num_targets
    (*_, (_, heldout)) = column(read_records(run.stage("qat").metrics), "heldout_loss")
    assert total / num_targets == pytest.approx(heldout, rel=1e-4)  # FP32 sums in another order meet rounding edges
    results = json.loads((run.stage("quantize").artifact / "results.json").read_text())
    assert results["comparison"]["reference_bytes"] > results["comparison"]["int8_bytes"]
    assert "4-bit weights, symmetric per group of 32 inputs with learned steps" in run.report.read_text()
    (completion,) = generate(integers, [[1, 2, 3]], [SamplingParams(max_tokens=2)])
    assert len(completion.token_ids) == 2


def _quantize_without_training(run: RunDir, small_words: tuple[str, ...]) -> None:
    """The model before qat, by each of the other ways; qat then trains it on."""
    words = [*small_words, "--run-dir", str(run.path), "--stages=clean,tokenize,pack,pretrain,quantize,report"]
    assert main([*words, "--serve.int8.weights=int4_gptq"]) == 0
    results = json.loads((run.stage("quantize").artifact / "results.json").read_text())
    assert all(error["gptq"] < error["nearest"] for error in results["layer_errors"].values())
    assert "GPTQ leaves" in run.report.read_text()
    packed = load_int8(run.stage("quantize").artifact, Int8WeightsConfig())
    assert isinstance(packed.blocks["0"].ffn.up_proj, GridLinear)
    assert main([*words, "--serve.int8.weights=int8_smooth"]) == 0
    assert "SmoothQuant" in run.report.read_text()
    assert main([*words, "--serve.int8.weights=int4_folded"]) == 0
    assert "Norms before projections were multiplied into these" in run.report.read_text()
    folded = load_int8(run.stage("quantize").artifact, Int8WeightsConfig())
    assert all(torch.equal(one.ffn_norm.weight, torch.ones_like(one.ffn_norm.weight)) for one in folded.blocks.values())
    assert not any((one.ffn_norm.weight == 1).all() for one in packed.blocks.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activations": "tensor_min_max"}, "start_step: activations"),
        ({"asymmetric": True, "learned_steps": True}, "asymmetric: learned_steps"),
        ({"num_steps": 4, "start_step": 4}, "start_step: 4 is not before the last of 4 steps"),
    ],
)
def test_settings_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QatConfig(**settings)
