"""Training stages: one trainer for all, with an objective and rows for each (`training_spec`). Artifact: the model with
its tokenizer in the Hugging Face layout, and its adapters, if it trained any, in PEFT's layout.

The stage adds the techniques that depend on its rows, such as source shares that follow held-out loss, and measures the
peak rate of matrix products that utilization refers to.

Its figures besides the loss: samples of text while it learns, charts of the objective's metrics,
bits per byte, utilization of the machine, and the share of tokens for which each attention head is open.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from modelwright.core.artifacts import ArtifactError, RunDir, read_manifest, write_atomic
from modelwright.core.compatibility import UNDECLARED
from modelwright.core.config import ConfigError, DataError, derive_seed, dump
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, json_line, read_records
from modelwright.core.sinks import Tracking, require_packages
from modelwright.core.texts import redact_plain
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.loader import PackedRows, PlannedLoader, build_loader
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.adapters import merge_adapters, projection_sizes
from modelwright.model.decoder import Decoder
from modelwright.model.head_selection import decisions_seen
from modelwright.model.hf import deferred_model, load_model
from modelwright.model.peft_folder import save_adapter
from modelwright.ops import cpu_kernels
from modelwright.pipeline.augmenting import augmentation_digest, augmented, is_augmented, tell_cost
from modelwright.pipeline.estimate.cost import TRAINING_PROCESS_BYTES, StageEstimate, training_stage
from modelwright.pipeline.report.blocks import Block, Chart, Samples, Section, Table, TextSample, count, percent, plural
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.results import NATS_PER_TOKEN, loss_highlight, training_section
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.resolve import product_rate
from modelwright.pipeline.stage import Rates, RunConfig, Stage, StageContext, StageInputs, StageSpec
from modelwright.pipeline.stages import rows as row_sets
from modelwright.pipeline.stages.estimates import SCORED_FRACTION
from modelwright.pipeline.stages.imported import row_tokens
from modelwright.pipeline.stages.init import INIT, folder_fingerprint, save_model_folder
from modelwright.pipeline.stages.pack import PACK, model_before, tokenizer_stage
from modelwright.pipeline.stages.rows import TEXT_ROWS
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import stored_row_losses
from modelwright.train.job import TrainJob, TrainResult, load_best
from modelwright.train.memory.activations import FP32_BYTES, ActivationCheckpointingConfig
from modelwright.train.objective import BatchSource, Objective, forward
from modelwright.train.optim.build import update_flops
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder, observer
from modelwright.train.techniques.heldout_mixture import heldout_mixture
from modelwright.train.techniques.score_mixture import score_mixture


def mixture_techniques(
    loader: BatchSource, objective: Objective, config: RunConfig, training: TrainConfig, rows: Path, *, batch_rows: int
) -> list[TechniqueBuilder]:
    """Techniques that change the shares of the sources, if settings ask for them. rows: folder of the training rows."""
    if not isinstance(loader, PlannedLoader) or not training.batching.mixture.is_measured:
        return []
    heldout: dict[str, Sequence[TokenBatch]] = {}
    if (folder := rows.parent / "heldout").is_dir():
        packed = PackedRows(folder)
        group_tokens = packed.seq_len * packed.group_size
        tokens = config.validation_tokens or packed.num_groups * group_tokens
        # Equally many tokens of each source, whatever its size: the rules compare the losses of sources.
        most = max(1, tokens // group_tokens // len(packed.sources))
        for name in packed.sources:
            own = packed.source_groups(name)[:most]
            heldout[name] = [packed.gather(own[first : first + batch_rows]) for first in range(0, len(own), batch_rows)]
    return [
        partial(
            build,
            training.batching.mixture,
            mixture=loader.mixture,
            objective=objective,
            heldout=heldout,
            every=training.eval_every_steps,
        )
        for build in (heldout_mixture, score_mixture)
    ]


USES_ROWS = row_sets.RowUse()
"""Default: training learns from each row once per epoch."""


@dataclass(frozen=True, kw_only=True)
class FurtherModels:
    """Computation of a training stage for each row, in addition to forward and backward of its model."""

    num_models: int = 0
    """Further models in memory, of the size of the one in training."""
    num_trained: int = 0
    """Further models of that size whose weights are trained on the same rows, all of them, without recomputation."""
    num_forwards: float = 0.0
    """Forward passes without gradients."""
    folders: Mapping[str, str] = field(default_factory=dict[str, str])
    """Folders of models that settings name, by setting; their contents enter the stage's digest."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Result of a training stage, from which `save` writes the artifact."""

    model: Decoder
    tokenizer: Tokenizer
    folder: Path
    """Folder of the artifact."""
    heldout: Path
    """Folder of the held-out rows; it is missing if nothing is held out."""
    data: row_sets.TrainingData | None
    """Training data, still open; None if there were no rows, so that the model is passed on unchanged."""
    config: RunConfig
    context: StageContext


