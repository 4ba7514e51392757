"""Checks that the features of a training run can be combined, from each feature's needs and the properties it breaks.

A feature declares both next to its configuration; `check_compatible` refuses a run in which one feature breaks what
another one needs. No rule names a pair.
"""

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from modelwright.core.config import ConfigError

WHOLE_GRADIENTS = "whole gradients after backward"
UNDIVIDED_GRADIENTS = "every parameter's gradient in one piece on every rank"
GRADIENT_SUMS = "gradients that are summed over ranks after backward"
EXACT_SUMS = "exact sums of gradients"
PROMPT_GRADIENTS = "gradients that are used in the step that computed them"
SYNCHRONOUS_UPDATES = "updates that all ranks make together"
EQUAL_REPLICAS = "equal weights on all replicas after every step"
WHOLE_MODEL = "a whole model on every rank"
WHOLE_MATRICES = "whole weight matrices on every rank"
WHOLE_ROWS = "whole rows on every rank"
WHOLE_BATCHES = "all rows of a rank's batch in one forward pass"
LAYER_OUTPUTS = "the output of every layer on every rank"
WHOLE_LAYERS = "all layers, undivided, on every rank"
EAGER_BLOCKS = "blocks that are not compiled"
SAME_MATMULS = "the same matrix products in every step"
SAME_UNITS = "updates of all units of the model"
FLOAT_PRODUCTS = "matrix products in floating-point formats of 16 bits and more"
TRAINED_WEIGHTS = "updates of the model's own weights"
ADAMW_STATES = "AdamW with FP32 states"
RESIDENT_STATES = "optimizer states beside the weights"
REVERSIBLE_UPDATES = "updates that a rollback can undo"
ONE_COPY = "one copy of the weights for all processes of a host"
OWN_WEIGHTS = "weights that no other process changes"
LASTING_LAYOUT = "layers that stay where they are"

UNDECLARED = frozenset({WHOLE_GRADIENTS, UNDIVIDED_GRADIENTS, OWN_WEIGHTS, EQUAL_REPLICAS, SYNCHRONOUS_UPDATES})
"""Needs of code that changes gradients or weights and declares none: every rank has all of them, equal to those of the
others, so that a result that is right on one process is right on each."""

SEVERAL_REPLICAS = "several replicas whose gradients are summed"
SEVERAL_STAGES = "a pipeline"
ACCELERATOR = "an accelerator"
"""Conditions that some features need for any effect (`Feature.only_with`)."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that a run does besides plain training. key: the setting that enables it. value: of that setting, where
    it matters. needs: properties of the run that it relies on. breaks: properties that it removes. only_with:
    properties of the layout or the machine without which it changes nothing.
    """

    key: str
    value: str = ""
    needs: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()
    only_with: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.key} {self.value}".rstrip()


def feature(
    key: str,
    value: object = "",
    *,
    needs: Iterable[str] = (),
    breaks: Iterable[str] = (),
    only_with: Iterable[str] = (),
) -> Feature:
    """Build a `Feature` from plain collections."""
    return Feature(
        key=key, value=str(value), needs=frozenset(needs), breaks=frozenset(breaks), only_with=frozenset(only_with)
    )


def conflict(features: Iterable[Feature]) -> str:
    """Returns the reason why these features cannot be combined, or ""."""
    # Permutations: each feature can break the needs of the other. Sorted needs keep the message the same in every run.
    for one, other in itertools.permutations(features, 2):
        for need in sorted(one.needs & other.breaks):
            what = f"{one.value} needs" if one.value else "needs"
            remedy = "change one of the two"
            # Code that declares nothing has all needs of `UNDECLARED`, so the user can also remedy the declaration.
            if one.needs >= UNDECLARED:
                remedy += f"; if {one.key} can do without, it has to declare what it needs (docs/extending.md)"
            return f"{one.key}: {what} {need}, which {other} takes away; {remedy}"
    return ""


def check_compatible(features: Iterable[Feature]) -> None:
    """Raise `ConfigError` for the first feature whose needs another one breaks."""
    if problem := conflict(features):
        raise ConfigError(problem)


def idle(features: Iterable[Feature], offered: Collection[str]) -> list[str]:
    """Lists the features that need more than the `offered` properties for any effect, each with those that it lacks."""
    lacking = ((one, sorted(one.only_with.difference(offered))) for one in features)
    return [f"{one} (needs {', '.join(lacks)})" for one, lacks in lacking if lacks]
