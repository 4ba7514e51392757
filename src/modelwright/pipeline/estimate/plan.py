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
from modelwright.pipeline.resolve import is_same_run, measured_rates, resolve
from modelwright.pipeline.run_config import previous_config
from modelwright.pipeline.runner import survey
from modelwright.pipeline.stage import Rates
from modelwright.pipeline.stages.specs import build_stages
from modelwright.train.config import TrainConfig

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
    lines += [plan_text(config.model, estimates, memories), "", _MEMORY_NOTES[config.hardware.device], "", "state"]
    for name, state in states.items():
        is_left_out = only and name not in only and state != "done"
        lines.append(f"  {name:<12}{'left out this time' if is_left_out else _WORDS[state]}")
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
    """Estimates the cost of each stage of a resolved configuration, and the memory, by part, of each that trains: that
    of the fullest process. Each process counts weights in shared memory in full.
    """
    estimates = [stage.estimate(config, run, rates) for stage in config.stages]
    further = {one.name: one.further_bytes for one in estimates}
    memories: dict[str, MemoryEstimate] = {}
    device = config.hardware.device
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
        memories[stage.name] = replace(memory.on_device(device), further_models=further[stage.name])
    # The stages' own estimates assume a whole model on one process.
    estimates = [replace(e, peak_bytes=memories[e.name].total) if e.name in memories else e for e in estimates]
    return estimates, memories