def save_language_model(trained: TrainedModel) -> Mapping[str, Any]:
    """Writes a Hugging Face folder; adds no facts."""
    save_model_folder(trained.model, trained.tokenizer, trained.folder)
    return {}


MANY_EPOCHS = 4.0
"""Epochs up to which repeated text is worth almost as much as new text (Muennighoff et al. 2023, section 6)."""
ADAPTER_FOLDER = "adapter"
"""Subfolder of the artifact for trained adapters; the model in the artifact has the adapters merged in."""


@dataclass(frozen=True, kw_only=True)
class _Traits:
    """Arguments of `training_spec` that are not part of `StageSpec`."""

    start: Callable[[RunConfig, str], str]
    further: Callable[[RunConfig, Any], FurtherModels]
    techniques: Callable[[StageInputs], Sequence[TechniqueBuilder]]
    row_use: row_sets.RowUse
    save: Callable[[TrainedModel], Mapping[str, Any]]
    prepare: Callable[[RunConfig, Decoder], None]


def training_spec(
    *,
    name: str,
    report_title: str,
    run_needs: frozenset[str] = UNDECLARED | Objective.needs,
    config: type[TrainConfig] = TrainConfig,
    loss_unit: str = NATS_PER_TOKEN,
    blocks: Callable[[StageData], Sequence[Block]] = lambda stage: metric_charts(
        stage, {name: {name: name} for name in stage.facts.get("metric_names", ())}
    ),
    further: Callable[[RunConfig, Any], FurtherModels] = lambda config, training: FurtherModels(),
    start: Callable[[RunConfig, str], str] = model_before,
    techniques: Callable[[StageInputs], Sequence[TechniqueBuilder]] = lambda inputs: (),
    row_use: row_sets.RowUse = USES_ROWS,
    save: Callable[[TrainedModel], Mapping[str, Any]] = save_language_model,
    fresh: Callable[[RunConfig], Decoder] | None = None,
    prepare: Callable[[RunConfig, Decoder], None] = lambda config, model: None,
    **of_stage: Any,
) -> StageSpec:
    """Returns a stage that trains the model before it, or random weights, on rows of pack (see `StageSpec`).

    config: `TrainConfig`, or a dataclass that adds settings of the objective to it
    loss_unit: of the loss, for charts
    blocks: further blocks of its section of the report; by default a chart for each metric of the objective
    run_needs: properties of a run that its objective and its techniques rely on (`core/compatibility.py`)
    further: further models that compute on the rows, from the run's configuration and the stage's settings
    start: names the stage whose model is trained, "" for random weights
    techniques: techniques of this stage, in addition to those of all trainings
    row_use: how the stage uses its rows; differs for a stage that generates its training data
    save: writes the artifact on the first rank and returns further facts
    fresh: makes the model with random weights
    prepare: changes the model that training starts from, in place; its weights may still be on disk (`deferred_model`)
    of_stage: further fields of `StageSpec`; `title`, `model_title`, `objective`, `rows` and `needs` are required
    """
    traits = _Traits(start=start, further=further, techniques=techniques, row_use=row_use, save=save, prepare=prepare)

    def report(data: RunData, stage: StageData) -> Section:
        training = data.config.section(name)
        section = training_section(stage, training, report_title, loss_unit="" if training.objective else loss_unit)
        # The top of the report has already shown the samples of the run's first training (`highlight`).
        samples = () if stage.name == data.config.trainings[0].name else sample_block(stage.folder.path)
        further_blocks = (*head_blocks(stage), *row_sets.cache_blocks(stage))
        return replace(section, blocks=[*samples, *blocks(stage), *section.blocks, *further_blocks])

    def highlight(data: RunData, stage: StageData) -> Sequence[Block]:
        if stage.name != data.config.trainings[0].name:
            return ()
        # A named objective may come from another package, and only that package knows the unit of its loss.
        unit = "" if data.config.section(stage.name).objective else loss_unit
        return [*loss_highlight(stage, unit), *sample_block(stage.folder.path)]

    spec = StageSpec(
        name=name,
        config=config,
        build=lambda run_config, run, present: _stage(run_config, spec, traits),
        estimate=lambda run_config, run, rates: _estimate(run_config, run, rates, spec, traits),
        report=report,
        highlight=highlight,
        warnings=lambda stage: (
            [f"{num_skipped} steps were skipped because values were not finite."]
            if (num_skipped := stage.facts.get("num_skipped"))
            else []
        ),
        run_needs=run_needs,
        fresh=fresh or fresh_model,
        **of_stage,
    )
    return spec


