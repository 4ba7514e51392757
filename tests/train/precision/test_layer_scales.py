"""Scales of layers, update by update, and what they do to gradients."""

from copy import deepcopy

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.model.attention import packed_attend
from modelwright.train.precision.layer_scales import LayerFindings, LayerScales, layer_scales_for, scale_blocks
from modelwright.train.precision.loss_scale import LossScale, LossScaleConfig
from tiny_decoder import make_decoder

CPU = torch.device("cpu")
QUIET = [LayerFindings(), LayerFindings(), LayerFindings()]


def scales(**config) -> LayerScales:
    settings = LossScaleConfig(**{"per_layer": True, "init_scale": 1024.0, "growth_interval": 2, **config})
    return LayerScales(settings, LossScale(settings, 10), 3, CPU)


def good(found: LayerScales, step: int, findings=QUIET) -> None:
    found.update(step, overflowed=False, culprit=None, found=findings)


def test_the_layer_in_which_an_overflow_began_is_the_one_that_falls():
    found = scales(growth_interval=9)
    good(found, 0)
    found.update(0, overflowed=True, culprit=1, found=QUIET)
    assert (found.values, found.common.value) == ([1024.0, 512.0, 1024.0], 1024.0)
    found.update(1, overflowed=True, culprit=None, found=QUIET)
    assert (found.values, found.common.value) == ([1024.0, 512.0, 1024.0], 512.0)
    assert (found.num_overflows, found.common.num_overflows) == ([0, 1, 0], 2)
    assert found.history == [(1, 1, 512.0)]
    assert [float(factor) for factor in found.entering] == [2.0, 1.0, 2.0]
    assert [float(factor) for factor in found.leaving] == [0.5, 1.0, 0.5]


def test_layers_that_have_yet_to_fit_fall_with_the_one_before_them():
    found = scales()
    found.update(0, overflowed=True, culprit=1, found=QUIET)
    assert found.values == [512.0, 512.0, 1024.0]
    found.update(1, overflowed=True, culprit=0, found=QUIET)
    assert found.values == [256.0, 512.0, 1024.0]
    untried = scales()
    untried.update(0, overflowed=True, culprit=None, found=QUIET)
    assert (untried.values, untried.common.value) == ([512.0] * 3, 512.0)


def test_a_layer_grows_after_a_window_if_its_gradients_are_small_and_there_is_room():
    found = scales(max_underflow_fraction=0.1)
    findings = [LayerFindings(largest=1.0, small=0.2), LayerFindings(largest=1.0, small=0.1),
                LayerFindings(largest=9000.0, small=0.2)]  # fmt: skip
    good(found, 0, findings)
    assert found.due(0)
    assert found.values == [1024.0] * 3
    good(found, 1, findings)
    assert found.values == [2048.0, 1024.0, 1024.0]
    assert not found.due(0)
    assert found.common.value == 2048.0  # that of all else follows its own rule


def test_an_overflow_ends_its_layers_window_and_no_other():
    """Layers whose backward pass came before had a good update; of the others nothing is known."""
    found = scales(max_underflow_fraction=0.0)
    small = [LayerFindings(largest=1.0, small=1.0)] * 3
    good(found, 0, small)
    found.update(1, overflowed=True, culprit=1, found=small)
    assert found.values == [1024.0, 512.0, 2048.0]
    good(found, 2, small)
    assert found.values == [2048.0, 512.0, 2048.0]


def test_it_goes_on_where_it_stopped():
    once, first, second = scales(), scales(), scales()
    moments = [(True, 2), (False, None), (True, None), (False, None), (False, None), (True, 0)]
    small = [LayerFindings(largest=1.0, small=1.0)] * 3
    for step, (overflowed, culprit) in enumerate(moments):
        once.update(step, overflowed=overflowed, culprit=culprit, found=small)
        here = first if step < 3 else second
        here.update(step, overflowed=overflowed, culprit=culprit, found=small)
        if step == 2:
            second.load_state_dict(first.state_dict())
    assert second.state_dict() == once.state_dict()
    assert [float(factor) for factor in second.entering] == [float(factor) for factor in once.entering]


def gradients(model, scale: float, tokens) -> dict[str, torch.Tensor]:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    attend = packed_attend(torch.zeros_like(tokens, dtype=torch.int32))
    model.zero_grad()
    model.cross_entropy(model(tokens, positions, attend), tokens.roll(-1, 1), chunk_tokens=64).mul(scale).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_blocks_have_gradients_of_their_own_scale_and_all_else_the_common_one():
    """To the last bit: all are powers of two."""
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = make_decoder()
    scaled = deepcopy(plain)
    found = LayerScales(settings := LossScaleConfig(per_layer=True), LossScale(settings, 10), 2, CPU)
    found.load_state_dict(found.state_dict() | {"values": [2.0**20, 2.0**3]})
    scale_blocks(scaled, found)
    naive, ours = gradients(plain, 1.0, tokens), gradients(scaled, found.common.value, tokens)
    for name, gradient in ours.items():
        scale = {"blocks.0": 2.0**20, "blocks.1": 2.0**3}.get(".".join(name.split(".")[:2]), 2.0**15)
        assert torch.equal(gradient, naive[name] * scale), name


def test_who_has_scales_of_layers():
    def made(uses_fp16: bool, **config):
        return layer_scales_for(
            LossScaleConfig(**config), uses_fp16=uses_fp16, count=lambda: 1, num_layers=3, device=CPU
        )

    assert made(True) is None
    assert made(False, per_layer=True) is None
    assert made(True, per_layer=True).values == [2.0**15] * 3  # pyright: ignore


@pytest.mark.parametrize(
    ("change", "field"),
    [({"dynamic": False}, "per_layer"), ({"growth_factor": 3.0}, "growth_factor"),
     ({"init_scale": 1000.0}, "init_scale"),
     ({"max_underflow_fraction": 1.0}, "max_underflow_fraction")],
)  # fmt: skip
def test_what_makes_no_sense_is_named(change, field):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        LossScaleConfig(per_layer=True, **change)
