"""`doctor`: the survey of `estimate.doctor` and the probes of `estimate.probes`, at the shapes of a run's model."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from modelwright.core.config import ConfigError
from modelwright.core.progress import Progress
from modelwright.pipeline.estimate.doctor import survey, survey_text
from modelwright.pipeline.estimate.probes.survey import MachineProbes, measure_machine, probe_lines
from modelwright.pipeline.resolve import check_device, check_size, check_threads, resolve_inputs, resolved_device
from modelwright.pipeline.stage import RunConfig

RUNS = Path("runs")
RATES = "rates"
"""Name by which the rates of products are left out."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Measurements of this machine."""

    facts: dict[str, Any]
    """Survey with the rates of products; empty if they are left out."""
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
    """Measures this machine. Raises `ConfigError` for a part, or a folder, that does not exist.

    budget_s: seconds for the rates of each format; folder: folder whose disk is measured, None for the folder of runs;
    skipped: parts that are left out
    """
    config = resolve_inputs(config)
    check_size(config.model)
    training, device = config.first_training, resolved_device(config.hardware.device)
    check_device(device)
    check_threads(config.hardware.num_threads)
    if config.hardware.num_threads:
        torch.set_num_threads(config.hardware.num_threads)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is not a folder; name one on the disk to measure")
    on_disk = folder or (RUNS if RUNS.is_dir() else Path())
    probes = measure_machine(on_disk, without=[name for name in skipped if name != RATES], progress=progress)
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