def _stage(config: RunConfig, spec: StageSpec, traits: _Traits) -> Stage:
    name, training, before = spec.name, config.section(spec), traits.start(config, spec.name)
    require_packages(config.tracking)
    # Without the layout over processes: a resumed run may have another number of them.
    settings = {
        "training": training.identity(),
        "seed": derive_seed(config.seed, name),
        "validation_tokens": config.validation_tokens,
    }
    if judge := training.batching.curriculum.model:
        settings["curriculum_model"] = folder_fingerprint(Path(judge), f"{name}.batching.curriculum.by")
    for setting, folder in traits.further(config, training).folders.items():
        settings[setting] = folder_fingerprint(Path(folder), f"{name}.{setting}")
    if is_augmented(config, spec):
        settings["augmentation"] = augmentation_digest(config.augmentation)
    if not before:
        if training.lora.r:
            raise ConfigError(
                f"{name}.lora.r: {name} starts from random weights, which adapters never train; set it to 0, or start "
                "from a model folder with init_from"
            )
        settings["model"] = dump(config.model)

    def learn(context: StageContext) -> None:
        assert spec.rows is not None
        assert spec.fresh is not None
        rows = context.parents[PACK.name] / spec.rows.name / "train"
        # Training reads each weight once its place among the ranks is known; without rows the model is only written
        # again.
        load = deferred_model if rows.is_dir() else load_model
        model = load(context.parents[before]) if before else spec.fresh(config)
        traits.prepare(config, model)
        if rows.is_dir():
            with row_sets.training_data(rows, config.cache, context) as data:
                facts = _learn(context, config, spec, model, data, traits)
                _save(context, config, spec, model, data, facts, traits)
        elif spec.rows.if_empty:
            context.progress.note(f"{name}: {spec.rows.if_empty}")
            _save(context, config, spec, model, None, {"skipped": spec.rows.if_empty}, traits)
        else:
            raise DataError(
                f"{name}: no {spec.rows.documents} is left to train on; see the dropped documents of the clean stage"
            )

    return Stage(
        name=name,
        title=spec.title,
        settings=settings,
        parents=tuple(
            dict.fromkeys([PACK.name, tokenizer_stage(config), *([before] if before else []), *spec.needs(config)])
        ),
        run=learn,
        every_rank=True,
    )


def _save(
    context: StageContext, config: RunConfig, spec: StageSpec, model: Decoder, data: row_sets.TrainingData | None,
    facts: Mapping[str, Any], traits: _Traits,
) -> None:  # fmt: skip
    if context.ranks.rank:
        return
    assert spec.rows is not None
    before = traits.start(config, spec.name)
    tokenizer = Tokenizer.load(context.parents[tokenizer_stage(config)])
    if model.adapters.r:
        started_from = config.init_from if before == INIT.name else str(context.parents[before])
        save_adapter(model, context.output.path / ADAPTER_FOLDER, base=started_from)
        merge_adapters(model)  # after the adapters were written: merging removes them from the model
    trained = TrainedModel(
        model=model,
        tokenizer=tokenizer,
        folder=context.output.path,
        heldout=context.parents[PACK.name] / spec.rows.name / "heldout",
        data=data,
        config=config,
        context=context,
    )
    context.output.facts |= {**facts, **head_shares(model, trained.heldout), **traits.save(trained)}


