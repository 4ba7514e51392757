"""quantize: the final model with integer matrices, and its effect on size, speed and accuracy. A model that was trained
on a grid keeps exactly that grid; any other is quantized as `serve.int8.weights` says. Artifact: a quantized model
folder with its tokenizer, `results.json`, and the evaluation's records.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from modelwright.compress import int8 as integers
from modelwright.compress.fold import fold_norms, smoothed
from modelwright.compress.gptq import LayerError, gptq
from modelwright.core.artifacts import RunDir, write_atomic
from modelwright.core.config import dump
from modelwright.data.clean.folder import read_kept
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.suite import compare_evaluations, evaluate_model
from modelwright.infer.generate import SpeedPair, measure_speed
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.ops.int_grid import WeightGrid
from modelwright.pipeline.report.results import int8_facts, int8_section
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.estimates import scoring_estimate
from modelwright.pipeline.stages.evaluate import EVALUATE, RESULTS, headline
from modelwright.pipeline.stages.pack import PACK, final_model, needed_model
from modelwright.pipeline.stages.rows import ALL_ROWS, CHAT_ROWS, TEXT_ROWS

AGREEMENT_ROWS = 16
CALIBRATION_ROWS = 64
INT8_GRID = "Weights are quantized per output channel, activations per token at run time."
FOLDED = "Norms before projections were multiplied into these. "
INT8_SMOOTH = "Outliers of activations were moved into the weights (SmoothQuant). "
SPEED_SHAPES = ((1, 1), (8, 1), (32, 1), (1, 256))
"""Batches on which speed is measured: streams, and tokens of each."""
LIBRARY_BYTES = 35 * 2**20
"""Memory of libraries that the stage loads, which stay in the process: measured in a run of all stages."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantized model against its original: bytes of the weights, speed in the engine, agreement."""

    reference_bytes: int
    int8_bytes: int
    speed: tuple[SpeedPair, ...]
    agreement: integers.Agreement


