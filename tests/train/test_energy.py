"""Meters on recorded files, the models against their formulas, the file of a run, readings that fail."""

import json
from pathlib import Path

import pytest
import torch
from tiny_run import run, settings

from modelwright.core.artifacts import StageDir
from modelwright.pipeline.report.page import energy_section
from modelwright.pipeline.report.run_data import StageData
from modelwright.train.monitors.energy import (
    ENERGY_FILE,
    MEMORY_WATTS_PER_GB,
    CoreTimeModel,
    EnergyConfig,
    EnergyMonitor,
    MemoryModel,
    NvmlMeter,
    meters_of_rank,
    nvml_meters,
    rapl_meters,
    read_energy,
    total_energy,
)
from modelwright.train.technique import StepInfo
from refusals import config_error


def powercap(folder: Path, **domains: tuple[str, int]) -> Path:
    for name, (kind, microjoules) in domains.items():
        domain = folder / name.replace("_", ":")
        domain.mkdir(parents=True, exist_ok=True)
        (domain / "name").write_text(f"{kind}\n")
        (domain / "energy_uj").write_text(f"{microjoules}\n")
        (domain / "max_energy_range_uj").write_text("1000000000\n")
    return folder


def rapl(folder: Path, **microjoules: int) -> Path:
    kinds = {
        "intel-rapl_0": "package-0",
        "intel-rapl_1": "package-1",
        "intel-rapl_0_0": "core",
        "intel-rapl_0_1": "dram",
    }
    return powercap(folder, **{name: (kinds[name], value) for name, value in microjoules.items()})


def test_rapl_sums_packages_and_survives_a_counter_that_goes_round(tmp_path: Path) -> None:
    start = {"intel-rapl_0": 999_000_000, "intel-rapl_1": 5_000_000, "intel-rapl_0_0": 7, "intel-rapl_0_1": 1_000_000}
    meters = {meter.name: meter for meter in rapl_meters(rapl(tmp_path, **start))}
    assert meters.keys() == {"rapl", "rapl_memory"}
    rapl(tmp_path, **{"intel-rapl_0": 2_000_000, "intel-rapl_1": 9_000_000, "intel-rapl_0_1": 4_500_000})
    assert meters["rapl"].joules() == pytest.approx(3 + 4)  # 1 J to the end, 2 J from zero; and 4 J
    assert meters["rapl_memory"].joules() == pytest.approx(3.5)
    rapl(tmp_path, **{"intel-rapl_0": 3_000_000})
    assert meters["rapl"].joules() == pytest.approx(8)
    assert rapl_meters(tmp_path / "nothing") == []


def test_nvml_counts_from_its_start() -> None:
    readings = iter([5_000, 12_500])
    meter = NvmlMeter(lambda: next(readings))
    assert meter.joules() == pytest.approx(7.5)
    if not torch.cuda.is_available():
        assert nvml_meters("0000:01:00.0") == []


def test_models_are_their_formulas() -> None:
    seconds = iter([2.0, 5.0])
    assert CoreTimeModel(15.0, cpu_s=lambda: next(seconds)).joules() == pytest.approx(45)
    clock, sizes = iter([0.0, 10.0, 14.0]), iter([2_000_000_000, 4_000_000_000])
    memory = MemoryModel(resident_bytes=lambda: next(sizes), clock=lambda: next(clock))
    assert memory.joules() == pytest.approx(MEMORY_WATTS_PER_GB * 2 * 10)
    assert memory.joules() == pytest.approx(MEMORY_WATTS_PER_GB * (2 * 10 + 4 * 4))


def test_one_rank_of_a_host_reads_its_processors() -> None:
    packages = NvmlMeter(lambda: 0)
    packages.name = "rapl"  # pyright: ignore[reportAttributeAccessIssue]
    cpu = torch.device("cpu")
    first, second = (
        meters_of_rank(EnergyConfig(), cpu, is_host_first=is_first, rapl=[packages]) for is_first in (True, False)
    )
    assert [meter.name for meter in first] == ["rapl", "memory_model"]
    assert [meter.name for meter in second] == ["memory_model"]
    alone = meters_of_rank(EnergyConfig(), cpu, is_host_first=False, rapl=[])
    assert [meter.name for meter in alone] == ["cores_model", "memory_model"]


