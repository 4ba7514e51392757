"""The whole report from a run's folder: figures at the top, then the section of each stage, and those on the run itself
(energy, cost, machine, settings), as one self-contained HTML file without scripts and network access. Also the lines
that the terminal shows at the end of a run.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from modelwright.core import VERSION
from modelwright.core.artifacts import RunDir
from modelwright.core.config import dump
from modelwright.core.texts import redact_plain
from modelwright.pipeline.report.blocks import (
    Block,
    Chart,
    Excerpt,
    Fact,
    Fold,
    Note,
    Page,
    Section,
    Table,
    compact,
    count,
    number,
    percent,
    plural,
    seconds,
    size,
)
from modelwright.pipeline.report.charts import bar_chart
from modelwright.pipeline.report.run_data import RunData, StageData, read_run
from modelwright.pipeline.stage import RunConfig, StageSpec
from modelwright.train.monitors.energy import ENERGY_FILE, MEMORY_WATTS_PER_GB, read_energy, total_energy

_TITLES = {
    "rapl": "processors (RAPL)",
    "rapl_memory": "memory (RAPL)",
    "nvml": "GPUs (NVML)",
    "cores_model": "cores (estimated)",
    "memory_model": "memory (estimated)",
}


def energy_section(stages: Sequence[StageData]) -> Section | None:
    """Returns energy and carbon dioxide of each training stage; None if no stage has trained."""
    entries = {stage.name: read_energy(stage.folder.path / ENERGY_FILE) for stage in stages}
    totals = {name: total_energy(of_stage) for name, of_stage in entries.items() if of_stage}
    if not totals:
        return None
    rows: list[list[str]] = []
    for name, total in totals.items():
        all_joules = sum(total.joules.values())
        sources = (f"{_TITLES[one]} {percent(value / all_joules, 0)}" for one, value in total.joules.items())
        figures = _energy_cells(total.total_joules, total.joules_per_token, total.co2_g, total.seconds)
        rows.append([name, *figures, percent(total.measured_share, 0), ", ".join(sources)])
        if other := total.codecarbon:
            figures = _energy_cells(other.joules, other.joules / max(1, other.num_tokens), other.co2_g, other.seconds)
            rows.append(["codecarbon, an estimate", *figures, "–", f"whole machine, {other.country}"])
    header = ["stage", "energy", "per token", "CO₂", "mean power", "measured", "sources"]
    # Of the latest training: all share the section `energy` unless they override it.
    last = [of_stage[-1] for of_stage in entries.values() if of_stage][-1]
    terms = (
        f"Energy is what the sources say times {last['pue']:g} (PUE: cooling and losses of the data center), carbon "
        f"dioxide {last['carbon_g_per_kwh']:g} g per kWh; both are settings (energy). RAPL and NVML are "
        "readings of a whole host or GPU, other processes included. Estimated: the process's CPU time times "
        f"{last['watts_per_core']:g} W per core, its resident memory times {MEMORY_WATTS_PER_GB:g} W per GB "
        "(Lannelongue et al. 2021); idle parts, disks, network and fans do not count. Work that an interruption undid "
        "counts."
    )
    blocks: list[Block] = [Table(header, rows, "Energy of training", numeric=range(1, 6)), Note(terms)]
    if others := {name: total.codecarbon for name, total in totals.items() if total.codecarbon}:
        versions = ", ".join(dict.fromkeys(other.version for other in others.values()))
        processes = ", ".join(f"{other.num_processes} of {name}" for name, other in others.items())
        terms = (
            f"codecarbon {versions} follows the whole first host, other processes included, models what it cannot "
            "read, and takes the country's mean intensity; the PUE is in its figures, too. They are of the process "
            f"starts with energy.country: {processes}."
        )
        blocks.append(Note(terms))
    return Section("energy", "Energy and carbon dioxide", blocks)


def energy_facts(stages: Sequence[StageData]) -> Sequence[Fact]:
    """Returns the energy of all trainings together, and the share of it that was measured."""
    totals = [total_energy(entries) for stage in stages if (entries := read_energy(stage.folder.path / ENERGY_FILE))]
    if not totals:
        return ()
    used = sum(total.total_joules for total in totals)
    measured = sum(total.measured_share * total.total_joules for total in totals) / max(used, 1e-9)
    hint = (
        f"{number(sum(total.co2_g for total in totals), 3)} g CO₂; {percent(measured, 0)} measured, the rest estimated"
    )
    return (Fact("Energy of training", joules(used), hint),)


def _energy_cells(all_joules: float, joules_per_token: float, co2_g: float, duration_s: float) -> list[str]:
    mean_watts = all_joules / max(1e-9, duration_s)
    return [
        joules(all_joules), f"{number(joules_per_token, 3)} J", f"{number(co2_g, 3)} g", f"{number(mean_watts, 3)} W"
    ]  # fmt: skip


def joules(value: float) -> str:
    """Formats energy: `512 J`, `3.4 kJ`, `1.2 kWh`."""
    if value >= 3.6e5:
        return f"{number(value / 3.6e6, 3)} kWh"
    return f"{number(value / 1e3, 3)} kJ" if value >= 1e3 else f"{number(value, 3)} J"


def cost_section(stages: Sequence[StageData]) -> Section:
    """Returns time and peak memory of finished stages."""
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
        rows: list[list[str]] = []
        for stage in stages:
            use = used(stage)
            share = percent(use["wall_s"] / sum(wall), 0) if sum(wall) else ""
            cores = f"{use['cpu_s'] / use['wall_s']:.2f}" if use["wall_s"] else ""
            attempts = str(len(stage.attempts))
            rows.append([stage.name, seconds(use["wall_s"]), share, cores, size(use["peak_bytes"]), attempts])
        rows.append(["total", seconds(sum(wall)), "", "", "", ""])
        header = ["stage", "time", "share", "cores busy", "peak memory", "attempts"]
        blocks += [
            Chart("Time per stage", time_svg),
            Chart("Peak memory per stage", memory_svg, "Resident memory of the process, libraries included."),
            Table(header, rows, "Stages in numbers", numeric=range(1, 6), strong=(len(rows) - 1,)),
        ]
    cut = sum(entry["state"] in ("killed", "stopped", "failed") for stage in stages for entry in stage.attempts)
    if cut:
        verb = "was" if cut == 1 else "were"
        blocks.append(Note(f"{plural(cut, 'attempt')} {verb} interrupted before the stage finished and then resumed."))
    return Section("cost", "Time and memory", blocks)


def used(stage: StageData) -> dict[str, float]:
    """Returns wall time and CPU time of all attempts together, and the largest peak memory, child processes
    included.
    """
    return {
        "wall_s": sum(entry["wall_s"] for entry in stage.attempts),
        "cpu_s": sum(entry["cpu_s"] for entry in stage.attempts),
        "peak_bytes": max(max(entry["peak_bytes"], entry.get("child_peak_bytes", 0)) for entry in stage.attempts),
    }


def settings_section(data: RunData) -> Section:
    """Returns machine, versions, command lines, and the whole configuration."""
    invocations = data.info.get("invocations", [])
    blocks: list[Block] = []
    if invocations:
        last = invocations[-1]
        box, threads = last["hardware"], plural(last["hardware"].get("num_threads", 1), "thread")
        rows = [
            ["processor", f"{box['processor']}, {plural(box['cores'], 'core')}"],
            ["memory", size(box["memory_bytes"])],
            ["device", f"{box.get('device', '')}, {threads}, {plural(last['world_size'], 'process')}"],
            ["system", f"{box['system']}, Python {box['python']}"],
            ["versions", ", ".join(f"{name} {version}" for name, version in last["versions"].items())],
        ]
        if last.get("commit"):
            rows.append(["commit", last["commit"]])
        blocks.append(Table(["", ""], rows, "Machine and versions"))
        commands = "\n".join(f"{entry['started']}  {' '.join(entry['command'])}" for entry in invocations)
        blocks.append(Fold("Command lines", [Excerpt("", commands)]))
    text = yaml.safe_dump(redact_plain(dump(data.config)), sort_keys=False, allow_unicode=True)
    blocks.append(Fold("Resolved configuration, which can be run again", [Excerpt("config.yaml", text)]))
    return Section("settings", "Machine and settings", blocks)


def machine_words(info: Mapping[str, Any]) -> str:
    """Describes a machine: `AMD EPYC, 2 threads, 24 GB memory`."""
    box = info.get("hardware", {})
    if not box:
        return ""
    is_cuda = str(box.get("device", "")).startswith("cuda")
    device = "CUDA" if is_cuda else plural(box.get("num_threads", 1), "thread")  # threads of all processes together
    ranks = f" x {plural(info['world_size'], 'process')}" if info.get("world_size", 1) > 1 else ""
    return f"{box['processor']}, {device}{ranks}, {size(box['memory_bytes'])} memory"


def render(page: Page) -> str:
    """Returns the page as HTML. All text is escaped; only the charts' SVG is inserted unchanged."""
    # Escaped, because texts and paths come from users' data; strict, so that a misspelled name is an error.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)

    def runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
        # Neighbors of the same kind form a group, so that charts can share a row.
        return [(kind, list(group)) for kind, group in groupby(blocks, key=lambda block: block.kind)]

    environment.filters["runs"] = runs
    source = files("modelwright.pipeline.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    style = files("modelwright.serve").joinpath("static/pages.css").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page, style=style)


def build_page(config: RunConfig, run: RunDir, *, without: StageSpec) -> Page:
    """Returns the report of the stages that have finished so far.

    without: the stage that writes the report, which has not finished when the report is first written
    """
    data = read_run(config, run)
    specs = [spec for spec in config.stages if spec.name != without.name]
    finished = [(spec, stage) for spec in specs if (stage := data.done(spec.name))]
    timed = [stage for _, stage in finished if stage.attempts]
    sections = [spec.report(data, stage) for spec, stage in finished]
    warnings = [f"{spec.name}: {text}" for spec, stage in finished for text in spec.warnings(stage)]
    invocations = data.info.get("invocations", [])
    last = invocations[-1] if invocations else {}
    words = [last.get("started", "")[:10], machine_words(last)]
    highlights = [block for spec, stage in finished for block in spec.highlight(data, stage)]
    charts_first = sorted(highlights, key=lambda block: block.kind != "chart")  # next to each other, then the rest
    overview = Section("overview", "At a glance", charts_first) if highlights else None
    if missing := [spec.name for spec in specs if not data.done(spec.name)]:
        warnings.insert(0, f"Not finished: {', '.join(missing)}. This report shows the finished stages.")
    model, wall_s = config.model, sum(used(stage)["wall_s"] for stage in timed)
    shape = f"{model.num_layers} layers of width {model.model_dim}, {count(model.vocab_size)} tokens"
    return Page(
        title=config.name,
        subtitle=" · ".join(word for word in words if word),
        facts=[
            Fact("Parameters", compact(model.num_parameters), shape),
            *(fact for spec, stage in finished for fact in spec.headline(data, stage)),
            Fact("Whole run", seconds(wall_s), plural(len(timed), "stage")),
            *energy_facts(timed),
        ],
        sections=[
            *filter(None, [overview, *sections, cost_section(timed), energy_section(timed)]),
            settings_section(data),
        ],
        footer=f"Written by Modelwright {VERSION}"
        + (f", commit {last['commit']}" if last.get("commit") else "")
        + ". This file needs no network.",
        warnings=warnings,
    )


def answer_blocks(results: Mapping[str, Any], titles: Mapping[str, str]) -> list[Block]:
    """Returns the table of the models' perplexities; empty without held-out conversations. titles: names of the models,
    by stage.
    """
    rows = [
        [
            titles[name],
            number(table["perplexity"]),
            f"{number(table['perplexity_low'])} to {number(table['perplexity_high'])}",
            f"{table['nats_per_token']:.3f}",
            f"{table['bits_per_byte']:.3f}",
            count(table["conversations"]),
            count(table["tokens"]),
        ]
        for name, table in _tables(results)
    ]
    if not rows:
        return []
    header = ["model", "perplexity", "95% interval", "nats per token", "bits per byte", "conversations", "tokens"]
    caption = "Of the assistant's tokens in held-out conversations, in the model's own chat template."
    return [Table(header, rows, "Held-out answers", caption, numeric=range(1, 7))]


def answer_facts(results: Mapping[str, Any], titles: Mapping[str, str]) -> Sequence[Fact]:
    """Returns the perplexity of the final model's answers, with that of the model before it."""
    tables = _tables(results)
    if not tables:
        return ()
    (_, last), before = tables[-1], tables[:-1]
    hints = [f"{titles[name]}: {number(table['perplexity'], 4)}" for name, table in before]
    return [Fact("Perplexity of answers", number(last["perplexity"], 4), "; ".join(hints))]


def _tables(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the summaries of the models that were scored on answers, in the order in which they were trained."""
    models: Mapping[str, Any] = results["models"]
    return [(name, model["answers"]) for name, model in reversed(list(models.items())) if model.get("answers")]


LABEL_LEN = 8
"""Width of the first word of a line in characters, so that the rest is aligned."""


def closing_lines(config: RunConfig, run: RunDir) -> Sequence[str]:
    """Returns the lines of each finished stage, or its figures if it has no lines, and last the time of each stage, all
    its attempts together.
    """
    data = read_run(config, run)
    finished = [(spec, stage) for spec in config.stages if (stage := data.done(spec.name))]
    lines = [
        line
        for spec, stage in finished
        for line in spec.closing(data, stage) or _fact_lines(spec.headline(data, stage), width=LABEL_LEN)
    ]
    times = {stage.name: used(stage)["wall_s"] for _, stage in finished if stage.attempts}
    parts = ", ".join(f"{name} {seconds(wall_s)}" for name, wall_s in times.items())
    return [*lines, f"{'time':<{LABEL_LEN}} {seconds(sum(times.values()))}: {parts}"] if times else lines


def figures(data: RunData) -> list[str]:
    """Returns the figures of the finished stages, one line each."""
    finished = [(spec, stage) for spec in data.config.stages if (stage := data.done(spec.name))]
    facts = [fact for spec, stage in finished for fact in spec.headline(data, stage)]
    return _fact_lines(facts, width=max((len(fact.label) for fact in facts), default=0) + 1)


def _fact_lines(facts: Sequence[Fact], *, width: int) -> list[str]:
    return [f"{fact.label:<{width}} {fact.value}" + (f" ({fact.hint})" if fact.hint else "") for fact in facts]