def fresh_model(config: RunConfig) -> Decoder:
    """Returns a model of the run's configuration with random weights that the seed determines."""
    model = Decoder(config.model)
    model.init_weights(derive_seed(config.seed, "init"))
    return model


def _learn(
    context: StageContext, config: RunConfig, spec: StageSpec, model: Decoder, data: row_sets.TrainingData,
    traits: _Traits,
) -> dict[str, Any]:  # fmt: skip
    name, training, packed = spec.name, config.section(spec), data.rows
    rows, world = packed.folder, context.ranks.world
    num_copies = training.num_copies(config.parallel.axes(world.size))
    batch_rows = training.batch_rows(packed.seq_len * spec.trained_rows, num_copies=num_copies)
    judge = Path(training.batching.curriculum.model)
    loader = build_loader(
        packed,
        training.batching,
        batch_rows=batch_rows,
        by_tokens=config.section(PACK).mode == "length_buckets",
        seed=derive_seed(config.seed, name, "order"),
        num_steps_of=training.resolve_num_steps,
        row_losses=lambda: stored_row_losses(packed, judge, context.folder.path, world),
    )
    ahead, cache = row_sets.read_ahead(loader, data, config.cache)
    # After reading ahead, because augmentation changes the documents of batches that have been read.
    source, augmentation = augmented(ahead, config, spec, context.parents[tokenizer_stage(config)], context.progress)
    inputs = StageInputs(
        config=config,
        training=training,
        loader=source,
        plan=ahead,
        images=data.images,
        parents=context.parents,
        world=world,
        folder=context.folder.path,
        note=context.progress.note,
    )
    objective, row_use = spec.new_objective(inputs), traits.row_use
    known_needs = spec.run_needs.union(*(feature.needs for feature in training.features()))
    _check_declared(name, "its objective", objective.needs, known_needs)
    batches_per_epoch = math.ceil(loader.num_batches_per_epoch * row_use.updates_per_row(training))
    num_steps = training.resolve_num_steps(batches_per_epoch)
    if row_use.learns_by_heart and (num_reads := num_steps * batch_rows / packed.num_groups) > MANY_EPOCHS:
        context.progress.note(
            f"{name}: warning: the training text fills only {plural(packed.num_groups, 'row')} and is read "
            f"{num_reads:,.0f} times; after about {MANY_EPOCHS:.0f} passes a model mostly learns its text by heart: "
            "add text, or train for fewer steps"
        )
    # Held-out batches have the size of microbatches, so that evaluation needs no more memory than training.
    microbatch_rows = max(1, batch_rows // (training.gradient_accumulation_steps * num_copies))
    heldout_rows = batch_rows if row_use.compares_rows else microbatch_rows
    heldout = row_use.heldout(rows.parent / "heldout", config, batch_rows=heldout_rows)
    tokenizer = Tokenizer.load(context.parents[tokenizer_stage(config)])
    prompt = first_prompt(heldout) if spec.model_title else ()
    result = train(
        TrainJob(
            model=model,
            objective=objective,
            config=training,
            num_steps=num_steps,
            stage=context.folder,
            seed=derive_seed(config.seed, name),
            name=name,
            input_digest=context.digest,
            heldout=heldout,
            peak_flops=peak_flops(context, config, training),
            parallel=config.parallel,
            restart=context.restart,
            tracking=_tracking(config, spec),
            old_rows=row_sets.old_rows(packed, training.ewc, derive_seed(config.seed, name, "ewc")),
            techniques=[
                *cache,
                *augmentation,
                *mixture_techniques(loader, objective, config, training, rows, batch_rows=heldout_rows),
                partial(text_samples, folder=context.folder.path, tokenizer=tokenizer, prompt=prompt),
                *bits_per_byte(context, config, spec),
                *(partial(_build_declared, name, build, known_needs) for build in traits.techniques(inputs)),
                *row_use.techniques(objective, heldout, context.folder.path),
            ],
        ),
        world,
        context.progress,
    )
    return _conclude(context, config, name, model, objective, result, num_epochs=num_steps / batches_per_epoch)


def _check_declared(name: str, who: str, needs: frozenset[str], known_needs: frozenset[str]) -> None:
    # Only declared needs are checked against the run's settings before its first stage; an undeclared one would fail
    # hours later, or be ignored.
    if unknown := needs - known_needs:
        raise ConfigError(
            f"{name}: {who} needs {', '.join(sorted(unknown))}, which is not declared; name it in "
            "training_spec(run_needs=...) of the stage, or in ObjectiveSpec(needs=...) of an objective in its settings"
        )


def _build_declared(name: str, build: TechniqueBuilder, known_needs: frozenset[str], run: Runtime) -> Technique | None:
    technique = build(run)
    if technique is not None:
        _check_declared(name, f"its technique {technique.name}", technique.needs, known_needs)
    return technique


def _tracking(config: RunConfig, spec: StageSpec) -> Tracking:
    """Returns the shape of the model and the settings of the training, for experiment trackers."""
    settings = {"seed": config.seed, "model": dump(config.model), spec.name: dump(config.section(spec))}
    return Tracking(report_to=config.tracking.report_to, run=config.name, settings=redact_plain(settings))


def _conclude(
    context: StageContext, config: RunConfig, name: str, model: Decoder, objective: Objective, result: TrainResult, *,
    num_epochs: float,
) -> dict[str, Any]:  # fmt: skip
    """Reports how the training went, restores the best weights if settings ask for it, and returns the facts."""
    training: TrainConfig = config.section(name)
    peaks = peaks_after(context, config, training, result)
    parts = [f"{name}: {result.num_steps} steps", f"loss {result.loss:.3f}"]
    if math.isfinite(result.heldout_loss):
        parts.append(f"held out {result.heldout_loss:.3f}")
    if result.train_time_s:
        parts.append(f"{result.num_tokens / result.train_time_s:,.0f} tokens/s")
    if peaks["peak_flops"] and result.train_time_s:  # model FLOPs utilization of the whole training
        used_share = result.model_flops / result.train_time_s / (peaks["peak_flops"] * context.ranks.size)
        parts += [f"MFU {used_share:.0%}"] if used_share else []
    context.progress.note(", ".join(parts))
    tell_cost(name, result, context.progress)
    better = training.keep_best and 0 < result.best.step < result.num_steps and result.best.loss < result.heldout_loss
    if better and context.ranks.rank == 0:  # only the first rank writes the artifact
        load_best(model, context.folder, result.best)
        context.progress.note(
            f"weights of step {result.best.step} taken (held-out loss {result.best.loss:.4f}, "
            f"last {result.heldout_loss:.4f})"
        )
    losses = result.heldout_loss, result.best.loss
    heldout_loss, best_loss = (loss if math.isfinite(loss) else None for loss in losses)  # JSON has no NaN or infinity
    return {
        "num_steps": result.num_steps,
        "taken_step": result.best.step if better else result.num_steps,
        "num_parameters": model.config.num_parameters,
        "heldout_loss": heldout_loss,
        "best_step": result.best.step,
        "best_loss": best_loss,
        "num_tokens": result.num_tokens,
        "train_time_s": result.train_time_s,
        "model_flops": result.model_flops,
        "num_skipped": result.summary_of("finite_check")["num_skipped"],
        "loss_scale": dict(result.summary_of("loss_scaling")),
        "left_out": list(result.summary_of("loss_spikes").get("left_out", ())),
        "events": dict(result.summary_of("anomalies").get("num_events", {})),
        "num_epochs": num_epochs,
        "heldout_metrics": dict(result.heldout_metrics),
        "metric_names": list(objective.metric_names),
        row_sets.ROW_CACHE: dict(result.summary_of(row_sets.ROW_CACHE)),
        "world_size": context.ranks.size,
        **peaks,
    }


def _estimate(config: RunConfig, run: RunDir, rates: Rates, spec: StageSpec, traits: _Traits) -> StageEstimate:
    assert spec.rows is not None
    training, seq_len = config.section(spec), config.section(PACK).seq_len
    packed = run.stage(PACK.name).artifact
    try:
        read_manifest(packed, kind=PACK.name)
        rows = PackedRows(packed / spec.rows.name / "train")
        tokens = float(rows.num_groups * spec.trained_rows * seq_len)
    except ArtifactError:  # not packed yet: estimated from the size of the sources
        tokens = row_tokens(config, spec.rows, seq_len, PACK.name)
    batches_per_epoch = max(1, round(tokens / training.batch_tokens))
    num_steps = training.resolve_num_steps(math.ceil(batches_per_epoch * traits.row_use.updates_per_row(training)))
    heldout_tokens = SCORED_FRACTION * batches_per_epoch * training.batch_tokens
    num_validations = math.ceil(num_steps / training.eval_every_steps) if training.eval_every_steps else 1
    matrices = projection_sizes(config.model).values() if training.optimizer == "muon" else ()
    one_model = partial(
        training_stage,
        spec.name,
        config.model,
        num_steps=num_steps,
        validation_tokens=num_validations * min(config.validation_tokens or heldout_tokens, heldout_tokens),
        update_flops=sum(update_flops(*sizes) for sizes in matrices),
        batch_tokens=training.batch_tokens,
        num_microbatches=training.gradient_accumulation_steps,
        # half of a document on average, and documents are about half of a row
        mean_context=min(seq_len, config.model.max_seq_len) / 4,
        compute=training.precision.planned_as,
        flops_per_s=rates.flops_per_s[training.precision.planned_as],
        fp32_flops_per_s=rates.flops_per_s["fp32"],
        fused=cpu_kernels.are_used_on(config.hardware.device),
        world_size=rates.num_hosts,  # the rate is that of all threads of a host, which its processes share
    )
    estimate = one_model(activations=training.activation_checkpointing, adapters=training.lora)
    further = traits.further(config, training)
    factor = 1 + further.num_forwards / 3  # a backward pass costs two forward passes
    steps_s = estimate.seconds - estimate.overhead_s
    trained = one_model(activations=ActivationCheckpointingConfig())
    further_bytes = further.num_models * config.model.num_parameters * FP32_BYTES
    further_bytes += further.num_trained * (trained.peak_bytes - TRAINING_PROCESS_BYTES)
    return replace(
        estimate,
        flops=estimate.flops * factor + further.num_trained * trained.flops,
        seconds=estimate.overhead_s + steps_s * factor + further.num_trained * (trained.seconds - trained.overhead_s),
        peak_bytes=estimate.peak_bytes + further_bytes,
        further_bytes=further_bytes,
    )


FILE = "samples.jsonl"
EVERY_S = 60.0
NUM_PROMPT_TOKENS = 16
SAMPLING = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=1)
"""The seed is the same for all samples, so that only the weights differ between two of them."""
NUM_SHOWN = 6


