"""THE training loop: a model laid out, and the course of its run (`train/trainer.py`), step by step (`train/step.py`).

What makes a run repeatable: batch number n is a function of n, random streams are seeded afresh at every step from
(seed, step, rank), and everything else that lives longer than a step is in the checkpoint. So a run that is killed at
any moment and started again ends with the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.memory.allocator import freed_memory_kept
from modelwright.memory.arena_run import StepArena, step_arena
from modelwright.memory.offload import open_store
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.gather import give_weights, take_weights, whole_weights
from modelwright.parallel.mesh import World, lay_out
from modelwright.parallel.gradient_sync import GradientTransport
from modelwright.precision.layer_scales import layer_scales_for
from modelwright.precision.model import ModelFormats, fp32_products
from modelwright.train.checkpoint.writer import Checkpoints
from modelwright.train.config import TrainConfig
from modelwright.train.trainer import Course
from modelwright.train.exchange import check_exchange, transport_for, turns_for
from modelwright.train.objective import Batch, Controller, Objective
from modelwright.train.techniques.out_of_memory import not_halving
from modelwright.train.parallelize import activation_pass, remove_passes, spread
from modelwright.train.state import TrainResult
from modelwright.train.signals import StopRequest
from modelwright.train.step import TrainStep
from modelwright.train.monitors.watchdog import Watchdog

DATA_PARALLEL = ParallelConfig()


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
    controllers: Mapping[str, Controller] | None = None,
    transport: GradientTransport | None = None,
    parallel: ParallelConfig = DATA_PARALLEL,
    restart: bool = False,
) -> TrainResult:
    """Train `model` in place until `num_steps` updates are done, going on from the newest whole checkpoint in `stage`.

    num_steps: from `config.resolve_num_steps`; name: what the progress display calls it; input_digest: of whatever
    decides the result (config, data, initial weights): a checkpoint with another one is refused; heldout: batches for
    evaluation, shared among the ranks; peak_flops: matrix-product rate of one rank in FLOP/s, 0 when unknown;
    transport: the one that `config.transport` describes unless given; parallel: how the world is laid out; restart:
    begin at step 0 when all checkpoints are damaged, which is an error otherwise. Every rank
    comes with the same whole model and leaves with it, trained; in between, and after an error, a model that is laid
    out over several ranks has no values of its own. Writes `stage.checkpoints`, `stage.metrics`, `stage.tensorboard`
    and, in `stage.path`, the watch list and what guards leave, mostly on the first rank only.

    Raises `Stopped` after a SIGTERM or Ctrl-C (the state is saved), `StorageError` when a checkpoint or a metric
    cannot be written, `ArtifactError` for checkpoints of another run, `ModelwrightError` when training has diverged or
    replicas differ, `ConfigError` when the settings do not go together.
    """
    in_backward = config.updates_in_backward
    check_exchange(config.transport, config.asynchronous, parallel, num_processes=world.size, in_backward=in_backward)
    progress = progress if world.is_first else SilentProgress()
    progress.begin(name, num_steps, "steps")
    hang_after_s = config.guards.hang_after_s if world.size > 1 else 0.0
    model = model.to(world.device)
    note_once = cache(progress.note)  # a run may be laid out several times
    try:
        with (
            StopRequest() as stop,
            freed_memory_kept(),
            fp32_products(
                tf32=config.precision.tf32,
                onednn=config.precision.onednn is True,
                on_cpu=world.device.type == "cpu",
            ),
            Watchdog(stage.path / f"hang-{world.rank}.txt", limit_s=hang_after_s) as watchdog,
            step_arena(config.memory_arena, world.device, progress.note) as arena,
        ):
            while True:
                ended = _train_laid_out(
                    model,
                    config,
                    parallel,
                    world,
                    given_transport=transport,
                    stop=stop,
                    objective=objective,
                    num_steps=num_steps,
                    stage=stage,
                    seed=seed,
                    progress=progress,
                    heldout=heldout,
                    peak_flops=peak_flops,
                    given_controllers=dict(controllers or {}),
                    input_digest=input_digest,
                    watchdog=watchdog,
                    arena=arena,
                    note_once=note_once,
                    restart=restart,
                )
                if isinstance(ended, TrainResult):
                    return ended
                parallel = replace(parallel, layers_per_stage=ended)
    finally:
        progress.end()


def _train_laid_out(
    model: Decoder,
    config: TrainConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    objective: Objective,
    num_steps: int,
    stage: StageDir,
    seed: int,
    peak_flops: float,
    input_digest: str,
    given_transport: GradientTransport | None,
    stop: StopRequest,
    arena: StepArena,
    note_once: Callable[[str], None],
    **parts: Any,
) -> TrainResult | tuple[int, ...]:
    """Train under one layout: to the end, or until other numbers of layers per stage, which are returned, are better.

    The model leaves with the trained weights.
    """
    everyone = lay_out(world, parallel)
    with ExitStack() as held:
        shares_memory = parallel.share_memory and given_transport is None and config.is_plain
        in_backward = config.updates_in_backward
        turns = held.enter_context(
            turns_for(config.asynchronous, everyone, model, shares_memory=shares_memory, in_backward=in_backward)
        )
        mesh = turns.mesh
        in_place = mesh.is_only_data_parallel
        layer_scales = layer_scales_for(
            config.precision.loss_scale,
            uses_fp16=config.precision.uses_fp16,
            count=lambda: model.config.num_parameters,
            num_layers=model.config.num_layers,
            device=world.device,
        )
        runner = spread(
            model if in_place else take_weights(model),
            mesh=mesh,
            parallel=parallel,
            activations=activation_pass(
                config.activations,
                precision=config.precision,
                tokens_per_microbatch=config.batch_tokens
                // (mesh.data.size * mesh.context.size * config.num_microbatches),
                num_microbatches=config.num_microbatches,
                parallel=parallel,
                store=open_store(config.activations, device=world.device, folder=stage.path),
                pipeline_rank=mesh.pipeline.rank,
            ),
            compile_blocks=config.compile,
            precision=config.precision,
            layer_scales=layer_scales,
            scatters_each=in_backward,
        )
        held.callback(remove_passes, model)
        formats = ModelFormats(runner.model, config.precision)
        transport = given_transport or held.enter_context(
            transport_for(config.transport, config.asynchronous, turns, runner.model, in_backward=in_backward)
        )
        checkpoints = Checkpoints(
            stage.checkpoints,
            keep_last=config.keep_last,
            digest=input_digest,
            world=world,
            reduce=everyone.reduce,
        )
        one_step = TrainStep(
            runner=runner,
            objective=objective,
            config=config,
            num_steps=num_steps,
            turns=turns,
            everyone=everyone,
            seed=seed,
            peak_flops=peak_flops,
            transport=transport,
            formats=formats,
            folder=stage.path,
            layer_scales=layer_scales,
            arena=arena,
        )
        if config.guards.out_of_memory == "halve" and one_step.in_the_way:
            note_once(not_halving(one_step.in_the_way))
        course = Course(
            one_step=one_step,
            config=config,
            num_steps=num_steps,
            everyone=everyone,
            stage=stage,
            checkpoints=checkpoints,
            **parts,
        )
        held.callback(course.close)
        if one_step.sparse:
            held.callback(one_step.sparse.close)
        ended = course.run(stop)
        if not in_place:
            give_weights(model, whole_weights(runner.model, mesh))
        return ended
