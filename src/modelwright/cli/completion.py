"""`modelwright completion`: shell completion by `shtab`, from the parsers of all commands and their settings."""

import argparse
import zlib
from collections.abc import Callable, Mapping, Sequence

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import require

SHELLS = ("bash", "zsh", "fish")


def completion(commands: Callable[[], Mapping[str, Command]]) -> Command:
    """Builds the command. commands: returns all commands by name, this one included."""

    def run(words: Sequence[str]) -> int:
        shell = parser().parse_args(words).shell
        require({"completion": "completion"})
        import shtab

        program = argparse.ArgumentParser(prog="modelwright")
        subparsers = program.add_subparsers()
        for name, command in commands().items():
            added = subparsers.add_parser(
                name, help=command.summary, parents=[command.parser()], add_help=False, conflict_handler="resolve"
            )
            for setting in command.settings():
                added.add_argument(f"--{setting}", help="")
            if names := " ".join(command.targets()):
                # The first argument is one of the names or a path. The function's name is a checksum of the names, so
                # that commands with the same names share one function.
                function = f"_modelwright_names_or_file_{zlib.crc32(names.encode()):08x}"
                first = next(action for action in added._actions if not action.option_strings)  # pyright: ignore[reportPrivateUsage]
                first.complete = {  # type: ignore[attr-defined]
                    "bash": function,
                    "zsh": f"{{_files; compadd {names}}}",
                    "fish": f"(__fish_complete_path (commandline -ct); printf '%s\\n' {names})",
                    "preamble": {"bash": f'{function}() {{ compgen -W \'{names}\' -- "$1"; compgen -f -- "$1"; }}'},
                }
        print(shtab.complete(program, shell=shell))
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
