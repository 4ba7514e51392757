"""The strength of augmentation follows the loss, is in the checkpoint and resumes exactly."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from modelwright.core.config import ConfigError, Stopped
from modelwright.data.rows.ahead import AHEAD, AugmentationCost
from modelwright.train.technique import Update
from modelwright.train.techniques.augmentation_strength import (
    AugmentationStrength,
    AugmentationStrengthConfig,
    augmentation_strength,
)


class Told:
    """The strengths that a loader is told, by batch."""

    def __init__(self) -> None:
        self.cost = AugmentationCost()
        self.strengths: dict[int, float] = {}
        self.num_closed = 0

    def set_strength(self, batch: int, strength: float) -> None:
        assert self.strengths.get(batch, strength) == strength, "a strength that is decided stays"
        self.strengths[batch] = strength

    def close(self) -> None:
        self.num_closed += 1


def strength_after(losses: list[float], config: AugmentationStrengthConfig) -> float:
    follower = AugmentationStrength(config, Told())
    for loss in losses:
        follower.observe(loss)
    return follower.strength


@pytest.mark.parametrize(("loss", "strength"), [(0.81, 0.45), (0.8, 0.3), (0.5, 0.3), (0.3, 0.3), (0.29, 0.21)])
def test_the_published_rule(loss: float, strength: float) -> None:
    assert strength_after([loss], AugmentationStrengthConfig()) == pytest.approx(strength)


def test_relative_thresholds_are_fractions_of_the_loss_at_the_start() -> None:
    config = AugmentationStrengthConfig(relative=True, window=4)
    start = [6.0] * 4
    assert strength_after(start, config) == pytest.approx(0.45)
    assert strength_after([*start, *[3.0] * 60], config) == pytest.approx(0.3)
    assert strength_after([*start, *[1.0] * 60], config) == pytest.approx(0.21)
    assert strength_after([*start, *[1.0] * 60], AugmentationStrengthConfig(window=4)) == pytest.approx(0.45)


def test_the_running_loss_is_a_mean_and_then_an_exponential_mean() -> None:
    losses = [5.0, 4.0, 6.0, 2.0, 3.0]
    follower = AugmentationStrength(AugmentationStrengthConfig(window=3), Told())
    for loss in [*losses[:2], math.nan, math.inf, *losses[2:]]:
        follower.observe(loss)
    expected = sum(losses[:3]) / 3
    for loss in losses[3:]:
        expected = expected * 2 / 3 + loss / 3
    assert follower.running_loss == pytest.approx(expected)
    assert follower.first_loss == pytest.approx(5.0)


def test_a_strength_is_a_probability_and_empty_batches_say_nothing() -> None:
    assert strength_after([9.0], AugmentationStrengthConfig(probability=0.9)) == 1.0
    follower = AugmentationStrength(AugmentationStrengthConfig(), Told())
    empty = Update(step=0, num_steps=1, gradients=[], losses={"loss": 0.0}, weights={"loss": 0.0})
    follower.on_gradients(empty)
    assert follower.num_losses == 0
    assert empty.metrics["augmentation_strength"] == 0.3


@pytest.mark.parametrize(
    "wrong",
    [{"probability": 1.1}, {"low_loss": 0.9}, {"low_factor": -1.0}, {"window": 0}],
    ids=lambda one: next(iter(one)),
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AugmentationStrengthConfig(**wrong)


def run(folder: Path, told: Told, *, stop: int = 0) -> list[float]:
    config = AugmentationStrengthConfig(relative=True, high_loss=0.999, low_loss=0.9, window=3)
    techniques = [partial(augmentation_strength, config, told), *tiny_run.watching(stop=tiny_run.StopAfter(stop))]
    tiny_run.run(folder, techniques=techniques)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["augmentation_strength"] for record in records if "augmentation_strength" in record]


def test_a_resumed_run_goes_on_with_the_same_strengths(tmp_path: Path) -> None:
    expected, told = Told(), Told()
    whole = run(tmp_path / "whole", expected)
    with pytest.raises(Stopped):
        run(tmp_path / "cut", Told(), stop=5)
    resumed = run(tmp_path / "cut", told)
    assert resumed == whole
    assert len(set(expected.strengths.values())) > 1, "the loss must cross a threshold"
    assert {batch: expected.strengths[batch] for batch in told.strengths if batch >= 5} == {
        batch: strength for batch, strength in told.strengths.items() if batch >= 5
    }
    assert max(told.strengths) == tiny_run.SETTINGS["num_steps"] + AHEAD
    assert told.num_closed == 1
