"""What a pipeline schedule allows: the order of work that ranks really took, simulated with chosen durations.

With equal durations this gives the schedules' textbook figures, with measured ones the bound of that split.
"""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from modelwright.parallel.pipeline.balance import StageSpan
from modelwright_plan.bubble import Action, Kind, makespan

EQUAL: dict[Kind, float] = {"forward": 1.0, "loss": 0.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
"""Durations where forward, input and weight passes of all stages take equally long."""


def order_taken(spans: Sequence[Sequence[StageSpan]]) -> list[list[Action]]:
    """What each rank did; a stage's spans of one kind come in the order of microbatches."""
    return [_order_of(rank) for rank in spans]


def _order_of(spans: Sequence[StageSpan]) -> list[Action]:
    seen: Counter[tuple[str, int]] = Counter()
    actions: list[Action] = []
    for span in spans:
        counted = "backward" if span.kind == "backward_input" else span.kind, span.stage
        actions.append((cast(Kind, span.kind), span.stage, seen[counted]))
        seen[counted] += 1
    return actions


def measured_durations(spans: Sequence[Sequence[StageSpan]]) -> list[list[float]]:
    return [[span.busy_s for span in rank] for rank in spans]


def equal_durations(spans: Sequence[Sequence[StageSpan]]) -> list[list[float]]:
    return [[EQUAL[cast(Kind, span.kind)] for span in rank] for rank in spans]


def busy_share(spans: Sequence[Sequence[StageSpan]], durations: Sequence[Sequence[float]]) -> float:
    """Share of the step in which ranks compute, the mean of the ranks; sending costs nothing."""
    busy = sum(map(sum, durations)) / len(durations)
    return busy / makespan(order_taken(spans), durations)
