"""From a `TrainConfig` to a running `Trainer`. `build_techniques` is the list of techniques, in order.

Runs are repeatable: batch number n is a function of n, random streams are reseeded at every step from (seed, step,
rank), and everything else that outlives a step is in the checkpoint. A run that is killed at any moment and restarted
therefore ends with the same bits.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.memory.glibc_malloc import freed_memory_kept
from modelwright.memory.offload import Store, open_store
from modelwright.memory.step_arena_runtime import StepArena, step_arena
from modelwright.model.auxiliary_loss import auxiliary_losses as layers_with_losses
from modelwright.model.decoder import Decoder
from modelwright.optim.build import build_optimizer
from modelwright.optim.delay import compensate
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.full_state import move_out, restore_weights, whole_weights
from modelwright.parallel.gradient_sync import GradientSync
from modelwright.parallel.mesh import Mesh, World, build_mesh, single
from modelwright.parallel.strategies.config import build_strategy
from modelwright.parallel.strategy import AllReduce, Replica, Strategy
from modelwright.precision.apply import ModelPrecision, fp32_products
from modelwright.precision.layer_scales import layer_scales_for
from modelwright.precision.loss_scale import LossScaler, loss_scale_for
from modelwright.train.checkpoint.manager import CheckpointManager
from modelwright.train.checkpoint.reader import CheckpointReader
from modelwright.train.checkpoint.writer import CheckpointWriter
from modelwright.train.config import TrainConfig, check_layout
from modelwright.train.monitors.anomalies import AnomalyLog
from modelwright.train.monitors.build import build_monitors
from modelwright.train.monitors.watchdog import Watchdog
from modelwright.train.objective import Batch, Objective
from modelwright.train.parallelize import activation_pass, parallelize, remove_passes
from modelwright.train.runner import MicrobatchRunner, Runner
from modelwright.train.runtime import Report, Runtime, TechniqueBuilder, ignore_event
from modelwright.train.signals import StopRequest
from modelwright.train.state import TrainResult, TrainState
from modelwright.train.step import TrainStep
from modelwright.train.technique import Relayout, StepInfo, Technique
from modelwright.train.techniques.adaptive_precision import adaptive_precision
from modelwright.train.techniques.amax_history import amax_history
from modelwright.train.techniques.auxiliary_losses import auxiliary_losses
from modelwright.train.techniques.finite_check import finite_check, skip_empty_batches
from modelwright.train.techniques.gradient_clipping import gradient_clipping
from modelwright.train.techniques.learning_rate import learning_rate
from modelwright.train.techniques.loss_scaling import PerLayerLossScale, loss_scaling
from modelwright.train.techniques.loss_spikes import loss_spikes
from modelwright.train.techniques.out_of_memory import (
    RetryOutOfMemory,
    give_back_memory,
    out_of_memory,
    retry_blocked_message,
)
from modelwright.train.techniques.pipeline_rebalancing import pipeline_rebalancing
from modelwright.train.techniques.sparse_updates import layer_sparsity
from modelwright.train.techniques.token_balance import token_balance
from modelwright.train.techniques.weight_decay import dynamic_weight_decay
from modelwright.train.throughput import Throughput
from modelwright.train.trainer import Trainer

DATA_PARALLEL = ParallelConfig()


def build_techniques(
    config: TrainConfig,
    run: Runtime,
    *,
    objective: Objective,
    scaler: LossScaler,
    loss_scale: Technique | None,
    num_rows: int,
) -> list[Technique]:
    """All techniques of a run except its monitors, in the order in which they act.

    This is the only list of techniques in the project: a new one is a file in techniques/ and a line here. num_rows:
    tokens of one microbatch on one rank.
    """
    spikes, rate_after_rollback = loss_spikes(config.loss_spikes, run, checkpoint_every=config.checkpoint_every_steps)
    clip_norm = 0.0 if config.optimizer_in_backward else config.max_grad_norm
    requested = (
        layer_sparsity(  # on_batch: choose rows and units; on_gradients: count what was executed
            config.sparse_updates,
            config.batch_selection,
            run,
            betas=config.betas,
            eps=config.adam_eps,
            num_microbatches=config.gradient_accumulation_steps,
        ),
        finite_check(config.max_skipped_steps, run),  # on_gradients: norm, skip on inf or nan
        amax_history(run),  # on_batch, on_gradients: maxima of FP8 factors
        loss_scale,  # on_gradients: follow overflows
        skip_empty_batches(),  # on_gradients
        spikes,  # on_gradients: skip; on_step_end: roll back
        adaptive_precision(  # on_batch: observe; on_gradients: change formats
            config.precision.adaptive, run, objective=objective, scaler=scaler, num_rows=num_rows
        ),
        gradient_clipping(clip_norm, config.adaptive_clip),  # on_gradients
        dynamic_weight_decay(config.weight_decay_schedule, run),  # on_gradients
        learning_rate(config.schedule, run, peak=config.peak_learning_rate),  # on_batch
        rate_after_rollback,  # on_batch
        token_balance(config.load_balance, run),  # on_batch: equal work per microbatch
        auxiliary_losses(run, scaler),  # on_batch: their scale, for the batch as it is now
        pipeline_rebalancing(  # on_step_end: ask for another layout
            config.load_balance, run, every=config.checkpoint_every_steps
        ),
    )
    return [technique for technique in requested if technique is not None]


@dataclass(kw_only=True)
class StepParts:
    """A training step and what else the trainer needs, made by `build_step`."""

    one_step: TrainStep
    run: Runtime
    techniques: list[Technique]


def build_step(
    model: Decoder,
    objective: Objective,
    config: TrainConfig,
    parallel: ParallelConfig,
    global_mesh: Mesh,
    *,
    num_steps: int,
    seed: int,
    folder: Path,
    store: Store | None,
    exit_stack: ExitStack,
    note: Callable[[str], None] = lambda text: None,
    report: Report = ignore_event,
    techniques: Sequence[Technique] = (),
    technique_builders: Sequence[TechniqueBuilder] = (),
    gradient_sync: GradientSync | None = None,
    abandon_memory: Callable[[], None] = lambda: None,
    peak_flops: float = 0.0,
    wrap_strategy: Callable[[Strategy], Strategy] = lambda strategy: strategy,
) -> StepParts:
    """Lay the model out over the mesh, in place, and build its step; also used by the memory planner. store: where
    offloaded activations wait. techniques: further ones, which act last. gradient_sync: replaces the one that
    `config.gradient_sync` describes. abandon_memory: called before a step that ran out of memory is retried.
    wrap_strategy: wraps the strategy.
    """
    is_hogwild = config.async_updates.mode == "hogwild"
    mesh = build_mesh(single(global_mesh.world.device), DATA_PARALLEL) if is_hogwild else global_mesh
    in_place = mesh.is_only_data_parallel
    num_copies = mesh.data.size * mesh.context.size * config.gradient_accumulation_steps
    num_rows = config.batch_tokens // num_copies
    shape = model.config

    def count() -> int:
        return shape.num_parameters

    scale_config, uses_fp16 = config.precision.loss_scale, config.precision.uses_fp16
    scale = loss_scale_for(scale_config, uses_fp16=uses_fp16, count=count)
    layer_scales = layer_scales_for(
        scale_config,
        uses_fp16=uses_fp16,
        count=count,
        num_layers=model.config.num_layers,
        device=mesh.world.device,
    )
    executor = parallelize(
        model if in_place else move_out(model),
        mesh=mesh,
        parallel=parallel,
        activations=activation_pass(
            config.activation_checkpointing,
            precision=config.precision,
            tokens_per_microbatch=num_rows,
            num_microbatches=config.gradient_accumulation_steps,
            parallel=parallel,
            store=store,
            pipeline_rank=mesh.pipeline.rank,
        ),
        compile_blocks=config.compile,
        precision=config.precision,
        layer_scales=layer_scales,
        scatters_each=config.optimizer_in_backward,
    )
    exit_stack.callback(remove_passes, model)
    replica = Replica(
        mesh=mesh,
        model=executor.model,
        optimizer=build_optimizer(
            executor.model,
            config.optimizer,
            learning_rate=config.learning_rate,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            offload=config.optimizer_cpu_offload,
        ),
        num_stages_with=executor.num_stages_with,
        finish_gradients=executor.finish_gradients,
    )
    if gradient_sync is not None:
        strategy: Strategy = AllReduce(replica, gradient_sync, unscale_first=True)
    else:
        strength = config.async_updates.delay_compensation
        strategy = build_strategy(
            config.strategy(shares_memory=parallel.shared_memory),
            replica,
            global_mesh.world,
            compensate=partial(compensate, strength=strength) if strength else None,
            encode=StepInfo.as_json,
            decode=StepInfo.from_json,
        )
    strategy = wrap_strategy(strategy)
    exit_stack.callback(strategy.close)
    formats = ModelPrecision(executor.model, config.precision)
    runner: Runner = MicrobatchRunner(
        executor=executor, microbatches=config.gradient_accumulation_steps, device=mesh.world.device
    )
    retry: Technique | None = None
    if config.fault_tolerance.on_out_of_memory == "halve_microbatch":
        undo = (
            lambda: replica.optimizer.zero_grad(set_to_none=True),
            strategy.abandon_step,
            partial(give_back_memory, mesh.world.device),
            abandon_memory,
            formats.begin_step,
            *(layer.forget for layer in layers_with_losses(executor.model)),
        )
        runner = RetryOutOfMemory(
            runner=runner, world=mesh.world, blocker=lambda: strategy.retry_blocker, can_cut=in_place, undo=undo
        )
        retry = out_of_memory(runner)
        if strategy.retry_blocker:
            note(retry_blocked_message(strategy.retry_blocker))
    run = Runtime(
        replica=replica,
        strategy=strategy,
        executor=executor,
        runner=runner,
        formats=formats,
        global_mesh=global_mesh,
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        note=note,
        report=report,
        on_exit=exit_stack,
    )
    per_layer = PerLayerLossScale(layer_scales, mesh.world, replica.names) if layer_scales else None
    scaler, loss_scale = loss_scaling(layer_scales.common if layer_scales else scale, per_layer)
    acting = build_techniques(config, run, objective=objective, scaler=scaler, loss_scale=loss_scale, num_rows=num_rows)
    acting += [retry] if retry else []
    acting += techniques
    acting += [built for build in technique_builders if (built := build(run)) is not None]
    check_layout(config, parallel, num_processes=global_mesh.world.size, techniques=acting)
    one_step = TrainStep(
        model=executor.model,
        runner=runner,
        objective=objective,
        strategy=strategy,
        optimizer=replica.optimizer,
        loss_scaler=scaler,
        techniques=acting,
        throughput=Throughput(world=global_mesh.world, num_updating=mesh.world.size, peak_flops=peak_flops),
        num_steps=num_steps,
        seed=seed,
    )
    return StepParts(one_step=one_step, run=run, techniques=acting)


def train(
    model: Decoder,
    objective: Objective,
    config: TrainConfig,
    *,
    num_steps: int,
    world: World,
    stage: StageDir,
    seed: int,
    name: str,
    input_digest: str,
    progress: Progress,
    heldout: Sequence[Batch] = (),
    peak_flops: float = 0.0,
    techniques: Sequence[Technique] = (),
    technique_builders: Sequence[TechniqueBuilder] = (),
    gradient_sync: GradientSync | None = None,
    parallel: ParallelConfig = DATA_PARALLEL,
    restart: bool = False,
) -> TrainResult:
    """Train `model` in place until `num_steps` updates are done, going on from the newest whole checkpoint in `stage`.

    num_steps: from `config.resolve_num_steps`; name: what the progress display calls it; input_digest: of whatever
    decides the result (config, data, initial weights): a checkpoint with another one is refused; heldout: batches for
    evaluation, shared among the ranks; peak_flops: matrix-product rate of one rank in FLOP/s, 0 when unknown;
    techniques: further ones, which act last; technique_builders: of further ones that need parts of the run;
    gradient_sync: sums gradients instead of what `config.gradient_sync`
    describes; parallel: how the world is laid out; restart: begin at step 0 when all checkpoints are damaged, which is
    an error otherwise. Every rank comes with the same whole model and leaves with it, trained; in between, and after an
    error, a model that is laid out over several ranks has no values of its own. Writes `stage.checkpoints`,
    `stage.metrics`, `stage.tensorboard` and, in `stage.path`, the logs of techniques and monitors, mostly on the first
    rank only.

    Raises `Stopped` after a SIGTERM or Ctrl-C (the state is saved), `StorageError` when a checkpoint or a metric
    cannot be written, `ArtifactError` for checkpoints of another run, `ModelwrightError` when training has diverged or
    replicas differ, `ConfigError` when the settings do not go together.
    """
    learned = Technique(name=type(objective).__name__, needs=objective.needs)
    check_layout(config, parallel, num_processes=world.size, techniques=[*techniques, learned])
    progress = progress if world.is_first else SilentProgress()
    progress.begin(name, num_steps, "steps")
    hang_after_s = config.fault_tolerance.watchdog_timeout_s if world.size > 1 else 0.0
    model = model.to(world.device)
    note_once = cache(progress.note)  # a run may be laid out several times
    try:
        with (
            StopRequest() as stop,
            freed_memory_kept(),
            fp32_products(
                tf32=config.precision.fp32_matmul == "tf32",
                onednn=config.precision.fp32_matmul == "onednn",
                on_cpu=world.device.type == "cpu",
            ),
            Watchdog(stage.path / f"hang-{world.rank}.txt", limit_s=hang_after_s) as watchdog,
            step_arena(config.step_arena, world.device, progress.note) as arena,
        ):
            while True:
                ended = _train_laid_out(
                    model,
                    objective,
                    config,
                    parallel,
                    build_mesh(world, parallel),
                    num_steps=num_steps,
                    stage=stage,
                    seed=seed,
                    input_digest=input_digest,
                    progress=progress,
                    note=note_once,
                    heldout=heldout,
                    peak_flops=peak_flops,
                    techniques=techniques,
                    technique_builders=technique_builders,
                    gradient_sync=gradient_sync,
                    watchdog=watchdog,
                    arena=arena,
                    stop=stop,
                    restart=restart,
                )
                match ended:
                    case TrainResult():
                        return ended
                    case Relayout():
                        parallel = replace(parallel, layers_per_stage=ended.layers_per_stage)
    finally:
        progress.end()


def _train_laid_out(
    model: Decoder,
    objective: Objective,
    config: TrainConfig,
    parallel: ParallelConfig,
    global_mesh: Mesh,
    *,
    num_steps: int,
    stage: StageDir,
    seed: int,
    input_digest: str,
    progress: Progress,
    note: Callable[[str], None],
    heldout: Sequence[Batch],
    peak_flops: float,
    techniques: Sequence[Technique],
    technique_builders: Sequence[TechniqueBuilder],
    gradient_sync: GradientSync | None,
    watchdog: Watchdog,
    arena: StepArena,
    stop: StopRequest,
    restart: bool,
) -> TrainResult | Relayout:
    """Train under one layout; on return the model holds the trained weights."""
    world = global_mesh.world
    with ExitStack() as exit_stack:
        anomalies = None
        if world.is_first:
            anomalies = AnomalyLog(stage.path / "anomalies.jsonl", config.anomalies, note=progress.note)
        parts = build_step(
            model,
            objective,
            config,
            parallel,
            global_mesh,
            num_steps=num_steps,
            seed=seed,
            folder=stage.path,
            store=open_store(config.activation_checkpointing, device=world.device, folder=stage.path),
            exit_stack=exit_stack,
            note=note,
            report=anomalies.report if anomalies else ignore_event,
            techniques=techniques,
            technique_builders=technique_builders,
            gradient_sync=gradient_sync,
            abandon_memory=arena.abandon,
            peak_flops=peak_flops,
        )
        monitors = build_monitors(config.fault_tolerance, parts.run, anomalies)
        reader = CheckpointReader(stage.checkpoints, digest=input_digest, world=world, reduce=global_mesh.reduce)
        state, all_techniques = TrainState(), [*parts.techniques, *monitors]
        checkpoints = CheckpointManager(
            reader=reader,
            writer=CheckpointWriter(reader, keep_last=config.keep_last),
            config=config,
            num_steps=num_steps,
            one_step=parts.one_step,
            replica=parts.run.replica,
            global_mesh=global_mesh,
            techniques=all_techniques,
            state=state,
            progress=progress,
            restart=restart,
        )
        trainer = Trainer(
            one_step=parts.one_step,
            config=config,
            num_steps=num_steps,
            executor=parts.run.executor,
            formats=parts.run.formats,
            global_mesh=global_mesh,
            stage=stage,
            progress=progress,
            heldout=heldout,
            techniques=all_techniques,
            checkpoints=checkpoints,
            watchdog=watchdog,
            memory=arena,
            state=state,
        )
        exit_stack.callback(trainer.close)
        ended = trainer.fit(stop)
        if not parts.run.mesh.is_only_data_parallel:
            restore_weights(model, whole_weights(parts.run.model, parts.run.mesh))
    return ended
