"""`doctor` for a run: the survey of `plan.doctor` at the run's own model and batch size."""

import json
from pathlib import Path

import torch

from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.resolve import check_device, check_size, check_threads, resolve_model, resolved_device
from modelwright.plan.doctor import survey, survey_text


def examine(config: RunConfig, *, as_json: bool, budget_s: float) -> str:
    """The survey as text or as JSON."""
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
        folder=Path("runs"),
        device=device,
        budget_s=budget_s,
    )
    return json.dumps(facts, indent=1) if as_json else survey_text(facts)
