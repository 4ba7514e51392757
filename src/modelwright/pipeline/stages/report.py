"""report: everything that the run produced, as one page. Artifact: `report.html`, also in the run's own folder."""

from collections.abc import Sequence

from modelwright.core.artifacts import write_atomic
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.page import build_page, render
from modelwright.pipeline.stage import Rates, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import fixed_estimate


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Reads artifacts, metrics and journals of the other stages; waits for those in `present`."""
    return Stage(
        name=REPORT.name,
        title=REPORT.title,
        settings={},
        parents=tuple(name for name in present if name != REPORT.name),
        run=lambda context: _run(context, config, run),
    )


def _run(context: StageContext, config: RunConfig, run: RunDir) -> None:
    context.progress.begin("report", 0, "sections")
    write_atomic(context.output.path / "report.html", write_report(config, run))
    context.progress.end()


def write_report(config: RunConfig, run: RunDir) -> str:
    """The report of what is in the run's folder now, also written to it. Returns the HTML."""
    html = render(build_page(config, run, without=REPORT))
    write_atomic(run.report, html)
    return html


def _estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    return fixed_estimate(REPORT.name, seconds=5.0, library_bytes=95 * 2**20)


REPORT = StageSpec(
    name="report",
    title="Writing the report",
    build=_build,
    estimate=_estimate,
)
