"""Fits the length of training to the time budget of the run, from steps that are timed when it is created; and
`--dry-run`: the plan of a run as text, with each stage's state, tokens, FLOPs, memory and time, which changes nothing.

The expected time of the other stages is subtracted first. The lengths are written into the run's config.yaml as
`num_steps`, so that a resumed run ends with the same bits as an uninterrupted one. They are measured once: the same
command keeps them.
"""

import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from modelwright.core.artifacts import RunDir, StageDir, save_yaml
from modelwright.core.config import ConfigError, derive_seed
from modelwright.core.progress import Progress, SilentProgress
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedRows
from modelwright.model.hf import load_model
from modelwright.objectives.experience import RowPlan
from modelwright.objectives.next_token import NextToken
from modelwright.ops import cpu_kernels
from modelwright.pipeline.estimate import cost
from modelwright.pipeline.estimate.layout import fullest_memory, planned
from modelwright.pipeline.process_group import RunGroup, use_threads
from modelwright.pipeline.report.blocks import plural
from modelwright.pipeline.resolve import is_same_run, measured_rates, resolve
from modelwright.pipeline.run_config import previous_config, read_run_config
from modelwright.pipeline.runner import survey
from modelwright.pipeline.stage import Rates, RunConfig, StageSpec
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.specs import build_stages
from modelwright.train.build import train
from modelwright.train.config import LENGTHS, TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.technique import StepInfo, observer

NUM_WARMUP_STEPS, NUM_TIMED_STEPS = 4, 8
FEWEST_STEPS = 10
"""Steps that a stage needs for a warmup and a decay of its learning rate."""
FOLDER = "time-budget"


def fit_to_minutes(config: RunConfig, run: RunDir, ranks: RunGroup, progress: Progress) -> RunConfig:
    """Returns the configuration with a `num_steps` for each training stage, such that the run takes `config.minutes`.

    Called on all ranks, before the run's config.yaml is written. A stage that the run already has keeps its length.
    Raises `ConfigError` if the budget is too small for a useful number of steps.
    """
    previous = read_run_config(run.config) if run.config.exists() else None
    ranks.barrier()  # all have read it before the first rank may write another one
    if previous and is_same_run(config, previous):
        config = with_lengths_of(config, previous)
        new = [stage for stage in config.trainings if not previous.has(stage)]
    else:
        new = list(config.trainings)
    if not new:
        return config
    for stage in new:
        assert stage.rows is not None
        objective = next(iter(config.section(stage).objective), "")
        learns = f"the objective {objective}" if objective else f"from {stage.rows.learned}"
        if objective or stage.rows.learned != "tokens":  # updates are timed by predicting random tokens
            raise ConfigError(
                f"minutes: the updates of {stage.name} cannot be timed before its rows exist, because it learns "
                f"{learns}; set minutes to 0, and {stage.name}.num_steps"
            )
    started = time.monotonic()
    folder = run.path / FOLDER
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_yaml(folder / "config.yaml", resolve(config, None, progress))
    ranks.barrier()
    resolved = read_run_config(folder / "config.yaml")
    use_threads(resolved.hardware.num_threads)
    seconds = {one.name: step_seconds(resolved, one, folder, ranks, progress) for one in new}
    rates = Rates(flops_per_s=measured_rates(resolved, resolved.first_training.precision, progress.note))
    left_s = training_seconds(resolved, run, rates) - (time.monotonic() - started)
    (least_s,) = ranks.world.maxima(-left_s)  # all ranks take the lengths of the slowest one
    share = sum(one.time_weight for one in new) / sum(one.time_weight for one in config.trainings)
    lengths = num_steps_within(resolved, -least_s * share, seconds)
    fitted = with_lengths(resolved, lengths)
    # All ranks have finished their steps before the first one removes the folder.
    ranks.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder)
        for name, num_steps in lengths.items():
            progress.note(f"{name}: {num_steps:,} steps of {seconds[name]:.3g} s fit into {config.minutes:g} minutes")
        trained = {
            name: cost.TRAINING_OVERHEAD_S + training_s(resolved, name, num_steps, seconds[name])
            for name, num_steps in lengths.items()
        }
        progress.note(time_plan(fitted, run, rates, trained))
    return fitted


def time_plan(config: RunConfig, run: RunDir, rates: Rates, trained_s: Mapping[str, float]) -> str:
    """Returns a line with the time of each stage. trained_s: seconds of training stages that are known better than by
    their estimates.
    """
    spent = {one.name: trained_s.get(one.name) or one.estimate(config, run, rates).seconds for one in config.stages}
    parts = ", ".join(f"{name} {cost.duration(seconds)}" for name, seconds in spent.items())
    return f"plan for {config.minutes:g} minutes: {parts}"


def training_s(config: RunConfig, name: str, num_steps: int, step_s: float) -> float:
    """Returns the seconds of a training stage with its validations; step_s: seconds of one update. A validation token
    costs a third of a training token (no backward pass).
    """
    training = config.section(name)
    # The loop evaluates once at the end, in addition to the validations at intervals.
    every = training.eval_every_steps
    num_validations = 1 + (num_steps / every if every else 0)
    return step_s * (num_steps + num_validations * config.validation_tokens / training.batch_tokens / 3)


