"""evaluate: held-out bits per byte and multiple choice of the final model, and of the one before fine-tuning.

Artifact: `results.json`, and for each model a folder with the records of documents and questions.
"""

import json
from collections.abc import Sequence
from typing import Any

from modelwright.core.artifacts import RunDir, write_atomic
from modelwright.core.config import dump
from modelwright.data.clean.folder import read_kept
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import EvaluateConfig
from modelwright.evaluate.suite import LOSSY, compare_evaluations, evaluate_model
from modelwright.model.hf import load_model
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report import results as shown
from modelwright.pipeline.stage import Rates, RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.estimates import BYTES_PER_TOKEN, scoring_estimate, text_bytes
from modelwright.pipeline.stages.pack import PACK, final_model, needed_model
from modelwright.pipeline.stages.rows import TEXT_ROWS

RESULTS = "results.json"
ROWS_AT_ONCE = 64
LIBRARY_BYTES = 30 * 2**20
"""Memory of libraries that the stage loads, which stay in the process: measured in a run of all stages."""
BIGRAM_BYTES = 26
"""Bytes of the bigram baseline for each pair of training tokens: the pair, its sorted copy, and the counts of distinct
pairs."""


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    models, settings = evaluated_models(config), config.section(EVALUATE)

    def evaluate(context: StageContext) -> None:
        out = context.output.path
        documents = list(read_kept(context.parents[CLEAN.name], split="heldout"))
        results: dict[str, Any] = {"models": {}, "final": final_model(config)}
        for name in models:
            folder = context.parents[name]
            (out / name).mkdir()
            # The bigram baseline, which learns from the rows of pretraining, is measured once, with the final model.
            train = context.parents[PACK.name] / TEXT_ROWS.name / "train"
            rows = PackedRows(train).batches(ROWS_AT_ONCE) if name == models[0] and train.is_dir() else ()
            result = evaluate_model(
                load_model(folder).to(context.ranks.world.device),
                Tokenizer.load(folder),
                documents,
                settings,
                train_rows=rows,
                folder=out / name,
                progress=context.progress,
            )
            if name == models[0]:
                results["baselines"] = result["baselines"]
            results["models"][name] = {key: value for key, value in result.items() if key != "baselines"}
            context.progress.note(f"{name}: {headline(result)}")
        if len(models) > 1:
            results["change"] = compare_evaluations(out / models[0], out / models[1], settings)
        write_atomic(out / RESULTS, json.dumps(results, indent=1))

    return Stage(
        name=EVALUATE.name,
        title=EVALUATE.title,
        settings=dump(settings),
        parents=(CLEAN.name, PACK.name, *models),
        run=evaluate,
    )


def evaluated_models(config: RunConfig) -> tuple[str, ...]:
    """Returns the last two stages that produce a model, the final one first."""
    return tuple(reversed(config.model_names[-2:]))


def headline(result: dict[str, Any]) -> str:
    """Returns a line such as `bits per byte prose 1.71, code 1.50; answers perplexity 8.12; multiple choice 41.2% of
    600 (above the best rival, chance, 25.0%)`, with a warning if the bits are too low.
    """
    bits = ", ".join(f"{kind} {table['bits_per_byte']:.3f}" for kind, table in result["bits_per_byte"].items())
    choice = result["multiple_choice"]
    parts = [f"bits per byte {bits}"] if bits else []
    parts += [f"warning: {LOSSY}"] if bits and not result["lossless"] else []
    parts += [f"answers perplexity {result['answers']['perplexity']:.3f}"] if result.get("answers") else []
    if choice["questions"]:
        parts.append(f"multiple choice {choice['accuracy']:.1%} of {choice['questions']} ({shown.rival_words(choice)})")
    return "; ".join(parts or ["nothing held out"])


def _estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    settings = config.section(EVALUATE)
    num_pairs = text_bytes(config.data, TEXT_ROWS) / BYTES_PER_TOKEN
    if settings.bigram_tokens:
        num_pairs = min(num_pairs, settings.bigram_tokens)
    return scoring_estimate(
        EVALUATE.name,
        config,
        settings,
        rates,
        num_models=len(evaluated_models(config)),
        library_bytes=LIBRARY_BYTES + int(BIGRAM_BYTES * num_pairs),
    )


EVALUATE = StageSpec(
    name="evaluate",
    title="Evaluating on held-out text",
    config=EvaluateConfig,
    needs=lambda config: (PACK.name, *needed_model(config), CLEAN.name),
    build=_build,
    estimate=_estimate,
    report=shown.evaluation_section,
    headline=shown.evaluation_facts,
    highlight=shown.evaluation_highlight,
    closing=shown.evaluation_lines,
    warnings=lambda stage: (
        () if all(model["lossless"] for model in stage.json(RESULTS)["models"].values()) else (f"{LOSSY}.",)
    ),
)
