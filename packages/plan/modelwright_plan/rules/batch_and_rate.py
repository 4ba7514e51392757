"""Evaluators of rules about the batch and the learning rate."""

import math
from collections.abc import Callable
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright_plan.rules.rule import RuleOutcome, RuleRow, RuleTarget, refusal, value

WITHIN = 2.0
"""A table of model sizes is taken to say something about sizes up to this factor outside it."""


def table_batch(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """A table of batches by model size: the entry nearest in the logarithm of the size."""
    return _of_table(row, target, lambda size: value(f"{size:,.0f} tokens", f"{target.batch_tokens:,}"))


def table_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """A table of peak learning rates by model size, for Adam."""
    if not target.is_adaptive:
        return refusal(f"the rates are Adam's, and the optimizer is {target.optimizer}")
    return _of_table(row, target, lambda rate: value(f"{rate:.2g}", f"{target.learning_rate:.2g}"))


def power_law_batch(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Batch in tokens: factor x compute ^ exponent."""
    return _of_compute(row, target, lambda size: value(f"{size:,.0f} tokens", f"{target.batch_tokens:,}"))


def power_law_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Peak learning rate of AdamW: factor x compute ^ exponent."""
    if not target.is_adaptive:
        return refusal(f"it was fitted with AdamW, and the optimizer is {target.optimizer}")
    return _of_compute(row, target, lambda rate: value(f"{rate:.2g}", f"{target.learning_rate:.2g}"))


def logarithmic_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Peak learning rate of Adam: intercept + slope x ln(parameters without the embedding)."""
    if because := _outside(row, target):
        return refusal(because)
    return value(
        f"{_logarithmic(row, target):.2g} (for batches of {row.number('batch_tokens'):,.0f} tokens)",
        f"{target.learning_rate:.2g} (for {target.batch_tokens:,})",
    )


def scaled_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """A rate carried from the batch that it belongs to, to the target's, by the row's power of their ratio.

    The rate is the configured one where the training says which batch it belongs to, else that of `logarithmic_rate`.
    """
    kind, fits = ("Adam", target.is_adaptive) if row.number("exponent") < 1 else ("SGD", target.optimizer == "sgd")
    if not fits:
        return refusal(f"it was derived for {kind}, and the optimizer is {target.optimizer}")
    if target.reference_batch_tokens:
        start, tokens, whose = target.reference_rate, float(target.reference_batch_tokens), "your learning_rate"
    elif "intercept" not in row.parameters:
        return refusal(
            "nobody has said which batch the rate belongs to; set training.lr_scaling and lr_reference_batch_tokens"
        )
    elif because := _outside(row, target):
        return refusal(f"there is no rate to start from: {because}")
    else:
        start, tokens, whose = _logarithmic(row, target), row.number("batch_tokens"), "Kaplan's rate"
    rate = start * (target.batch_tokens / tokens) ** row.number("exponent")
    return value(
        f"{rate:.2g} for your batch of {target.batch_tokens:,} tokens (from {whose} {start:.2g} at {tokens:,.0f})",
        f"{target.learning_rate:.2g}",
    )


def _logarithmic(row: RuleRow, target: RuleTarget) -> float:
    return row.number("intercept") + row.number("slope") * math.log(target.num_parameters)


def _outside(row: RuleRow, target: RuleTarget) -> str:
    """Why a rule about pretraining with Adam, fitted to some sizes of models, does not apply; "" if it does."""
    low, high = row.number("least_parameters"), row.number("most_parameters")
    if not target.is_from_scratch:
        return "it is about training from random weights, and yours starts from a model"
    if not target.is_adaptive:
        return f"it was fitted with Adam, and the optimizer is {target.optimizer}"
    if not low <= target.num_parameters <= high:
        return f"it was fitted to {low:,.0f} to {high:,.0f} parameters, yours has {target.num_parameters:,}"
    return ""


def _of_table(row: RuleRow, target: RuleTarget, outcome: Callable[[float], RuleOutcome]) -> RuleOutcome:
    entries: Any = row.parameters.get("by_parameters")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"rules: {row.name} needs by_parameters, a list of pairs")
    pairs = [(float(size), float(of)) for size, of in entries]
    smallest, largest = min(pairs)[0], max(pairs)[0]
    size = target.num_all_parameters
    if not target.is_from_scratch:
        return refusal("it is about training from random weights, and yours starts from a model")
    if not smallest / WITHIN <= size <= largest * WITHIN:
        return refusal(f"its models have {smallest:,.0f} to {largest:,.0f} parameters, yours has {size:,}")
    return outcome(min(pairs, key=lambda pair: abs(math.log(pair[0] / size)))[1])


def _of_compute(row: RuleRow, target: RuleTarget, outcome: Callable[[float], RuleOutcome]) -> RuleOutcome:
    least = row.number("least_flops")
    if not target.is_from_scratch:
        return refusal("it is about training from random weights, and yours starts from a model")
    if not target.training_flops:
        return refusal("the length of the training is not known before its data is packed; set num_steps or num_tokens")
    if target.training_flops < least:
        return refusal(f"it was fitted from {least:.0e} FLOPs on, and yours takes {target.training_flops:.1e}")
    return outcome(row.number("factor") * target.training_flops ** row.number("exponent"))
