"""pretrain and sft: one trainer, two objectives. Artifact: the model with its tokenizer in the Hugging Face layout."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump
from modelwright.core.errors import DataError
from modelwright.core.progress import SilentProgress
from modelwright.core.seeds import derive_seed
from modelwright.data.batch import TokenBatch
from modelwright.data.batching.loader import build_loader
from modelwright.data.loader import PackedLoader, PackedRows
from modelwright.data.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.objectives.pretrain import Pretrain
from modelwright.objectives.sft import Sft
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.resolve import product_rate
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.model_folder import save_model_folder
from modelwright.pipeline.stages.stage_inputs import model_before, tokenizer_stage
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import HeldoutBatches
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.row_losses import stored_row_losses
from modelwright.train.state import TrainResult, load_best
from modelwright.train.techniques.heldout_mixture import heldout_mixture

Learn = Callable[[BatchSource], Objective]
TOO_LOW = 1.02
"""Steps faster than the peak by more than this share of measurement error show that the peak is wrong."""


def pretrain_stage(config: RunConfig) -> Stage:
    """Next-token prediction on prose and code."""
    return _stage(config, "pretrain", "Pretraining", config.pretrain, Pretrain)


def sft_stage(config: RunConfig) -> Stage:
    """Fine-tuning on question/answer pairs; without any, the model is passed on unchanged."""
    return _stage(config, "sft", "Fine-tuning on questions and answers", config.sft, Sft)


def _stage(config: RunConfig, name: str, title: str, training: TrainConfig, learn: Learn) -> Stage:
    before = model_before(config, name)
    settings = {
        "training": training.identity(),
        "seed": derive_seed(config.seed, name),
        "validation_tokens": config.validation_tokens,
    }
    if not before:
        settings["model"] = dump(config.model)
    return Stage(
        name=name,
        title=title,
        settings=settings,
        parents=("pack", tokenizer_stage(config), *([before] if before not in ("", tokenizer_stage(config)) else [])),
        run=lambda context: _run(context, config, name, training, learn),
        every_rank=True,
    )


def _run(context: StageContext, config: RunConfig, name: str, training: TrainConfig, learn: Learn) -> None:
    before = model_before(config, name)
    model = load_model(context.parents[before]) if before else fresh_model(config)
    rows = context.parents["pack"] / name / "train"
    if rows.is_dir():
        facts = _learn(context, config, name, training, learn, model, rows)
    elif name == "sft":
        facts = {"skipped": "there are no question/answer pairs to learn from; the model stays as it was"}
        context.progress.note(f"sft: {facts['skipped']}")
    else:
        raise DataError(
            f"{name}: no prose or code document is left to train on; see the dropped documents of the clean stage"
        )
    if context.ranks.rank == 0:
        tokenizer = Tokenizer.load(context.parents[tokenizer_stage(config)])
        save_model_folder(model, tokenizer, context.output.path)
        context.output.facts |= facts


def fresh_model(config: RunConfig) -> Decoder:
    """A model with random weights determined by the seed."""
    model = Decoder(config.model)
    model.init_weights(derive_seed(config.seed, "init"))
    return model


def _learn(
    context: StageContext, config: RunConfig, name: str, training: TrainConfig, learn: Learn, model: Decoder, rows: Path
) -> dict[str, Any]:
    packed, world = PackedRows(rows), context.ranks.world
    num_copies = training.num_copies(config.parallel.axes(world.size))
    batch_rows = training.batch_rows(packed.seq_len, num_copies=num_copies)
    judge = Path(training.batching.curriculum.model)
    loader = build_loader(
        packed,
        training.batching,
        batch_rows=batch_rows,
        by_tokens=config.pack.mode == "length_buckets",
        seed=derive_seed(config.seed, name, "order"),
        num_steps_of=training.resolve_num_steps,
        row_losses=lambda: stored_row_losses(packed, judge, context.folder.path, world),
    )
    objective = learn(loader)
    num_steps = training.resolve_num_steps(loader.num_batches_per_epoch)
    microbatch_rows = max(1, batch_rows // (training.gradient_accumulation_steps * num_copies))
    result = train(
        model,
        objective,
        training,
        num_steps=num_steps,
        world=world,
        stage=context.folder,
        seed=derive_seed(config.seed, name),
        name=name,
        input_digest=context.digest,
        progress=context.progress,
        heldout=heldout_sample(rows.parent / "heldout", config, batch_rows=microbatch_rows),
        peak_flops=peak_flops(context, config, training),
        parallel=config.parallel,
        restart=context.restart,
        technique_builders=[
            partial(
                heldout_mixture,
                training.batching.mixture,
                mixture=loader.mixture,
                objective=objective,
                heldout=heldout_by_source(rows.parent / "heldout", config, batch_rows=microbatch_rows),
                every=training.eval_every_steps,
            )
        ]
        if training.batching.mixture.update == "heldout_loss"
        else (),
    )
    peaks = _peaks_after(context, config, training, result)
    used_share = _utilization(result, peaks, context.ranks.size)
    context.progress.note(_summary(name, num_steps, result, used_share))
    taken = _take_best(model, context, training, result)
    return _facts(result, model, num_steps, loader, taken, context) | peaks


def heldout_sample(folder: Path, config: RunConfig, *, batch_rows: int) -> Sequence[TokenBatch]:
    """The held-out batches that training is evaluated on: about `config.validation_tokens`, always the same ones."""
    if not folder.is_dir():
        return ()
    packed = PackedRows(folder)
    requested = packed.num_rows if not config.validation_tokens else config.validation_tokens // packed.seq_len
    if requested >= packed.num_rows:
        return HeldoutBatches(packed, batch_rows=batch_rows)
    loader = PackedLoader(packed, batch_rows=batch_rows, seed=derive_seed(config.seed, "heldout"))
    return [loader.batch(number) for number in range(max(1, requested // batch_rows))]


def heldout_by_source(folder: Path, config: RunConfig, *, batch_rows: int) -> dict[str, Sequence[TokenBatch]]:
    """Held-out batches of each source, for a mixture: the first of them on disk, equally many tokens of each, together
    about `config.validation_tokens`.
    """
    if not folder.is_dir():
        return {}
    packed = PackedRows(folder)
    tokens = config.validation_tokens or packed.num_rows * packed.seq_len
    most = max(1, tokens // packed.seq_len // len(packed.sources))
    chosen = {name: packed.source_rows(name)[:most] for name in packed.sources}
    return {
        name: [packed.gather(own[first : first + batch_rows]) for first in range(0, len(own), batch_rows)]
        for name, own in chosen.items()
    }


def _take_best(model: Decoder, context: StageContext, training: TrainConfig, result: TrainResult) -> int:
    """Restore the weights with the lowest held-out loss if they are not the last; returns their step."""
    better = training.keep_best and 0 < result.best.step < result.num_steps and result.best.loss < result.heldout_loss
    if better and context.ranks.rank == 0:
        load_best(model, context.folder, result.best)
        context.progress.note(
            f"weights of step {result.best.step} taken (held-out loss {result.best.loss:.4f}, "
            f"last {result.heldout_loss:.4f})"
        )
    return result.best.step if better else result.num_steps


def _facts(
    result: TrainResult, model: Decoder, num_steps: int, loader: BatchSource, taken: int, context: StageContext
) -> dict[str, Any]:
    return {
        "num_steps": num_steps,
        "taken_step": taken,
        "num_parameters": model.config.num_parameters,
        "heldout_loss": _finite(result.heldout_loss),
        "best_step": result.best.step,
        "best_loss": _finite(result.best.loss),
        "num_tokens": result.num_tokens,
        "train_time_s": result.train_time_s,
        "model_flops": result.model_flops,
        "num_skipped": result.summary_of("finite_check")["num_skipped"],
        "loss_scale": dict(result.summary_of("loss_scaling")),
        "left_out": list(result.summary_of("loss_spikes").get("left_out", ())),
        "events": dict(result.summary_of("anomalies").get("num_events", {})),
        "num_epochs": num_steps / loader.num_batches_per_epoch,
        "world_size": context.ranks.size,
    }


def peak_flops(context: StageContext, config: RunConfig, training: TrainConfig) -> float:
    """FLOP/s of the matrix products here in the stage's format: measured once, kept for resumed runs."""
    if context.ranks.rank != 0:
        return 0.0
    known = _read_peak(context)
    if not known:
        rate = product_rate(config, training.precision, context.progress.note)
        known = {"compute": training.precision.compute, "flops": rate}
        write_atomic(context.folder.path / "peak.json", json.dumps(known))
    return float(known["flops"])


