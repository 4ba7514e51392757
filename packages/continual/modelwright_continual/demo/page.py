"""The report of the demonstration: its measurements, its timeline, and which parts are synthetic."""

import json
from pathlib import Path

from modelwright.core.artifacts import write_atomic
from modelwright.pipeline.report.blocks import Fact, Note, Page, Section, Table
from modelwright.pipeline.report.page import render
from modelwright_continual.benchmark import TASKS
from modelwright_continual.demo.run import REPLAY, Demo, DemoResult
from modelwright_continual.drift_trigger import DRIFT_FILE
from modelwright_continual.loop import PROMOTION

REPORT, FIGURES = "report.html", "report.json"
SYNTHETIC = (
    "Made up: the users. Programs in sessions of one to four requests ask how held-out documentation goes on, and from "
    "one moment on half of the sessions ask about libraries that the first model has never seen. Nobody gives "
    "feedback, so the A/B test judges errors and slow answers alone. Real: the texts, which are documentation of this "
    "machine's Python, PyTorch and NumPy; both models and their training; the server, its log and its answers; the "
    "drift monitor, the gate, the A/B test, the promotion, and all figures."
)
FLOOR_LEAD = (
    "Bits per byte of the validation half of the benchmark, each model as it is served; in brackets the difference "
    "from the old model. The floor learned old and new texts together from random weights, with the FLOPs of both "
    "trainings."
)


def write_page(demo: Demo, result: DemoResult) -> Path:
    """Writes `report.html` and `report.json`; returns the path of the page."""
    figures = {
        "ending": result.loop.ending,
        "handsoff_s": result.handsoff_s,
        "total_s": result.total_s,
        "requests": {"answered": result.num_answered, "failed": len(result.failures)},
        "models": [
            {"model": row.model, "flops": row.flops, "bits_per_byte": dict(row.bits)}
            | {"change": {task: result.floor.change(row, task) for task in TASKS}}
            for row in result.floor.rows
        ],
        "synthetic": SYNTHETIC,
    }
    write_atomic(demo.folder / FIGURES, json.dumps(figures, indent=1))
    path = demo.folder / REPORT
    write_atomic(path, render(_page(demo, result)))
    return path


def _page(demo: Demo, result: DemoResult) -> Page:
    updated, floor = result.floor.rows[1:]
    change = result.floor.change
    facts = [
        Fact("old texts after the update", f"{change(updated, 'old'):+.1%}", f"floor {change(floor, 'old'):+.1%}"),
        Fact("new texts after the update", f"{change(updated, 'new'):+.1%}", f"floor {change(floor, 'new'):+.1%}"),
        Fact("failed requests", str(len(result.failures)), f"of {result.num_answered + len(result.failures):,}"),
    ]
    if result.handsoff_s is not None:
        facts.append(Fact("from the change to the new model", f"{result.handsoff_s / 60:.1f} min", "without a person"))
    return Page(
        title="Continual update: demonstration",
        subtitle=f"The loop ended: {result.loop.ending}. Bits per byte, relative to the old model; lower is better.",
        facts=facts,
        sections=[
            Section("models", "Forgetting and learning beside the capacity floor", [_models(result)], lead=FLOOR_LEAD),
            Section("timeline", "What happened when", [_timeline(demo)]),
            Section("gate", "Drift, gate and A/B test", _verdicts(demo, result)),
            Section("synthetic", "What is synthetic", [Note(SYNTHETIC)]),
        ],
        warnings=[f"{len(result.failures)} requests failed: {result.failures[0]}"] if result.failures else [],
    )


def _models(result: DemoResult) -> Table:
    rows = [[row.model, *result.floor.cells(row), f"{row.flops:.2e}"] for row in result.floor.rows]
    header = ["Model", "Old texts, bits per byte", "New texts, bits per byte", "Training FLOPs"]
    caption = f"The update replays {REPLAY:.0%} old rows."
    return Table(header, rows, "Models", caption=caption, numeric=(1, 2, 3), strong=(1,))


def _timeline(demo: Demo) -> Table:
    moments = demo.timeline.read()
    first = min(one["time"] for one in moments.values())
    rows = [[name, f"{one['time'] - first:,.0f}"] for name, one in moments.items()]
    return Table(["Step", "Seconds since the first"], rows, "Timeline", numeric=(1,))


def _verdicts(demo: Demo, result: DemoResult) -> list[Note]:
    windows = json.loads((demo.update.path / DRIFT_FILE).read_text(encoding="utf-8"))
    causes = {one["name"]: one["cause"] for window in windows for one in window["features"] if one["alarm"]}
    notes = [Note(f"Drift in {name}: {cause}.") for name, cause in causes.items()]
    notes += [Note(line) for line in result.loop.text.splitlines()]
    if result.loop.ending == "promoted":
        promotion = json.loads((demo.update.path / PROMOTION).read_text(encoding="utf-8"))
        units = promotion["test"]["sample_ratio"]["units"]
        notes.append(Note(f"A/B test: sessions by arm {units}; promoted after {demo.size.min_units} in each."))
    return notes
