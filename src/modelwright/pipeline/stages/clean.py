"""clean: sources to kept documents, with every drop counted and open to inspection.

The artifact is `data.clean`'s folder: kept and dropped documents, and `sources.json` with what was read.
"""

import json
import shutil
import sys
from dataclasses import asdict

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump
from modelwright.core.errors import DataError
from modelwright.core.resources import versions
from modelwright.data.clean import DROPPED, clean_documents, describe_drops
from modelwright.data.find_files import locate
from modelwright.data.sources import BUILTIN, SourceConfig, SourceReport, read_documents
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.redact import redact_text
from modelwright.pipeline.stage import Stage, StageContext


def clean_stage(config: RunConfig) -> Stage:
    """Reads the sources and cleans them. Its digest covers the sources' names, sizes and modification times."""
    return Stage(
        name="clean",
        title="Reading and cleaning",
        settings={"data": dump(config.data), "clean": dump(config.clean), "sources": fingerprint(config.data)},
        parents=(),
        run=lambda context: _run(context, config),
    )


def fingerprint(data: SourceConfig) -> list[list[str | int | float]]:
    """A fingerprint of the sources without reading them. Raises `DataError` for a missing source."""
    result: list[list[str | int | float]] = []
    if BUILTIN in data.sources:
        libraries = versions("torch", "numpy")
        result.append([BUILTIN, sys.version, *libraries.values()])
    named = tuple(source for source in data.sources if source != BUILTIN)
    for file in locate(named, lambda reason, where: None):
        facts = file.filesystem.info(file.path)
        changed = facts.get("mtime") or facts.get("LastModified") or facts.get("ETag") or ""
        result.append([file.name, int(facts.get("size") or 0), str(changed)])
    return result


def _run(context: StageContext, config: RunConfig) -> None:
    out, report = context.output.path, SourceReport()
    documents = read_documents(config.data, report=report)
    context.progress.begin("clean", 0, "documents")
    try:
        cleaned = clean_documents(documents, config.clean, out, context.progress)
    except DataError as error:
        if not (out / DROPPED).exists():
            raise
        kept = context.folder.path / DROPPED  # the artifact goes; what was dropped and why must stay to be looked at
        shutil.copyfile(out / DROPPED, kept)
        raise DataError(f"{error}; the dropped text is in {kept}") from None
    context.progress.end()
    write_atomic(out / "sources.json", json.dumps(asdict(report), indent=1, ensure_ascii=False))
    context.output.facts |= {"sources": asdict(report), "clean": asdict(cleaned)}
    for line in report.summary():
        context.progress.note(redact_text(f"clean: {line}"))
    where = f"; the dropped text is in {context.folder.artifact / DROPPED}" if cleaned.num_dropped else ""
    context.progress.note(f"clean: {cleaned.num_kept:,} documents kept, {describe_drops(cleaned, config.clean)}{where}")
