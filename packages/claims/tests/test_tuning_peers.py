"""The benchmark next to TRL and PEFT: our side of each job, the arithmetic, the output; TRL runs in make bench."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
CASES = ("sft", "lora", "dpo", "grpo", "ppo")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield SimpleNamespace(
        peers=importlib.import_module("tuning_peers"),
        own=importlib.import_module("tuners.own"),
        task=importlib.import_module("tuners.task"),
    )
    for name in [name for name in sys.modules if name.split(".")[0] in ("tuners", "tuning_peers")]:
        del sys.modules[name]


def job(bench: Any, folder: Path, case: str) -> Any:
    return bench.task.Task(
        folder=folder, case=case, compute="fp32", threads=1, num_updates=3, num_warmup=1, batch=4, seq_len=160,
        prompt_len=8, completion_len=8,
    )  # fmt: skip


@pytest.fixture
def models(bench: Any, tmp_path: Path) -> Path:
    """A policy and a reward model of 32 dimensions."""
    tiny = replace(bench.peers.SIZES["8.6M"], model_dim=32, ffn_dim=32, num_layers=1, num_heads=2, num_kv_heads=1)
    described = bench.peers.write_models(tmp_path, tiny)
    assert described["config"]["model_type"] == "llama"
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_our_side_does_every_job(bench: Any, models: Path, case: str) -> None:
    torch.set_num_threads(1)
    task = job(bench, models, case)
    found = bench.own.run(task, "Modelwright", models / "out")
    assert found["samples_per_s"] > 0
    assert found["tokens_per_update"] > 0
    samples = found["samples_per_s"] / found["tokens_per_s"] * found["tokens_per_update"]
    if case in ("sft", "lora"):
        assert 0.7 * task.batch * task.seq_len < found["tokens_per_update"] <= task.batch * task.seq_len
        assert samples == pytest.approx(bench.task.samples_of_update(task), rel=0.35)
    else:
        assert samples == pytest.approx(task.batch)
    if case == "dpo":  # the policy is its reference
        assert found["first_loss"] == pytest.approx(0.6931, abs=1e-4)


def test_sizes_are_named_by_their_parameters(bench: Any) -> None:
    for name, size in bench.peers.SIZES.items():
        assert float(name.removesuffix("M")) == pytest.approx(size.config.num_parameters / 1e6, rel=0.01)


def test_a_job_survives_its_file(bench: Any, tmp_path: Path) -> None:
    task = job(bench, tmp_path, "grpo")
    task.save(tmp_path / "task.json")
    assert bench.task.Task.load(tmp_path / "task.json") == task
    assert bench.task.ids_of(bench.task.text([5, 7, bench.task.EOS])) == [5, 7]


def test_rates_leave_the_warm_up_out(bench: Any, tmp_path: Path) -> None:
    clock = bench.task.Clock(job(bench, tmp_path, "dpo"), ends=[0.0, 10.0, 12.0], cpu_ends=[0.0, 20.0, 24.0])
    found = clock.rates([4, 4, 4], [90, 100, 140])
    assert found["samples_per_s"] == pytest.approx(8 / 12)
    assert found["tokens_per_s"] == pytest.approx(20.0)
    assert found["tokens_per_cpu_s"] == pytest.approx(10.0)
    assert found["tokens_per_update"] == 120
    clock.ends.pop()
    with pytest.raises(AssertionError, match="2 updates of 3"):
        clock.rates([4, 4, 4], [1, 1, 1])


def measured(samples_per_s: float) -> dict[str, Any]:
    rates = {f"{unit}_per_{time}": samples_per_s for unit in ("samples", "tokens") for time in ("s", "cpu_s")}
    return {**rates, "tokens_per_update": 1.0, "first_loss": 0.5, "peak_bytes": 2**20, "peak_bytes_above_start": 2**19}


def test_the_fastest_form_of_trl_is_repeated_and_compared_with(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"Modelwright": 10.0, "TRL, packed": 1.0, "TRL, padding-free": 4.0, "TRL, padded": 2.0}
    asked: list[str] = []

    def run_once(task: Path, name: str, python: str, out: Path) -> dict[str, Any]:
        asked.append(name)
        assert python == (sys.executable if name == "Modelwright" else "/trl/python")
        return measured(speeds[name])

    monkeypatch.setattr(bench.peers, "run_once", run_once)
    options = SimpleNamespace(threads=1, quick=False, repeats=3, trl=Path("/trl/python"), trl_ppo=Path("/old/python"))
    row = bench.peers.measure(tmp_path, "8.6M", "bf16", "sft", options)
    assert asked[4:] == ["Modelwright", "TRL, padding-free"] * 2
    assert (row["peer"], row["ratio"], row["target"], row["verdict"]) == ("TRL, padding-free", 2.5, 5.0, "short")
    speeds["Modelwright"] = 20.0
    record = {
        "rows": [row, bench.peers.measure(tmp_path, "8.6M", "fp32", "sft", options)],
        "machine": {"processor": "p", "instruction_set": "avx2"}, "threads": 1, "commit": "c", "wall_s": 60.0,
        "remarks": ["one repeat"],
    }  # fmt: skip
    bench.peers.save(record, tmp_path / "record.json")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["tuning_peers.py", "--show", str(tmp_path / "record.json")])
    bench.peers.main()
    printed = capsys.readouterr().out
    assert "short (at least 5x)" in printed
    assert "met (at least 5x)" in printed
    assert "1 of 2 targets met" in printed
    assert "remark: one repeat" in printed


def test_a_missing_peer_is_named(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ([], "--trl: is missing; give an interpreter with its packages"),
        (["--only", "ppo", "--trl-ppo", "/nowhere/python"], "--trl-ppo: /nowhere/python cannot be run"),
    ):
        monkeypatch.setattr(sys, "argv", ["tuning_peers.py", *words])
        with pytest.raises(SystemExit):
            bench.peers.main()
        assert message in capsys.readouterr().err
