"""`--dry-run`: the plan of a run as text: each stage's state, tokens, FLOPs, memory and time. Changes nothing."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from modelwright.core.artifacts import read_manifest
from modelwright.core.errors import ArtifactError
from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import RunDir
from modelwright.data.find_files import locate
from modelwright.data.loader import PackedRows
from modelwright.data.sources import BUILTIN, SourceConfig
from modelwright.model.config import ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.plan_inputs import planned
from modelwright.pipeline.report.format import plural
from modelwright.pipeline.resolve import measured_rates, resolve
from modelwright.pipeline.run import previous_config
from modelwright.pipeline.run_identity import is_same_run
from modelwright.pipeline.runner import survey
from modelwright.pipeline.stages.build import build_stages
from modelwright.pipeline.time_budget import num_steps_within, with_lengths, with_lengths_of
from modelwright.plan.catalog import ComputeRate
from modelwright.plan.communication import Cluster
from modelwright.plan.estimate import (
    StageEstimate,
    data_stage,
    duration,
    plan_text,
    scoring_stage,
    training_memory,
    training_stage,
)
from modelwright.plan.layout import assess
from modelwright.plan.memory import MemoryEstimate

BUILTIN_BYTES = {"pretrain": 20e6, "sft": 4e6}
"""Size of the built-in corpus: prose and code, and rendered question/answer pairs."""
BYTES_PER_TOKEN = 3.7
BYTES_PER_S = {"clean": 0.8e6, "tokenize": 1.2e6, "pack": 3e6}
"""Rates assumed for the stages that move text, on one core."""
CHOICE_TOKENS = 80
"""Tokens of one candidate with its question."""
OTHER_S = {"init": 2.0, "serve_check": 20.0, "report": 5.0}
ANY_CLUSTER = Cluster(
    num_hosts=1,
    devices_per_host=1,
    memory_bytes=1.0,
    compute=ComputeRate(peak_flops_per_s=1.0, efficiency=1.0, source=""),
    host_bytes_per_s=1.0,
    network_bytes_per_s=1.0,
    device="cpu",
)
"""For memory, which no speed changes."""
_MEMORY_NOTES = {
    "cpu": "Peak memory is the resident memory of one process: tensors, the gaps that the heap leaves between them "
    "(heap_gaps), and\nPython with its libraries (process). The system's cache of files comes on top.",
    "cuda": "Peak memory of training is what tensors take on the accelerator, without the gaps of its allocator.",
}
LIBRARY_BYTES = {"evaluate": 30 * 2**20, "quantize": 35 * 2**20, "serve_check": 70 * 2**20, "report": 95 * 2**20}
"""What later stages load and leave in the process, as measured in a run of all stages."""
_WORDS = {"done": "finished, kept", "begun": "begun, goes on", "changed": "to be made again", "new": "to be made"}


def describe_plan(
    config: RunConfig,
    run: RunDir,
    only: Sequence[str],
    *,
    num_processes: int = 1,
    num_hosts: int = 1,
    minutes: float = 0.0,
) -> str:
    """The plan as plain text. Measures the machine's rates (seconds); raises what the run itself would raise.

    num_processes: of all hosts, which are assumed to be like this one
    minutes: the time budget of training, 0 for the configured lengths
    """
    previous, busy = previous_config(run), []
    config = resolve(config, previous, SilentProgress())
    stages = build_stages(config, run, only)
    states = survey(run, stages).states
    torch.set_num_threads(config.hardware.num_threads)
    rates = measured_rates(config, config.pretrain.precision, busy.append)
    if minutes:
        config = _within(config, previous, run, rates, num_hosts, 60.0 * minutes)
    memories = _memories(config, num_processes)
    estimates = [_estimate(config, run, stage.name, rates, num_hosts) for stage in stages]
    estimates = [replace(e, peak_bytes=memories[e.name].total) if e.name in memories else e for e in estimates]
    to_do = [e for e in estimates if states[e.name] != "done" and (not only or e.name in only)]
    lines = [f"run         {config.name} in {run.path}", f"sources     {', '.join(config.data.sources)}"]
    if num_processes > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in config.parallel.axes(num_processes).items() if size > 1)
        lines.append(f"processes   {num_processes} on {num_hosts} host{'s' * (num_hosts > 1)}: {axes}")
    lines += [plan_text(config.model, estimates, memories), "", _MEMORY_NOTES[config.hardware.device], "", "state"]
    lines += [f"  {stage.name:<12}{_words(states[stage.name], stage.name, only)}" for stage in stages]
    left = sum(estimate.seconds for estimate in to_do)
    threads = config.hardware.num_threads
    lines += ["", f"left to do: about {duration(left)} on {config.hardware.device} with {plural(threads, 'thread')}"]
    lines.append("Times are estimates from rates measured just now; a dry run writes nothing.")
    return "\n".join(lines + [f"Busy machine: {note}" for note in busy])


def _within(
    config: RunConfig, previous: RunConfig | None, run: RunDir, rates: dict[str, float], num_hosts: int, budget_s: float
) -> RunConfig:
    """The lengths of training that fit into the budget, by estimated times of steps; those of a run that has them."""
    if previous and is_same_run(config, previous):
        return with_lengths_of(config, previous)
    one_step = with_lengths(config, dict.fromkeys(config.trainings, 1))
    seconds = {name: _estimate(one_step, run, name, rates, num_hosts).seconds for name in config.trainings}
    return with_lengths(config, num_steps_within(config, budget_s, seconds))


def _words(state: str, name: str, only: Sequence[str]) -> str:
    return "left out this time" if only and name not in only and state != "done" else _WORDS[state]


def _estimate(config: RunConfig, run: RunDir, name: str, rates: dict[str, float], num_hosts: int) -> StageEstimate:
    if name in BYTES_PER_S:
        return data_stage(name, num_bytes=sum(_text_bytes(config.data).values()), bytes_per_s=BYTES_PER_S[name])
    if name in ("pretrain", "sft"):
        training = config.stage_config(name)
        return training_stage(
            name,
            config.model,
            num_steps=training.resolve_num_steps(_batches_per_epoch(config, run, name)),
            batch_tokens=training.batch_tokens,
            num_microbatches=training.gradient_accumulation_steps,
            mean_context=_mean_context(config.model, config.pack.seq_len),
            compute=training.precision.planned_as,
            activations=training.activation_checkpointing,
            flops_per_s=rates[training.precision.planned_as],
            fused=cpu_kernels.are_used_on(config.hardware.device),
            world_size=num_hosts,  # the rate is that of all threads of a host, which its processes share
        )
    if name in ("evaluate", "quantize"):
        models = min(2, len(config.trained_stages)) if name == "evaluate" else 1
        scoring = scoring_stage(
            name,
            config.model,
            num_tokens=models * _scored_tokens(config),
            context_overlap=config.evaluate.context_overlap,
            batch_tokens=config.evaluate.batch_tokens,
            flops_per_s=rates["fp32"],
        )
        return replace(scoring, peak_bytes=scoring.peak_bytes + LIBRARY_BYTES[name])
    other = data_stage(name, num_bytes=0, bytes_per_s=1.0)
    return replace(other, seconds=OTHER_S[name], peak_bytes=other.peak_bytes + LIBRARY_BYTES.get(name, 0))


def _memories(config: RunConfig, num_processes: int) -> dict[str, MemoryEstimate]:
    """Memory of the fullest process by stage; each process counts weights in shared memory in full."""
    result, device = {}, config.hardware.device
    for name in ("pretrain", "sft"):
        training = config.stage_config(name)
        if name in config.stages and num_processes > 1:
            job, layout = planned(config, training, config.parallel, num_processes)
            result[name] = assess(job, layout, replace(ANY_CLUSTER, device=device)).memory
        elif name in config.stages:
            memory = training_memory(
                config.model,
                tokens_per_microbatch=training.batch_tokens // training.gradient_accumulation_steps,
                compute=training.precision.planned_as,
                num_microbatches=training.gradient_accumulation_steps,
                activations=training.activation_checkpointing,
                fused=cpu_kernels.are_used_on(config.hardware.device),
            )
            result[name] = memory.on_device(device, arena=training.step_arena)
    return result


def _batches_per_epoch(config: RunConfig, run: RunDir, name: str) -> int:
    """From the packed rows if they exist, else estimated from the size of the sources."""
    rows = run.stage("pack").artifact / name / "train"
    try:
        read_manifest(run.stage("pack").artifact, kind="pack")
        tokens = float(PackedRows(rows).num_rows * config.pack.seq_len)
    except ArtifactError:
        tokens = _text_bytes(config.data)[name] / BYTES_PER_TOKEN
    return max(1, round(tokens / config.stage_config(name).batch_tokens))


def _text_bytes(data: SourceConfig) -> dict[str, float]:
    """Bytes of text by purpose; a user's files count for both, because their content is not known yet."""
    total = {name: size * data.stdlib_fraction * (BUILTIN in data.sources) for name, size in BUILTIN_BYTES.items()}
    named = tuple(source for source in data.sources if source != BUILTIN)
    own = sum(file.filesystem.info(file.path).get("size") or 0 for file in locate(named, lambda reason, where: None))
    return {name: size + own for name, size in total.items()}


def _mean_context(model: ModelConfig, seq_len: int) -> float:
    """Positions that a token attends to on average: half of a document, and documents are about half of a row."""
    return min(seq_len, model.max_seq_len) / 4


def _scored_tokens(config: RunConfig) -> float:
    kinds = len(config.evaluate.domains)
    size = config.evaluate.max_bytes_per_domain * kinds or BUILTIN_BYTES["pretrain"] / 20
    return size / BYTES_PER_TOKEN + 4 * CHOICE_TOKENS * config.evaluate.multiple_choice.num_questions
