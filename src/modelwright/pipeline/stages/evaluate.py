"""evaluate: held-out bits per byte and multiple choice of the final model, and of the one before fine-tuning.

artifact/results.json, and per model a folder with the per-document and per-question records.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump
from modelwright.data.batch import TokenBatch
from modelwright.data.clean import read_kept
from modelwright.data.loader import PackedRows
from modelwright.data.tokenizer import Tokenizer
from modelwright.evaluate.suite import LOSSY, compare_evaluations, evaluate_model
from modelwright.model.hf import load_model
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.stage_inputs import final_model

RESULTS = "results.json"
ROWS_AT_ONCE = 64


def evaluate_stage(config: RunConfig) -> Stage:
    """Evaluates the last two models of the run, with baselines."""
    models = evaluated_models(config)
    return Stage(
        name="evaluate",
        title="Evaluating on held-out text",
        settings=dump(config.evaluate),
        parents=("clean", "pack", *models),
        run=lambda context: _run(context, config, models),
    )


def evaluated_models(config: RunConfig) -> tuple[str, ...]:
    """Stages whose models are evaluated, the final one first."""
    return tuple(reversed(config.trained_stages[-2:]))


def _run(context: StageContext, config: RunConfig, models: tuple[str, ...]) -> None:
    out = context.output.path
    documents = list(read_kept(context.parents["clean"], split="heldout"))
    results: dict[str, Any] = {"models": {}, "final": final_model(config)}
    for name in models:
        folder = context.parents[name]
        (out / name).mkdir()
        rows = training_rows(context.parents["pack"]) if name == models[0] else ()
        result = evaluate_model(
            load_model(folder).to(context.ranks.world.device),
            Tokenizer.load(folder),
            documents,
            config.evaluate,
            train_rows=rows,
            folder=out / name,
            progress=context.progress,
        )
        if name == models[0]:
            results["baselines"] = result["baselines"]
        results["models"][name] = {key: value for key, value in result.items() if key != "baselines"}
        context.progress.note(f"{name}: {headline(result)}")
    if len(models) > 1:
        results["change"] = compare_evaluations(out / models[0], out / models[1], config.evaluate)
    write_atomic(out / RESULTS, json.dumps(results, indent=1))


def training_rows(pack: Path) -> Iterable[TokenBatch]:
    """The rows of pretraining, for the bigram; none if there are none."""
    folder = pack / "pretrain" / "train"
    return PackedRows(folder).batches(ROWS_AT_ONCE) if folder.is_dir() else ()


def headline(result: dict[str, Any]) -> str:
    """`bits per byte prose 1.71, code 1.50; multiple choice 41.2 % of 600`, with a warning if the bits are too low."""
    bits = ", ".join(f"{kind} {table['bits_per_byte']:.3f}" for kind, table in result["bits_per_byte"].items())
    choice = result["multiple_choice"]
    asked = f"{choice['accuracy']:.1%} of {choice['questions']} (chance {choice['chance']:.0%})"
    parts = [f"bits per byte {bits}"] if bits else []
    parts += [f"warning: {LOSSY}"] if bits and not result["lossless"] else []
    return "; ".join([*parts, f"multiple choice {asked}"] if choice["questions"] else parts or ["nothing held out"])
