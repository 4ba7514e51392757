"""`doctor`: the survey of `plan.doctor` and the probes of `plan.probes`; for a run also what limits its first training
on this machine, which techniques help, and what published rules of thumb say about it.
"""

import datetime
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.errors import ConfigError
from modelwright.core.progress import Progress
from modelwright.core.rundir import RunDir
from modelwright.ops import cpu_kernels
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.resolve import check_device, check_size, check_threads, resolve_model, resolved_device
from modelwright.pipeline.stages.pack import packed_row_len
from modelwright.plan.advice.ledger import read_ledger, this_machine
from modelwright.plan.advice.needs import StepNeeds, step_needs
from modelwright.plan.advice.techniques import SWITCHES, Refusal, Situation, advise
from modelwright.plan.advice.text import advice_data, limit_lines, technique_lines
from modelwright.plan.advice.times import StepTimes, Transport, step_times
from modelwright.plan.doctor import survey, survey_text
from modelwright.plan.probes.survey import MachineProbes, measure_machine, probe_lines
from modelwright.plan.rules.formats import number_formats
from modelwright.plan.rules.rule import RuleTarget
from modelwright.plan.rules.table import evaluated, known_rules, rule_lines
from modelwright.train.config import TrainConfig

RUNS = Path("runs")
USUAL_PROCESSES = 2
RATES = "rates"
"""The name by which the rates of products are left out; advice needs them."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is measured, and for how many processes."""

    as_json: bool
    budget_s: float
    """Seconds for the rates of each format."""
    num_processes: int
    """Processes on this machine that would train together."""
    results: Path
    """Folder of the ledger's results."""
    folder: Path | None
    """Folder whose disk is measured; None for the one that runs are written to."""
    skipped: Collection[str] = ()
    """Parts that are left out."""
    mtbf_s: float = 0.0
    """Mean seconds between interruptions, 0 if unknown."""
    with_advice: bool = True
    """Whether the configuration is one that the user has named."""
    refusal: Refusal = lambda settings: ""
    """Says why the run would be refused with further settings."""


def usual_processes(target: Path, parallel: ParallelConfig) -> int:
    """Processes of a run folder's last invocation; for any other target as few as its layout needs, at least 2, so that
    communication is judged, too.
    """
    run = RunDir(target)
    if run.info.is_file():
        return next((one["world_size"] for one in reversed(run.read_info()["invocations"]) if one.get("world_size")), 1)
    divided = parallel.pipeline * parallel.context * parallel.tensor
    return divided * parallel.data if parallel.data else max(divided, USUAL_PROCESSES)


def examine(config: RunConfig, options: DoctorOptions, progress: Progress) -> str:
    """Everything that is measured and advised, as text or as JSON. Raises `ConfigError` for a part that does not exist
    or a layout that does not divide the processes.
    """
    config = resolve_model(config)
    check_size(config.model)
    training = config.first_training
    device = resolved_device(config.hardware.device)
    check_device(device)
    check_threads(config.hardware.num_threads)
    if options.with_advice and RATES in options.skipped:
        raise ConfigError(f"--skip: advice for a training needs {RATES}; leave it in, or name no target")
    if options.with_advice:
        _needs(config, _with_format(training, {"fp32": 1.0, "bf16": 0.0}), options, device)  # checks the layout
    if config.hardware.num_threads:
        torch.set_num_threads(config.hardware.num_threads)
    probes = measure_machine(
        _folder(options), without=[name for name in options.skipped if name != RATES], progress=progress
    )
    data: dict[str, Any] = {"probes": asdict(probes)}
    lines = ["memory, disk and network", *probe_lines(probes), ""]
    facts: dict[str, Any] = {}
    if RATES not in options.skipped:
        facts = survey(
            config.model,
            num_tokens=training.batch_tokens // training.gradient_accumulation_steps,
            folder=RUNS,
            device=device,
            budget_s=options.budget_s,
        )
        lines = [survey_text(facts), "", *lines]
    if options.with_advice:
        advice = _advise(config, options, device, probes, facts)
        data |= advice.data
        lines += advice.lines
    else:
        lines.append("name a recipe, a YAML file or a run for what limits it here: modelwright doctor quickstart")
    return json.dumps({**facts, **data}, indent=1) if options.as_json else "\n".join(lines)


@dataclass(frozen=True)
class _Advice:
    lines: list[str]
    data: Mapping[str, Any]


