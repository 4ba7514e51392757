"""Data: the first records and fields of a file, `modelwright clean --dry-run`, and the sources of a run."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from modelwright_board.files import as_number, as_object, masked, open_inside
from modelwright_board.runs import Run, shown_path
from modelwright_board.screen import Board, Query, Screen, last_value

NUM_RECORDS = 5


def first_records(board: Board, query: Query) -> Mapping[str, Any]:
    """Returns the first records of a dropped file and the names of their fields. A file elsewhere is not opened: only
    the command line reads it.
    """
    wanted = last_value(query, "sources")
    path = next((one for one in board.uploads() if wanted in (shown_path(one), one.name)), None)
    if path is None:
        return {"file": "", "records": [], "fields": []}
    records: list[str] = []
    fields: dict[str, None] = {}
    try:
        with open_inside(board.own / "data", path.name) as file:
            for _ in range(NUM_RECORDS):
                line = file.readline(200_000)
                if not line:
                    break
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    records.append(masked(line.decode("utf-8", "replace"), 1500))
                    continue
                fields |= dict.fromkeys(as_object(value))
                records.append(masked(json.dumps(value, ensure_ascii=False, indent=1), 1500))
    except OSError:
        pass
    return {"file": path.name, "records": records, "fields": [str(name) for name in fields][:60]}


def read_by(run: Run | None) -> Mapping[str, Any]:
    """Returns counts, lengths, languages and fields of the documents of a run; unused fields come first."""
    names = ("sources.json", "report.json")
    sources, report = (run.json("clean", "artifact", name) if run else {} for name in names)
    sizes = as_object(sources.get("bytes"))
    read = [
        [kind, as_number(number), as_number(sizes.get(kind))]
        for kind, number in as_object(sources.get("documents")).items()
    ]
    lengths = sorted(
        (int(key), as_number(value)) for key, value in as_object(report.get("kept_lengths")).items() if key.isdigit()
    )
    languages = sorted(
        ((as_number(value), key) for key, value in as_object(report.get("languages")).items()), reverse=True
    )
    uses: dict[str, Counter[str]] = defaultdict(Counter)
    for file in as_object(sources.get("field_use")).values():
        for name, counts in as_object(as_object(file).get("fields")).items():
            numbers = (as_number(as_object(counts).get(key)) for key in ("records", "used"))
            num_records, num_used = (int(one) if math.isfinite(one) else 0 for one in numbers)
            uses[name] += Counter(used=num_used, unused=num_records - num_used)
    ordered = sorted(uses.items(), key=lambda pair: -pair[1]["unused"])
    field_use = [[name, use["used"], use["unused"]] for name, use in ordered]
    return {
        "sources": sources, "lengths": lengths, "languages": languages[:12], "read": read, "field_use": field_use[:200],
    }  # fmt: skip


def show(board: Board, query: Query) -> Mapping[str, Any]:
    first = first_records(board, query)
    return {
        **first, **read_by(board.chosen_run(query)),
        "suggestions": {"fields": [(name, name) for name in first["fields"]]},
        "uploads": [(shown_path(path), path.name, path.stat().st_size) for path in board.uploads()[:20]],
    }  # fmt: skip


def state(board: Board, run: Run | None) -> str:
    number = len(board.uploads())
    return f"{number} dropped" if number else "read" if run and run.has_done("clean") else ""


SCREEN = Screen(
    name="data", title="Data", question="What is in my data, and which of its fields are used?", show=show, state=state,
)  # fmt: skip
