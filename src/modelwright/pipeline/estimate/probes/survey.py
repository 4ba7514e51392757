"""Survey of this machine with all probes, in turn. `PROBES` is their only list."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelwright.core.config import ConfigError, did_you_mean
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.resources import MISSING_CORES, PERIOD_S, LoadMeter, OtherProcesses, missing_cores
from modelwright.pipeline.estimate.doctor import busy_note
from modelwright.pipeline.estimate.probes.bandwidth import ACCELERATOR, MEMORY
from modelwright.pipeline.estimate.probes.disk import DISK
from modelwright.pipeline.estimate.probes.network import GLOO, LOOPBACK
from modelwright.pipeline.estimate.probes.probe import Probe, ProbeResult, ProbeSetting, ProbeUnavailable

PROBES: tuple[Probe, ...] = (MEMORY, DISK, LOOPBACK, GLOO, ACCELERATOR)
NAMES = tuple(probe.name for probe in PROBES)
LEFT_OUT = ProbeResult(state="left out")


@dataclass(frozen=True, kw_only=True)
class MachineProbes:
    """Results by probe; busy_cores: cores that other processes used before the survey, 0 if they left enough."""

    results: Mapping[str, ProbeResult]
    busy_cores: float = 0.0

    def figure(self, probe: str, name: str) -> float:
        """Returns a measured figure, 0 if it was not measured."""
        return self.results.get(probe, LEFT_OUT).figures.get(name, 0.0)


def measure_machine(
    folder: Path,
    *,
    without: Collection[str] = (),
    probes: Sequence[Probe] = PROBES,
    others: LoadMeter | None = None,
    progress: Progress | None = None,
) -> MachineProbes:
    """Runs all probes but `without`. folder: existing folder on the disk that is measured. Raises `ConfigError` for a
    probe that does not exist.
    """
    names = [probe.name for probe in probes]
    for name in without:
        if name not in names:
            raise ConfigError(f"--skip: {name!r} is not one of rates, {', '.join(names)}{did_you_mean(name, names)}")
    meter = others or OtherProcesses()
    # The meter counts since its creation; a shorter period would be mostly noise.
    time.sleep(max(0.0, PERIOD_S - meter.seconds()))
    others_use = meter.other_cores()
    is_busy = missing_cores(others_use, torch.get_num_threads()) >= MISSING_CORES
    wanted = [probe for probe in probes if probe.name not in without]
    progress = progress or SilentProgress()
    results = dict.fromkeys(names, LEFT_OUT)
    progress.begin("probing", len(wanted), "parts")
    try:
        for number, probe in enumerate(wanted):
            progress.advance(number, part=probe.name)
            start = time.perf_counter()
            try:
                result = probe.measure(ProbeSetting(folder=folder, budget_s=probe.budget_s))
            except (ProbeUnavailable, OSError, RuntimeError) as error:  # the other probes go ahead
                lines = str(error).strip().splitlines()
                result = ProbeResult(state=f"none: {lines[0] if lines else type(error).__name__}")
            results[probe.name] = replace(result, seconds=time.perf_counter() - start)
    finally:
        progress.end()
    return MachineProbes(results=results, busy_cores=others_use if is_busy else 0.0)


def probe_lines(probed: MachineProbes, probes: Sequence[Probe] = PROBES) -> list[str]:
    """Returns the results as text, a line for each probe."""
    lines = []
    for probe in probes:
        result = probed.results.get(probe.name, LEFT_OUT)
        lines.append(f"{probe.name:<12}{probe.text(result) if result.state == 'measured' else result.state}")
    note = busy_note(probed.busy_cores, remedy="run this again when the machine is quiet")
    return [*lines, f"note: {note}"] if note else lines
