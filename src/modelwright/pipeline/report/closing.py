"""What the terminal shows when a run has ended: the figures at the top of the report, and what stages add to them."""

from collections.abc import Sequence

from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.run_data import RunData, read_run


def closing_lines(config: RunConfig, run: RunDir) -> Sequence[str]:
    """The figures of the finished stages, one line each, then their own lines."""
    data = read_run(config, run)
    finished = [(spec, stage) for spec in config.stages if (stage := data.done(spec.name))]
    return [*figures(data), *(line for spec, stage in finished for line in spec.closing(data, stage))]


def figures(data: RunData) -> list[str]:
    """The figures of the finished stages, one line each."""
    finished = [(spec, stage) for spec in data.config.stages if (stage := data.done(spec.name))]
    facts = [fact for spec, stage in finished for fact in spec.headline(data, stage)]
    width = max((len(fact.label) for fact in facts), default=0)
    return [f"{fact.label:<{width}}  {fact.value}" + (f" ({fact.hint})" if fact.hint else "") for fact in facts]
