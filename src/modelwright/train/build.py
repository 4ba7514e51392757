"""Trains a `TrainJob`: `train`, and the builders of a step. `technique_builders` is the list of techniques.

Runs are repeatable: batch number n is a function of n, random streams are reseeded at every step from (seed, step,
rank), and everything else that outlives a step is in the checkpoint. A run that is killed at any moment and restarted
therefore ends with the same bits.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from modelwright.core.compatibility import Feature, feature
from modelwright.core.config import derive_seed
from modelwright.core.progress import Progress, SilentProgress
from modelwright.model.adapters import attach_adapters
from modelwright.model.decoder import Decoder, StoredParameters
from modelwright.ops.tensor_heap import use_tensor_heap
from modelwright.parallel.mesh import Mesh, ParallelConfig, World, build_mesh, single
from modelwright.parallel.sharded_weights import is_deferred, move_out, restore_weights, whole_weights
from modelwright.parallel.strategy import Replica
from modelwright.train.config import check_layout, without_effect
from modelwright.train.interruption import StopRequest, Watchdog
from modelwright.train.job import Session, StepParts, TrainJob, TrainResult, configured_strategy
from modelwright.train.memory.offload import Store, open_store
from modelwright.train.monitors.anomalies import AnomalyLog, anomaly_monitor
from modelwright.train.monitors.energy import energy_monitor
from modelwright.train.monitors.recovery_time import recovery_time
from modelwright.train.monitors.replica_check import replica_check
from modelwright.train.monitors.stragglers import straggler_monitor
from modelwright.train.objective import Executor, MicrobatchRunner, ModelLayout, Objective
from modelwright.train.optim.build import build_optimizer
from modelwright.train.outside import guarded, named_techniques
from modelwright.train.parallelize import activation_pass, parallelize, remove_passes
from modelwright.train.precision.apply import ModelPrecision, fp32_products
from modelwright.train.step import TrainStep
from modelwright.train.technique import Relayout, Runtime, Technique, TechniqueBuilder
from modelwright.train.techniques.adaptive_precision import adaptive_precision
from modelwright.train.techniques.amax_history import amax_history
from modelwright.train.techniques.auxiliary_losses import auxiliary_losses
from modelwright.train.techniques.base_weights import base_weights
from modelwright.train.techniques.ewc import ewc
from modelwright.train.techniques.finite_check import finite_check, skip_empty_batches
from modelwright.train.techniques.gradient_clipping import gradient_clipping
from modelwright.train.techniques.l2_sp import l2_sp
from modelwright.train.techniques.learning_rate import learning_rate
from modelwright.train.techniques.loss_scaling import loss_scaling
from modelwright.train.techniques.loss_spikes import loss_spikes
from modelwright.train.techniques.neftune import neftune
from modelwright.train.techniques.out_of_memory import out_of_memory
from modelwright.train.techniques.pipeline_rebalancing import pipeline_rebalancing
from modelwright.train.techniques.sparse_updates import layer_sparsity
from modelwright.train.techniques.token_balance import token_balance
from modelwright.train.techniques.weight_decay import dynamic_weight_decay
from modelwright.train.trainer import Trainer
from modelwright.train.work import BatchStream, Throughput


def attach_modules(model: Decoder, objective: Objective, seed: int) -> None:
    """Add the objective's modules to `model.heads`, in place, initialized from the seed, so that all ranks and layouts
    start with equal values. An existing head is kept: an earlier stage has trained it. The decoder is frozen if the
    objective does not train it.
    """
    if not objective.trains_decoder:
        model.requires_grad_(False)
        model.heads.requires_grad_(True)
    # Forked, so that the caller's random stream does not depend on the objective.
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(derive_seed(seed, "heads"))  # pyright: ignore[reportUnknownMemberType]
        modules = objective.own_modules(model.config)
    values: dict[str, Tensor] = {}
    for name, module in modules.items():
        if name in model.heads:
            continue
        module.to(model.head_weight.dtype)
        values |= {f"heads.{name}.{key}": value.detach() for key, value in module.named_parameters()}
        model.heads[name] = module
    if is_deferred(model) and model.stored is not None:
        model.stored = _WithHeads(stored=model.stored, values={name: value.clone() for name, value in values.items()})
        model.heads.to("meta")


@dataclass(frozen=True, kw_only=True)
class _WithHeads(StoredParameters):
    """Weights on disk, and values of heads in memory."""

    stored: StoredParameters
    values: Mapping[str, Tensor]

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return self.values[name][part] if name in self.values else self.stored.read(name, part)


ALONE, SILENT = single(), SilentProgress()
"""The defaults of `train`: one process on the CPU, and no display."""


def technique_builders(job: TrainJob, anomalies: AnomalyLog | None) -> list[TechniqueBuilder]:
    """All techniques of a run, in the order in which they act. This is the only list of techniques in the project: a
    new one is a file in techniques/ and a line here.
    """
    config, faults = job.config, job.config.fault_tolerance
    sparse = partial(
        layer_sparsity, betas=config.betas, eps=config.adam_eps, num_microbatches=config.gradient_accumulation_steps
    )
    # In backward the strategy clips by the last step's norm itself (`config.strategy`).
    clip_norm = 0.0 if config.optimizer_in_backward else config.max_grad_norm
    every = config.checkpoint_every_steps
    # The order is part of the results: the finite check measures the norm that later entries read, the loss scale must
    # see an overflow before other reasons to skip, and spikes are judged before clipping changes the gradients.
    return [
        partial(sparse, config.sparse_updates, config.batch_selection),  # on_batch: choose; on_gradients: count
        partial(ewc, config.ewc, rows=job.old_rows),  # on_batch: which weights matter; on_gradients: add the pull
        partial(finite_check, config.max_skipped_steps, measures=job.measure_grad_norm),  # on_gradients: norm, skip
        amax_history,  # on_batch, on_gradients: maxima of FP8 factors
        partial(loss_scaling, config.precision),  # on_gradients: follow overflows
        skip_empty_batches,  # on_gradients
        partial(learning_rate, config.schedule, peak=config.peak_learning_rate),  # on_batch
        partial(loss_spikes, config.loss_spikes, checkpoint_every=every),  # on_batch: lower rate; on_gradients: skip
        partial(neftune, config.neftune_noise_alpha),  # on_batch: which noise the forward passes of this step add
        partial(adaptive_precision, config.precision.adaptive, objective=job.objective),  # on_batch: observe
        partial(gradient_clipping, clip_norm, config.adaptive_clip),  # on_gradients
        partial(dynamic_weight_decay, config.weight_decay_schedule),  # on_gradients
        partial(token_balance, config.load_balance),  # on_batch: equal work per microbatch
        auxiliary_losses,  # on_batch: their scale, for the batch as it is now
        partial(pipeline_rebalancing, config.load_balance, every=every),  # on_step_end: ask for another layout
        partial(out_of_memory, faults.on_out_of_memory),  # on_retry: smaller microbatches
        base_weights,  # state: which model the adapters belong to
        partial(l2_sp, config.l2_sp),  # on_step_end: pull weights to their start
        *map(guarded, [*named_techniques(config.techniques), *job.techniques]),
        # Monitors come last: they see what all others made of a step.
        partial(anomaly_monitor, anomalies),
        recovery_time,
        partial(energy_monitor, config.energy),
        partial(replica_check, every=faults.replica_check_every_steps),
        partial(straggler_monitor, faults.stragglers),
    ]


def train(job: TrainJob, world: World = ALONE, progress: Progress = SILENT) -> TrainResult:
    """Train the job's model in place until all updates are done, resuming from the newest intact checkpoint of its
    stage.

    Every rank of `world` passes the same whole model and gets it back trained; in between, and after an error, a model
    that is laid out over several ranks is empty. Writes `stage.checkpoints`, `stage.metrics` and, in `stage.path`, the
    files of sinks and the logs of techniques and monitors, mostly on the first rank only.

    Raises `Stopped` after a SIGTERM or Ctrl-C (the state is saved); one that comes after the last step acts as it would
    outside of training, and the next call returns the result. Raises `StorageError` when a checkpoint or a metric
    cannot be written, `ArtifactError` for checkpoints of another run, `ModelwrightError` when training has diverged or
    replicas differ, `ConfigError` when the settings do not go together.
    """
    further = features_of(job, ())
    check_layout(job.config, job.parallel, num_processes=world.size, further=further)
    compiled = job.config.compiles(world.device.type, job.parallel, further)
    job = replace(job, config=replace(job.config, compile=compiled))
    progress = progress if world.is_first else SilentProgress()
    progress.begin(job.name, job.num_steps, "steps")
    on_accelerator = world.device.type != "cpu"
    unused = without_effect(job.config, job.parallel, num_processes=world.size, on_accelerator=on_accelerator)
    if unused:
        progress.note(f"without effect in this run: {'; '.join(unused)}")
    attach_modules(job.model, job.objective, job.seed)
    if not is_deferred(job.model):  # each rank reads its own shards of deferred weights when it lays the model out
        job.model.to(world.device)
    try:
        with open_session(job, world, progress) as session:
            while True:
                match fit_layout(job, build_mesh(world, job.parallel), session):
                    case TrainResult() as result:
                        return result
                    case Relayout(layers_per_stage=layers):
                        # The trainer has saved a checkpoint, from which the next layout resumes.
                        job = replace(job, parallel=replace(job.parallel, layers_per_stage=layers))
    finally:
        progress.end()


@contextmanager
def open_session(job: TrainJob, world: World, progress: Progress) -> Generator[Session]:
    """Opens what outlives a layout: signals, watchdog, event log and the store of offloaded activations."""
    config, folder, on_cpu = job.config, job.stage.path, world.device.type == "cpu"
    matmul = config.precision.fp32_matmul
    # The watchdog ends a process whose collective a lost rank never enters; one process alone has no such collectives.
    hang_after_s = config.fault_tolerance.watchdog_timeout_s if world.size > 1 else 0.0
    use_tensor_heap()
    with (
        StopRequest() as stop,
        ExitStack() as on_exit,
        fp32_products(tf32=matmul == "tf32", onednn=matmul == "onednn", on_cpu=on_cpu),
        Watchdog(folder / f"hang-{world.rank}.txt", limit_s=hang_after_s) as watchdog,
    ):
        # The fastest algorithms of cuDNN sum gradients of convolutions in any order.
        on_exit.callback(setattr, torch.backends.cudnn, "deterministic", torch.backends.cudnn.deterministic)
        torch.backends.cudnn.deterministic = True
        anomalies = None
        if world.is_first:
            anomalies = AnomalyLog(folder / "anomalies.jsonl", config.anomalies, note=progress.note)
        yield Session(
            world=world,
            progress=progress,
            stop=stop,
            watchdog=watchdog,
            anomalies=anomalies,
            store=open_store(config.activation_checkpointing, device=world.device, folder=folder),
            note=cache(progress.note),
        )


def fit_layout(job: TrainJob, mesh: Mesh, session: Session) -> TrainResult | Relayout:
    """Train under one layout; on return the model holds the trained weights."""
    with ExitStack() as on_exit:
        parts = build_step(job, mesh, session, on_exit)
        trainer = Trainer(job=job, session=session, parts=parts)
        on_exit.callback(trainer.close)
        ended = trainer.fit()
        # Collective, and before the passes are removed on exit: sharded weights need their layout to be gathered.
        if not parts.run.mesh.is_only_data_parallel:
            restore_weights(job.model, whole_weights(parts.run.model, parts.run.mesh))
    return ended


def build_step(job: TrainJob, global_mesh: Mesh, session: Session, on_exit: ExitStack) -> StepParts:
    """Lay the model out over the mesh, in place, and build its step; also used by the memory planner. on_exit: closed
    by the caller when the run under this layout ends.
    """
    config, world = job.config, global_mesh.world
    # In mode hogwild each process updates the shared weights alone, so its own mesh has one rank.
    is_hogwild = config.async_updates.mode == "hogwild"
    mesh = build_mesh(single(world.device), ParallelConfig()) if is_hogwild else global_mesh
    microbatches = config.gradient_accumulation_steps
    microbatch_tokens = config.batch_tokens // (mesh.data.size * mesh.context.size * microbatches)
    executor, replica = build_replica(job, mesh, session.store, microbatch_tokens=microbatch_tokens)
    on_exit.callback(remove_passes, job.model)  # first, so last on exit: techniques undo their changes before
    own_modules = job.objective.own_modules
    job.objective.begin(ModelLayout(mesh=mesh, precision=config.precision, own_modules=own_modules))
    run = Runtime(
        replica=replica,
        executor=executor,
        runner=MicrobatchRunner(executor=executor, microbatches=microbatches, device=mesh.world.device),
        formats=ModelPrecision(executor.model, config.precision),
        global_mesh=global_mesh,
        microbatch_tokens=microbatch_tokens,
        num_steps=job.num_steps,
        seed=job.seed,
        folder=job.stage.path,
        note=session.note,
        log_event=session.anomalies and session.anomalies.report,
        alive=session.watchdog.alive,
        on_exit=on_exit,
    )
    builders = technique_builders(job, session.anomalies)
    techniques = [technique for build in builders if (technique := build(run)) is not None]
    features = features_of(job, techniques)
    check_layout(config, job.parallel, num_processes=world.size, further=features)
    # The strategy comes last, because it follows from what objective and techniques need.
    settings = config.strategy(shares_memory=job.parallel.shared_memory, further=features)
    run.chosen.append(job.strategy(settings, replica, world))
    on_exit.callback(run.strategy.close)
    if job.strategy is not configured_strategy:
        strategy = run.strategy
        own = feature(type(strategy).__name__, needs=strategy.needs, breaks=strategy.breaks)
        check_layout(config, job.parallel, num_processes=world.size, further=[*features, own])
    one_step = TrainStep(
        run=run,
        objective=job.objective,
        batches=BatchStream(job.objective, run),
        techniques=techniques,
        throughput=Throughput(world=world, num_updating=mesh.world.size, peak_flops=job.peak_flops),
    )
    return StepParts(one_step=one_step, run=run, techniques=techniques)


def build_replica(
    job: TrainJob, mesh: Mesh, store: Store | None, *, microbatch_tokens: int
) -> tuple[Executor, Replica]:
    """Lay the model out, in place, with all passes that the configuration asks for, and build its optimizer."""
    config = job.config
    attach_adapters(job.model, config.lora, job.seed)
    executor = parallelize(
        job.model if mesh.is_only_data_parallel else move_out(job.model),
        mesh=mesh,
        parallel=job.parallel,
        activations=activation_pass(
            config.activation_checkpointing,
            precision=config.precision,
            tokens_per_microbatch=microbatch_tokens,
            num_microbatches=config.gradient_accumulation_steps,
            parallel=job.parallel,
            store=store,
            pipeline_rank=mesh.pipeline.rank,
        ),
        compile_blocks=config.compile is True,  # `train` has settled `auto`
        precision=config.precision,
        scatters_each=config.optimizer_in_backward,
    )
    optimizer = build_optimizer(
        executor.model,
        config.optimizer,
        learning_rate=config.learning_rate,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        offload=config.optimizer_cpu_offload,
    )
    return executor, Replica(
        mesh=mesh,
        model=executor.model,
        optimizer=optimizer,
        num_stages_with=executor.num_stages_with,
        finish_gradients=executor.finish_gradients,
    )


def features_of(job: TrainJob, techniques: Sequence[Technique]) -> list[Feature]:
    """Properties of the run that objective and techniques need, and those that techniques break."""
    learned = feature(type(job.objective).__name__, needs=job.objective.needs)
    return [learned, *(feature(one.name, needs=one.needs, breaks=one.breaks) for one in techniques)]
