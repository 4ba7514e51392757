"""`modelwright augment`: changed copies of documents for training, or a look at some of them."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError, all_paths, dump, merge, parse, read_overrides, split_settings
from modelwright.recipes.display import shown_progress

_FLAGS = ("preview", "help")
_PIECES = re.compile(r"\s+|\w+|[^\w\s]")


def config_class() -> type:
    """Builds the settings of the command: sources, the copies to make, and a section for each method."""
    from modelwright.data.augment.augmenter import AugmentConfig
    from modelwright.data.augment.methods import known_methods
    from modelwright.data.sources.sources import SourceConfig

    methods = [(method.name, method.config) for method in known_methods()]
    sections = [("data", SourceConfig), ("augment", AugmentConfig), *methods]
    fields = [(name, section, field(default_factory=section)) for name, section in sections]
    return make_dataclass("AugmentCommandConfig", fields, frozen=True, kw_only=True)


def parser() -> argparse.ArgumentParser:
    from modelwright.data.augment.methods import known_methods

    parser = new_parser(
        "augment",
        "Make changed copies of training documents and write them as JSON lines, with the id of the original and the "
        "method. Documents that a run with the same --data.validation_fraction holds out get no copy. The same command "
        "resumes what was interrupted.",
        example="modelwright augment notes/ copies.jsonl --augment.methods random_swap case_noise --augment.copies 2",
        notes="methods: " + ", ".join(method.name for method in known_methods()),
        usage="modelwright augment SOURCE ... OUT [--a.b VALUE ...]\n"
        "       modelwright augment SOURCE ... OUT --preview N [--a.b VALUE ...]",
    )
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="sources in a form of data.sources (docs/data.md)")
    parser.add_argument("out", metavar="OUT", help="file for the copies, with the ending .jsonl")
    parser.add_argument(
        "--preview", metavar="N", type=int, default=0, help="show N copies next to their originals only"
    )
    return parser


def augment(words: Sequence[str]) -> int:
    leading, own, settings = split_settings(words, _FLAGS)
    options = parser().parse_args([*leading, *own])
    if not options.out.endswith(".jsonl"):
        raise ConfigError(f"augment: {options.out}: give a file for the copies with the ending .jsonl as the last word")
    commands = config_class()
    base = {"data": {"sources": options.sources, "on_bad_record": "skip"}}
    config: Any = parse(commands, merge(base, read_overrides(commands, settings, _FLAGS)))
    from modelwright.data.augment.methods import known_methods
    from modelwright.pipeline.augmenting import augment_sources, preview

    methods = {method.name: dump(getattr(config, method.name)) for method in known_methods()}

    if options.preview:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # Originals and copies side by side, with the differences marked by color and by brackets.
        console = Console(highlight=False)
        pairs = preview(config.data, config.augment, methods, options.preview)
        for original, copy in pairs:
            table = Table(title=f"{copy.meta['augmentation']}: {original.id}", title_justify="left", expand=True)
            before, after = Text(), Text()
            old_pieces, new_pieces = _PIECES.findall(original.text), _PIECES.findall(copy.text)
            # Without autojunk: it would treat frequent pieces, such as blanks, as noise in texts of 200 pieces and
            # more.
            for _, i, j, k, m in SequenceMatcher(None, old_pieces, new_pieces, autojunk=False).get_opcodes():
                old, new = "".join(old_pieces[i:j]), "".join(new_pieces[k:m])
                same = old == new
                before.append(old if same or not old else f"[{old}]", "" if same else "bold red")
                after.append(new if same or not new else f"[{new}]", "" if same else "bold green")
            table.add_column("before", ratio=1, overflow="fold")
            table.add_column("after", ratio=1, overflow="fold")
            table.add_row(before, after)
            console.print(table)
        if not pairs:
            console.print("no document changes; check --augment.methods and the kinds of the documents")
        return 0
    with shown_progress() as display:
        for line in augment_sources(config.data, config.augment, methods, Path(options.out), display):
            print(line)
    return 0


COMMAND = Command(
    name="augment",
    run=augment,
    parser=parser,
    settings=lambda: all_paths(config_class()),
    summary="make changed copies of documents for training, or look at some",
    is_resumable=True,
)
