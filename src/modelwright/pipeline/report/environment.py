"""The report's sections on the run itself: energy and carbon dioxide of each training stage, the cost of each stage,
the machine, the settings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from modelwright.core.config import dump
from modelwright.core.redact import redact_plain
from modelwright.pipeline.report.blocks import (
    Block,
    Chart,
    Excerpt,
    Fact,
    Fold,
    Note,
    Section,
    Table,
    number,
    percent,
    plural,
    seconds,
    size,
)
from modelwright.pipeline.report.charts import bar_chart
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.train.monitors.energy import ENERGY_FILE, EnergyTotal, read_energy, total_energy
from modelwright.train.monitors.power_meters import MEMORY_WATTS_PER_GB

_TITLES = {
    "rapl": "processors (RAPL)",
    "rapl_memory": "memory (RAPL)",
    "nvml": "GPUs (NVML)",
    "cores_model": "cores (estimated)",
    "memory_model": "memory (estimated)",
}


def energy_section(stages: Sequence[StageData]) -> Section | None:
    """None if no stage has trained."""
    entries = {stage.name: read_energy(stage.folder.path / ENERGY_FILE) for stage in stages}
    totals = {name: total_energy(of_stage) for name, of_stage in entries.items() if of_stage}
    if not totals:
        return None
    header = ["stage", "energy", "per token", "CO₂", "mean power", "measured", "sources"]
    rows = [row for name, total in totals.items() for row in _rows(name, total)]
    last = [of_stage[-1] for of_stage in entries.values() if of_stage][-1]
    table = Table(header, rows, "Energy of training", numeric=range(1, 6))
    notes = [Note(_terms(last)), *(Note(text) for text in _codecarbon_terms(totals))]
    return Section("energy", "Energy and carbon dioxide", [table, *notes])


def energy_facts(stages: Sequence[StageData]) -> Sequence[Fact]:
    """The energy of all trainings together, and how much of it was measured."""
    totals = [total_energy(entries) for stage in stages if (entries := read_energy(stage.folder.path / ENERGY_FILE))]
    if not totals:
        return ()
    used = sum(total.total_joules for total in totals)
    measured = sum(total.measured_share * total.total_joules for total in totals) / max(used, 1e-9)
    hint = (
        f"{number(sum(total.co2_g for total in totals), 3)} g CO₂; {percent(measured, 0)} measured, the rest estimated"
    )
    return (Fact("Energy of training", joules(used), hint),)


def _rows(name: str, total: EnergyTotal) -> list[list[str]]:
    """The stage, and below it codecarbon's estimate of the same training if there is one."""
    rows = [[name, *_cells(total)]]
    if other := total.codecarbon:
        cells = [
            joules(other.joules),
            f"{number(other.joules / max(1, other.num_tokens), 3)} J",
            f"{number(other.co2_g, 3)} g",
            f"{number(other.joules / max(1e-9, other.seconds), 3)} W",
            "–",
            f"whole machine, {other.country}",
        ]
        rows.append(["codecarbon, an estimate", *cells])
    return rows


def _codecarbon_terms(totals: Mapping[str, EnergyTotal]) -> list[str]:
    """One note about all of its rows."""
    others = {name: total.codecarbon for name, total in totals.items() if total.codecarbon}
    if not others:
        return []
    versions = ", ".join(dict.fromkeys(other.version for other in others.values()))
    processes = ", ".join(f"{other.num_processes} of {name}" for name, other in others.items())
    return [
        f"codecarbon {versions} follows the whole first host, other processes included, models what it cannot read, "
        "and takes the country's mean intensity; the PUE is in its figures, too. They are of the process starts "
        f"with energy.country: {processes}."
    ]


def _cells(total: EnergyTotal) -> list[str]:
    sources = ", ".join(
        f"{_TITLES[name]} {percent(value / sum(total.joules.values()), 0)}" for name, value in total.joules.items()
    )
    return [
        joules(total.total_joules),
        f"{number(total.joules_per_token, 3)} J",
        f"{number(total.co2_g, 3)} g",
        f"{number(total.total_joules / max(1e-9, total.seconds), 3)} W",
        percent(total.measured_share, 0),
        sources,
    ]


def joules(value: float) -> str:
    """`512 J`, `3.4 kJ`, `1.2 kWh`."""
    if value >= 3.6e5:
        return f"{number(value / 3.6e6, 3)} kWh"
    return f"{number(value / 1e3, 3)} kJ" if value >= 1e3 else f"{number(value, 3)} J"


