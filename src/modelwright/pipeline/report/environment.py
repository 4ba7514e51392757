"""The report's sections on the run itself: the cost of each stage, the machine, the settings."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from modelwright.core.config import dump
from modelwright.core.redact import redact_plain
from modelwright.pipeline.report.blocks import Block, Chart, Excerpt, Fold, Note, Section, Table
from modelwright.pipeline.report.charts import bar_chart
from modelwright.pipeline.report.format import percent, plural, seconds, size
from modelwright.pipeline.report.run_data import RunData, StageData


def cost_section(stages: Sequence[StageData]) -> Section:
    """Time and peak memory of finished stages."""
    wall = [used(stage)["wall_s"] for stage in stages]
    peak = [used(stage)["peak_bytes"] / 1e6 for stage in stages]
    names = [stage.name for stage in stages]
    blocks: list[Block] = []
    if stages:
        time_svg = bar_chart(
            names, [("seconds", wall)], name="time", x_label="seconds", values=[[seconds(value) for value in wall]]
        )
        memory_svg = bar_chart(
            names, [("MB", peak)], name="memory", x_label="MB", values=[[size(value * 1e6) for value in peak]]
        )
        blocks += [
            Chart("Time per stage", time_svg),
            Chart("Peak memory per stage", memory_svg, "Resident memory of the process, libraries included."),
            _table(stages, sum(wall)),
        ]
    cut = sum(entry["state"] in ("killed", "stopped", "failed") for stage in stages for entry in stage.attempts)
    if cut:
        verb = "was" if cut == 1 else "were"
        blocks.append(Note(f"{plural(cut, 'attempt')} {verb} interrupted before the stage finished and then resumed."))
    return Section("cost", "Time and memory", blocks)


def used(stage: StageData) -> dict[str, float]:
    """Wall time and CPU time of all attempts together, and the largest peak memory (child processes included)."""
    return {
        "wall_s": sum(entry["wall_s"] for entry in stage.attempts),
        "cpu_s": sum(entry["cpu_s"] for entry in stage.attempts),
        "peak_bytes": max(max(entry["peak_bytes"], entry.get("child_peak_bytes", 0)) for entry in stage.attempts),
    }


def settings_section(data: RunData) -> Section:
    """Machine, versions, command lines, and the whole configuration."""
    invocations = data.info.get("invocations", [])
    blocks: list[Block] = []
    if invocations:
        blocks.append(_machine_table(invocations[-1]))
        commands = "\n".join(f"{entry['started']}  {' '.join(entry['command'])}" for entry in invocations)
        blocks.append(Fold("Command lines", [Excerpt("", commands)]))
    text = yaml.safe_dump(redact_plain(dump(data.config)), sort_keys=False, allow_unicode=True)
    blocks.append(Fold("Resolved configuration, which can be run again", [Excerpt("config.yaml", text)]))
    return Section("settings", "Machine and settings", blocks)


def machine_words(info: Mapping[str, Any]) -> str:
    """`AMD EPYC, 2 threads, 24 GB`."""
    box = info.get("hardware", {})
    if not box:
        return ""
    device = "CUDA" if str(box.get("device", "")).startswith("cuda") else machine_threads(box)
    ranks = f" x {plural(info['world_size'], 'process')}" if info.get("world_size", 1) > 1 else ""
    return f"{box['processor']}, {device}{ranks}, {size(box['memory_bytes'])} memory"


def machine_threads(box: Mapping[str, Any]) -> str:
    """Threads of all processes together."""
    return plural(box.get("num_threads", 1), "thread")


def _table(stages: Sequence[StageData], total: float) -> Table:
    rows = []
    for stage in stages:
        use = used(stage)
        share = percent(use["wall_s"] / total, 0) if total else ""
        cores = f"{use['cpu_s'] / use['wall_s']:.2f}" if use["wall_s"] else ""
        attempts = str(len(stage.attempts))
        rows.append([stage.name, seconds(use["wall_s"]), share, cores, size(use["peak_bytes"]), attempts])
    rows.append(["total", seconds(total), "", "", "", ""])
    header = ["stage", "time", "share", "cores busy", "peak memory", "attempts"]
    return Table(header, rows, "Stages in numbers", numeric=range(1, 6), strong=(len(rows) - 1,))


def _machine_table(entry: Mapping[str, Any]) -> Table:
    box = entry["hardware"]
    rows = [
        ["processor", f"{box['processor']}, {plural(box['cores'], 'core')}"],
        ["memory", size(box["memory_bytes"])],
        ["device", f"{box.get('device', '')}, {machine_threads(box)}, {plural(entry['world_size'], 'process')}"],
        ["system", f"{box['system']}, Python {box['python']}"],
        ["versions", ", ".join(f"{name} {version}" for name, version in entry["versions"].items())],
    ]
    if entry.get("commit"):
        rows.append(["commit", entry["commit"]])
    return Table(["", ""], rows, "Machine and versions")
