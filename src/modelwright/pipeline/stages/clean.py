"""clean: sources to kept documents, with every drop counted and open to inspection.

The artifact is the folder of `pipeline.cleaning`.
"""

import shutil
from collections.abc import Sequence

from modelwright.core.artifacts import RunDir
from modelwright.core.config import DataError, dump, install_line, is_installed
from modelwright.data.clean.config import CleanConfig
from modelwright.data.clean.folder import DROPPED
from modelwright.data.clean.report import describe_drops
from modelwright.pipeline.cleaning import clean_into, fingerprint, noise_warnings
from modelwright.pipeline.report.page import corpus_lines, corpus_section
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import moving_estimate
from modelwright.pipeline.stages.imported import imported_stage

BYTES_PER_S = 0.28e6
"""Cleaning rate, measured on the built-in corpus, whose documents are short, with two worker processes."""


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Reads the sources and cleans them. Its digest covers names, sizes and modification times of the files read."""
    if config.rows_from:
        return imported_stage(config, CLEAN)
    clean: CleanConfig = config.section(CLEAN)
    # The result does not depend on how, and in how many processes, the shards are cleaned.
    settings = {name: value for name, value in dump(clean).items() if name not in ("engine", "num_workers")}
    if clean.duplicates.pairs_by == "answer":
        del settings["duplicates"]["pairs_by"]  # as before the setting existed: artifacts of those runs stay valid
    if clean.noise.trusted:
        settings["seed"] = config.seed

    def clean_sources(context: StageContext) -> None:
        out, note = context.output.path, context.progress.note
        work = context.folder.path / "work"
        try:
            cleaned, sources, unread = clean_into(
                config.data, clean, out, work, context.digest, context.progress, seed=config.seed
            )
        except DataError as error:
            if not (out / DROPPED).exists():
                raise
            kept = context.folder.path / DROPPED  # the draft is deleted; the record of dropped text must outlive it
            shutil.copyfile(out / DROPPED, kept)
            raise DataError(f"{error}; the dropped text is in {kept}") from None
        context.output.facts |= {"sources": sources, "clean": cleaned.plain()}
        for line in (*unread, *noise_warnings(cleaned)):
            note(f"clean: {line}")
        where = f"; the dropped text is in {context.folder.artifact / DROPPED}" if cleaned.num_dropped else ""
        if not is_installed("clean"):
            note(f"clean: the languages of the text are not counted; {install_line('clean')} to count them")
        if not any("heldout" in splits for splits in cleaned.kept.values()):
            text = "no document is held out, so this run has no validation loss and no evaluation of its text"
            note(f"clean: {text}; raise --data.validation_fraction, or give sources with a held-out split")
        note(f"clean: {cleaned.num_kept:,} documents kept, {describe_drops(cleaned)}{where}")

    return Stage(
        name=CLEAN.name,
        title=CLEAN.title,
        settings={
            "data": dump(config.data),
            "clean": settings,
            "sources": fingerprint(config.data, clean),
            "files": "by split and kind",  # an artifact of an earlier version, with one file, is made again
        },
        parents=(),
        run=clean_sources,
    )


CLEAN = StageSpec(
    name="clean",
    title="Reading and cleaning",
    config=CleanConfig,
    build=_build,
    estimate=lambda config, run, rates: moving_estimate("clean", config, bytes_per_s=BYTES_PER_S),
    extras=lambda config: {} if config.rows_from else config.section(CLEAN).extras(),
    report=corpus_section,
    closing=corpus_lines,
)
