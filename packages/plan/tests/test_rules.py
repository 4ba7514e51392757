"""Published rules of thumb: values by hand, why they do not apply, and a rule from outside."""

import datetime
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.config import ConfigError
from modelwright_plan.rules import (
    EVALUATORS,
    PublishedRule,
    RuleOutcome,
    RuleRow,
    RuleTarget,
    evaluated,
    known_rules,
    number_formats,
    rule_lines,
    shipped_rules,
    value,
)
from refusals import config_error

GIB = 2**30
TARGET = RuleTarget(
    num_parameters=1_200_000_000,
    num_all_parameters=1_300_000_000,
    training_flops=1e20,
    is_from_scratch=True,
    batch_tokens=2**17,
    learning_rate=1e-3,
    reference_rate=0.0,
    reference_batch_tokens=0,
    optimizer="adamw",
    policy="fp32",
    device="cuda",
    formats={"fp32", "fp16", "bf16"},
    num_devices=8,
    device_bytes=16 * GIB,
    axes={"tensor": 1, "pipeline": 1},
    zero_stage=0,
    checkpoint_s=10.0,
    checkpoint_every_s=300.0,
    mtbf_s=0.0,
)
KAPLAN = 0.003239 - 0.0001395 * math.log(1_200_000_000)


def outcome(name: str, **changes) -> RuleOutcome:
    rule = next(rule for rule in shipped_rules() if rule.row.name == name)
    return rule.evaluate(rule.row, replace(TARGET, **changes))


def would_be(name: str, **changes) -> str:
    found = outcome(name, **changes)
    assert found.applies, found.because
    return found.would_be


def because(name: str, **changes) -> str:
    found = outcome(name, **changes)
    assert not found.applies, found.would_be
    return found.because


def test_each_row_has_one_evaluator_a_source_and_a_date() -> None:
    rules = shipped_rules()
    assert [rule.row.name for rule in rules] == list(EVALUATORS)
    for rule in rules:
        assert rule.row.source
        assert rule.row.section
        assert datetime.date.fromisoformat(rule.row.date) <= datetime.date(2026, 11, 30)
    assert {rule.row.subject for rule in rules} == {
        "batch", "learning rate", "precision", "parallelism", "checkpoints"
    }  # fmt: skip


def test_batches_by_hand() -> None:
    assert str(outcome("gpt3_batch")) == "applies: would be 1,000,000 tokens, you have 131,072"
    assert would_be("gpt3_batch", num_all_parameters=70_000_000) == "500,000 tokens"
    assert would_be("deepseek_batch") == f"{0.2920 * 1e20**0.3271:,.0f} tokens"
    assert "yours has 8,622,080" in because("gpt3_batch", num_all_parameters=8_622_080)
    assert "starts from a model" in because("gpt3_batch", is_from_scratch=False)
    assert "length of the training is not known" in because("deepseek_batch", training_flops=0.0)
    assert "fitted from 1e+17 FLOPs" in because("deepseek_batch", training_flops=1e15)


def test_rates_by_hand() -> None:
    assert would_be("gpt3_rate") == "0.0002"
    assert would_be("deepseek_rate") == f"{0.3118 * 1e20**-0.125:.2g}"
    assert would_be("kaplan_rate") == f"{KAPLAN:.2g} (for batches of 524,288 tokens)"
    assert would_be("square_root_rate").startswith(f"{KAPLAN / 2:.2g} for your batch of 131,072 tokens (from Kaplan's")
    known = {"reference_rate": 4e-4, "reference_batch_tokens": 2**19}
    assert would_be("square_root_rate", **known).startswith("0.0002 for your batch")
    assert would_be("linear_rate", optimizer="sgd", **known).startswith("0.0001 for your batch")


def test_why_rates_do_not_apply() -> None:
    assert because("linear_rate") == "it was derived for SGD, and the optimizer is adamw"
    assert because("square_root_rate", optimizer="muon") == "it was derived for Adam, and the optimizer is muon"
    assert "nobody has said which batch" in because("linear_rate", optimizer="sgd")
    assert "there is no rate to start from" in because("square_root_rate", num_parameters=10**10)
    for name in ("gpt3_rate", "kaplan_rate", "deepseek_rate"):
        assert "the optimizer is lion" in because(name, optimizer="lion")


def test_precision_follows_the_processor() -> None:
    assert would_be("bf16") == "precision.policy bf16_mixed"
    assert would_be("fp16") == "precision.policy fp16_mixed"
    assert because("fp8").endswith("in fp8 (it has bf16, fp16, fp32)")


