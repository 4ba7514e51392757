"""Commands and their parsers, which look alike."""

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `modelwright`: the object `COMMAND` of its file, or of another package's entry point."""

    name: str
    """Word on the command line; for a command of another package, the name of its entry point is used instead."""
    run: Callable[[Sequence[str]], int]
    """Takes the words after the command's name and returns the exit code."""
    summary: str
    """Line in the overview of commands."""
    parser: Callable[[], argparse.ArgumentParser]
    """Builds the parser of the command's options, without the settings."""
    settings: Callable[[], Iterable[str]] = tuple
    """Dotted names of settings that the command takes as options, too."""
    targets: Callable[[], Iterable[str]] = tuple
    """Names, other than those of files, that the first argument may have."""
    is_resumable: bool = False
    """True if the same command line continues the work that a signal has stopped."""
    spared: tuple[int, ...] = ()
    """Signals that it handles itself and may survive."""


def new_parser(name: str, description: str, *, example: str, notes: str = "", **more: Any) -> argparse.ArgumentParser:
    """Builds a parser whose help ends with one example. Options cannot be abbreviated, because the words may contain
    settings.
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
