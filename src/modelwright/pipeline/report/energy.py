"""The report's section on energy: joules, joules per token and carbon dioxide of each training stage."""

from collections.abc import Mapping, Sequence

from modelwright.pipeline.report.blocks import Fact, Note, Section, Table
from modelwright.pipeline.report.format import number, percent
from modelwright.pipeline.report.run_data import StageData
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