def test_layouts_by_hand() -> None:
    assert would_be("zero").startswith("zero_stage 1")  # 1.3e9 x (4 + 12/8) = 7.2 GB
    assert would_be("zero", device_bytes=4e9).startswith("zero_stage 3")  # 2: 4.9 GB, 3: 2.6 GB
    assert would_be("zero", device_bytes=64 * GIB).startswith("zero_stage 0")
    assert "even stage 3 needs" in because("zero", device_bytes=1e9)
    assert because("zero", num_devices=1).startswith("there is one device")
    assert would_be("tensor_parallel") == "tensor 2, pipeline 1 on this server"  # 20.8 GB over 2 of 17.2 GB
    assert "data parallelism alone" in because("tensor_parallel", device_bytes=64 * GIB)
    assert "do not fit the 8 devices" in because("tensor_parallel", device_bytes=1e9)


def test_intervals_by_hand() -> None:
    assert would_be("young", mtbf_s=72_000.0) == "a checkpoint every 20 min (an interruption every 20 h 00 min)"
    daly = 1200 * (1 + math.sqrt(10 / 144_000) / 3 + 10 / 144_000 / 9) - 10
    assert would_be("daly", mtbf_s=72_000.0).startswith(f"a checkpoint every {daly / 60:.0f} min")
    assert "an interruption every 6334 h 30 min" in would_be("young")  # 50676 h over 8 GPUs
    assert "give --interruptions-per-hour" in because("young", device="cpu")
    assert because("daly", checkpoint_s=0.0) == "the disk was not measured"
    assert outcome("young", checkpoint_every_s=0.0).have == "none during the training"


def test_the_lines_name_source_and_date() -> None:
    rules = shipped_rules()
    lines = rule_lines(evaluated(TARGET, rules))
    assert len(lines) == 2 * len(rules)
    assert lines[0] == "batch: batch by model size: applies: would be 1,000,000 tokens, you have 131,072"
    assert lines[1].endswith("table 2.1 (row of 2026-11-25)")
    for rule, line in zip(rules, lines[1::2], strict=True):
        assert line.endswith("not compared with the source since)") != rule.row.checked
    assert {rule.row.checked for rule in rules} == {True, False}


def test_a_rule_from_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with an entry point; nothing of the package is edited."""
    (tmp_path / "my_rules.py").write_text(
        "from modelwright_plan.rules import PublishedRule, RuleRow, value\n"
        "ROW = RuleRow(name='mine', subject='batch', statement='as many as parameters', source='me', section='1',\n"
        "              date='2026-11-25', checked=True)\n"
        "RULE = PublishedRule(row=ROW, evaluate=lambda row, target: value(f'{target.num_parameters}', 'less'))\n"
    )
    info = tmp_path / "my_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[modelwright.rules_of_thumb]\nmine = my_rules:RULE\nother = my_rules:ROW\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with config_error("my_rules:ROW"):
        known_rules()
    (info / "entry_points.txt").write_text("[modelwright.rules_of_thumb]\nmine = my_rules:RULE\n")
    rules = known_rules()
    assert len(rules) == len(shipped_rules()) + 1
    assert rule_lines(evaluated(TARGET, rules))[-2:] == [
        "batch: as many as parameters: applies: would be 1200000000, you have less", "  me, 1 (row of 2026-11-25)",
    ]  # fmt: skip
    sys.modules.pop("my_rules")


def test_a_bad_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    row = "{name: NAME, subject: batch, statement: s, source: s, section: s, date: DATE}"
    path.write_text(f"rules: [{row.replace('NAME', 'unknown').replace('DATE', '2026-01-01')}]")
    with pytest.raises(ConfigError):
        shipped_rules(path)
    path.write_text(f"rules: [{row.replace('NAME', 'bf16').replace('DATE', 'soon')}]")
    with pytest.raises(ConfigError, match="bf16: date: 'soon' is not a date"):
        shipped_rules(path)
    empty = RuleRow(name="x", subject="batch", statement="", source="", section="", date="2026-01-01")
    with config_error("rules"):
        empty.number("factor")
    mine = PublishedRule(row=empty, evaluate=lambda row, target: value("a", "b"))
    assert evaluated(TARGET, [mine])[0][1].would_be == "a"


def test_formats_are_those_of_the_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n")
    assert number_formats("cpu", info) == {"fp32", "bf16"}
    info.write_text("flags\t\t: fpu avx2\n")
    assert number_formats("cpu", info) == {"fp32"}
    assert number_formats("cpu", tmp_path / "nowhere") == {"fp32"}
