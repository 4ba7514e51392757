"""Wishes are settled by what the machine can do, not by what a busy moment showed."""

import re
from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.ops import matmul
from modelwright.pipeline import resolve
from modelwright.recipes.load import load, recipe


@pytest.fixture(autouse=True)
def no_speed_up(monkeypatch):
    """Or every test would time products in FP32 for seconds."""
    monkeypatch.setattr(resolve, "onednn_speed_up", lambda shapes, num_rows: 0.0)


@pytest.mark.parametrize(("has_bf16", "expected"), [(False, "fp32"), (True, "bf16")])
def test_bf16_without_instructions_is_never_the_fastest(monkeypatch, has_bf16, expected):
    monkeypatch.setattr(resolve, "measured_rates", lambda config, precision, note: {"fp32": 1e9, "bf16": 2e9})
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", matmul.NARROW if has_bf16 else frozenset())
    monkeypatch.setattr(resolve, "resolved_device", lambda device: "cpu")
    found = resolve.resolve(recipe("quickstart"), None, SilentProgress())
    assert found.section("pretrain").precision.compute == expected
    assert found.section("sft").precision.compute == expected


def test_a_busy_machine_is_told_beside_the_choice_of_precision(monkeypatch):
    notes: list[str] = []
    progress = SilentProgress()
    monkeypatch.setattr(progress, "note", notes.append)
    measured = {"effective": {"fp32": 1e9, "bf16": 2e9}, "busy_cores": 1.9}
    monkeypatch.setattr(resolve, "measure_rates", lambda model, **settings: measured)
    resolve.resolve(recipe("quickstart"), None, progress)
    assert any(re.match(r"other processes use 1\.9 of \d+ cores: .* set precision\.policy", one) for one in notes)
    notes.clear()
    monkeypatch.setattr(resolve, "measure_rates", lambda model, **settings: measured | {"busy_cores": 0.0})
    resolve.resolve(recipe("quickstart"), None, progress)
    assert not any("other processes" in one for one in notes)


def test_the_peak_rate_scales_with_the_batch():
    training = replace(recipe("tiny").section("pretrain"), learning_rate=4e-3, batch_tokens=2048)
    of_16_rows = {"lr_reference_batch_tokens": 16 * 512}
    assert training.peak_learning_rate == 4e-3
    assert replace(training, lr_scaling="sqrt", **of_16_rows).peak_learning_rate == pytest.approx(2e-3)
    assert replace(training, lr_scaling="linear", **of_16_rows).peak_learning_rate == pytest.approx(1e-3)


def settled(monkeypatch, speed_up, config=None, previous=None):
    """Who multiplies in FP32 after a measurement that shows this speed-up."""
    monkeypatch.setattr(resolve, "onednn_speed_up", lambda shapes, num_rows: speed_up)
    config = config or load("quickstart", {"pretrain": FP32, "sft": FP32}).config
    return resolve.resolve(config, previous, SilentProgress())


FP32 = {"precision": {"policy": "fp32"}}


@pytest.mark.parametrize(("speed_up", "expected"), [(0.0, "default"), (1.1, "default"), (1.9, "onednn")])
def test_onednn_multiplies_where_it_is_clearly_faster(monkeypatch, speed_up, expected):
    found = settled(monkeypatch, speed_up)
    assert found.section("pretrain").precision.fp32_matmul == expected
    assert found.section("sft").precision.fp32_matmul == expected


def test_who_multiplies_stays_as_it_was_when_the_run_was_created(monkeypatch):
    """Another measurement changes nothing."""
    before = settled(monkeypatch, 1.9)
    assert settled(monkeypatch, 0.0, previous=before) == before
    older = all_with(before, "default")
    assert settled(monkeypatch, 1.9, previous=older) == older


def test_who_multiplies_can_be_said(monkeypatch):
    config = load(
        "quickstart", {"pretrain": {"precision": {"policy": "fp32", "fp32_matmul": "default"}}, "sft": FP32}
    ).config
    found = settled(monkeypatch, 1.9, config)
    assert found.section("pretrain").precision.fp32_matmul == "default"
    assert found.section("sft").precision.fp32_matmul == "onednn"


def all_with(config, kernels):
    def changed(section):
        return replace(section, precision=replace(section.precision, fp32_matmul=kernels))

    config = config.with_sections({name: changed(config.section(name)) for name in ("pretrain", "sft")})
    return replace(config, training=changed(config.training))
