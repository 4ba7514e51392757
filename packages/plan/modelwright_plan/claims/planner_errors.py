"""The planner's measured errors, taken from the results: `python -m modelwright_plan.claims.planner_errors`.

The product ships them as data, so that `modelwright plan` can state them without the results.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import modelwright_plan
from modelwright.core.artifacts import write_atomic
from modelwright_claims.activation_checkpointing import MEMORY_ERRORS
from modelwright_claims.results import all_figures, read_results
from modelwright_plan.claims.planned_memory import HEAP_GAPS, PLANNED_HEAP_GAPS
from modelwright_plan.measured import DATA_FILE, MeasuredError

RESULTS = Path("benchmarks/results")


def planner_errors(records: Sequence[Mapping[str, Any]]) -> list[MeasuredError]:
    """Return the error of each full measurement in which predicted peaks were compared with real ones."""
    gap_figures = {"as configured": HEAP_GAPS, "as planned": PLANNED_HEAP_GAPS}
    return [
        MeasuredError(
            claim=record["name"],
            processor=record["machine"]["processor"],
            date=record["date"],
            num_predictions=len(record["samples"][MEMORY_ERRORS]),
            max_error_percent=round(max(map(abs, record["samples"][MEMORY_ERRORS])), 2),
            heap_gap_percent={
                step: round(all_figures(record)[name]["value"], 1)
                for step, name in gap_figures.items()
                if name in all_figures(record)
            },
        )
        for record in records
        if record["samples"].get(MEMORY_ERRORS) and not record["quick"]
    ]


def as_json(errors: Sequence[MeasuredError]) -> str:
    return json.dumps([asdict(error) for error in errors], indent=1) + "\n"


def main() -> None:
    """Write the errors in `benchmarks/results` into the source of `modelwright_plan`."""
    (package,) = modelwright_plan.__path__
    write_atomic(Path(package) / DATA_FILE, as_json(planner_errors(read_results(RESULTS))))


if __name__ == "__main__":
    main()
