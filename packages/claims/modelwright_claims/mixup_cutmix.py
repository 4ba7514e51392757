"""Claim: MixUp and CutMix raise the accuracy of a small ResNet on digits.

The product's recipe `vision` with and without them; crops and smoothed labels are the same in all arms.
"""

from collections.abc import Mapping
from typing import Any

from modelwright_claims import product_runs
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences

NONE, MIXUP, CUTMIX, BOTH = "neither", "MixUp", "CutMix", "both"
ALPHAS: Mapping[str, tuple[float, float]] = {NONE: (0.0, 0.0), MIXUP: (0.2, 0.0), CUTMIX: (0.0, 1.0), BOTH: (0.2, 1.0)}
"""Beta(alpha, alpha) of MixUp and of CutMix; `BOTH` is the recipe's."""
ACCURACY = "accuracy, "


def measure(setting: Setting) -> Measurement:
    arms: dict[str, Mapping[str, Any]] = {
        arm: {"augment": {"mixup_alpha": mixup, "cutmix_alpha": cutmix}} for arm, (mixup, cutmix) in ALPHAS.items()
    }
    seeds = range(1 if setting.quick else 5)
    found = product_runs.accuracies(setting, arms, seeds)
    return Measurement(
        samples={ACCURACY + arm: values for arm, values in found.items()},
        conditions=described(__name__)
        | {
            "seeds": len(seeds),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    for arm in (MIXUP, CUTMIX, BOTH):
        judgment.ask(
            f"accuracy over neither, {arm}",
            lambda arm=arm: differences(samples[ACCURACY + arm], samples[ACCURACY + NONE]),
            "points", ">" if arm == BOTH else "", 0.0,
            what="accuracy of both over neither", say=arm + " {0.mean:+.2f} points",
        )  # fmt: skip
    judgment.show(samples, [ACCURACY + arm for arm in ALPHAS], "%")
    return judgment.verdict()


CLAIM = declared(__name__)
