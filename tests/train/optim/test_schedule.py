"""Learning-rate shapes, step by step."""

import itertools

import pytest

from modelwright.core.config import ConfigError
from modelwright.train.techniques.learning_rate import ScheduleConfig, rate_factor
from refusals import config_error


def factors(num_steps, **config):
    return [rate_factor(ScheduleConfig(**config), step, num_steps) for step in range(num_steps)]


def test_warmup_climbs_linearly_over_the_first_tenth():
    shape = factors(100)
    assert shape[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert shape[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(shape[10:]))


def test_cosine_is_half_way_in_the_middle_and_ends_near_its_floor():
    shape = factors(110, warmup_fraction=10 / 110, final_lr_fraction=0.1)
    assert shape[60] == pytest.approx(0.55)
    assert 0.1 < shape[-1] < 0.101


def test_linear_falls_by_equal_steps():
    shape = factors(50, kind="warmup_linear", warmup_fraction=0.0)
    assert shape == pytest.approx([1 - i / 50 for i in range(50)])


def test_constant_warms_up_too_unless_told_otherwise():
    assert factors(20, kind="constant") == [0.5] + [1.0] * 19
    assert factors(20, kind="constant", warmup_fraction=0.0) == [1.0] * 20


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate_in_every_step(num_steps):
    assert all(0 < factor <= 1 for factor in factors(num_steps))


def test_bad_fractions_are_refused():
    with config_error("warmup_fraction"):
        ScheduleConfig(warmup_fraction=1.0)
    with config_error("final_lr_fraction"):
        ScheduleConfig(final_lr_fraction=-0.1)


def test_wsd_stays_at_its_peak_until_the_cooldown():
    shape = factors(100, kind="wsd", warmup_fraction=0.1, cooldown_fraction=0.25, final_lr_fraction=0.1)
    assert shape[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert shape[10:76] == [1.0] * 66
    assert shape[75:] == pytest.approx([0.1 + 0.9 * (1 - (i / 25) ** 0.5) for i in range(25)])


def test_inverse_sqrt_goes_on_from_the_end_of_the_warmup():
    shape = factors(100, kind="inverse_sqrt", warmup_fraction=0.16)
    assert shape[15] == 1.0
    assert shape[16:] == pytest.approx([(16 / (step + 1)) ** 0.5 for step in range(16, 100)])
    assert factors(4, kind="inverse_sqrt", warmup_fraction=0.0) == pytest.approx([1.0, 0.5**0.5, 3**-0.5, 0.5])


@pytest.mark.parametrize("fraction", [0.0, 0.95])
def test_a_cooldown_needs_room(fraction):
    with config_error("cooldown_fraction"):
        ScheduleConfig(kind="wsd", cooldown_fraction=fraction)


def test_a_cooldown_may_take_all_that_the_warmup_leaves():
    for warmup in (0.7, 0.8, 0.9):
        ScheduleConfig(kind="wsd", warmup_fraction=warmup, cooldown_fraction=round(1.0 - warmup, 1))


def test_a_range_test_climbs_by_equal_factors_to_its_peak():
    shape = factors(5, kind="exponential", initial_lr_fraction=1e-4)
    assert shape == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert factors(1, kind="exponential", initial_lr_fraction=0.5) == [0.5]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ScheduleConfig(initial_lr_fraction=0.0), "initial_lr_fraction"),
    ],
)
def test_what_makes_no_sense_is_named(make, field):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        make()
