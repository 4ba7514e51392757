"""Decisions about formats: estimate, rules, bandit, schedule, hysteresis, fallback, and state that comes back whole."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from modelwright.core.config import ConfigError, parse
from modelwright.ops.lowp_linear import Format
from modelwright.train.precision.controllers import (
    Bandit,
    PrecisionSwitcher,
    Rules,
    damage,
    features,
    scheduled,
)
from modelwright.train.precision.indicators import Indicators
from modelwright.train.precision.policy import AdaptiveConfig

PART = "blocks.0.ffn"
CANDIDATES = ["fp32", "bf16", "int8"]
CALM = Indicators(
    gradient_noise=15.0,
    gradient_variance=0.1,
    update_to_weight=1e-2,
    overflow_share=0.0,
    underflow_share=0.0,
    skipped_share=0.0,
    weight_error={"fp32": 0.0, "bf16": 0.002, "int8": 0.01},
    input_error={"fp32": 0.0, "bf16": 0.002, "int8": 0.02},
    gradient_error={"fp32": 0.0, "bf16": 0.002, "int8": 0.03},
    sensitivity={"bf16": 0.0, "fp16": 0.0, "int8": 0.0},
    loss_trend=-0.1,
    norm_outliers=0.0,
    speed={"fp32": 1.0, "bf16": 0.5, "int8": 0.25},
    size={"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "fp8": 0.5, "int8": 1.0},
    memory_pressure=0.2,
)


def config(**given) -> AdaptiveConfig:
    return parse(AdaptiveConfig, {"kind": "rules", "decide_every_steps": 10, **given}, constants=True)


def known(part: str, chosen: Format) -> float | None:
    raise AssertionError(f"{chosen} has a sensitivity")


def switcher(probe: Callable[[str, Format], float | None] = known, **given) -> PrecisionSwitcher:
    made = config(**given)
    return PrecisionSwitcher(made, {PART: "fp32"}, Bandit(made) if made.kind == "bandit" else Rules(made), probe)


@pytest.mark.parametrize(
    "worse",
    [
        {"gradient_noise": 0.0},
        {"gradient_variance": 1.0},
        {"update_to_weight": 1e-5},
        {"weight_error": {"int8": 0.1}},
        {"input_error": {"int8": 0.1}},
        {"gradient_error": {"int8": 0.1}},
        {"sensitivity": {"int8": 0.01}},
        {"loss_trend": 0.3},
        {"norm_outliers": 0.5},
    ],
)
def test_each_indicator_moves_the_estimate(worse):
    assert damage(replace(CALM, **worse), "int8") > 1.05 * damage(CALM, "int8")
    assert damage(replace(CALM, **worse), "fp32") == 0.0


def test_range_matters_to_fp16_alone():
    narrow = replace(CALM, overflow_share=0.01, underflow_share=0.2)
    assert damage(narrow, "fp16") > 0.3
    assert damage(narrow, "int8") == damage(CALM, "int8")


def test_skipped_steps_count_against_fp16_and_teach_a_bandit():
    skipped = replace(CALM, skipped_share=0.25)
    assert damage(skipped, "fp16") > damage(CALM, "fp16") + 0.25
    assert damage(skipped, "int8") == damage(CALM, "int8")
    rewards = {}
    for chosen in ("fp16", "bf16"):
        made = switcher(kind="bandit")
        made.formats[PART] = chosen
        made.last_signs = {PART: replace(CALM, speed={**CALM.speed, "fp16": 0.5})}
        made.decide(10, {PART: replace(skipped, speed={**CALM.speed, "fp16": 0.5})}, 0.0)
        assert isinstance(made.controller, Bandit)
        rewards[chosen] = made.controller.rewards[chosen][0]
    assert rewards["fp16"] < 0 < rewards["bf16"]


def test_rules_take_the_fastest_that_is_tolerable():
    rules = Rules(config())
    assert rules.propose(PART, CALM, "fp32", CANDIDATES).chosen == "int8"
    assert rules.propose(PART, replace(CALM, sensitivity={"int8": 0.2}), "fp32", CANDIDATES).chosen == "bf16"
    rough = replace(CALM, sensitivity={"int8": 0.2, "bf16": 0.2})
    back = rules.propose(PART, rough, "int8", CANDIDATES)
    assert back.chosen == "fp32"
    assert "damage of int8" in back.reason


def test_rules_leave_a_format_that_is_nearly_as_fast():
    slow = replace(CALM, speed={"fp32": 1.0, "bf16": 12.0, "int8": 0.95})
    assert Rules(config()).propose(PART, slow, "fp32", CANDIDATES).chosen == "fp32"


def test_rules_take_the_smallest_that_is_tolerable_where_memory_is_short():
    """BF16 is slow here; INT8's results are as large as FP32's."""
    rules, short = Rules(config()), replace(CALM, speed={"fp32": 1.0, "bf16": 12.0, "int8": 0.5}, memory_pressure=0.95)
    assert rules.propose(PART, replace(short, memory_pressure=0.89), "fp32", CANDIDATES).chosen == "int8"
    for present in ("fp32", "int8"):
        choice = rules.propose(PART, short, present, CANDIDATES)
        assert choice.chosen == "bf16"
        assert "95% of memory in use" in choice.reason
    harmful = replace(short, sensitivity={"bf16": 0.2, "int8": 0.0})
    assert rules.propose(PART, harmful, "fp32", CANDIDATES).chosen == "int8"  # of two alike the faster


def test_bytes_count_in_the_bandits_reward_as_far_as_memory_is_short():
    bandit = Bandit(config(kind="bandit"))
    half, full = (replace(CALM, memory_pressure=pressure) for pressure in (0.95, 1.0))
    for signs, saved in ((half, 0.25), (full, 0.5)):
        assert bandit.reward(signs, "bf16", 0.0) == pytest.approx(bandit.reward(CALM, "bf16", 0.0) + saved)
        assert bandit.reward(signs, "int8", 0.0) == bandit.reward(CALM, "int8", 0.0)
        changed = np.flatnonzero(features(signs, "bf16") != features(CALM, "bf16"))
        assert len(changed) == 1
        assert features(signs, "bf16")[changed] == pytest.approx(saved)


def test_memory_that_is_not_short_changes_nothing():
    """It differs from run to run, by what else the machine does."""
    other = replace(CALM, memory_pressure=0.6)
    assert Rules(config()).propose(PART, other, "fp32", CANDIDATES) == Rules(config()).propose(
        PART, CALM, "fp32", CANDIDATES
    )
    assert np.array_equal(features(other, "bf16"), features(CALM, "bf16"))


def test_the_bandit_learns_what_pays():
    """INT8 raises the loss with this part and BF16 does not; after some tries of each it stays with BF16. FP32 saves
    nothing, whatever comes of it, so it is not tried."""
    bandit = Bandit(config(kind="bandit", exploration=1.0))
    chosen = []
    for _ in range(40):
        choice = bandit.propose(PART, CALM, "fp32", CANDIDATES).chosen
        bandit.learn(PART, CALM, choice, loss_excess=0.3 if choice == "int8" else 0.0)
        chosen.append(choice)
    assert set(chosen) == {"bf16", "int8"}
    assert chosen[-15:] == ["bf16"] * 15
    again = Bandit(bandit.config)
    again.load_state_dict(json.loads(json.dumps(bandit.state_dict())))
    assert all(np.array_equal(again.precision[name], value) for name, value in bandit.precision.items())
    assert again.propose(PART, CALM, "fp32", CANDIDATES) == bandit.propose(PART, CALM, "fp32", CANDIDATES)


def test_a_bandit_does_not_try_what_is_known_to_harm():
    harmful = replace(CALM, sensitivity={"bf16": 0.0, "int8": 0.3})
    assert Bandit(config(kind="bandit", exploration=9.0)).propose(PART, harmful, "fp32", CANDIDATES).chosen == "bf16"


def test_a_changed_part_rests_and_every_change_has_its_reason():
    made = switcher(cooldown_decisions=2)
    rough = replace(CALM, sensitivity={"int8": 0.3, "bf16": 0.3})
    formats = []
    for step, signs in ((10, CALM), (20, rough), (30, rough), (40, rough)):
        made.decide(step, {PART: signs}, 0.0)
        formats.append(made.formats[PART])
    assert formats == ["int8", "int8", "int8", "fp32"]
    first, second = made.take_changes()
    assert first == {"step": 10, "part": PART, "from": "fp32", "to": "int8", "reason": first["reason"]}
    assert "as fast as fp32" in first["reason"]
    assert second["step"] == 40
    assert made.take_changes() == []


@pytest.mark.parametrize("kind", ["rules", "bandit"])
def test_a_format_is_probed_before_a_part_changes_to_it(kind):
    """INT8 turns out to be harmful, nothing can be said of FP8, BF16 is harmless: one probe of each, and no more."""
    rises, probed = {"int8": 0.4, "fp8": None, "bf16": 0.001}, []

    def probe(part: str, chosen: Format) -> float | None:
        probed.append((chosen, made.formats[part]))
        return rises[chosen]

    made = switcher(probe, kind=kind, cooldown_decisions=0, candidates=["fp8", "bf16", "int8"], exploration=0.5)
    unknown = replace(CALM, sensitivity={}, speed={**CALM.speed, "fp8": 0.2})
    made.decide(10, {PART: unknown}, 0.0)
    assert made.formats == {PART: "bf16"}
    assert sorted(probed) == [("bf16", "fp32"), ("fp8", "fp32"), ("int8", "fp32")]
    assert made.last_signs[PART].sensitivity == {"int8": 0.4, "bf16": 0.001}


def test_a_jump_of_the_loss_brings_the_last_good_formats_back():
    made = switcher(cooldown_decisions=0)
    for step in range(10):
        assert not made.see_loss(step, 2.0)
    made.decide(10, {PART: CALM}, 0.0)
    assert made.formats == {PART: "int8"}
    assert made.see_loss(11, 2.5)
    assert made.formats == {PART: "fp32"}
    assert made.take_changes()[-1]["reason"] == "the loss jumped to 2.5"
    assert not made.see_loss(12, 9.0)  # nothing to go back to


def test_formats_that_have_proved_good_are_what_a_jump_leads_back_to():
    made = switcher(cooldown_decisions=0)
    made.see_loss(1, 2.0)
    made.formats[PART] = "bf16"
    made.decide(10, {PART: CALM}, 0.0)  # bf16 was in force and the loss was calm
    assert made.formats == {PART: "int8"}
    assert made.see_loss(11, float("nan"))
    assert made.formats == {PART: "bf16"}


def test_a_bandit_learns_from_a_jump_what_brought_it():
    """INT8 makes the loss jump each time, BF16 does not."""
    made = switcher(kind="bandit", cooldown_decisions=0, exploration=1.0)
    chosen = []
    for step in range(10, 400, 10):
        made.mean_loss = 2.0
        made.decide(step, {PART: CALM}, 0.0)
        chosen.append(made.formats[PART])
        made.see_loss(step + 1, 9.0 if made.formats[PART] == "int8" else 2.0)
    assert "int8" in chosen
    assert chosen[-10:] == ["bf16"] * 10
    controller = made.controller
    assert isinstance(controller, Bandit)
    assert controller.rewards["int8"][0] < 0 < controller.rewards["bf16"][0]


def test_a_jump_teaches_nothing_of_formats_that_had_proved_good_and_no_more_than_a_doubling():
    other, made = "blocks.1.ffn", switcher(kind="bandit", cooldown_decisions=0)
    made.formats |= {PART: "bf16", other: "int8"}
    made.good |= {PART: "bf16", other: "fp32"}
    made.widest |= {other: "fp32"}
    made.last_signs, made.mean_loss = {PART: CALM, other: CALM}, 2.0
    assert made.see_loss(1, 2e4)
    assert made.formats == {PART: "bf16", other: "fp32"}
    assert isinstance(made.controller, Bandit)
    assert set(made.controller.rewards) == {"int8"}
    assert made.controller.rewards["int8"][0] > -10


def test_state_comes_back_whole():
    for kind in ("rules", "bandit"):
        made, other = switcher(kind=kind), switcher(kind=kind)
        made.see_loss(1, 2.0)
        made.decide(10, {PART: CALM}, 0.0)
        made.decide(20, {PART: CALM}, 0.1)
        other.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert other.state_dict() == made.state_dict()
        assert other.last_signs[PART] == CALM


def test_a_schedule_narrows_the_middle_feed_forward_parts_first():
    parts = [f"blocks.{layer}.{part}" for layer in range(3) for part in ("attention", "ffn")]
    widest = dict.fromkeys(parts, "fp32")
    made = parse(
        AdaptiveConfig, {"kind": "schedule", "schedule": [[5, 0.5], [9, 1.0]], "low_precision": "int8"}, constants=True
    )
    assert scheduled(made, 4, parts, widest) == widest
    narrow = {part for part, chosen in scheduled(made, 6, parts, widest).items() if chosen == "int8"}
    assert narrow == {"blocks.0.ffn", "blocks.1.ffn", "blocks.2.ffn"}
    assert set(scheduled(made, 9, parts, widest).values()) == {"int8"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decide_every_steps": 3}, "^decide_every_steps: must be at least 5, because the last 4 steps .* got 3$"),
        ({"decide_every_steps": 1, "measure_steps": 1}, "^decide_every_steps: must be at least 2"),
        ({"min_speedup": 0.9}, "min_speedup: must be at least 1"),
        ({"tolerance": 0.0}, "tolerance: must be above 0"),
        ({"kind": "schedule"}, "schedule: .* set both or neither"),
        ({"kind": "schedule", "schedule": [[5, 0.5], [3, 1.0]]}, "schedule: steps must increase"),
    ],
)
def test_what_cannot_be_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        parse(AdaptiveConfig, given, constants=True)