class Failing:
    name = "rapl"

    def __init__(self) -> None:
        self.left = 2

    def joules(self) -> float:
        self.left -= 1
        if self.left < 0:
            raise OSError("gone")
        return 10.0 * (2 - self.left)


def step(number: int) -> StepInfo:
    return StepInfo(
        step=number, loss=1.0, losses={}, grad_norm=1.0, learning_rate=1.0, num_tokens=100, tokens_per_s=1.0, mfu=0.0,
        data_wait_s=0.0, comm_s=0.0, step_time_s=1.0, bytes_sent=None,
    )  # fmt: skip


def monitor(path: Path, notes: list[str], **more) -> EnergyMonitor:
    arguments = {"sums": list, "sum_every": 1, "last_step": 9} | more
    return EnergyMonitor(
        [Failing()], EnergyConfig(pue=2.0, carbon_g_per_kwh=360.0), path=path, note=notes.append, **arguments
    )


def test_a_meter_that_fails_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    notes: list[str] = []
    energy = monitor(tmp_path / ENERGY_FILE, notes)
    for number in range(1, 6):
        energy.observe(step(number))
    energy.write()
    assert len(notes) == 1
    assert "rapl can no longer be read" in notes[0]
    total = total_energy(read_energy(tmp_path / ENERGY_FILE))
    assert total.joules == {"rapl": 20.0}
    assert total.total_joules == pytest.approx(40)
    assert total.joules_per_token == pytest.approx(40 / 500)
    assert total.co2_g == pytest.approx(40 / 3.6e6 * 360)
    assert total.measured_share == 1
    (tmp_path / "folder").mkdir()
    lost = monitor(tmp_path / "folder" / "gone" / ENERGY_FILE, notes)
    lost.observe(step(1))
    lost.write()  # no such folder
    assert "cannot be written" in notes[-1]


def test_ranks_are_summed_at_the_same_steps() -> None:
    calls: list[list[float]] = []

    def sums(values: list[float]) -> list[float]:
        calls.append(values)
        return [2 * value for value in values]

    energy = monitor(Path("unused"), [], sums=sums, sum_every=4, last_step=6)
    for number in range(1, 7):
        energy.observe(step(number))
    assert len(calls) == 2  # at 4 and at the end
    assert energy.joules == {"rapl": 40.0}
    assert energy.num_tokens == 600  # of all ranks already


def test_a_run_writes_its_energy_and_a_second_start_adds_to_it(tmp_path: Path) -> None:
    run(tmp_path, settings(num_steps=4))
    (entry,) = read_energy(tmp_path / ENERGY_FILE)
    result = run(tmp_path, settings(num_steps=8))
    entries = read_energy(tmp_path / ENERGY_FILE)
    assert entries[0] == entry
    assert len(entries) == 2
    assert sum(one["num_tokens"] for one in entries) == result.num_tokens
    total = total_energy(entries)
    assert total.total_joules > 0
    stage = StageData("pretrain", StageDir(tmp_path), {}, [], is_done=True)
    section = energy_section([stage])
    assert section is not None
    (row,) = section.blocks[0].rows  # pyright: ignore[reportAttributeAccessIssue]
    assert row[0] == "pretrain"
    assert "CO₂" in section.blocks[0].header  # pyright: ignore[reportAttributeAccessIssue]
    (tmp_path / ENERGY_FILE).write_text("{")
    assert energy_section([stage]) is None
    run(tmp_path, settings(num_steps=9))  # a damaged file stops nothing
    assert len(read_energy(tmp_path / ENERGY_FILE)) == 1


def test_terms_are_checked() -> None:
    with config_error("pue"):
        EnergyConfig(pue=0.9)
    with config_error("watts_per_core"):
        EnergyConfig(watts_per_core=-1)
    assert json.dumps(total_energy([]).joules) == "{}"
