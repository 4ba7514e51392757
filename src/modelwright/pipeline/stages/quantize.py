"""quantize: the final model with INT8 matrices, and its effect on size, speed and accuracy. Artifact: an INT8 model
folder with its tokenizer, `results.json`, and the evaluation's records.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from modelwright.compress.compare import compare
from modelwright.compress.int8 import load_int8, quantize_model, save_int8
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump
from modelwright.data.clean import read_kept
from modelwright.data.loader import PackedRows
from modelwright.data.tokenizer import Tokenizer
from modelwright.evaluate.suite import compare_evaluations, evaluate_model
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.evaluate import RESULTS, headline
from modelwright.pipeline.stages.stage_inputs import final_model

AGREEMENT_ROWS = 16


def quantize_stage(config: RunConfig, *, evaluated: bool) -> Stage:
    """Size, speed and accuracy of the INT8 model beside FP32, on the evaluation's own documents and questions.

    evaluated: whether the stage evaluate provides the FP32 model's figures.
    """
    return Stage(
        name="quantize",
        title="Quantizing to INT8",
        settings={"quantize": dump(config.serve.int8), "evaluate": dump(config.evaluate)},
        parents=("clean", "pack", final_model(config), *(("evaluate",) if evaluated else ())),
        run=lambda context: _run(context, config),
    )


def _run(context: StageContext, config: RunConfig) -> None:
    out, name = context.output.path, final_model(config)
    source = context.parents[name]
    reference, tokenizer = load_model(source), Tokenizer.load(source)
    context.progress.begin("quantize", 0, "tensors")
    save_int8(quantize_model(reference, config.serve.int8), out)
    tokenizer.save(out, max_length=config.model.max_seq_len)
    int8 = load_int8(out, config.serve.int8)
    comparison = compare(reference, int8, _sample(context.parents["pack"]))
    context.progress.end()
    results: dict[str, Any] = {"model": name, "backend": config.serve.int8.backend, "comparison": asdict(comparison)}
    results["int8"] = _evaluate(context, config, int8, tokenizer, out / "int8")
    if "evaluate" in context.parents:
        before = context.parents["evaluate"] / name
        results["fp32"] = json.loads((context.parents["evaluate"] / RESULTS).read_text())["models"][name]
    else:
        before = out / "fp32"
        results["fp32"] = _evaluate(context, config, reference, tokenizer, before)
    results["change"] = compare_evaluations(out / "int8", before, config.evaluate)
    write_atomic(out / RESULTS, json.dumps(results, indent=1))
    ratio = comparison.reference_bytes / comparison.int8_bytes
    context.progress.note(f"INT8: {ratio:.1f}x smaller; {headline(results['int8'])}")


def _evaluate(
    context: StageContext, config: RunConfig, model: Decoder, tokenizer: Tokenizer, folder: Path
) -> dict[str, Any]:
    folder.mkdir()
    return evaluate_model(
        model,
        tokenizer,
        read_kept(context.parents["clean"], split="heldout"),
        config.evaluate,
        train_rows=(),
        folder=folder,
        progress=context.progress,
    )


def _sample(pack: Path) -> torch.Tensor:
    """Rows of tokens that the model was not trained on (training rows if nothing is held out)."""
    places = [pack / purpose / split for split in ("heldout", "train") for purpose in ("pretrain", "sft")]
    rows = PackedRows(next(place for place in places if place.is_dir()))
    return next(iter(rows.batches(AGREEMENT_ROWS))).input_ids_BT
