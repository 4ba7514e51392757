"""Wishes are settled by what the machine can do, not by what a busy moment showed."""

from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.ops import narrow
from modelwright.optim.schedule import RateRuleConfig
from modelwright.pipeline import resolve
from modelwright.recipes.quickstart import quickstart
from modelwright.recipes.tiny import tiny


@pytest.mark.parametrize(("has_bf16", "expected"), [(False, "fp32"), (True, "bf16")])
def test_bf16_without_instructions_is_never_the_fastest(monkeypatch, has_bf16, expected):
    monkeypatch.setattr(resolve, "measured_rates", lambda config: {"fp32": 1e9, "bf16": 2e9})
    monkeypatch.setattr(narrow, "CPU_MULTIPLIES", narrow.NARROW if has_bf16 else frozenset())
    monkeypatch.setattr(resolve, "settled_device", lambda device: "cpu")
    found = resolve.resolve(quickstart(), None, SilentProgress())
    assert found.pretrain.precision.compute == expected
    assert found.sft.precision.compute == expected


def test_a_rule_settles_the_peak_rate_once_and_for_all():
    """4 rows a batch; whoever runs the resolved configuration again gets the same one."""
    plain = tiny()
    rule = RateRuleConfig(kind="sqrt", reference_rate=4e-3, reference_rows=16)
    found = resolve.resolve(replace(plain, pretrain=replace(plain.pretrain, rate_rule=rule)), None, SilentProgress())
    assert found.pretrain.learning_rate == pytest.approx(2e-3)
    assert found.sft.learning_rate == plain.sft.learning_rate
    assert resolve.resolve(found, found, SilentProgress()) == found
