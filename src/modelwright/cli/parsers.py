"""Commands and their parsers, which look alike."""

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def no_names() -> Iterable[str]:
    """`Command.settings` and `Command.targets` of a command that takes none."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `modelwright`: the object `COMMAND` of its file, or of another package's entry point."""

    name: str
    """Its word on the command line. For a command of another package the name of its entry point counts."""
    run: Callable[[Sequence[str]], int]
    """Takes the words after the command's name and returns the exit code."""
    summary: str
    """One line of the overview."""
    parser: Callable[[], argparse.ArgumentParser]
    """Its options, without the settings."""
    settings: Callable[[], Iterable[str]] = no_names
    """Dotted names that it takes as options besides."""
    targets: Callable[[], Iterable[str]] = no_names
    """Names that its first argument may have, beside those of files."""
    is_resumable: bool = False
    """Whether the same command line continues what a signal has stopped."""
    spared: tuple[int, ...] = ()
    """Signals that it handles itself and may survive."""


def new_parser(name: str, description: str, *, example: str, notes: str = "", **more: Any) -> argparse.ArgumentParser:
    """A parser whose help ends with one example. Options cannot be abbreviated, because what follows may be a
    setting.
    """
    epilog = "\n".join(part for part in (notes, f"example: {example}") if part)
    return argparse.ArgumentParser(
        prog=f"modelwright {name}",
        description=textwrap.fill(description, 116) if notes else description,
        epilog=epilog,
        formatter_class=_Formatter if notes else argparse.HelpFormatter,
        allow_abbrev=False,
        **more,
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the notes."""