def training_seconds(config: RunConfig, run: RunDir, rates: Rates) -> float:
    """Returns the seconds of `config.minutes` that remain after the stages that do not train."""
    others = [stage for stage in config.stages if not stage.objective]
    return 60.0 * config.minutes - sum(stage.estimate(config, run, rates).seconds for stage in others)


def with_lengths_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """Returns the configuration with the lengths of `other` in the trainings that both have."""
    names = [stage.name for stage in config.trainings if other.has(stage)]
    lengths = {name: {one: getattr(other.section(name), one) for one in LENGTHS} for name in names}
    return config.with_sections({name: replace(config.section(name), **lengths[name]) for name in names})


def with_lengths(config: RunConfig, num_steps: Mapping[str, int]) -> RunConfig:
    """Returns the configuration with these numbers of updates, by stage."""
    return config.with_sections(
        {
            name: replace(config.section(name), num_steps=count, num_tokens=0, num_epochs=0.0)
            for name, count in num_steps.items()
        }
    )


def num_steps_within(config: RunConfig, budget_s: float, seconds: Mapping[str, float]) -> dict[str, int]:
    """Returns the number of updates by stage with which the training stages together take `budget_s`. Their time
    outside of updates is subtracted first, and they share the rest by their weights, validation included, as in
    `training_s`. seconds: seconds of one update, by stage, for the stages to fit.
    """
    budget_s -= cost.TRAINING_OVERHEAD_S * len(seconds)
    weights = {stage.name: stage.time_weight for stage in config.trainings if stage.name in seconds}
    lengths: dict[str, int] = {}
    for name, step_s in seconds.items():
        fraction = weights[name] / sum(weights.values())
        validation_s = training_s(config, name, 0, step_s)
        each_s = training_s(config, name, 1, step_s) - validation_s
        lengths[name] = int((fraction * budget_s - validation_s) / each_s)
        if lengths[name] < FEWEST_STEPS:
            needed_s = (FEWEST_STEPS * each_s + validation_s) / fraction - budget_s
            least = math.ceil(10 * (config.minutes + needed_s / 60)) / 10  # rounded up, or it would be too few again
            raise ConfigError(
                f"minutes: {config.minutes:g} are too few for {FEWEST_STEPS} steps of {name} and the other stages; "
                f"give at least {least:g}, or a smaller model or batch"
            )
    return lengths


def step_seconds(config: RunConfig, stage: StageSpec, folder: Path, ranks: RunGroup, progress: Progress) -> float:
    """Returns the median seconds of an update of a training stage on random tokens in full rows, with its layout."""
    name, training, fresh = stage.name, config.section(stage), stage.fresh
    assert fresh is not None
    timed = Timed()
    num_steps = NUM_WARMUP_STEPS + NUM_TIMED_STEPS
    train(
        TrainJob(
            model=load_model(Path(config.init_from)) if config.init_from else fresh(config),
            objective=NextToken(RandomRows(config, training)),
            config=replace(
                training,
                num_steps=num_steps,
                num_tokens=0,
                num_epochs=0.0,
                eval_every_steps=0,
                checkpoint_every_steps=0,
                checkpoint_every_minutes=0.0,
                keep_best=False,
                loss_spikes=replace(training.loss_spikes, num_sigmas=0.0, rollback_after=0),
            ),
            num_steps=num_steps,
            stage=StageDir(folder / name),
            seed=derive_seed(config.seed, name),
            name=f"time {name}",
            input_digest=FOLDER,
            parallel=ranks.layout,
            techniques=[observer("timed", timed.observe)],
        ),
        ranks.world,
        progress,
    )
    (slowest,) = ranks.world.maxima(statistics.median(timed.seconds[NUM_WARMUP_STEPS:]))
    return float(slowest)


class Timed:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def observe(self, info: StepInfo) -> None:
        self.seconds.append(info.step_time_s)


class RandomRows:
    """Batches of random tokens, each row one document."""

    num_batches_per_epoch = 1

    def __init__(self, config: RunConfig, training: TrainConfig) -> None:
        self.vocab_size, self.seq_len = config.model.vocab_size, config.section(PACK).seq_len
        self.num_rows = training.batch_tokens // self.seq_len

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        draw = torch.Generator().manual_seed(index)
        shape = (self.num_rows, self.seq_len)
        ids_BT = torch.randint(self.vocab_size, shape, generator=draw)
        whole = TokenBatch(
            input_ids_BT=ids_BT,
            labels_BT=ids_BT.roll(-1, dims=1),
            positions_BT=torch.arange(self.seq_len).expand(shape).contiguous(),
            segments_BT=torch.zeros(shape, dtype=torch.int32),
        )
        return whole.split(world_size)[rank]


_MEMORY_NOTES = {
    "cpu": "Peak memory is the resident memory of one process: tensors, the gaps that the heap leaves between them "
    "(heap_gaps), and\nPython with its libraries (process). The system's cache of files comes on top.",
    "cuda": "Peak memory of training is what tensors take on the accelerator, without the gaps of its allocator.",
}
_WORDS = {"done": "finished, kept", "begun": "begun, continues", "changed": "to be made again", "new": "to be made"}


