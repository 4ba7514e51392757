"""`--dry-run`: the plan of a run as text: each stage's state, tokens, FLOPs, memory and time. Changes nothing."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import RunDir
from modelwright.ops import cpu_kernels
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.estimate.cost import StageEstimate, duration, plan_text, training_memory
from modelwright.pipeline.estimate.layout import fullest_memory, planned
from modelwright.pipeline.estimate.memory import MemoryEstimate
from modelwright.pipeline.estimate.time_budget import (
    num_steps_within,
    time_plan,
    training_seconds,
    with_lengths,
    with_lengths_of,
)
from modelwright.pipeline.report.blocks import plural
from modelwright.pipeline.resolve import measured_rates, resolve
from modelwright.pipeline.run import previous_config
from modelwright.pipeline.run_config import is_same_run
from modelwright.pipeline.runner import survey
from modelwright.pipeline.stage import Rates
from modelwright.pipeline.stages.specs import build_stages
from modelwright.train.config import TrainConfig

_MEMORY_NOTES = {
    "cpu": "Peak memory is the resident memory of one process: tensors, the gaps that the heap leaves between them "
    "(heap_gaps), and\nPython with its libraries (process). The system's cache of files comes on top.",
    "cuda": "Peak memory of training is what tensors take on the accelerator, without the gaps of its allocator.",
}
_WORDS = {"done": "finished, kept", "begun": "begun, goes on", "changed": "to be made again", "new": "to be made"}


def describe_plan(
    config: RunConfig,
    run: RunDir,
    only: Sequence[str],
    *,
    num_processes: int = 1,
    num_hosts: int = 1,
) -> str:
    """The plan as plain text. Measures the machine's rates (seconds); raises what the run itself would raise.

    num_processes: of all hosts, which are assumed to be like this one
    """
    previous, busy = previous_config(run), []
    config = resolve(config, previous, SilentProgress())
    torch.set_num_threads(config.hardware.num_threads)
    flops_per_s = measured_rates(config, config.first_training.precision, busy.append)
    rates = Rates(flops_per_s=flops_per_s, num_hosts=num_hosts)
    if config.minutes:
        config = _within(config, previous, run, rates)
    states = survey(run, build_stages(config, run, only)).states
    estimates, memories = stage_estimates(config, run, rates, num_processes)
    lines = [f"run         {config.name} in {run.path}", f"sources     {', '.join(config.text_sources)}"]
    if num_processes > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in config.parallel.axes(num_processes).items() if size > 1)
        lines.append(f"processes   {num_processes} on {num_hosts} host{'s' * (num_hosts > 1)}: {axes}")
    lines += [plan_text(config.model, estimates, memories), "", _MEMORY_NOTES[config.hardware.device], "", "state"]
    lines += [f"  {name:<12}{_words(state, name, only)}" for name, state in states.items()]
    to_do = [e.seconds for e in estimates if states[e.name] != "done" and (not only or e.name in only)]
    threads = plural(config.hardware.num_threads, "thread")
    if config.minutes:
        spent = {one.name: one.seconds for one in estimates}
        lines += ["", time_plan(config, run, rates, spent)]
    lines += ["", f"left to do: about {duration(sum(to_do))} on {config.hardware.device} with {threads}"]
    lines.append("Times are estimates from rates measured just now; a dry run writes nothing.")
    return "\n".join(lines + [f"Busy machine: {note}" for note in busy])


def stage_estimates(
    config: RunConfig, run: RunDir, rates: Rates, num_processes: int = 1
) -> tuple[list[StageEstimate], dict[str, MemoryEstimate]]:
    """The cost of each stage of a resolved configuration, and the parts of the memory of those that train."""
    estimates = [stage.estimate(config, run, rates) for stage in config.stages]
    further = {one.name: one.further_bytes for one in estimates}
    memories = {
        name: replace(memory, further_models=further[name]) for name, memory in _memories(config, num_processes).items()
    }
    estimates = [replace(e, peak_bytes=memories[e.name].total) if e.name in memories else e for e in estimates]
    return estimates, memories


def _within(config: RunConfig, previous: RunConfig | None, run: RunDir, rates: Rates) -> RunConfig:
    """The lengths of training that fit into the budget, by estimated times of steps; those of a run that has them."""
    if previous and is_same_run(config, previous):
        return with_lengths_of(config, previous)
    one_step = with_lengths(config, {stage.name: 1 for stage in config.trainings})
    estimates = [stage.estimate(one_step, run, rates) for stage in config.trainings]
    seconds = {one.name: one.seconds - one.overhead_s for one in estimates}
    return with_lengths(config, num_steps_within(config, training_seconds(config, run, rates), seconds))


def _words(state: str, name: str, only: Sequence[str]) -> str:
    return "left out this time" if only and name not in only and state != "done" else _WORDS[state]


def _memories(config: RunConfig, num_processes: int) -> dict[str, MemoryEstimate]:
    """Memory of the fullest process by training stage; each process counts weights in shared memory in full."""
    result, device = {}, config.hardware.device
    for stage in config.trainings:
        training: TrainConfig = config.section(stage)
        if num_processes > 1:
            job, layout = planned(config, training, config.parallel, num_processes)
            memory = fullest_memory(job, layout)
        else:
            memory = training_memory(
                config.model,
                tokens_per_microbatch=training.batch_tokens // training.gradient_accumulation_steps,
                compute=training.precision.planned_as,
                num_microbatches=training.gradient_accumulation_steps,
                activations=training.activation_checkpointing,
                fused=cpu_kernels.are_used_on(device),
                adapters=training.lora,
            )
        result[stage.name] = memory.on_device(device)
    return result
