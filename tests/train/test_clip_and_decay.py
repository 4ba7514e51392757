"""Clipping and weight decay that follow the gradient norms."""

import math
from types import SimpleNamespace

import pytest
import torch

from modelwright.core.config import ConfigError
from modelwright.ops.dtensor import view_of
from modelwright.train.technique import NOT_FINITE, Update
from modelwright.train.techniques.gradient_clipping import AdaptiveClipConfig, GradientClipping
from modelwright.train.techniques.weight_decay import WeightDecaySchedule, WeightDecayScheduleConfig


def update(norm: float, skip: bool = False) -> Update:
    gradient = view_of("weight", torch.full((4,), norm / 2))
    return Update(
        step=0, num_steps=9, gradients=[gradient], losses={"loss": 1.0}, weights={"loss": 1.0}, grad_norm=norm,
        skip_reason=NOT_FINITE if skip else "",
    )  # fmt: skip


def test_limits_are_their_definition():
    norms = [float(n) for n in range(1, 41)]
    plain = AdaptiveClipConfig(window_steps=20)
    assert plain.limit(norms, 1.0) == 1.0
    percentile = AdaptiveClipConfig(kind="percentile", window_steps=20, percentile=90.0)
    recent = sorted(norms[-20:])
    assert percentile.limit(norms, 1.0) == recent[17]
    assert sum(norm <= recent[17] for norm in recent) == 18
    mean = sum(recent) / 20
    deviation = math.sqrt(sum((norm - mean) ** 2 for norm in recent) / 20)
    zscore = AdaptiveClipConfig(kind="zscore", window_steps=20, num_stddev=1.5)
    assert zscore.limit(norms, 1.0) == pytest.approx(mean + 1.5 * deviation)
    assert zscore.limit(norms, 100.0) == 100.0
    assert zscore.limit(norms[:6], 1.0) == 1.0  # not a third of the window yet


def test_a_spike_is_clipped_to_what_was_usual_and_joins_the_history():
    clip = GradientClipping(1.0, AdaptiveClipConfig(kind="percentile", window_steps=6, percentile=100.0))
    for norm in (2.0, 3.0):
        clip.on_gradients(update(norm))
    spike = update(50.0)
    clip.on_gradients(spike)
    assert float(spike.tensors[0].norm()) == pytest.approx(3.0, rel=1e-5)
    assert spike.metrics == {"clip_norm": 3.0}
    skipped = update(9.0, skip=True)
    clip.on_gradients(skipped)
    assert float(skipped.tensors[0].norm()) == pytest.approx(9.0)
    again = GradientClipping(1.0, clip.adaptive)
    again.load_state_dict(clip.state_dict())
    assert again.norms == clip.norms == [2.0, 3.0, 50.0]


def test_decay_is_low_while_norms_are_large_and_comes_back_below_the_threshold():
    groups = [{"weight_decay": 0.01}, {"weight_decay": 0.0}]
    optimizer = SimpleNamespace(param_groups=groups)
    decay = WeightDecaySchedule(optimizer, WeightDecayScheduleConfig(grad_norm_threshold=5.0))  # pyright: ignore
    found = []
    for norm in (4.9, 5.1, 4.5, 3.9, 4.5, 5.1):
        decay.on_gradients(update(norm))
        found.append(groups[0]["weight_decay"])
        assert groups[1]["weight_decay"] == 0.0
    assert found == pytest.approx([0.01, 0.001, 0.001, 0.01, 0.01, 0.001])
    again = WeightDecaySchedule(SimpleNamespace(param_groups=[{"weight_decay": 0.01}]), decay.config)  # pyright: ignore
    again.load_state_dict(decay.state_dict())
    assert again.low


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: AdaptiveClipConfig(window_steps=3), "window_steps"),
        (lambda: AdaptiveClipConfig(percentile=0.0), "percentile"),
        (lambda: AdaptiveClipConfig(num_stddev=0.0), "num_stddev"),
        (lambda: WeightDecayScheduleConfig(grad_norm_threshold=-1.0), "grad_norm_threshold"),
        (lambda: WeightDecayScheduleConfig(factor=2.0), "factor"),
        (lambda: WeightDecayScheduleConfig(release_fraction=0.0), "release_fraction"),
    ],
)
def test_what_makes_no_sense_is_named(make, field):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        make()