def describe_plan(
    config: RunConfig, run: RunDir, only: Sequence[str], *, num_processes: int = 1, num_hosts: int = 1
) -> str:
    """Returns the plan as plain text. Measures the machine's rates, which takes seconds; raises the errors that the run
    itself would raise.

    num_processes: processes of all hosts, which are assumed to be like this one
    """
    # Notes on a busy machine are collected: they belong below the plan.
    previous, busy = previous_config(run), []
    config = resolve(config, previous, SilentProgress())
    torch.set_num_threads(config.hardware.num_threads)
    flops_per_s = measured_rates(config, config.first_training.precision, busy.append)
    rates = Rates(flops_per_s=flops_per_s, num_hosts=num_hosts)
    if config.minutes and previous and is_same_run(config, previous):
        config = with_lengths_of(config, previous)
    elif config.minutes:
        # The lengths of training that fit into the budget, by estimated times of steps.
        one_step = with_lengths(config, {stage.name: 1 for stage in config.trainings})
        steps = [stage.estimate(one_step, run, rates) for stage in config.trainings]
        step_s = {one.name: one.seconds - one.overhead_s for one in steps}
        config = with_lengths(config, num_steps_within(config, training_seconds(config, run, rates), step_s))
    states = survey(run, build_stages(config, run, only)).states
    estimates, memories = stage_estimates(config, run, rates, num_processes)
    lines = [f"run         {config.name} in {run.path}", f"sources     {', '.join(config.text_sources)}"]
    if num_processes > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in config.parallel.axes(num_processes).items() if size > 1)
        lines.append(f"processes   {num_processes} on {num_hosts} host{'s' * (num_hosts > 1)}: {axes}")
    lines += [cost.plan_text(config.model, estimates, memories), "", _MEMORY_NOTES[config.hardware.device], "", "state"]
    for name, state in states.items():
        is_left_out = only and name not in only and state != "done"
        lines.append(f"  {name:<12}{'left out this time' if is_left_out else _WORDS[state]}")
    to_do = [e.seconds for e in estimates if states[e.name] != "done" and (not only or e.name in only)]
    threads = plural(config.hardware.num_threads, "thread")
    if config.minutes:
        spent = {one.name: one.seconds for one in estimates}
        lines += ["", time_plan(config, run, rates, spent)]
    lines += ["", f"left to do: about {cost.duration(sum(to_do))} on {config.hardware.device} with {threads}"]
    lines.append("Times are estimates from rates measured just now; a dry run writes nothing.")
    return "\n".join(lines + [f"Busy machine: {note}" for note in busy])


def update_tokens(config: RunConfig, stage: StageSpec, run: RunDir) -> int:
    """Returns the tokens of an update with the padding of its rows. Completions share rows: of the prompts that are
    packed, each is counted with a completion of the allowed length.
    """
    training, seq_len = config.section(stage), config.section(PACK).seq_len
    assert stage.rows is not None
    folder = run.stage(PACK.name).artifact / stage.rows.name / "train"
    if stage.rows.learned != "completions" or not folder.is_dir():
        return training.batch_tokens
    shares = np.linspace(0, 1, training.batch_tokens // seq_len)
    lengths = np.quantile(PackedRows(folder).group_lengths(), shares, method="nearest")
    # The length of a prompt counts an end token, and the last token of a completion predicts nothing.
    lengths = np.minimum(lengths + training.rollout.max_completion_length - 2, seq_len)
    return RowPlan.of(torch.from_numpy(lengths), seq_len).num_rows * seq_len


def stage_estimates(
    config: RunConfig, run: RunDir, rates: Rates, num_processes: int = 1
) -> tuple[list[cost.StageEstimate], dict[str, cost.MemoryEstimate]]:
    """Estimates the cost of each stage of a resolved configuration, and the memory, by part, of each that trains: that
    of the fullest process. Each process counts weights in shared memory in full.
    """
    estimates = [stage.estimate(config, run, rates) for stage in config.stages]
    further = {one.name: one.further_bytes for one in estimates}
    memories: dict[str, cost.MemoryEstimate] = {}
    device = config.hardware.device
    for stage in config.trainings:
        training: TrainConfig = config.section(stage)
        if num_processes > 1:
            job, layout = planned(config, training, config.parallel, num_processes)
            memory = fullest_memory(job, layout)
        else:
            memory = cost.training_memory(
                config.model,
                tokens_per_microbatch=update_tokens(config, stage, run) // training.gradient_accumulation_steps,
                compute=training.precision.planned_as,
                num_microbatches=training.gradient_accumulation_steps,
                activations=training.activation_checkpointing,
                fused=cpu_kernels.are_used_on(device),
                adapters=training.lora,
            )
        memories[stage.name] = replace(memory.on_device(device), further_models=further[stage.name])
    # The stages' own estimates assume a whole model on one process.
    estimates = [replace(e, peak_bytes=memories[e.name].total) if e.name in memories else e for e in estimates]
    return estimates, memories
