"""Cleaning from Python and for `modelwright clean`, without what needs PyTorch."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.config import merge, parse
from modelwright.core.errors import ConfigError
from modelwright.core.overrides import nested_settings
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
    """Cleans text into the folder `out`, as `modelwright clean` does; returns the lines that it prints. dry_run: says
    what would be dropped of a sample, and writes nothing.
    """
    from modelwright.pipeline.cleaning import clean_sources, try_cleaning

    if not os.fspath(out) and not dry_run:
        raise ConfigError("out: give a folder for the result", code="missing")
    given = read_sources(sources)
    try:
        # Records in memory lie beside the result, which must be outside of its sources.
        side = Path(f"{os.fspath(out)}-{given.paths[0]}").parent
        paths = [str(given.waiting)] if dry_run and given.waiting else given.place(side)
        # Without a run nothing is trained, so nothing is held out unless the caller asks for it.
        base = {"data": {"sources": paths, "validation_fraction": 0.0}}
        config = parse(CleanCommandConfig, merge(base, nested_settings(CleanCommandConfig, settings)))
        with shown(progress) as display:
            if dry_run:
                return list(try_cleaning(config.data, config.clean, display))
            return list(clean_sources(config.data, config.clean, os.fspath(out), display, parquet=parquet))
    finally:
        given.close()
