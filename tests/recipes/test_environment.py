"""Variables of the environment as settings: what they mean, who goes first, and that config.yaml shows them."""

import pytest

from modelwright.core.artifacts import save_yaml
from modelwright.core.config import ConfigError, dump, load_yaml, merge, parse
from modelwright.recipes.load import environment_overrides, load
from modelwright.train.precision.policy import PrecisionConfig
from refusals import config_error


@pytest.mark.parametrize(
    ("environment", "policy"),
    [
        ({"DEEPSEEK_PRECISION_MODE": "bf16"}, "bf16_mixed"),
        ({"DEEPSEEK_PRECISION_MODE": "PURE_FP16"}, "pure_fp16"),
        ({"DEEPSEEK_AMP_ENABLED": "1"}, "bf16_mixed"),
        ({"DEEPSEEK_AMP_ENABLED": "true", "DEEPSEEK_PRECISION_MODE": "fp16"}, "fp16_mixed"),
        ({"DEEPSEEK_AMP_ENABLED": "0", "DEEPSEEK_PRECISION_MODE": "fp8"}, "fp32"),
    ],
)
def test_mode_and_switch_name_a_policy(monkeypatch, environment, policy):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    request = load("tiny", {})
    assert (
        request.config.section("pretrain").precision.policy == request.config.section("sft").precision.policy == policy
    )
    assert request.origin == ", ".join(["recipe tiny", *sorted(environment, reverse=True)])


def test_switched_off_is_fp32_in_every_layer_for_good():
    own = {"overrides": {"ffn": "fp8"}, "adaptive": {"kind": "schedule", "schedule": [[0, 1.0]]}}
    base = {"pretrain": {"precision": own}}
    found = merge(base, environment_overrides({"DEEPSEEK_AMP_ENABLED": "0"}, base))
    precision = parse(PrecisionConfig, found["pretrain"]["precision"], constants=True)
    assert precision.possible == {"fp32"}
    assert not precision.uses_fp16


def test_switched_on_leaves_a_narrow_policy_as_it_is():
    base = {"pretrain": {"precision": {"policy": "int8"}}, "sft": {"precision": {"policy": "fp32"}}}
    assert environment_overrides({"DEEPSEEK_AMP_ENABLED": "1"}, base) == {
        "training": {"precision": {"policy": "bf16_mixed"}},
        "sft": {"precision": {"policy": "bf16_mixed"}},
    }
    both = {"DEEPSEEK_AMP_ENABLED": "1", "DEEPSEEK_PRECISION_MODE": "fp16"}
    found = environment_overrides(both, base)
    assert {one["precision"]["policy"] for one in found.values()} == {"fp16_mixed"}


def test_the_command_line_goes_first_and_the_resolved_file_shows_what_was_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSEEK_PRECISION_MODE", "int8")
    monkeypatch.setenv("DEEPSEEK_LOSS_SCALE_WINDOW", "1000")
    monkeypatch.setenv("DEEPSEEK_FP32_OPS", "softmax, layernorm")
    config = load("tiny", {"sft": {"precision": {"policy": "bf16_mixed"}}}).config
    save_yaml(tmp_path / "config.yaml", config)
    shown = load_yaml(tmp_path / "config.yaml")
    assert (config.section("pretrain").precision.policy, config.section("sft").precision.policy) == (
        "int8",
        "bf16_mixed",
    )
    assert shown["training"]["precision"]["loss_scale"]["growth_interval"] == 1000
    assert shown["training"]["precision"]["fp32_ops"] == ["softmax", "reduction", "rope", "norm"]
    assert ("precision" in shown["pretrain"], shown["sft"]["precision"]) == (False, {"policy": "bf16_mixed"})


def test_nothing_set_changes_nothing(monkeypatch):
    before = dump(load("tiny", {}).config)
    monkeypatch.setenv("DEEPSEEK_PRECISION_MODE", " ")
    assert dump(load("tiny", {}).config) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEEPSEEK_PRECISION_MODE", "fp4"),
        ("DEEPSEEK_AMP_ENABLED", "perhaps"),
        ("DEEPSEEK_LOSS_SCALE_WINDOW", "0"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}: .*'?{value}"):
        environment_overrides({name: value}, {})


def test_an_unknown_operator_is_named(monkeypatch):
    monkeypatch.setenv("DEEPSEEK_FP32_OPS", "softmax,dropout")
    with config_error("training.precision.fp32_ops"):
        load("tiny", {})
