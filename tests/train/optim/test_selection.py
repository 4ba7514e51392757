"""Which units are chosen: the strongest, and in time all others; the published mask only shrinks."""

import pytest
import torch
from torch import Tensor

from modelwright.core.config import ConfigError
from modelwright.train.techniques.batch_selection import BatchSelectionConfig
from modelwright.train.techniques.sparse_updates import Selector, SparseUpdateConfig, moment_signal


def selector(num_units: int = 20, **changes) -> Selector:
    return Selector(num_units, **{"seed": 3, "name": "units", "regrowth": 0.0, "feedback": False, **changes})


def strongest_last(num_units: int = 20) -> torch.Tensor:
    return torch.arange(1.0, num_units + 1)


def chosen_over(one: Selector, num_choices: int, signal: torch.Tensor) -> list[set[int]]:
    return [set(one.refresh(step, 0.25, signal).tolist()) for step in range(num_choices)]


def test_units_without_a_signal_come_first_and_then_the_strongest():
    """Signals are infinite before anything is measured, as at the beginning of a run."""
    one = selector()
    one.refresh(0, 0.25, torch.full((20,), torch.inf))
    seen = set(one.indices().tolist())
    for step in range(1, 4):
        now = set(one.refresh(step, 0.25, strongest_last()).tolist())
        assert not now & seen
        seen |= now
    assert seen == set(range(20))
    assert set(one.refresh(4, 0.25, strongest_last()).tolist()) == set(range(15, 20))


def test_a_signal_that_was_not_measured_stays():
    one = selector(4)
    one.refresh(0, 0.5, torch.tensor([4.0, 3.0, 2.0, 1.0]))
    assert one.indices().tolist() == [0, 1]
    one.refresh(1, 0.5, torch.tensor([1.0, 1.0, 9.0, 9.0]))
    assert one.signals.tolist() == [1.0, 1.0, 2.0, 1.0]
    assert 2 in one.indices().tolist()


def shrunk_mask(mask: Tensor, signal: Tensor, share: float) -> Tensor:
    """The published pseudo-code: the new mask is the old one times the strongest units now. A unit
    that has left it never returns, and from one refresh to the next the mask can only lose units.
    """
    strongest = torch.zeros_like(mask).index_fill_(0, signal.topk(max(1, round(share * len(signal)))).indices, True)
    return mask & strongest


def test_the_published_mask_only_shrinks_and_ours_brings_every_unit_back():
    draw = torch.Generator().manual_seed(0)
    signals = [torch.rand(20, generator=draw) for _ in range(60)]
    mask, sizes = torch.ones(20, dtype=torch.bool), []
    for signal in signals:
        mask = shrunk_mask(mask, signal, 0.5)
        sizes.append(int(mask.sum()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0  # nothing is trained any more
    for one in (selector(regrowth=0.25), selector(feedback=True)):
        fixed = strongest_last()
        assert set().union(*chosen_over(one, 60, fixed)[-55:]) == set(range(20))
        assert int(one.chosen.sum()) == 5
    assert set().union(*chosen_over(selector(), 60, strongest_last())) == set(range(15, 20))


def test_all_units_left_out_are_drawn_alike():
    one, counts = selector(regrowth=0.4), torch.zeros(20)
    for step in range(3000):
        counts += torch.zeros(20).index_fill_(0, one.refresh(step, 0.25, strongest_last()), 1.0)
    assert counts[-3:].tolist() == [3000.0] * 3
    torch.testing.assert_close(counts[:-3], torch.full((17,), 2 * 3000 / 17), rtol=0.15, atol=0.0)


def test_the_choice_is_a_function_of_state_seed_and_step():
    first = selector(regrowth=0.5, feedback=True)
    chosen_over(first, 7, strongest_last())
    second = selector(regrowth=0.5, feedback=True)
    second.load_state_dict(first.state_dict())
    assert chosen_over(first, 5, strongest_last()) == chosen_over(second, 5, strongest_last())
    other = selector(regrowth=0.5, feedback=True, seed=4)
    other.load_state_dict(second.state_dict())
    assert chosen_over(second, 5, strongest_last()) != chosen_over(other, 5, strongest_last())


@pytest.mark.parametrize("num_updates", [1, 30])
def test_moments_say_how_large_gradients_are_and_how_much_of_them_points_one_way(num_updates):
    steady, noisy = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([steady, noisy], betas=(0.9, 0.95), eps=1e-8)
    signal = lambda p, kind: moment_signal(optimizer.state.get(p, {}), kind, (0.9, 0.95), 1e-8)  # noqa: E731
    assert signal(steady, "gradient") is None
    for number in range(num_updates):
        steady.grad, noisy.grad = torch.full((3,), 2.0), torch.full((3,), 2.0 * (-1) ** number)
        optimizer.step()
    torch.testing.assert_close(signal(steady, "gradient"), torch.full((3,), 4.0))
    torch.testing.assert_close(signal(noisy, "gradient"), torch.full((3,), 4.0))
    torch.testing.assert_close(signal(steady, "momentum"), torch.ones(3))
    if num_updates > 1:
        assert float(signal(noisy, "momentum").max()) < 0.01


def test_courses():
    dense_first = SparseUpdateConfig(kind="rows", keep_fraction=0.4, density_schedule="dense_first", ramp_fraction=0.5)
    assert [round(dense_first.share(step, 8), 2) for step in (0, 2, 4, 7)] == [1.0, 0.7, 0.4, 0.4]
    sparse_first = SparseUpdateConfig(
        kind="rows", keep_fraction=0.4, density_schedule="sparse_first", ramp_fraction=0.5
    )
    assert [round(sparse_first.share(step, 8), 2) for step in (0, 4, 6, 8)] == [0.4, 0.4, 0.7, 1.0]
    assert SparseUpdateConfig(kind="rows", keep_fraction=0.4).share(0, 8) == 0.4


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (SparseUpdateConfig, "keep_fraction", 0.0),
        (SparseUpdateConfig, "ramp_fraction", 0.0),
        (SparseUpdateConfig, "refresh_every_steps", 0),
        (SparseUpdateConfig, "random_fraction", 1.5),
        (BatchSelectionConfig, "keep_fraction", 1.1),
        (BatchSelectionConfig, "random_fraction", -0.1),
        (BatchSelectionConfig, "dense_fraction", 1.0),
        (BatchSelectionConfig, "probe_tokens", 1),
        (BatchSelectionConfig, "max_initial_loss", -1.0),
        (BatchSelectionConfig, "max_initial_loss", float("inf")),
        (BatchSelectionConfig, "max_initial_loss", 1.0),  # without a signal
    ],
)
def test_values_out_of_range_are_named(config, field, value):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        config(**{field: value})
