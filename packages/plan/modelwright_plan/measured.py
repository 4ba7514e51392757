"""The measured error of the memory model.

The figures ship with the package in `measured_errors.json`; `python -m modelwright_plan.claims.planner_errors` writes
it from the committed results, and it is never edited by hand.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

DATA_FILE = "measured_errors.json"


@dataclass(frozen=True, kw_only=True)
class MeasuredError:
    """The error of predicted memory in one measurement on one machine."""

    claim: str
    """Name of the measured claim."""
    processor: str
    date: str
    num_predictions: int
    """Number of predicted peaks that were compared with a real one."""
    max_error_percent: float
    """Largest absolute error."""
    heap_gap_percent: Mapping[str, float] = field(default_factory=dict)
    """Excess of a process's heap over one without gaps, in a step "as configured" and one "as planned"."""


def measured_errors() -> list[MeasuredError]:
    """Reads the errors that ship with the package."""
    text = (files("modelwright_plan") / DATA_FILE).read_text(encoding="utf-8")
    return [MeasuredError(**entry) for entry in json.loads(text)]


def error_text(errors: Sequence[MeasuredError]) -> str:
    """Describes the largest error of each measurement and its machine; "" without measurements."""
    return "; ".join(
        f"{error.claim}: at most {error.max_error_percent:.1f}% off over {error.num_predictions} measurements "
        f"({error.processor}, {error.date})"
        for error in errors
    )


def heap_gap_text(errors: Sequence[MeasuredError]) -> str:
    """Describes the excess of a training process's heap over the predicted peak; "" without measurements."""
    return "; ".join(
        ", ".join(f"{percent:.0f}% for a step {step}" for step, percent in error.heap_gap_percent.items())
        + f": {error.processor}, {error.date}"
        for error in errors
        if error.heap_gap_percent
    )