def first_prompt(heldout: Sequence[TokenBatch]) -> list[int]:
    """Returns the beginning of the first held-out row: the tokens before its first target, such as a question with its
    template, or its first tokens if every token is a target. Empty if nothing is held out.
    """
    if not heldout:
        return []
    batch = heldout[0]
    targets = (batch.labels_BT[0] != IGNORED).nonzero().flatten().tolist()
    first = targets[0] + 1 if targets and targets[0] else NUM_PROMPT_TOKENS
    in_first_document = int((batch.segments_BT[0] == batch.segments_BT[0, 0]).sum())
    return batch.input_ids_BT[0, : min(first, in_first_document)].tolist()


def text_samples(
    run: Runtime,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
) -> Technique | None:
    """Returns a technique that shows the model's continuation of `prompt` and appends it to `samples.jsonl` in
    `folder`.
    """
    # None without a prompt, if another rank samples, and if this rank has only a part of the model: training does not
    # depend on a sample.
    model = run.model
    is_whole = len(model.blocks) == model.config.num_layers
    is_divided = any(isinstance(one, DTensor) for one in model.parameters())
    if not (prompt and run.world.is_first and is_whole) or is_divided or len(prompt) >= model.config.max_seq_len:
        return None
    params = [replace(SAMPLING, stop_ids=tokenizer.stop_ids)]
    # One text has no neighbors that could change its last bits, and to rule that out takes 80 MiB of oneDNN's kernels.
    config = EngineConfig(max_num_seqs=1, kv_cache_tokens=model.config.max_seq_len, batch_invariant=False)
    last = clock()

    def on_step_end(info: StepInfo) -> None:
        nonlocal last
        if clock() - last < EVERY_S and 1 < info.step < run.num_steps:
            return
        with run.formats.evaluating():
            (completion,) = generate(model, [prompt], params, config)
        # A long sample must not look like a hang of this rank.
        run.alive()
        # A model may have rows beyond the tokenizer's vocabulary, which are hardly trained and mean nothing.
        text = tokenizer.decode([one for one in completion.token_ids if one < tokenizer.vocab_size])
        shown = " ▸ ".join(" ".join(one.split()) for one in (tokenizer.decode(prompt), text))
        run.note(f"step {info.step:,}: {shown}")
        beginning = tokenizer.decode(prompt)
        # The sample follows those of earlier steps; samples of later steps, from before a crash, are dropped.
        earlier = [record for record in read_records(folder / FILE) if record["step"] < info.step]
        samples = [*earlier, {"step": info.step, "loss": info.loss, "prompt": beginning, "text": text}]
        write_atomic(folder / FILE, "".join(json_line(sample) for sample in samples))
        last = clock()

    return Technique(name="text_samples", on_step_end=on_step_end, needs=frozenset())