def _advise(
    config: RunConfig, options: DoctorOptions, device: str, probes: MachineProbes, facts: Mapping[str, Any]
) -> _Advice:
    rates: Mapping[str, float] = facts["training"]["effective"]
    training = _with_format(config.first_training, rates)
    needs = _needs(config, training, options, device)
    transport = _transport(config, training, needs, device)
    times = step_times(
        needs,
        probes,
        flops_per_s=rates["bf16" if training.precision.planned_as == "bf16" else "fp32"],
        transport=transport,
        num_devices=needs.num_processes if device == "cuda" else 1,
    )
    situation = Situation(
        training=training,
        parallel=config.parallel,
        cache=config.cache,
        rows_at=config.rows_from if "://" in config.rows_from else "",
        needs=needs,
        times=times,
        rates=rates,
        available_bytes=_available_bytes(facts, needs, device),
        on_cpu=device == "cpu",
    )
    stage = config.trainings[0].name if config.trainings else "training"
    advice = advise(situation, SWITCHES, options.refusal, stage=stage)
    ledger, here = read_ledger(options.results), this_machine()
    today = datetime.datetime.now(datetime.UTC).date()
    outcomes = evaluated(_rule_target(config, situation, options, device), known_rules())
    lines = [
        *limit_lines(needs, times),
        "",
        *technique_lines(advice, ledger, here=here, today=today),
        "",
        "published rules of thumb",
        *rule_lines(outcomes),
    ]
    data = advice_data(needs, times, advice, ledger, here=here, today=today)
    rules = [{**asdict(row), **asdict(outcome), "says": str(outcome)} for row, outcome in outcomes]
    return _Advice(lines, {**data, "rules": rules})


def _needs(config: RunConfig, training: TrainConfig, options: DoctorOptions, device: str) -> StepNeeds:
    return step_needs(
        config.model,
        training,
        config.parallel,
        num_processes=options.num_processes,
        seq_len=packed_row_len(config),
        fused=cpu_kernels.are_used_on(device),
    )


def _with_format(training: TrainConfig, rates: Mapping[str, float]) -> TrainConfig:
    """With what `auto` would choose: the format that was measured to be the fastest."""
    if training.precision.policy != "auto":
        return training
    policy = "bf16_mixed" if rates["bf16"] > rates["fp32"] else "fp32"
    return replace(training, precision=replace(training.precision, policy=policy))


def _transport(config: RunConfig, training: TrainConfig, needs: StepNeeds, device: str) -> Transport:
    """What the processes of one host exchange gradients through."""
    if needs.num_processes == 1:
        return "none"
    if device == "cuda":
        return "NCCL"
    is_plain = needs.axes["replicate"] == needs.num_processes and config.parallel.shared_memory
    return "shared memory" if training.strategy(shares_memory=is_plain).shares_memory else "gloo"


def _available_bytes(facts: Mapping[str, Any], needs: StepNeeds, device: str) -> float:
    machine = facts["machine"]
    if device == "cuda":
        return needs.num_processes * min(gpu["memory_bytes"] for gpu in facts["torch"]["gpus"])
    return machine["memory_limit_bytes"] or machine["memory_bytes"]


def _rule_target(config: RunConfig, situation: Situation, options: DoctorOptions, device: str) -> RuleTarget:
    training, needs, times = situation.training, situation.needs, situation.times
    scales = training.lr_scaling != "none"
    return RuleTarget(
        num_parameters=config.model.num_parameters - config.model.embedding_parameters,
        num_all_parameters=config.model.num_parameters,
        training_flops=_training_flops(config, training),
        is_from_scratch=not config.init_from,
        batch_tokens=training.batch_tokens,
        learning_rate=training.peak_learning_rate,
        reference_rate=training.learning_rate if scales else 0.0,
        reference_batch_tokens=training.lr_reference_batch_tokens if scales else 0,
        optimizer=training.optimizer,
        policy=training.precision.policy,
        device=device,
        formats=number_formats(device),
        num_devices=needs.num_processes,
        device_bytes=situation.available_bytes / needs.num_processes,
        axes=needs.axes,
        zero_stage=config.parallel.zero_stage,
        checkpoint_s=times.checkpoint_s,
        checkpoint_every_s=_checkpoint_interval_s(needs, times),
        mtbf_s=options.mtbf_s,
    )


def _training_flops(config: RunConfig, training: TrainConfig) -> float:
    """FLOPs of the whole training without embedding and head; 0 if its length depends on the data."""
    num_tokens = training.num_tokens or training.num_steps * training.batch_tokens
    head = 2 * config.model.vocab_size * config.model.model_dim
    return 3.0 * num_tokens * (config.model.flops_per_token(packed_row_len(config) / 4) - head)


def _checkpoint_interval_s(needs: StepNeeds, times: StepTimes) -> float:
    """The shorter of what was set by time and by steps, 0 for none."""
    by_steps = needs.checkpoint_every_steps * max(times.seconds.values())
    return min(filter(None, (needs.checkpoint_every_s, by_steps)), default=0.0)


def _folder(options: DoctorOptions) -> Path:
    """An existing folder on the disk in question. Raises `ConfigError` if the one that was named is none."""
    if options.folder is not None:
        if not options.folder.is_dir():
            raise ConfigError(f"--folder: {options.folder} is not a folder; name one on the disk to measure")
        return options.folder
    return RUNS if RUNS.is_dir() else Path()