def _peaks_after(
    context: StageContext, config: RunConfig, training: TrainConfig, result: TrainResult
) -> dict[str, float]:
    """`live_peak_flops`, as measured before training, and `peak_flops`, the maximum of that, of the rate after training
    and of the fastest step: one measurement may fall into a busy moment of the machine, and no step is faster than the
    peak.
    """
    live = float(_read_peak(context).get("flops", 0.0))
    if not live:
        return {"live_peak_flops": 0.0, "peak_flops": 0.0}
    if result.peak_flops > TOO_LOW * live:
        context.progress.note(
            f"the peak was measured as {live / 1e9:.0f} GFLOP/s, which steps exceeded ({result.peak_flops / 1e9:.0f}), "
            "probably while other processes kept the machine busy; utilization refers to the higher rate"
        )
    after = product_rate(config, training.precision, SilentProgress().note)
    return {"live_peak_flops": live, "peak_flops": max(live, result.peak_flops, after)}


def _utilization(result: TrainResult, peaks: dict[str, float], num_ranks: int) -> float:
    """Model FLOPs utilization of the whole training in [0, 1], 0 if the peak rate is unknown."""
    if not peaks["peak_flops"] or not result.train_time_s:
        return 0.0
    return result.model_flops / result.train_time_s / (peaks["peak_flops"] * num_ranks)


def _read_peak(context: StageContext) -> dict[str, Any]:
    try:
        return json.loads((context.folder.path / "peak.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _summary(name: str, num_steps: int, result: TrainResult, used_share: float) -> str:
    """`pretrain: 700 steps, loss 2.310, held out 2.402, 2,415 tokens/s, MFU 61%`."""
    parts = [f"{name}: {num_steps} steps", f"loss {result.loss:.3f}"]
    if math.isfinite(result.heldout_loss):
        parts.append(f"held out {result.heldout_loss:.3f}")
    if result.train_time_s:
        parts.append(f"{result.num_tokens / result.train_time_s:,.0f} tokens/s")
    return ", ".join([*parts, f"MFU {used_share:.0%}"] if used_share else parts)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
