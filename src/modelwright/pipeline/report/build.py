"""The whole page from a run's folder: figures at the top, then the section of each stage."""

from collections.abc import Sequence

from modelwright import __version__
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Fact, Page, Section
from modelwright.pipeline.report.energy import energy_facts, energy_section
from modelwright.pipeline.report.environment import cost_section, machine_words, settings_section, used
from modelwright.pipeline.report.format import compact, count, plural, seconds
from modelwright.pipeline.report.run_data import RunData, StageData, read_run
from modelwright.pipeline.stage import StageSpec


def build_page(config: RunConfig, run: RunDir, *, without: StageSpec) -> Page:
    """The report of the stages that have finished so far.

    without: the stage that writes it, which has not finished when it is first written
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
    return Page(
        title=config.name,
        subtitle=" · ".join(word for word in words if word),
        facts=[
            _model_fact(data),
            *(fact for spec, stage in finished for fact in spec.headline(data, stage)),
            _cost(timed),
            *energy_facts(timed),
        ],
        sections=[
            *filter(None, [_overview(data, finished), *sections, cost_section(timed), energy_section(timed)]),
            settings_section(data),
        ],
        footer=f"Written by Modelwright {__version__}"
        + (f", commit {last['commit']}" if last.get("commit") else "")
        + ". This file needs no network.",
        warnings=[*_unfinished(data, specs), *warnings],
    )


def _overview(data: RunData, finished: Sequence[tuple[StageSpec, StageData]]) -> Section | None:
    """What is worth seeing first: charts side by side, then the rest. None if no stage has anything."""
    blocks = [block for spec, stage in finished for block in spec.highlight(data, stage)]
    charts_first = sorted(blocks, key=lambda block: block.kind != "chart")
    return Section("overview", "At a glance", charts_first) if blocks else None


def _model_fact(data: RunData) -> Fact:
    model = data.config.model
    shape = f"{model.num_layers} layers of width {model.model_dim}, {count(model.vocab_size)} tokens"
    return Fact("Parameters", compact(model.num_parameters), shape)


def _cost(stages: Sequence[StageData]) -> Fact:
    return Fact("Whole run", seconds(sum(used(stage)["wall_s"] for stage in stages)), plural(len(stages), "stage"))


def _unfinished(data: RunData, specs: Sequence[StageSpec]) -> list[str]:
    missing = [spec.name for spec in specs if not data.done(spec.name)]
    return [f"Not finished: {', '.join(missing)}. This report shows the finished stages."] if missing else []
