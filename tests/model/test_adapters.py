"""Low-rank adapters against the definition, W + s B A as one weight, with gradients; merging; the base is untouched."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from modelwright.core.config import ConfigError, dump, parse
from modelwright.model.adapters import (
    ADAPTER,
    adapters_of,
    attach_adapters,
    base_fingerprint,
    merge_adapters,
    remove_adapters,
)
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import AttentionConfig, Decoder
from modelwright.model.low_rank import AdapterConfig
from refusals import config_error
from tiny_decoder import make_decoder
from tolerances import TOLERANCES

TOKENS = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(13).expand(2, -1)


def adapted(seed: int = 3, **settings: Any) -> Decoder:
    """A decoder whose adapters are not zero."""
    model = make_decoder(attention=AttentionConfig(qkv_bias=True))
    attach_adapters(model, AdapterConfig(**{"r": 4, **settings}), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("lora_B", "magnitude", "bias")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


def logits(model: Decoder, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    inputs = (TOKENS, POSITIONS, causal_attend())
    return model.logits(functional_call(model, dict(weights), inputs) if weights else model(*inputs))


def naive_weights(model: Decoder, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The definition: the weight of each adapted projection as one matrix, with gradients in the factors; the length of
    the rows in DoRA counts as a constant.
    """
    weights = {}
    for name, adapter in adapters_of(model).items():
        config, own = model.adapters, {key: factors[f"{name}{ADAPTER}{key}"] for key, _ in adapter.named_parameters()}
        rank = own["lora_A"].shape[0]
        scale = config.scale_of(name)
        assert scale == pytest.approx(config.lora_alpha / (rank**0.5 if config.use_rslora else rank))
        weight = model.get_parameter(f"{name}.weight").detach() + scale * own["lora_B"] @ own["lora_A"]
        if config.use_dora:
            weight = weight * (own["magnitude"] / weight.detach().norm(dim=1))[:, None]
        weights[f"{name}.weight"] = weight
    return weights


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3.0},
    "some": {"target_modules": ("q_proj|v_proj", "ffn"), "rank_pattern": {"ffn": 2, "blocks.1.attention": 7}},
    "dora": {"use_dora": True, "rank_pattern": {"down_proj": 3}},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=list(CASES))
def test_outputs_and_gradients_are_those_of_one_weight(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    out = logits(model)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * towards).sum().backward()
    twin = make_decoder(attention=AttentionConfig(qkv_bias=True))
    twin.load_state_dict({name: value for name, value in model.state_dict().items() if ADAPTER not in name})
    factors = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if ADAPTER in n}
    wanted = logits(twin, naive_weights(model, factors))
    torch.testing.assert_close(out, wanted, **TOLERANCES["fp32_logits"])
    assert (wanted - logits(twin)).abs().max() > 0.1
    gradients = torch.autograd.grad((wanted * towards).sum(), list(factors.values()))
    for (name, factor), gradient in zip(factors.items(), gradients, strict=True):
        found = model.get_parameter(name).grad
        assert found is not None, name
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
        assert factor.shape == found.shape
    assert all(p.grad is None and not p.requires_grad for n, p in model.named_parameters() if ADAPTER not in n)


