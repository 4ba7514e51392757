"""Probes of this machine, the needs of a step against their formulas, and advice with gains from the ledger."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.cli.config import setting_names
from modelwright.model.config import ModelConfig
from modelwright.plan.advice import (
    StepNeeds,
    advice_lines,
    ledger_gain,
    read_ledger,
    recommend_techniques,
    step_needs,
)
from modelwright.plan.estimate import ASSUMED_TRAIN_MFU
from modelwright.plan.probes import Probes, probe, probe_lines

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=128, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64, max_seq_len=64
)
PROBES = Probes(
    memory_bytes_per_s=1e10, fsync_s=0.01, disk_write_bytes_per_s=1e8, disk_read_iops=1e4, loopback_s=1e-5,
    loopback_bytes_per_s=1e9, gloo_s=1e-4, gloo_bytes_per_s=5e8, accelerator="",
)  # fmt: skip
SLOW_LINK = {"compute_s": 1.0, "communication_s": 2.0, "optimizer_s": 0.01, "checkpoint_s": 0.0}


def needs_of(**parts) -> StepNeeds:
    return StepNeeds(**{**SLOW_LINK, "memory_bytes": 1e9, "num_processes": 2, **parts})


def test_probes_of_this_machine(tmp_path: Path) -> None:
    probes = probe(tmp_path / "runs")
    numbers = {name: value for name, value in vars(probes).items() if name not in ("accelerator", "disk_read_iops")}
    assert all(value > 0 for value in numbers.values())
    assert probes.disk_read_iops >= 0  # not on every file system
    assert list((tmp_path / "runs").iterdir()) == []
    assert len(probe_lines(probes)) >= 4


def test_needs_are_their_formulas() -> None:
    arguments = {"batch_tokens": 512, "mean_context": 16.0, "flops_per_s": 1e9, "num_processes": 4}
    needs = step_needs(MODEL, PROBES, **arguments, checkpoint_every_s=100.0, memory_bytes=5e8)
    weights = 4 * MODEL.num_parameters
    assert needs.compute_s == pytest.approx(3 * 512 * MODEL.flops_per_token(16.0) / (1e9 * ASSUMED_TRAIN_MFU))
    assert needs.communication_s == pytest.approx(1.5 * weights / 5e8 + 1e-4)
    assert needs.optimizer_s == pytest.approx(7 * weights / 1e10)
    step_s = needs.compute_s + needs.communication_s + needs.optimizer_s
    assert needs.checkpoint_s == pytest.approx((3 * weights / 1e8 + 0.01) * step_s / 100)
    assert needs.memory_bytes == 2e9
    alone = step_needs(MODEL, PROBES, **{**arguments, "num_processes": 1}, checkpoint_every_s=0, memory_bytes=5e8)
    assert (alone.communication_s, alone.checkpoint_s) == (0.0, 0.0)
    assert alone.bottleneck == "compute"
    slower = step_needs(
        MODEL, replace(PROBES, gloo_bytes_per_s=1e6), **arguments, checkpoint_every_s=0, memory_bytes=5e8
    )
    assert slower.bottleneck == "communication"


def settings_named(needs: StepNeeds, rates: dict[str, float], memory_bytes: float = 1e10) -> list[str]:
    advice = recommend_techniques(needs, rates, memory_bytes=memory_bytes, ledger=[])
    return [one.setting.partition(":")[0] for one in advice]


def test_advice_follows_what_limits() -> None:
    even = {"fp32": 1e9, "bf16": 0.9e9}
    assert settings_named(needs_of(), even) == [
        "training.gradient_sync.kind",
        "training.gradient_sync.local_sgd.sync_every_steps",
    ]
    computing = needs_of(communication_s=0.0)
    assert settings_named(computing, even) == []
    assert settings_named(computing, {"fp32": 1e9, "bf16": 3e9}) == ["training.precision.policy"]
    assert settings_named(computing, even, memory_bytes=1e8) == [
        "training.activation_checkpointing.mode",
        "parallel.zero_stage",
    ]
    assert settings_named(needs_of(communication_s=0.0, optimizer_s=5.0), even) == ["training.sparse_updates.kind"]


def test_every_advised_setting_exists() -> None:
    everything = needs_of(optimizer_s=5.0)
    named = settings_named(everything, {"fp32": 1e9, "bf16": 3e9}, memory_bytes=1.0)
    assert len(named) == 6
    assert set(named) <= set(setting_names())


def test_gains_come_from_the_ledger(tmp_path: Path) -> None:
    record = {
        "name": "bf16_mixed", "kind": "short", "headline": ["speed-up"], "quick": False, "date": "2026-11-20",
        "figures": {"other": {"value": 1.0, "unit": "x"}, "speed-up": {"value": 0.8456, "unit": "x"}},
        "machine": {"processor": "AMD EPYC", "instruction_set": "AVX2"},
    }  # fmt: skip
    (tmp_path / "bf16.json").write_text(json.dumps(record))
    (tmp_path / "quick.json").write_text(json.dumps({**record, "quick": True}))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("[]")
    ledger = read_ledger(tmp_path)
    assert ledger_gain(ledger, "bf16_mixed") == "speed-up 0.846x (short; AMD EPYC, AVX2, 2026-11-20)"
    assert ledger_gain(ledger, "unknown") == ""
    assert read_ledger(tmp_path / "nowhere") == []
    advice = recommend_techniques(
        needs_of(communication_s=0.0), {"fp32": 1e9, "bf16": 3e9}, memory_bytes=1e10, ledger=ledger
    )
    lines = advice_lines(needs_of(communication_s=0.0), advice)
    assert "  measured: speed-up 0.846x (short; AMD EPYC, AVX2, 2026-11-20)" in lines


def test_every_claim_that_is_named_has_results_here() -> None:
    ledger = read_ledger(ROOT / "benchmarks" / "results")
    advice = recommend_techniques(
        needs_of(optimizer_s=5.0), {"fp32": 1e9, "bf16": 3e9}, memory_bytes=1.0, ledger=ledger
    )
    assert [one.setting for one in advice if not one.gain] == []
