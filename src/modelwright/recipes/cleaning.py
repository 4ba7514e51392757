"""Cleaning from Python and for `modelwright clean`, without what needs PyTorch."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError, digest, merge, nested_settings, parse
from modelwright.core.progress import Progress
from modelwright.data.clean.config import CleanConfig
from modelwright.data.sources.sources import SourceConfig
from modelwright.recipes.sources import read_sources
from modelwright.recipes.watch import shown


@dataclass(frozen=True, kw_only=True)
class CleanCommandConfig:
    """The sections of a run that cleaning reads."""

    data: SourceConfig = field(default_factory=SourceConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)


def clean(
    sources: Any,
    out: str | os.PathLike[str] = "",
    *,
    parquet: bool = False,
    dry_run: bool = False,
    progress: bool | Progress = False,
    **settings: Any,
) -> list[str]:  # fmt: skip
    """Cleans text into the folder `out`, here or on a store, as `modelwright clean` does; returns the lines that it
    prints. dry_run: says what would be dropped of a sample, and writes nothing.
    """
    from modelwright.pipeline.cleaning import clean_sources, is_store, local_path, try_cleaning

    if not (place := os.fspath(out)) and not dry_run:
        raise ConfigError("out: give a folder for the result", code="missing")
    overrides = nested_settings(CleanCommandConfig, settings)
    parse(CleanCommandConfig, overrides)  # a wrong setting is refused before records are read and written
    given = read_sources(sources)
    # Records in memory wait beside the result, which must be outside of its sources, until it is complete: the same
    # call resumes what was cut off. Those of a result on a store wait in the working directory, as its work does.
    name = f"{place.rstrip('/').rpartition('/')[2]}-{digest(place)[:8]}"
    side = Path(f"{name if is_store(place) else os.path.abspath(local_path(place))}.sources")
    try:
        paths = [str(given.waiting)] if dry_run and given.waiting else given.place(side)
        # Without a run nothing is trained, so nothing is held out unless the caller asks for it.
        base = {"data": {"sources": paths, "validation_fraction": 0.0}}
        config = parse(CleanCommandConfig, merge(base, overrides))
        with shown(progress) as display:
            if dry_run:
                return list(try_cleaning(config.data, config.clean, display))
            lines = clean_sources(config.data, config.clean, place, display, parquet=parquet)
        if given.waiting:
            Path(paths[0]).unlink()
            with suppress(OSError):  # a folder of this name may have been there
                side.rmdir()
        return lines
    finally:
        given.close()