def sample_block(folder: Path) -> list[Samples]:
    """Returns a stage's samples for the report: at most six, from the first to the last; none without samples."""
    records = read_records(folder / FILE)
    if not records:
        return []
    num_shown = min(NUM_SHOWN, len(records))
    # Evenly spread, the first and the last sample included
    places = [math.ceil(place * (len(records) - 1) / max(1, num_shown - 1)) for place in range(num_shown)]
    items = [
        TextSample(f"Step {records[place]['step']:,}", records[place]["text"], f"loss {records[place]['loss']:.2f}")
        for place in places
    ]
    beginning = str(records[0].get("prompt", ""))
    first = [TextSample("The beginning", beginning)] if beginning else []
    return [Samples([*first, *items], title="One beginning, continued while the model learned")]


HEAD_SHARES = "head_shares"
"""Key of the stage's facts."""
ROWS_AT_ONCE, MOST_BATCHES = 8, 16
ALWAYS, NEVER = 0.99, 0.01
"""Shares of tokens from which, and up to which, the report counts a head as always or never open."""


@torch.no_grad()
def head_shares(model: Decoder, heldout: Path) -> dict[str, Any]:
    """Returns the facts of a model on a folder of held-out rows; {} if it is missing or the model selects no heads."""
    if model.config.head_budget == 1.0 or not heldout.is_dir():
        return {}
    # The tokens for which each head of each layer is open, and all tokens without padding
    counts_LH = torch.zeros(model.config.num_layers, model.config.num_heads, dtype=torch.int64)
    num_tokens, device, was_training = 0, model.norm.weight.device, model.training
    model.eval()
    for batch in islice(PackedRows(heldout).batches(ROWS_AT_ONCE), MOST_BATCHES):
        batch = batch.to(device)
        is_real_BT = batch.segments_BT >= 0

        # The mask is bound as a default: the closure must not see the one of a later batch.
        def see(layer: int, open_BTH: Tensor, is_real_BT: Tensor = is_real_BT) -> None:
            counts_LH[layer] += open_BTH[is_real_BT].sum(dim=0).cpu()

        with decisions_seen(model, see):
            forward(model, batch)
        num_tokens += int(is_real_BT.sum())
    model.train(was_training)
    shares = (counts_LH.double() / max(1, num_tokens)).tolist()
    return {HEAD_SHARES: {"shares": shares, "num_tokens": num_tokens, "budget": model.config.head_budget}}


