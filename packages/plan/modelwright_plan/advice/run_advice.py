"""Advice on the first training of a run on this machine: the resource that limits it, the techniques that help, each
with its results in the ledger, and the published rules of thumb; as text and as plain data.

The ledger's files are written by the package `modelwright-claims`, which also knows whether code has changed since.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import RunDir
from modelwright.core.resources import hardware
from modelwright.ops import cpu_kernels
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.doctor import Examination
from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.resolve import resolve_inputs, resolved_device
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.pack import packed_row_len
from modelwright.train.config import TrainConfig
from modelwright_plan.advice.needs import RESOURCES, StepNeeds, StepTimes, Transport, step_needs, step_times
from modelwright_plan.advice.techniques import SWITCHES, Refusal, Situation, TechniqueAdvice, advise
from modelwright_plan.rules import RuleTarget, evaluated, known_rules, number_formats, rule_lines

USUAL_PROCESSES = 2


def usual_processes(target: Path, parallel: ParallelConfig) -> int:
    """Returns the number of processes of a run folder's last invocation; for any other target the least that its layout
    needs, but at least 2, so that communication is judged, too.
    """
    run = RunDir(target)
    if run.info.is_file():
        return next((one["world_size"] for one in reversed(run.read_info()["invocations"]) if one.get("world_size")), 1)
    divided = parallel.pipeline * parallel.context * parallel.tensor
    return divided * parallel.data if parallel.data else max(divided, USUAL_PROCESSES)


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """Options of the advice."""

    num_processes: int
    """Number of processes that train together on this machine."""
    results: Path
    """Folder of the ledger's results."""
    mtbf_s: float = 0.0
    """Mean seconds between interruptions; 0 if unknown."""
    refusal: Refusal = lambda settings: ""
    """Returns why the run would be refused with further settings."""


@dataclass(frozen=True, kw_only=True)
class RunAdvice:
    """The advice as text and as plain data for JSON."""

    text: str
    data: Mapping[str, Any]


def check_layout(config: RunConfig, num_processes: int) -> None:
    """Raises `ConfigError` for a layout that does not divide the processes, the model or the batch."""
    config = resolve_inputs(config)
    training = _with_format(config.first_training, {"fp32": 1.0, "bf16": 0.0})  # no format changes the layout
    _needs(config, training, num_processes, resolved_device(config.hardware.device))


