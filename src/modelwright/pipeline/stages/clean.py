"""clean: sources to kept documents, with every drop counted and open to inspection.

The artifact is the folder of `pipeline.cleaning`.
"""

import shutil
from dataclasses import asdict

from modelwright.core.config import dump
from modelwright.core.errors import DataError
from modelwright.data.clean import describe_drops
from modelwright.data.clean_folder import DROPPED
from modelwright.pipeline.cleaning import clean_into, fingerprint, noise_warnings
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext


def clean_stage(config: RunConfig) -> Stage:
    """Reads the sources and cleans them. Its digest covers names, sizes and modification times of the files read."""
    settings = {name: value for name, value in dump(config.clean).items() if name != "num_workers"}
    if config.clean.noise.enabled:
        settings["seed"] = config.seed
    return Stage(
        name="clean",
        title="Reading and cleaning",
        settings={"data": dump(config.data), "clean": settings, "sources": fingerprint(config.data, config.clean)},
        parents=(),
        run=lambda context: _run(context, config),
    )


def _run(context: StageContext, config: RunConfig) -> None:
    out, note = context.output.path, context.progress.note
    work = context.folder.path / "work"
    try:
        cleaned, sources, unread = clean_into(
            config.data, config.clean, out, work, context.digest, context.progress, seed=config.seed
        )
    except DataError as error:
        if not (out / DROPPED).exists():
            raise
        kept = context.folder.path / DROPPED  # the artifact goes; what was dropped and why must stay to be looked at
        shutil.copyfile(out / DROPPED, kept)
        raise DataError(f"{error}; the dropped text is in {kept}") from None
    context.output.facts |= {"sources": sources, "clean": asdict(cleaned)}
    for line in (*unread, *noise_warnings(cleaned)):
        note(f"clean: {line}")
    where = f"; the dropped text is in {context.folder.artifact / DROPPED}" if cleaned.num_dropped else ""
    if not any("heldout" in splits for splits in cleaned.kept.values()):
        text = "no document is held out, so this run has no validation loss and no evaluation of its text"
        note(f"clean: {text}; raise --data.validation_fraction, or give sources with a held-out split")
    note(f"clean: {cleaned.num_kept:,} documents kept, {describe_drops(cleaned)}{where}")
