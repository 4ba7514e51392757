"""`doctor`: the survey of `plan.doctor` and the probes of `plan.probes`, at the shapes of a run's model."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from modelwright.core.errors import ConfigError
from modelwright.core.progress import Progress
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.estimate.doctor import survey, survey_text
from modelwright.pipeline.estimate.probes.survey import MachineProbes, measure_machine, probe_lines
from modelwright.pipeline.resolve import check_device, check_size, check_threads, resolve_model, resolved_device

RUNS = Path("runs")
RATES = "rates"
"""The name by which the rates of products are left out."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was measured of this machine."""

    facts: dict[str, Any]
    """The survey with the rates of products; empty where they are left out."""
    probes: MachineProbes

    @property
    def text(self) -> str:
        """Both as lines."""
        rates = [survey_text(self.facts), ""] if self.facts else []
        return "\n".join([*rates, "memory, disk and network", *probe_lines(self.probes)])

    @property
    def data(self) -> dict[str, Any]:
        """Both as JSON holds them."""
        return {**self.facts, "probes": asdict(self.probes)}


def examine(
    config: RunConfig, *, budget_s: float, folder: Path | None, skipped: Collection[str], progress: Progress
) -> Examination:
    """Measure this machine. Raises `ConfigError` for a part that does not exist.

    budget_s: seconds for the rates of each format; folder: whose disk is measured, None for the one that runs are
    written to; skipped: parts that are left out
    """
    config = resolve_model(config)
    check_size(config.model)
    training, device = config.first_training, resolved_device(config.hardware.device)
    check_device(device)
    check_threads(config.hardware.num_threads)
    if config.hardware.num_threads:
        torch.set_num_threads(config.hardware.num_threads)
    probes = measure_machine(
        _disk_folder(folder), without=[name for name in skipped if name != RATES], progress=progress
    )
    facts: dict[str, Any] = {}
    if RATES not in skipped:
        facts = survey(
            config.model,
            num_tokens=training.batch_tokens // training.gradient_accumulation_steps,
            folder=RUNS,
            device=device,
            budget_s=budget_s,
        )
    return Examination(facts=facts, probes=probes)


def _disk_folder(given: Path | None) -> Path:
    """An existing folder on the disk to measure. Raises `ConfigError` if the given one does not exist."""
    if given is not None:
        if not given.is_dir():
            raise ConfigError(f"--folder: {given} is not a folder; name one on the disk to measure")
        return given
    return RUNS if RUNS.is_dir() else Path()
