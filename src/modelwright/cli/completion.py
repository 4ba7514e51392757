"""`modelwright completion`: what a shell completes, by `shtab`, from the parsers of all commands and their settings."""

import argparse
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import shtab

from modelwright.cli.parsers import Command, new_parser

SHELLS = ("bash", "zsh", "fish")


def completion(commands: Callable[[], Mapping[str, Command]]) -> Command:
    """The command. commands: all of them, itself included, by name."""

    def run(words: Sequence[str]) -> int:
        print(completion_script(commands(), parser().parse_args(words).shell))
        return 0

    return Command(name="completion", run=run, parser=parser, summary="print shell completion for bash, zsh or fish")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "completion",
        "Print a script that completes commands, options and settings in a shell.",
        example='eval "$(modelwright completion bash)"',
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def completion_script(commands: Mapping[str, Command], shell: str) -> str:
    """The script for one of `SHELLS`. commands: by name."""
    program = argparse.ArgumentParser(prog="modelwright")
    subparsers = program.add_subparsers()
    for name, command in commands.items():
        added = subparsers.add_parser(
            name, help=command.summary, parents=[command.parser()], add_help=False, conflict_handler="resolve"
        )
        for setting in command.settings():
            added.add_argument(f"--{setting}", help="")
        if targets := " ".join(command.targets()):
            first = next(action for action in added._actions if not action.option_strings)  # pyright: ignore[reportPrivateUsage]
            first.complete = _names_and_files(targets)  # type: ignore[attr-defined]
    return shtab.complete(program, shell=shell)


def _names_and_files(names: str) -> dict[str, Any]:
    """What `shtab` completes for an argument that is one of some names or a path."""
    function = f"_modelwright_names_or_file_{zlib.crc32(names.encode()):08x}"
    return {
        "bash": function,
        "zsh": f"{{_files; compadd {names}}}",
        "fish": f"(__fish_complete_path (commandline -ct); printf '%s\\n' {names})",
        "preamble": {"bash": f'{function}() {{ compgen -W \'{names}\' -- "$1"; compgen -f -- "$1"; }}'},
    }
