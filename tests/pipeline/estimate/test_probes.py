"""Probes of this machine: one real short survey, what is left behind, and what cannot be measured."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.pipeline.estimate.probes.bandwidth import MEMORY, array_bytes, driver_version, last_level_cache_bytes
from modelwright.pipeline.estimate.probes.disk import DISK, file_system
from modelwright.pipeline.estimate.probes.probe import Probe, ProbeResult, ProbeSetting, ProbeUnavailable
from modelwright.pipeline.estimate.probes.survey import NAMES, PROBES, MachineProbes, measure_machine, probe_lines
from refusals import config_error

MIB = 2**20
SHORT = [replace(probe, budget_s=0.2) for probe in PROBES]


class Others:
    """Other processes that use so many cores."""

    def __init__(self, cores: float) -> None:
        self.cores = cores

    def begin(self) -> None: ...

    def seconds(self) -> float:
        return 1.0

    def other_cores(self) -> float:
        return self.cores


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[MachineProbes, Path]:
    folder = tmp_path_factory.mktemp("disk")
    return measure_machine(folder, probes=SHORT), folder


@pytest.mark.slow
def test_a_short_survey_of_this_machine(probed: tuple[MachineProbes, Path]) -> None:
    survey, folder = probed
    states = {name: result.state for name, result in survey.results.items()}
    assert all(states[name] == "measured" for name in NAMES if name != "accelerator"), states
    figures = {(name, figure): value for name in NAMES for figure, value in survey.results[name].figures.items()}
    assert all(value > 0 for (_, figure), value in figures.items() if figure != "cache_bytes")
    assert survey.figure("disk", "fsync_p50_s") <= survey.figure("disk", "fsync_p95_s")
    assert survey.figure("loopback", "latency_s") <= survey.figure("loopback", "latency_p95_s")
    assert survey.figure("memory", "array_bytes") >= survey.figure("memory", "cache_bytes")
    assert list(folder.iterdir()) == []
    assert len(probe_lines(survey)) >= len(PROBES)


def test_parts_are_left_out(tmp_path: Path) -> None:
    survey = measure_machine(tmp_path, without=NAMES, others=Others(0.0))
    assert {result.state for result in survey.results.values()} == {"left out"}
    assert survey.figure("memory", "array_bytes") == 0.0
    assert probe_lines(survey)[0] == "memory      left out"
    with config_error("skip"):
        measure_machine(tmp_path, without=["disc"])


def test_a_busy_machine_is_named(tmp_path: Path) -> None:
    busy = measure_machine(tmp_path, without=NAMES, others=Others(64.0))
    assert probe_lines(busy)[-1].startswith("note: other processes use 64.0 of")
    quiet = measure_machine(tmp_path, without=NAMES, others=Others(0.0))
    assert not probe_lines(quiet)[-1].startswith("note")


def test_a_probe_that_fails_does_not_end_the_survey(tmp_path: Path) -> None:
    def unavailable(setting: ProbeSetting) -> ProbeResult:
        raise ProbeUnavailable("no such thing")

    def broken(setting: ProbeSetting) -> ProbeResult:
        raise OSError(5, "Input/output error")

    probes = [
        Probe(name=name, budget_s=0.1, measure=measure, text=str)
        for name, measure in (("one", unavailable), ("two", broken))
    ]
    survey = measure_machine(tmp_path, probes=probes, others=Others(0.0))
    assert probe_lines(survey, probes) == [
        "one         none: no such thing", "two         none: [Errno 5] Input/output error",
    ]  # fmt: skip


def test_the_second_process_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.pipeline.estimate.probes.network.sys.executable", "/bin/false")
    survey = measure_machine(tmp_path, without=["memory", "disk", "accelerator"], others=Others(0.0))
    assert survey.results["loopback"].state.startswith("none: the second process ended")
    assert survey.results["gloo"].state.startswith("none: the second process ended")


def test_arrays_are_beyond_the_cache_and_within_memory() -> None:
    assert array_bytes(32 * MIB, 64 * 2**30) == 128 * MIB
    assert array_bytes(0, 64 * 2**30) == 64 * MIB
    assert array_bytes(512 * MIB, 64 * 2**30) == 2**30
    assert array_bytes(32 * MIB, 512 * MIB) == 64 * MIB
    with pytest.raises(ProbeUnavailable, match="too few beyond the cache"):
        array_bytes(32 * MIB, 64 * MIB)
    small = {"one_thread_bytes_per_s": 1e9, "all_threads_bytes_per_s": 2e9, "num_threads": 2.0}
    result = ProbeResult(state="measured", figures={**small, "array_bytes": 64 * MIB, "cache_bytes": 32 * MIB})
    assert "1.00 GB/s on one thread, 2.00 GB/s on 2" in MEMORY.text(result)
    assert "the rate may be the cache's" in MEMORY.text(result)


def test_the_cache_is_the_largest_one(tmp_path: Path) -> None:
    for number, size in enumerate(("32K", "1024K", "words")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == MIB
    assert last_level_cache_bytes(tmp_path / "nowhere") == 0


def test_the_file_system_is_the_one_mounted_last_above(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    lines = ["/dev/a / ext4 rw 0 0", f"tmpfs {tmp_path} tmpfs rw 0 0", f"/dev/b {tmp_path}x xfs rw 0 0"]
    mounts.write_text("\n".join(lines) + "\n")
    (tmp_path / "below").mkdir()
    assert file_system(tmp_path / "below", mounts) == "tmpfs"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "nowhere") == ""


def test_a_disk_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    result = DISK.measure(ProbeSetting(folder=tmp_path, budget_s=0.2))
    assert result.facts["reads"] == "cache dropped by advice"
    assert result.figures["reads_per_s"] > 0
    monkeypatch.delattr(os, "posix_fadvise")
    without = DISK.measure(ProbeSetting(folder=tmp_path, budget_s=0.2))
    assert "read_bytes_per_s" not in without.figures
    assert "no reads past the cache" in DISK.text(without)


def has_unlinked_file(pid: int, folder: Path) -> bool:
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    return any(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_on_the_disk(tmp_path: Path, number: signal.Signals) -> None:
    """Whatever ends the process while it writes and reads."""
    code = (
        "from pathlib import Path; from modelwright.pipeline.estimate.probes.disk import *; import sys\n"
        "print('now', flush=True); DISK.measure(ProbeSetting(folder=Path(sys.argv[1]), budget_s=60.0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while not has_unlinked_file(process.pid, tmp_path):
            assert time.monotonic() < deadline, "the probe opens no file"
        process.send_signal(number)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n")
    assert driver_version(path) == "550.90.07"
    assert driver_version(tmp_path / "nowhere") == ""