def compare(
    reference: Decoder, int8: Decoder, tokens_BT: torch.Tensor, *, shapes: Sequence[tuple[int, int]] = SPEED_SHAPES
) -> Comparison:
    """Measures both models. tokens_BT: held-out rows of at least two tokens."""
    return Comparison(
        reference_bytes=integers.weight_bytes(reference),
        int8_bytes=integers.weight_bytes(int8),
        speed=measure_speed(reference, int8, shapes),
        agreement=integers.measure_agreement(reference, int8, tokens_BT),
    )


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Compares size, speed and accuracy of the INT8 model with FP32, on the documents and questions of the evaluation.
    The FP32 model's figures are those of the stage evaluate if it is present.
    """
    evaluated = [EVALUATE.name] if EVALUATE.name in present else []

    def quantize(context: StageContext) -> None:
        out, name = context.output.path, final_model(config)
        source = context.parents[name]
        reference, tokenizer = load_model(source), Tokenizer.load(source)
        context.progress.begin("quantize", 0, "tensors")
        bits, described, errors = _quantize(context, source, reference, config)
        tokenizer.save(out, max_length=config.model.max_seq_len)
        int8 = integers.load_int8(out, config.serve.int8)
        # Agreement is measured on rows that the model was not trained on; on training rows if nothing is held out.
        pack = context.parents[PACK.name]
        places = [pack / rows.name / split for split in ("heldout", "train") for rows in (TEXT_ROWS, CHAT_ROWS)]
        packed = PackedRows(next(place for place in places if place.is_dir()))
        comparison = compare(reference, int8, next(iter(packed.batches(AGREEMENT_ROWS))).input_ids_BT)
        context.progress.end()
        results: dict[str, Any] = {
            "model": name,
            "backend": config.serve.int8.backend,
            "bits": bits,
            "grid": described,
            "layer_errors": errors,
            "comparison": asdict(comparison),
        }
        results["int8"] = _evaluate(context, config, int8, tokenizer, out / "int8")
        if evaluated := context.parents.get(EVALUATE.name):
            before = evaluated / name
            results["fp32"] = json.loads((evaluated / RESULTS).read_text())["models"][name]
        else:
            before = out / "fp32"
            results["fp32"] = _evaluate(context, config, reference, tokenizer, before)
        results["change"] = compare_evaluations(out / "int8", before, config.section(EVALUATE))
        write_atomic(out / RESULTS, json.dumps(results, indent=1))
        ratio = comparison.reference_bytes / comparison.int8_bytes
        context.progress.note(f"INT{bits}: {ratio:.1f}x smaller; {headline(results['int8'])}")

    return Stage(
        name=QUANTIZE.name,
        title=QUANTIZE.title,
        settings={"quantize": dump(config.serve.int8), "evaluate": dump(config.section(EVALUATE))},
        parents=(CLEAN.name, PACK.name, final_model(config), *evaluated),
        run=quantize,
        # Increased when results.json began to name the bits of the weights.
        version=2,
    )


def _quantize(
    context: StageContext, source: Path, reference: Decoder, config: RunConfig
) -> tuple[int, str, dict[str, Any]]:
    """Writes the quantized model; returns the bits of its weights, a description of its grid, and, of GPTQ, the errors
    of its layers.
    """
    settings, out = config.serve.int8, context.output.path
    grid, codes, errors, first = integers.TrainedGrid.load(source), None, dict[str, LayerError](), ""
    if grid is None and settings.weights.endswith("folded"):
        # A copy: the caller compares the result with the unchanged reference.
        reference, first = copy.deepcopy(reference), FOLDED
        fold_norms(reference)
    if grid is None and settings.weights not in integers.FOUR_BITS:
        is_smooth = settings.weights == "int8_smooth"
        plain = smoothed(reference, _calibration(context.parents[PACK.name])) if is_smooth else reference
        integers.save_int8(integers.quantize_model(plain, settings), out)
        return 8, f"{first}{INT8_SMOOTH if is_smooth else ''}{INT8_GRID}", {}
    if grid is None:
        grid = integers.TrainedGrid(weights=WeightGrid(bits=4, granularity=settings.granularity), int8_ends=True)
        if settings.weights == "int4_gptq":
            rows = _calibration(context.parents[PACK.name])
            codes = gptq(reference, rows, grid.weights, show=errors.__setitem__)
    quantized = integers.quantize_to_grid(
        reference, grid, codes=codes, choose=partial(integers.choose_backend, settings)
    )
    integers.save_grid_model(quantized, grid, out)
    return grid.weights.bits, f"{first}{grid.describe()}", {name: asdict(error) for name, error in errors.items()}


def _calibration(pack: Path) -> list[TokenBatch]:
    """Returns training rows, a few at a time, on which SmoothQuant and GPTQ are calibrated."""
    places = [pack / rows.name / "train" for rows in (ALL_ROWS, TEXT_ROWS, CHAT_ROWS)]
    packed = PackedRows(next(place for place in places if place.is_dir()))
    return list(islice(packed.batches(CALIBRATION_ROWS // 8), 8))


def _evaluate(
    context: StageContext, config: RunConfig, model: Decoder, tokenizer: Tokenizer, folder: Path
) -> dict[str, Any]:
    folder.mkdir()
    return evaluate_model(
        model,
        tokenizer,
        read_kept(context.parents[CLEAN.name], split="heldout"),
        config.section(EVALUATE),
        train_rows=(),
        folder=folder,
        progress=context.progress,
    )


QUANTIZE = StageSpec(
    name="quantize",
    title="Quantizing to integers",
    reads=(EVALUATE,),
    needs=lambda config: (PACK.name, *needed_model(config), CLEAN.name),
    build=_build,
    estimate=lambda config, run, rates: scoring_estimate(
        "quantize", config, config.section(EVALUATE), rates, num_models=1, library_bytes=LIBRARY_BYTES
    ),
    report=int8_section,
    headline=int8_facts,
)
