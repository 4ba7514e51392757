"""Cleaning: documents kept, dropped and changed by each step, with examples and the settings that keep them."""

import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import zstandard

from modelwright_board.files import as_number, as_object, masked, open_inside, parse_json
from modelwright_board.project import cleaning_remedies
from modelwright_board.runs import Run, changed
from modelwright_board.screen import Board, Query, Screen, last_value

MOST_SCANNED, MOST_SHOWN, MOST_LINE = 20_000, 20, 2_000_000
ARTIFACT = ("clean", "artifact")


def dropped_records(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the records of dropped documents, at most `MOST_SCANNED`."""
    try:
        with open_inside(folder, *ARTIFACT, "dropped.jsonl.zst") as file:
            reader = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file), 1 << 20)
            for _ in range(MOST_SCANNED):
                line = reader.readline(MOST_LINE)
                if not line:
                    return
                yield as_object(parse_json(line.decode("utf-8", "replace")))
    except (OSError, zstandard.ZstdError):
        return


def funnel(report: Mapping[str, Any], remedies: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the steps in order, each with its input documents and its dropped documents by reason. remedies:
    options that keep what is dropped for a reason, whatever the text.
    """
    remedies = {**remedies} | {str(key): str(value) for key, value in as_object(report.get("remedies")).items()}
    total = as_number(report.get("num_documents"))
    rows: list[dict[str, Any]] = []
    left = total
    for step in report.get("steps") or []:
        reasons = [
            (str(reason), as_number(as_object(entry).get("documents")), remedies.get(str(reason), ""))
            for reason, entry in as_object(as_object(report.get("dropped")).get(str(step))).items()
        ]
        gone = sum(number for _, number, _ in reasons if number == number)
        rows.append({"step": str(step), "reached": left, "gone": gone, "reasons": reasons})
        left -= gone
    return rows


def examples(run: Run, query: Query) -> Mapping[str, Any]:
    """Returns dropped documents of a reason or with a word, and the largest clusters of near-duplicates."""
    reason, word = (last_value(query, name) for name in ("reason", "word"))
    shown, clusters = scan(run.path, changed(run.path.joinpath(*ARTIFACT, "dropped.jsonl.zst")), reason, word)
    return {"examples": shown, "clusters": clusters, "reason": reason, "word": word, "most_scanned": MOST_SCANNED}


@lru_cache(maxsize=8)  # an open page asks every second
def scan(
    folder: Path, version: tuple[int, int], reason: str, word: str
) -> tuple[list[dict[str, str]], list[tuple[str, int, list[str]]]]:
    """Reads the dropped documents of a run. version: time and size of the file, another one after a change."""
    shown: list[dict[str, str]] = []
    clusters: dict[str, list[str]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    for record in dropped_records(folder):
        if record.get("step") == "duplicates":
            first = str(record.get("detail", "")).rpartition(" with ")[2]
            sizes[first] += 1
            if len(clusters[first]) < 8:
                clusters[first].append(str(record.get("id", "")))
        text = str(record.get("text", ""))
        if (
            reason in ("", record.get("reason"))
            and word.lower() in (text + str(record.get("id"))).lower()
            and len(shown) < MOST_SHOWN
        ):
            names = ("id", "step", "reason", "detail", "text", "source")
            shown.append({name: masked(record.get(name, ""), 600) for name in names})
    largest = [(masked(first, 200), number + 1, clusters[first]) for first, number in sizes.most_common(10)]
    return shown, largest


def show(board: Board, query: Query) -> Mapping[str, Any]:
    run = board.chosen_run(query)
    report = run.json(*ARTIFACT, "report.json") if run else {}
    empty = {"examples": [], "clusters": [], "reason": "", "word": "", "most_scanned": MOST_SCANNED}
    found = examples(run, query) if run and report else empty
    replaced = list(islice(as_object(report.get("replaced")).items(), 40))
    total = as_number(report.get("num_documents"))
    return {
        "report": report, "total": total, "funnel": funnel(report, cleaning_remedies(board.own)), "replaced": replaced,
        **found,
    }  # fmt: skip


SCREEN = Screen(
    name="cleaning", title="Cleaning", question="What did each step keep, drop and change, and why?", show=show,
    stage="clean", blocks=("reasons", "jobs"),
)  # fmt: skip
