"""The whole report from a run's folder: figures at the top, then the section of each stage, as one self-contained HTML
file without scripts and network access. Also the lines that the terminal shows at the end of a run.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from modelwright import __version__
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import (
    Block,
    Fact,
    Page,
    Section,
    Table,
    compact,
    count,
    number,
    plural,
    seconds,
)
from modelwright.pipeline.report.environment import (
    cost_section,
    energy_facts,
    energy_section,
    machine_words,
    settings_section,
    used,
)
from modelwright.pipeline.report.run_data import RunData, read_run
from modelwright.pipeline.stage import StageSpec


def render(page: Page) -> str:
    """Returns the page as HTML. All text is escaped; only the charts' SVG is inserted unchanged."""
    # Escaped, because texts and paths come from users' data; strict, so that a misspelled name is an error.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)

    def runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
        # Neighbors of the same kind form a group, so that charts can share a row.
        return [(kind, list(group)) for kind, group in groupby(blocks, key=lambda block: block.kind)]

    environment.filters["runs"] = runs
    source = files("modelwright.pipeline.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page)


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
        footer=f"Written by Modelwright {__version__}"
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
