"""What limits the first training of a run on this machine, which techniques help, and what published rules of thumb say
about it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core.rundir import RunDir
from modelwright.ops import cpu_kernels
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.doctor import Examination
from modelwright.pipeline.resolve import resolve_inputs, resolved_device
from modelwright.pipeline.stages.pack import packed_row_len
from modelwright.train.config import TrainConfig
from modelwright_plan.advice.ledger import read_ledger, this_machine
from modelwright_plan.advice.needs import StepNeeds, step_needs
from modelwright_plan.advice.techniques import SWITCHES, Refusal, Situation, advise
from modelwright_plan.advice.text import advice_data, limit_lines, technique_lines
from modelwright_plan.advice.times import StepTimes, Transport, step_times
from modelwright_plan.rules.formats import number_formats
from modelwright_plan.rules.rule import RuleTarget
from modelwright_plan.rules.table import evaluated, known_rules, rule_lines

USUAL_PROCESSES = 2


def usual_processes(target: Path, parallel: ParallelConfig) -> int:
    """Processes of a run folder's last invocation; for any other target as few as its layout needs, at least 2, so that
    communication is judged, too.
    """
    run = RunDir(target)
    if run.info.is_file():
        return next((one["world_size"] for one in reversed(run.read_info()["invocations"]) if one.get("world_size")), 1)
    divided = parallel.pipeline * parallel.context * parallel.tensor
    return divided * parallel.data if parallel.data else max(divided, USUAL_PROCESSES)


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """What the advice is for."""

    num_processes: int
    """Processes on this machine that would train together."""
    results: Path
    """Folder of the ledger's results."""
    mtbf_s: float = 0.0
    """Mean seconds between interruptions, 0 if unknown."""
    refusal: Refusal = lambda settings: ""
    """Says why the run would be refused with further settings."""


@dataclass(frozen=True, kw_only=True)
class RunAdvice:
    """What limits a training here, and what to do about it: as text, and as JSON holds it."""

    text: str
    data: Mapping[str, Any]


def check_layout(config: RunConfig, num_processes: int) -> None:
    """Raise `ConfigError` for a layout that does not divide the processes, the model or the batch."""
    config = resolve_inputs(config)
    training = _with_format(config.first_training, {"fp32": 1.0, "bf16": 0.0})  # no format changes the layout
    _needs(config, training, num_processes, resolved_device(config.hardware.device))


def advise_run(config: RunConfig, options: AdviceOptions, found: Examination) -> RunAdvice:
    """Advice on the first training of a run. found: this machine, with the rates of the run's products."""
    config = resolve_inputs(config)
    device = resolved_device(config.hardware.device)
    rates: Mapping[str, float] = found.facts["training"]["effective"]
    training = _with_format(config.first_training, rates)
    needs = _needs(config, training, options.num_processes, device)
    times = step_times(
        needs,
        found.probes,
        flops_per_s=rates["bf16" if training.precision.planned_as == "bf16" else "fp32"],
        transport=_transport(config, training, needs, device),
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
        available_bytes=_available_bytes(found.facts, needs, device),
        on_cpu=device == "cpu",
    )
    stage = config.trainings[0].name if config.trainings else "training"
    advice = advise(situation, SWITCHES, options.refusal, stage=stage)
    ledger, here = read_ledger(options.results), this_machine()
    outcomes = evaluated(_rule_target(config, situation, options.mtbf_s, device), known_rules())
    lines = [
        *limit_lines(needs, times),
        "",
        *technique_lines(advice, ledger, here=here),
        "",
        "published rules of thumb",
        *rule_lines(outcomes),
    ]
    rules = [{**asdict(row), **asdict(outcome), "says": str(outcome)} for row, outcome in outcomes]
    return RunAdvice(
        text="\n".join(lines), data={**advice_data(needs, times, advice, ledger, here=here), "rules": rules}
    )


def _needs(config: RunConfig, training: TrainConfig, num_processes: int, device: str) -> StepNeeds:
    return step_needs(
        config.model,
        training,
        config.parallel,
        num_processes=num_processes,
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


def _rule_target(config: RunConfig, situation: Situation, mtbf_s: float, device: str) -> RuleTarget:
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
        mtbf_s=mtbf_s,
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
