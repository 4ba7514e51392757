"""Command-line parsers with a common look."""

import argparse
from typing import Any


def new_parser(name: str, description: str, *, example: str, notes: str = "", **more: Any) -> argparse.ArgumentParser:
    """A parser whose help ends with one example. Options cannot be abbreviated, because what follows may be a
    setting.
    """
    epilog = "\n".join(part for part in (notes, f"example: {example}") if part)
    return argparse.ArgumentParser(
        prog=f"modelwright {name}",
        description=description,
        epilog=epilog,
        formatter_class=_Formatter if notes else argparse.HelpFormatter,
        allow_abbrev=False,
        **more,
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the notes."""