def head_blocks(stage: StageData) -> Sequence[Block]:
    """Returns the table of the report; none for a model that computes all heads."""
    facts = stage.facts.get(HEAD_SHARES)
    if not facts:
        return []
    shares: Sequence[Sequence[float]] = facts["shares"]
    rows = [
        [f"layer {layer}", *(percent(share, 0) for share in of), percent(sum(of) / len(of))]
        for layer, of in enumerate(shares)
    ]
    flat = [share for of in shares for share in of]
    always, never = sum(share >= ALWAYS for share in flat), sum(share <= NEVER for share in flat)
    caption = (
        f"Share of {count(facts['num_tokens'])} held-out tokens for which a head is open: "
        f"{percent(sum(flat) / len(flat))} on average, with a budget of {percent(facts['budget'], 0)}. "
        f"Of {count(len(flat))} heads, {count(always)} are "
        f"(almost) always open and {count(never)} (almost) never; those could be pruned."
    )
    header = ["", *(f"head {head}" for head in range(len(shares[0]))), "mean"]
    return [Table(header, rows, "Open heads", caption, numeric=range(1, len(header)))]


def metric_charts(stage: StageData, charts: Mapping[str, Mapping[str, str]]) -> Sequence[Block]:
    """Returns charts of an objective's metrics, smoothed in training and unsmoothed on held-out rows. charts: for each
    title the label of each metric.
    """
    records = stage.records()
    blocks: list[Block] = []
    for number, (title, metrics) in enumerate(charts.items()):
        lines: list[Line] = []
        for color, (metric, label) in enumerate(metrics.items()):
            if in_training := column(records, metric):
                lines.append(Line(label, smooth(in_training), color=color))
            if heldout := column(records, f"heldout/{metric}"):
                lines.append(Line(f"{label}, held out", heldout, marks=True, color=color))
        if any(line.points for line in lines):
            svg = line_chart(lines, name=f"{stage.name}-metrics-{number}", x_label="step", y_label=title.lower())
            blocks.append(Chart(title, svg))
    return blocks


