"""What the terminal shows when a run has ended: lines of the finished stages, or their figures in the report, and the
time that each stage took.
"""

from collections.abc import Sequence

from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Fact
from modelwright.pipeline.report.environment import used
from modelwright.pipeline.report.format import seconds
from modelwright.pipeline.report.run_data import RunData, read_run

LABEL_LEN = 8
"""Characters of the first word of a line, so that what follows is aligned."""


def closing_lines(config: RunConfig, run: RunDir) -> Sequence[str]:
    """The lines of each finished stage, of a stage without any its figures; at last the time of each stage, all its
    attempts together.
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
    """The figures of the finished stages, one line each."""
    finished = [(spec, stage) for spec in data.config.stages if (stage := data.done(spec.name))]
    facts = [fact for spec, stage in finished for fact in spec.headline(data, stage)]
    return _fact_lines(facts, width=max((len(fact.label) for fact in facts), default=0) + 1)


def _fact_lines(facts: Sequence[Fact], *, width: int) -> list[str]:
    return [f"{fact.label:<{width}} {fact.value}" + (f" ({fact.hint})" if fact.hint else "") for fact in facts]
