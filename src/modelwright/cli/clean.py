"""`modelwright clean`: clean text into a folder, without a run; and what happened to a document, and why."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.cli.display import choose_display
from modelwright.cli.overrides import read_overrides, split_settings
from modelwright.cli.parsers import new_parser
from modelwright.core.config import merge, parse
from modelwright.core.errors import ConfigError
from modelwright.data.clean_config import CleanConfig
from modelwright.data.sources import SourceConfig

_FLAGS = ("out", "explain", "help")


@dataclass(frozen=True, kw_only=True)
class CleanCommandConfig:
    """The sections of a run that cleaning reads."""

    data: SourceConfig = field(default_factory=SourceConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "clean",
        "Read text from files, directories, globs or URLs, clean it in five stages, and write kept and dropped "
        "documents, quarantined records and a report into a folder. The same command resumes what was interrupted.",
        example="modelwright clean notes/ more/*.jsonl.zst --out cleaned --clean.quality.thresholds auto",
        usage="modelwright clean SOURCE ... --out DIR [--a.b VALUE ...]\n"
        "       modelwright clean --out DIR --explain DOC_ID",
    )
    parser.add_argument("sources", metavar="SOURCE", nargs="*", help="as in data.sources; docs/data.md has the formats")
    parser.add_argument("--out", metavar="DIR", default="", help="folder for the result")
    parser.add_argument("--explain", metavar="DOC_ID", default="", help="what happened to one document of DIR, and why")
    return parser


def setting_names() -> list[str]:
    """The settings that `modelwright clean` takes as options."""
    from modelwright.core.config_docs import settings_of

    return [setting.key for setting in settings_of(CleanCommandConfig)]


def clean(words: Sequence[str]) -> int:
    """`modelwright clean`"""
    leading, own, settings = split_settings(words, _FLAGS)
    options = parser().parse_args([*leading, *own])
    if not options.out:
        raise ConfigError("clean: give a folder for the result: modelwright clean SOURCE ... --out DIR")
    out = Path(options.out)
    if options.explain:
        from modelwright.data.explain import explain

        print(explain(out, options.explain))
        return 0
    if not options.sources:
        raise ConfigError("clean: name at least one source: modelwright clean SOURCE ... --out DIR")
    base = {"data": {"sources": options.sources, "validation_fraction": 0.0, "on_bad_record": "skip"}}
    config = parse(CleanCommandConfig, merge(base, read_overrides(CleanCommandConfig, settings, _FLAGS)))
    from modelwright.pipeline.cleaning import clean_sources

    display = choose_display(sys.stderr)
    try:
        for line in clean_sources(config.data, config.clean, out, display):
            print(line)
    finally:
        display.end()
    return 0
