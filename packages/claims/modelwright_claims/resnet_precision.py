"""Claim: mixed precision trains the ResNet as accurately as FP32, and faster.

Accuracy: the product's recipe `vision` on digits. Pace: a wider ResNet on larger images, because the recipe's own is
too small for its products to matter.
"""

from collections.abc import Mapping
from typing import Any

import torch

from modelwright_claims import product_runs
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences, ratios

MOST_LOST = 0.2
"""Points of accuracy, as published."""
SPEEDUP = 1.4
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "FP32": {"precision": {"policy": "fp32"}}, "BF16 mixed": {"precision": {"policy": "bf16_mixed"}},
}  # fmt: skip
FP32, BF16 = POLICIES
ACCURACY, PACE = "accuracy, ", "images per second, "
WIDTHS, IMAGE_SIZE, BATCH_IMAGES = (64, 128, 256), 32, 64


def measure(setting: Setting) -> Measurement:
    seeds = range(1 if setting.quick else 5)
    accuracy = product_runs.accuracies(setting, POLICIES, seeds)
    threads = torch.get_num_threads()
    pace = product_runs.paces(setting, _wide(setting), num_repeats=1 if setting.quick else 5, num_threads=threads)
    return Measurement(
        samples={ACCURACY + arm: values for arm, values in accuracy.items()}
        | {PACE + arm: values for arm, values in pace.items()},
        conditions={
            "seeds": len(seeds),
            "accuracy": "recipe vision, a ResNet of 16, 32 and 64 channels on 16 x 16 digits",
            "pace": f"a ResNet of {', '.join(map(str, WIDTHS))} channels on {IMAGE_SIZE} x {IMAGE_SIZE} images, "
            f"{BATCH_IMAGES} a step, {threads} threads, arms in turn, median step",
            "batch norm": "in FP32 under both policies",
            "instruction set": torch.backends.cpu.get_cpu_capability(),
        },
    )


def _wide(setting: Setting) -> dict[str, Mapping[str, Any]]:
    """The settings whose pace is measured."""
    widths = WIDTHS[:1] if setting.quick else WIDTHS
    shape = {"resnet": {"image_size": IMAGE_SIZE, "widths": list(widths), "blocks_per_stage": 1}}
    length = {
        "num_steps": 6 if setting.quick else 20,
        "num_epochs": 0.0,
        "batch_tokens": product_runs.ROW_TOKENS * BATCH_IMAGES,
    }
    return {arm: {**settings, **shape, **length, "eval_every_steps": 0} for arm, settings in POLICIES.items()}


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    judgment.ask(
        "accuracy over FP32", lambda: differences(samples[ACCURACY + BF16], samples[ACCURACY + FP32]), "points", ">=",
        -MOST_LOST, say="accuracy {0.mean:+.2f} points beside FP32",
    )  # fmt: skip
    judgment.ask(
        "speed over FP32", lambda: ratios(samples[PACE + BF16], samples[PACE + FP32]), "x", ">=", SPEEDUP,
        say="{0.mean:.2f}x as fast",
    )  # fmt: skip
    for arm in POLICIES:
        judgment.show(samples, [ACCURACY + arm], "%")
        judgment.show(samples, [PACE + arm], "/s")
    return judgment.verdict()


CLAIM = declared(__name__)
