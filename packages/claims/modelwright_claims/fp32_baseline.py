"""The exact FP32 that number formats are compared with: the faster of PyTorch's own products and oneDNN's.

PyTorch takes MKL's products, on some processors at half the rate of oneDNN's, which are as exact there.
"""

import statistics

from modelwright.core.errors import ConfigError
from modelwright.train.precision.apply import fp32_products
from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Samples
from modelwright_claims.judging import Lacks

FP32, BY_ONEDNN = "fp32", "fp32 by oneDNN"
NO_ONEDNN = "FP32 by oneDNN"
"""The condition that says why it was not compared."""


def onednn_is_exact() -> bool:
    """Whether oneDNN's FP32 products are another way to the same values here."""
    if workbench.device().type != "cpu":
        return False
    try:
        with fp32_products(onednn=True):
            return True
    except ConfigError:
        return False


def baseline_conditions() -> dict[str, str]:
    """Return the condition to record where there is no second exact FP32."""
    return {} if onednn_is_exact() else {NO_ONEDNN: "not compared: oneDNN has no exact FP32 products here"}


def exact_baselines(samples: Samples, conditions: Conditions, prefix: str) -> list[str]:
    """Return the arms of exact FP32 that were measured. Raises `Lacks` when oneDNN's was left out without a reason."""
    if prefix + BY_ONEDNN in samples:
        return [FP32, BY_ONEDNN]
    if NO_ONEDNN not in conditions:
        raise Lacks(f"samples {prefix + BY_ONEDNN!r}")
    return [FP32]


def fastest_exact(samples: Samples, conditions: Conditions, prefix: str) -> str:
    """Return the arm of exact FP32 with the most tokens per second."""
    arms = exact_baselines(samples, conditions, prefix)
    return max(arms, key=lambda arm: statistics.fmean(samples[prefix + arm]))