def advise_run(config: RunConfig, options: AdviceOptions, found: Examination) -> RunAdvice:
    """Advises on the first training of a run. found: facts about this machine, with the rates of the run's products."""
    config = resolve_inputs(config)
    device = resolved_device(config.hardware.device)
    machine, rates = found.facts["machine"], found.facts["training"]["effective"]
    training = _with_format(config.first_training, rates)
    needs = _needs(config, training, options.num_processes, device)
    transport: Transport = "none"
    available_bytes = machine["memory_limit_bytes"] or machine["memory_bytes"]
    if device == "cuda":
        available_bytes = needs.num_processes * min(gpu["memory_bytes"] for gpu in found.facts["torch"]["gpus"])
    if needs.num_processes > 1 and device == "cuda":
        transport = "NCCL"
    elif needs.num_processes > 1:
        is_plain = needs.axes["replicate"] == needs.num_processes and config.parallel.shared_memory
        transport = "shared memory" if training.strategy(shares_memory=is_plain).shares_memory else "gloo"
    times = step_times(
        needs,
        found.probes,
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
        available_bytes=available_bytes,
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
    """Returns the training with the fastest measured format in place of the policy `auto`."""
    if training.precision.policy != "auto":
        return training
    policy = "bf16_mixed" if rates["bf16"] > rates["fp32"] else "fp32"
    return replace(training, precision=replace(training.precision, policy=policy))


def _rule_target(config: RunConfig, situation: Situation, mtbf_s: float, device: str) -> RuleTarget:
    training, needs, times = situation.training, situation.needs, situation.times
    scales = training.lr_scaling != "none"
    # Without embedding and head; 0 if the length depends on the data.
    num_tokens = training.num_tokens or training.num_steps * training.batch_tokens
    head = 2 * config.model.vocab_size * config.model.model_dim
    training_flops = 3.0 * num_tokens * (config.model.flops_per_token(packed_row_len(config) / 4) - head)
    by_steps_s = needs.checkpoint_every_steps * max(times.seconds.values())
    return RuleTarget(
        num_parameters=config.model.num_parameters - config.model.embedding_parameters,
        num_all_parameters=config.model.num_parameters,
        training_flops=training_flops,
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
        checkpoint_every_s=min(filter(None, (needs.checkpoint_every_s, by_steps_s)), default=0.0),
        mtbf_s=mtbf_s,
    )


_NEEDED = frozenset({"name", "kind", "figures", "machine", "date"})


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """A stored measurement of a claim on one machine."""

    claim: str
    verdict: str
    machine: str
    """Kind of processor or accelerator. A verdict says little about machines of another kind."""
    date: str
    file: str


def this_machine() -> str:
    """Returns the kind of this machine, in the form of `LedgerRow.machine`."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return accelerator or f"{hardware()['processor']}, {torch.backends.cpu.get_cpu_capability()}"


def read_ledger(folder: Path) -> list[LedgerRow]:
    """Reads the full measurements in a folder; returns none if the folder does not exist. Skips files of other
    benchmarks, quick measurements and damaged files.
    """
    rows = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(record, dict) or not record.keys() >= _NEEDED or record.get("quick"):
                continue
            machine = record["machine"]
            processor = machine.get("processor", "unknown processor")
            instructions = machine.get("instruction_set", "unknown instructions")
            kind = machine.get("accelerator", "") or f"{processor}, {instructions}"
        except (OSError, ValueError, AttributeError):
            continue
        rows.append(
            LedgerRow(claim=record["name"], verdict=record["kind"], machine=kind, date=record["date"], file=path.name)
        )
    return rows


def limit_lines(needs: StepNeeds, times: StepTimes) -> list[str]:
    """Formats the needs of a step, the time of each resource, and the bottleneck."""
    processes = "1 process" if needs.num_processes == 1 else f"{needs.num_processes} processes"
    layout = ", ".join(f"{axis} {number}" for axis, number in needs.axes.items() if number > 1)
    cadence = [f"every {needs.checkpoint_every_steps} steps"] if needs.checkpoint_every_steps else []
    if needs.checkpoint_every_s:
        cadence.append(f"every {needs.checkpoint_every_s / 60:g} min")
    via = "" if times.transport == "none" else f", through {times.transport}"
    if via and times.tcp_s:
        via += f"; bare TCP over loopback would take {times.tcp_s:.4f} s"
    amounts = {
        "compute": f"{needs.flops:.3g} FLOPs",
        "communication": f"{size(needs.link_bytes)} in {needs.link_messages:.0f} messages from each process{via}",
        "memory": (
            f"{size(needs.memory_bytes)}: weights and gradients {size(needs.weight_bytes)}, activations "
            f"{size(needs.activation_bytes)}, optimizer {size(needs.optimizer_bytes)}"
        ),
        "disk": (
            f"{size(needs.row_bytes)} of rows in {needs.row_reads:.0f} reads, checkpoints of "
            f"{size(needs.checkpoint_bytes)} {' and '.join(cadence) or 'at the end'}"
        ),
    }
    lines = [f"a step with {processes} here ({layout or 'no axis of more than one process'}):"]
    for one in RESOURCES:
        seconds = f"{times.seconds[one]:>10.4f} s" if one in times.seconds else f"{'not measured':>12}"
        lines.append(f"  {one:<15}{seconds}  {amounts[one]}")
    return [
        *lines,
        f"  {times.ratio}",
        f"bottleneck: {times.bottleneck}, {times.share(times.bottleneck):.0%} of what all of them would take one after "
        "the other",
    ]


def technique_lines(advice: Sequence[TechniqueAdvice], ledger: Sequence[LedgerRow], *, here: str) -> list[str]:
    """Formats the techniques to switch on, off or keep, each with its rows of the ledger; then those that nothing calls
    for. here: kind of this machine.
    """
    lines, idle = [], [one.switch.name for one in advice if one.action == "not now"]
    advised = [one for one in advice if one.action == "switch on"]
    for one in advice:
        if one.action == "not now":
            continue
        purpose = one.switch.remedy_for
        rivals = [
            other.switch.name
            for other in advised
            if other is not one and purpose and purpose == other.switch.remedy_for
        ]
        alternative = f"  (instead of: {', '.join(rivals)})" if one in advised and rivals else ""
        gain, rows = expected_gain(one, ledger, here=here)
        action = "try" if one in advised and gain != "likely" else one.action
        option = f"  {one.option}" if one.option else ""
        lines.append(f"{action}: {one.switch.name}{option}{alternative}")
        lines.append(f"  why: {one.reason}")
        lines.append(f"  expected gain: {gain}; {rows}")
    if idle:
        lines.append(f"nothing measured here asks for: {', '.join(idle)}")
    return lines


def expected_gain(advice: TechniqueAdvice, ledger: Sequence[LedgerRow], *, here: str) -> tuple[str, str]:
    """Returns the gain that stored results promise on this machine, and the results: those of this kind of processor,
    or those of others if none exists. The gain is DOUBTFUL if one of them missed its target.
    """
    rows = [row for row in ledger if row.claim in advice.switch.claims]
    rows = [row for row in rows if row.machine == here] or rows
    if not rows:
        return "unknown", "the ledger has no row for it (--results DIR)"
    where = "this kind of processor" if rows[0].machine == here else "ANOTHER KIND OF PROCESSOR"
    named = ", ".join(f"{row.claim} {row.verdict} ({row.date}, {row.file})" for row in rows)
    return "likely" if all(row.verdict == "met" for row in rows) else "DOUBTFUL", f"on {where}: {named}"


def advice_data(
    needs: StepNeeds, times: StepTimes, advice: Sequence[TechniqueAdvice], ledger: Sequence[LedgerRow], *, here: str
) -> dict[str, Any]:
    """Returns everything that `limit_lines` and `technique_lines` show, as plain data for JSON."""
    techniques = []
    for one in advice:
        gain, rows = expected_gain(one, ledger, here=here)
        facts = {"name": one.switch.name, "action": one.action, "option": one.option, "reason": one.reason}
        techniques.append({**facts, "expected_gain": gain, "ledger": rows})
    return {
        "needs": asdict(needs),
        "times": {**asdict(times), "ratio": times.ratio, "bottleneck": times.bottleneck},
        "techniques": techniques,
    }