def bits_per_byte(context: StageContext, config: RunConfig, spec: StageSpec) -> list[TechniqueBuilder]:
    """Also shows the loss of text as bits per byte, which can be compared across tokenizers: an estimate from the mean
    length of a token in the kinds of held-out text that are trained on.
    """
    kinds = read_manifest(context.parents[PACK.name]).facts["pretrain_kinds"]
    measured = read_manifest(context.parents[tokenizer_stage(config)]).facts.get("bytes_per_token", {})
    bytes_per_token = [measured[kind] for kind in kinds if kind in measured]
    # Only the default objective on text has a loss in nats per token of that text.
    if spec.rows is not TEXT_ROWS or not bytes_per_token or config.section(spec).objective:
        return []
    bits_per_nat = 1 / math.log(2) / statistics.mean(bytes_per_token)
    advance = context.progress.advance
    return [observer("bits_per_byte", lambda info: advance(info.step, bits_per_byte=info.loss * bits_per_nat))]


_PEAK_FILE = "peak.json"
TOO_LOW = 1.02
"""Steps faster than the peak by more than this share of measurement error show that the peak is wrong."""


def peak_flops(context: StageContext, config: RunConfig, training: TrainConfig) -> float:
    """Returns the peak FLOP/s of matrix products on this machine: measured once, kept for resumed runs."""
    if context.ranks.rank != 0:
        return 0.0
    known = _read_peak(context)
    if not known:
        rate = product_rate(config, training.precision, context.progress.note)
        known = {"compute": training.precision.compute, "flops": rate}
        write_atomic(context.folder.path / _PEAK_FILE, json.dumps(known))
    return float(known["flops"])


def peaks_after(
    context: StageContext, config: RunConfig, training: TrainConfig, result: TrainResult
) -> dict[str, float]:
    """Returns `live_peak_flops`, measured before training, and `peak_flops`, the maximum of that rate, the rate after
    training and the rate of the fastest step. A single measurement may fall into a busy moment of the machine, and no
    step is faster than the peak.
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


def _read_peak(context: StageContext) -> dict[str, Any]:
    try:
        return json.loads((context.folder.path / _PEAK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
