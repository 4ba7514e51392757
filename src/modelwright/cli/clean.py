"""`modelwright clean`: cleans text into a folder, without a run, and explains the cleaning of one document."""

import argparse
from collections.abc import Sequence

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError, merge, read_overrides, split_settings

_FLAGS = ("out", "engine", "parquet", "explain", "dry-run", "help")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "clean",
        "Read text from files, directories, globs or URLs, clean it step by step, and write kept and dropped "
        "documents, quarantined records and a report into a folder. The same command resumes what was interrupted; "
        "other settings replace the result.",
        example="modelwright clean notes/ more/*.jsonl.zst --out cleaned --clean.quality.thresholds auto",
        usage="modelwright clean SOURCE ... --out DIR [--a.b VALUE ...]\n"
        "       modelwright clean SOURCE ... --dry-run [--a.b VALUE ...]\n"
        "       modelwright clean --out DIR --explain DOC_ID",
    )
    parser.add_argument("sources", metavar="SOURCE", nargs="*", help="sources in a form of data.sources (docs/data.md)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="",
        help="folder for the result, outside of the sources, or the address of one on a store: s3://bucket/cleaned",
    )
    parser.add_argument(
        "--parquet", action="store_true", help="write kept documents as Parquet, too, for datasets.load_dataset"
    )
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="processes of this machine, or Ray (clean.engine)"
    )
    parser.add_argument("--explain", metavar="DOC_ID", default="", help="explain the cleaning of one document of DIR")
    parser.add_argument("--dry-run", action="store_true", help="show what would be dropped of a sample; write nothing")
    return parser


def setting_names() -> list[str]:
    """Settings that `modelwright clean` takes as options."""
    from modelwright.core.config_docs import settings_of
    from modelwright.recipes.cleaning import CleanCommandConfig

    return [setting.key for setting in settings_of(CleanCommandConfig)]


def clean(words: Sequence[str]) -> int:
    leading, own, settings = split_settings(words, _FLAGS)
    options = parser().parse_args([*leading, *own])
    if not options.out and not options.dry_run:
        raise ConfigError("clean: give a folder for the result: modelwright clean SOURCE ... --out DIR")
    if options.explain:
        from modelwright.pipeline.cleaning import explain_document

        print(explain_document(options.out, options.explain))
        return 0
    if not options.sources:
        raise ConfigError("clean: name at least one source: modelwright clean SOURCE ... --out DIR")
    from modelwright.recipes import cleaning

    given = merge({"clean": {"engine": options.engine}}, read_overrides(cleaning.CleanCommandConfig, settings, _FLAGS))
    lines = cleaning.clean(
        options.sources, options.out, parquet=options.parquet, dry_run=options.dry_run, progress=True, **given
    )
    print("\n".join(lines))
    return 0


COMMAND = Command(
    name="clean",
    run=clean,
    parser=parser,
    settings=setting_names,
    summary="clean text into a folder, or explain what happened to a document",
    is_resumable=True,
)
