"""`doctor` for a run: the survey of `plan.doctor` at the run's own model and batch size, the machine's other rates, and
what limits the run's training.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from modelwright.ops import cpu_kernels
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.resolve import check_device, check_size, check_threads, resolve_model, resolved_device
from modelwright.pipeline.stages.pack import packed_row_len
from modelwright.plan.advice import StepNeeds, advice_lines, read_ledger, recommend_techniques, step_needs
from modelwright.plan.doctor import survey, survey_text
from modelwright.plan.estimate import training_memory
from modelwright.plan.probes import Probes, probe, probe_lines

RUNS = Path("runs")


def examine(config: RunConfig, *, as_json: bool, budget_s: float, num_processes: int, results: Path) -> str:
    """The survey and the advice as text or as JSON.

    num_processes: processes on this machine that would train together; results: folder of the ledger's results
    """
    config = resolve_model(config)
    check_size(config.model)
    training = config.first_training
    device = resolved_device(config.hardware.device)
    check_device(device)
    check_threads(config.hardware.num_threads)
    if config.hardware.num_threads:
        torch.set_num_threads(config.hardware.num_threads)
    facts = survey(
        config.model,
        num_tokens=training.batch_tokens // training.gradient_accumulation_steps,
        folder=RUNS,
        device=device,
        budget_s=budget_s,
    )
    probes = probe(RUNS if RUNS.is_dir() else Path())
    rates = facts["training"]["effective"]
    needs = _needs(config, probes, rates, num_processes=num_processes)
    available = facts["machine"]["memory_limit_bytes"] or facts["machine"]["memory_bytes"]
    advice = recommend_techniques(needs, rates, memory_bytes=available, ledger=read_ledger(results))
    if not as_json:
        return "\n".join([survey_text(facts), "", *probe_lines(probes), "", *advice_lines(needs, advice)])
    step = {**asdict(needs), "bottleneck": needs.bottleneck}
    extra = {"probes": asdict(probes), "step": step, "advice": [vars(one) for one in advice]}
    return json.dumps({**facts, **extra}, indent=1)


def _needs(config: RunConfig, probes: Probes, rates: Mapping[str, Any], *, num_processes: int) -> StepNeeds:
    """What a step of the first training stage needs, in its configured format or in the fastest one."""
    training = config.first_training
    is_open = training.precision.policy == "auto"
    fastest = "bf16" if rates["bf16"] > rates["fp32"] else "fp32"
    compute = fastest if is_open else training.precision.planned_as
    memory = training_memory(
        config.model,
        tokens_per_microbatch=training.batch_tokens // training.gradient_accumulation_steps // num_processes,
        num_microbatches=training.gradient_accumulation_steps,
        compute=compute,
        activations=training.activation_checkpointing,
        fused=cpu_kernels.are_used_on(resolved_device(config.hardware.device)),
    )
    return step_needs(
        config.model,
        probes,
        batch_tokens=training.batch_tokens,
        mean_context=packed_row_len(config) / 4,  # as in the estimate of training stages
        flops_per_s=rates[compute],
        num_processes=num_processes,
        checkpoint_every_s=60 * training.checkpoint_every_minutes,
        memory_bytes=memory.total,
    )
