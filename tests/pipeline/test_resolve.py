"""Wishes are settled by what the machine can do, not by what a busy moment showed."""

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.pipeline import resolve
from modelwright.recipes.quickstart import quickstart


@pytest.mark.parametrize(("has_bf16", "expected"), [(False, "fp32"), (True, "bf16")])
def test_emulated_bf16_is_never_the_fastest(monkeypatch, has_bf16, expected):
    monkeypatch.setattr(resolve, "measured_rates", lambda config: {"fp32": 1e9, "bf16": 2e9})
    monkeypatch.setattr(resolve, "has_bf16_instructions", lambda: has_bf16)
    monkeypatch.setattr(resolve, "settled_device", lambda device: "cpu")
    found = resolve.resolve(quickstart(), None, SilentProgress())
    assert found.pretrain.precision.compute == expected
    assert found.sft.precision.compute == expected