def _terms(entry: dict[str, float]) -> str:
    return (
        f"Energy is what the sources say times {entry['pue']:g} (PUE: cooling and losses of the data center), carbon "
        f"dioxide {entry['carbon_g_per_kwh']:g} g per kWh; both are settings (energy). RAPL and NVML are "
        "readings of a whole host or GPU, other processes included. Estimated: the process's CPU time times "
        f"{entry['watts_per_core']:g} W per core, its resident memory times {MEMORY_WATTS_PER_GB:g} W per GB "
        "(Lannelongue et al. 2021); idle parts, disks, network and fans do not count. Work that an interruption undid "
        "counts."
    )


def cost_section(stages: Sequence[StageData]) -> Section:
    """Time and peak memory of finished stages."""
    wall = [used(stage)["wall_s"] for stage in stages]
    peak = [used(stage)["peak_bytes"] / 1e6 for stage in stages]
    names = [stage.name for stage in stages]
    blocks: list[Block] = []
    if stages:
        time_svg = bar_chart(
            names, [("seconds", wall)], name="time", x_label="seconds", values=[[seconds(value) for value in wall]]
        )
        memory_svg = bar_chart(
            names, [("MB", peak)], name="memory", x_label="MB", values=[[size(value * 1e6) for value in peak]]
        )
        blocks += [
            Chart("Time per stage", time_svg),
            Chart("Peak memory per stage", memory_svg, "Resident memory of the process, libraries included."),
            _table(stages, sum(wall)),
        ]
    cut = sum(entry["state"] in ("killed", "stopped", "failed") for stage in stages for entry in stage.attempts)
    if cut:
        verb = "was" if cut == 1 else "were"
        blocks.append(Note(f"{plural(cut, 'attempt')} {verb} interrupted before the stage finished and then resumed."))
    return Section("cost", "Time and memory", blocks)


def used(stage: StageData) -> dict[str, float]:
    """Wall time and CPU time of all attempts together, and the largest peak memory (child processes included)."""
    return {
        "wall_s": sum(entry["wall_s"] for entry in stage.attempts),
        "cpu_s": sum(entry["cpu_s"] for entry in stage.attempts),
        "peak_bytes": max(max(entry["peak_bytes"], entry.get("child_peak_bytes", 0)) for entry in stage.attempts),
    }


def settings_section(data: RunData) -> Section:
    """Machine, versions, command lines, and the whole configuration."""
    invocations = data.info.get("invocations", [])
    blocks: list[Block] = []
    if invocations:
        blocks.append(_machine_table(invocations[-1]))
        commands = "\n".join(f"{entry['started']}  {' '.join(entry['command'])}" for entry in invocations)
        blocks.append(Fold("Command lines", [Excerpt("", commands)]))
    text = yaml.safe_dump(redact_plain(dump(data.config)), sort_keys=False, allow_unicode=True)
    blocks.append(Fold("Resolved configuration, which can be run again", [Excerpt("config.yaml", text)]))
    return Section("settings", "Machine and settings", blocks)


def machine_words(info: Mapping[str, Any]) -> str:
    """`AMD EPYC, 2 threads, 24 GB`."""
    box = info.get("hardware", {})
    if not box:
        return ""
    device = "CUDA" if str(box.get("device", "")).startswith("cuda") else machine_threads(box)
    ranks = f" x {plural(info['world_size'], 'process')}" if info.get("world_size", 1) > 1 else ""
    return f"{box['processor']}, {device}{ranks}, {size(box['memory_bytes'])} memory"


def machine_threads(box: Mapping[str, Any]) -> str:
    """Threads of all processes together."""
    return plural(box.get("num_threads", 1), "thread")


def _table(stages: Sequence[StageData], total: float) -> Table:
    rows = []
    for stage in stages:
        use = used(stage)
        share = percent(use["wall_s"] / total, 0) if total else ""
        cores = f"{use['cpu_s'] / use['wall_s']:.2f}" if use["wall_s"] else ""
        attempts = str(len(stage.attempts))
        rows.append([stage.name, seconds(use["wall_s"]), share, cores, size(use["peak_bytes"]), attempts])
    rows.append(["total", seconds(total), "", "", "", ""])
    header = ["stage", "time", "share", "cores busy", "peak memory", "attempts"]
    return Table(header, rows, "Stages in numbers", numeric=range(1, 6), strong=(len(rows) - 1,))


def _machine_table(entry: Mapping[str, Any]) -> Table:
    box = entry["hardware"]
    rows = [
        ["processor", f"{box['processor']}, {plural(box['cores'], 'core')}"],
        ["memory", size(box["memory_bytes"])],
        ["device", f"{box.get('device', '')}, {machine_threads(box)}, {plural(entry['world_size'], 'process')}"],
        ["system", f"{box['system']}, Python {box['python']}"],
        ["versions", ", ".join(f"{name} {version}" for name, version in entry["versions"].items())],
    ]
    if entry.get("commit"):
        rows.append(["commit", entry["commit"]])
    return Table(["", ""], rows, "Machine and versions")