@pytest.mark.parametrize("use_dora", [False, True])
def test_new_adapters_change_nothing_and_leave_no_trace(use_dora: bool) -> None:
    model = make_decoder()
    before, fingerprint = logits(model), base_fingerprint(model)
    attach_adapters(model, AdapterConfig(r=4, use_dora=use_dora), 0)
    torch.testing.assert_close(logits(model), before, rtol=0.0, atol=1e-5 if use_dora else 0.0)
    assert base_fingerprint(model) == fingerprint
    remove_adapters(model)
    assert torch.equal(logits(model), before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.state_dict().keys() == make_decoder().state_dict().keys()


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    one, same, other = (make_decoder() for _ in range(3))
    attach_adapters(one, AdapterConfig(r=4), 7)
    attach_adapters(same, AdapterConfig(r=4, target_modules=("o_proj",)), 7)
    attach_adapters(other, AdapterConfig(r=4), 8)
    name = "blocks.1.attention.o_proj.adapter.lora_A"
    assert torch.equal(one.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    bound = one.get_parameter(name).abs().max() * 48**0.5
    assert 0.9 < bound <= 1.0


@pytest.mark.parametrize("settings", CASES.values(), ids=list(CASES))
def test_merging_keeps_the_outputs(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    wanted, before = logits(model), model.blocks["0"].get_parameter("ffn.up_proj.weight").clone()
    merge_adapters(model)
    assert not torch.equal(model.blocks["0"].get_parameter("ffn.up_proj.weight"), before)
    torch.testing.assert_close(logits(model), wanted, rtol=0.0, atol=1e-5)
    assert not adapters_of(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_its_adapters_is_the_base() -> None:
    model, base = adapted(use_dora=True), make_decoder(attention=AttentionConfig(qkv_bias=True))
    weights = model.state_dict()
    base.load_state_dict({name: weights[name] for name in base.state_dict()})
    on = logits(model)
    remove_adapters(model)
    assert torch.equal(logits(model), logits(base))
    assert (on - logits(model)).abs().max() > 0.1


def test_dropout_acts_in_training_only() -> None:
    model = adapted(lora_dropout=0.5)
    assert torch.equal(logits(model.eval()), logits(adapted().eval()))
    model.train()
    torch.manual_seed(0)
    first, second = logits(model), logits(model)
    torch.manual_seed(0)
    assert torch.equal(logits(model), first)
    assert not torch.equal(first, second)


def test_the_fingerprint_is_that_of_the_weights_in_any_format() -> None:
    model = make_decoder()
    fingerprint = base_fingerprint(model)
    assert base_fingerprint(make_decoder().to(torch.bfloat16)) == fingerprint
    with torch.no_grad():
        model.blocks["1"].get_parameter("ffn.down_proj.weight").mul_(1.1)
    assert base_fingerprint(model) != fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": -1}, "r: must not be negative, got -1"),
        ({"r": 4, "lora_dropout": 1.0}, "lora_dropout: must be at least 0 and below 1"),
        ({"r": 4, "target_modules": []}, "target_modules: is empty; name projections, such as q_proj"),
        (
            {"r": 4, "target_modules": ["query"]},
            "lora.target_modules: 'query' matches no projection; there are attention.q",
        ),
        ({"r": 4, "target_modules": ["q_proj"], "rank_pattern": {"ffn": 2}}, "lora.rank_pattern: 'ffn' matches no"),
        ({"r": 4, "rank_pattern": {"ffn": 0}}, "rank_pattern: the rank of 'ffn' must be at least 1"),
        ({"r": 4, "alpha_pattern": {"ffn": 0.0}}, "lora_alpha, alpha_pattern: must be above 0"),
        ({"r": 4, "target_modules": ["q_proj("]}, "'q_proj(' is not a regular expression"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        attach_adapters(make_decoder(), parse(AdapterConfig, settings), 0)


def test_the_configuration_survives_its_plain_form() -> None:
    config = AdapterConfig(r=8, rank_pattern={"ffn": 4}, alpha_pattern={"q_proj": 2.0}, use_dora=True)
    assert parse(AdapterConfig, dump(config)) == config


def test_training_can_go_on_with_adapters_that_are_there() -> None:
    """As after `load_adapter`; the base may be packed for it, but not unpacked."""
    model = adapted()
    attach_adapters(model, AdapterConfig(r=4, lora_dropout=0.5, base_format="int8"), 9)
    assert torch.equal(
        model.get_parameter("blocks.0.ffn.up_proj.adapter.lora_B"),
        adapted().get_parameter("blocks.0.ffn.up_proj.adapter.lora_B"),
    )
    torch.testing.assert_close(logits(model.eval()), logits(adapted().eval()), rtol=0.0, atol=0.2)
    assert not torch.equal(logits(model.train()), logits(model))
    with config_error("lora", match="the model has adapters of another form"):
        attach_adapters(model, AdapterConfig(r=4), 0)


def test_other_adapters_are_not_replaced_silently() -> None:
    model = make_decoder()
    attach_adapters(model, AdapterConfig(r=4), 0)
    with config_error("lora", match="the model has adapters of another form"):
        attach_adapters(model, AdapterConfig(r=8), 0)
