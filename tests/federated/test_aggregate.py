"""Which updates count, and how much of them."""

import numpy as np
import pytest
import tiny_run

from modelwright.core.config import parse
from modelwright.core.errors import ConfigError, ModelwrightError
from modelwright.federated.aggregate import ClientUpdate, clipped, mean_update
from modelwright.federated.config import FederatedConfig
from modelwright.federated.weights import set_weights, shape_digest, weight_vector


def update(*values: float, weight: float = 1.0) -> ClientUpdate:
    return ClientUpdate(np.array(values, dtype=np.float32), weight)


def mean(updates: dict[str, ClientUpdate], *, most: float = 0.0, ratio: float = 3.0, last: float | None = None):
    return mean_update(updates, size=2, most=most, max_norm_ratio=ratio, last_median_norm=last)


def test_the_mean_is_weighted() -> None:
    result = mean({"a": update(1.0, 0.0, weight=3.0), "b": update(0.0, 2.0, weight=1.0)})
    assert result.change == pytest.approx([0.75, 0.5])
    assert result.total_weight == 4
    assert (result.refused, result.scaled) == ((), ())


def test_updates_that_are_no_numbers_do_not_count() -> None:
    good = {"a": update(1.0, 1.0), "b": update(1.0, 3.0)}
    bad = {
        "nan": update(np.nan, 1.0),
        "inf": update(np.inf, 0.0),
        "short": update(1.0),
        "nothing": update(1.0, 1.0, weight=0.0),
        "weightless": update(1.0, 1.0, weight=float("nan")),
        "heavy": update(1.0, 1.0, weight=float("inf")),
    }
    result = mean({**good, **bad})
    assert result.change == pytest.approx([1.0, 2.0])
    assert result.refused == tuple(sorted(bad))
    with pytest.raises(ModelwrightError, match="none of 6 updates"):
        mean(bad)


def test_a_huge_update_is_bounded_by_the_others() -> None:
    usual = {name: update(1.0, 0.0) for name in "abc"}
    result = mean({**usual, "d": update(0.0, 1000.0)})
    assert result.scaled == ("d",)
    assert result.change == pytest.approx([0.75, 3.0 / 4])
    assert mean({**usual, "d": update(0.0, 1000.0)}, most=0.5).change == pytest.approx([0.375, 0.125])
    assert np.linalg.norm(clipped(update(3.0, 4.0), 1.0).change) == pytest.approx(1.0)
    same = update(3.0, 4.0)
    assert clipped(same, 5.0) is same


def test_of_two_updates_the_shorter_one_bounds_the_other() -> None:
    result = mean({"a": update(1.0, 0.0), "b": update(0.0, 1000.0)}, last=500.0)
    assert result.change == pytest.approx([0.5, 1.5])
    assert (result.scaled, result.median_norm) == (("b",), 1.0)


def test_a_single_update_is_bounded_by_an_earlier_round() -> None:
    huge = {"a": update(np.nan, 0.0), "b": update(0.0, 1000.0)}
    result = mean(huge, last=2.0)
    assert result.change == pytest.approx([0.0, 6.0])
    assert (result.refused, result.scaled) == (("a",), ("b",))
    assert result.median_norm == 2.0  # not its own norm: it could grow threefold in each round
    assert mean(huge, most=0.5, last=2.0).change == pytest.approx([0.0, 0.5])
    assert mean({"b": update(0.0, 1.0)}, last=2.0).scaled == ()


def test_a_single_update_of_the_first_round_needs_a_bound_by_the_settings() -> None:
    with pytest.raises(ModelwrightError, match=r"no earlier round says .*; set privacy\.clip_norm, or min_clients"):
        mean({"b": update(0.0, 1000.0)})
    result = mean({"b": update(0.0, 1000.0)}, most=0.5)
    assert result.change == pytest.approx([0.0, 0.5])
    assert result.median_norm is None


def test_weights_go_there_and_back() -> None:
    model = tiny_run.tiny_model()
    vector = weight_vector(model)
    assert len(vector) == model.config.num_parameters
    set_weights(model, vector + 1)
    assert np.array_equal(weight_vector(model), vector + 1)
    assert len(shape_digest(model)) == 64
    with pytest.raises(ModelwrightError, match="use the same model"):
        set_weights(model, vector[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": {"noise_multiplier": 1.0}}, "privacy.clip_norm: noise hides an update only if"),
        ({"secure_sum": {"enabled": True}}, "privacy.clip_norm: secure aggregation needs a bound"),
        ({"secure_sum": {"enabled": True, "threshold": 3}, "privacy": {"clip_norm": 1.0}}, "min_clients: 2 is below"),
        ({"client_fraction": 0.0}, "client_fraction: must be above 0"),
        ({"max_norm_ratio": 0.5}, "max_norm_ratio: must be at least 1"),
    ],
)
def test_settings_that_promise_too_much_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        parse(FederatedConfig, settings)
