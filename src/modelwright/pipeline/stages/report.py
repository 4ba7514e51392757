"""report: everything that the run produced, as one page. Artifact: `report.html`, also in the run's own folder."""

from collections.abc import Sequence

from modelwright.core.artifacts import RunDir, write_atomic
from modelwright.core.config import install_line, is_installed
from modelwright.pipeline.report.page import build_page, render
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import fixed_estimate


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    def write(context: StageContext) -> None:
        if not is_installed("report"):
            context.progress.note(f"report: without charts; {install_line('report')} to have them")
        context.progress.begin("report", 0, "sections")
        write_atomic(context.output.path / "report.html", write_report(config, run))
        context.progress.end()

    return Stage(
        name=REPORT.name,
        title=REPORT.title,
        settings={},
        parents=tuple(name for name in present if name != REPORT.name),  # all, so that the report comes last
        run=write,
    )


def write_report(config: RunConfig, run: RunDir) -> str:
    """Writes the report of the run's current state to its folder and returns the HTML."""
    html = render(build_page(config, run, without=REPORT))
    write_atomic(run.report, html)
    return html


REPORT = StageSpec(
    name="report",
    title="Writing the report",
    build=_build,
    estimate=lambda config, run, rates: fixed_estimate("report", seconds=5.0, library_bytes=95 * 2**20),
)
