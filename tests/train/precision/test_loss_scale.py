"""The loss scale, update by update."""

import pytest

from modelwright.core.config import ConfigError
from modelwright.train.precision.policy import LossScale, LossScaleConfig


def run(scale: LossScale, overflows: list[bool]) -> list[float]:
    found = []
    for step, overflowed in enumerate(overflows):
        scale.update(step, overflowed)
        found.append(scale.value)
    return found


def test_it_halves_on_overflow_and_grows_after_a_window_of_good_updates():
    scale = LossScale(LossScaleConfig(init_scale=1024.0, growth_interval=3), 10)
    assert run(scale, [False, True, False, False, False, False, False, True]) == [
        1024, 512, 512, 512, 1024, 1024, 1024, 512,
    ]  # fmt: skip
    assert scale.num_overflows == 2
    assert scale.history == [(0, 1024.0), (2, 512.0), (5, 1024.0), (8, 512.0)]


def test_growth_by_more_and_limits():
    scale = LossScale(
        LossScaleConfig(init_scale=16.0, growth_interval=1, growth_factor=8.0, min_scale=4.0, max_scale=128.0), 10
    )
    assert run(scale, [False, False, True, True, True, True, True, True]) == [128, 128, 64, 32, 16, 8, 4, 4]


def test_a_static_scale_stays():
    scale = LossScale(LossScaleConfig(init_scale=64.0, dynamic=False, growth_interval=1), 10)
    assert run(scale, [True, False, False]) == [64, 64, 64]
    assert scale.num_overflows == 1


def test_it_goes_on_where_it_stopped():
    config = LossScaleConfig(init_scale=1024.0, growth_interval=3)
    moments = [False, True, False, False, False, False, True, False]
    once, first, second = (LossScale(config, 10) for _ in range(3))
    whole = run(once, moments)
    begun = run(first, moments[:4])
    second.load_state_dict(first.state_dict())
    for step, overflowed in enumerate(moments[4:], start=4):
        second.update(step, overflowed)
        begun.append(second.value)
    assert begun == whole
    assert second.history == once.history


@pytest.mark.parametrize(
    ("parameters", "power"),
    [(10, 15), (10**8, 15), (2 * 10**8, 14), (10**9, 13), (7 * 10**10, 12), (10**12, 12)],
)
def test_the_first_scale_by_size(parameters, power):
    assert LossScale(LossScaleConfig(init_scale=0.0), parameters).value == 2.0**power
    assert LossScale(LossScaleConfig(), parameters).value == 2.0**15


def test_who_scales():
    assert not LossScaleConfig().scales(uses_fp16=False)
    assert not LossScaleConfig(enabled="never").scales(uses_fp16=True)
    assert LossScaleConfig().scales(uses_fp16=True)
    assert LossScaleConfig(enabled="always").scales(uses_fp16=False)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"init_scale": -1.0}, "init_scale"),
        ({"init_scale": 2.0**30}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"min_scale": 0.0}, "min_scale"),
    ],
)
def test_what_makes_no_sense_is_named(change, field):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        LossScaleConfig(**change)
