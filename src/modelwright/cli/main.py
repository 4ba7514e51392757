"""`modelwright COMMAND ...`: finds the command, runs it, and turns its errors into one line and an exit code.

Exit codes: 0 done, 1 a bug (with traceback), 2 a user's or the machine's error, 3 another process of the run was lost,
4 drift was found, 5 an update was refused, 130 Ctrl-C, 143 SIGTERM.
"""

import errno
import os
import signal
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from modelwright.cli import (
    augment,
    chat,
    clean,
    compare,
    config,
    doctor,
    evaluate,
    explain,
    export,
    finetune,
    launch,
    lr_find,
    merge,
    recipes,
    report,
    requests,
    run,
    serve,
    show,
)
from modelwright.cli.completion import completion
from modelwright.cli.parsers import Command
from modelwright.cli.processes import EXIT_REPORT_DIR, GOES_ON, StopSignals, leave_with_parent, write_exit_report
from modelwright.core import VERSION
from modelwright.core.config import ConfigError, ModelwrightError, did_you_mean
from modelwright.core.extensions import offered

_ABOUT_PATHS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP
)  # fmt: skip

COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        run.COMMAND, finetune.COMMAND, compare.COMMAND, launch.COMMAND, evaluate.COMMAND, clean.COMMAND,
        augment.COMMAND, recipes.COMMAND, config.COMMAND, explain.COMMAND, doctor.COMMAND, lr_find.COMMAND,
        serve.COMMAND, requests.COMMAND, chat.COMMAND, export.COMMAND, merge.COMMAND,
        show.COMMAND, report.COMMAND,
        completion(lambda: usable_commands()),
    )
}  # fmt: skip
"""The only list of the package's own commands."""

COMMANDS_GROUP = "modelwright.commands"
"""Entry points of other packages: each a `Command` in a module that is quick to import, because help imports all."""
DISTRIBUTIONS: Mapping[str, tuple[str, str]] = {
    "board": ("modelwright-board", "board"),
    "continual": ("modelwright-continual", "continual"),
    "drift": ("modelwright-continual", "continual"),
    "lineage": ("modelwright-continual", "continual"),
    "mcp": ("modelwright-agents", "agents"),
    "plan": ("modelwright-plan", "plan"),
    "prove": ("modelwright-claims", "claims"),
    "search": ("modelwright-search", "search"),
    "federated": ("modelwright-federated", "federated"),
}
"""Commands of this project's other packages: the distribution and the extra that installs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_last = argv is None
    if words[:1] == ["--version"]:
        print(f"modelwright {VERSION}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        help_ = Command(name="help", summary="", parser=ArgumentParser, run=lambda _: _help(0 if words else 2))
        return _guarded(help_, [], is_last=is_last)
    try:
        command = find_command(words[0])
    except ConfigError as error:
        return _complain(str(error))
    return _guarded(command, words[1:], is_last=is_last)


def find_command(name: str) -> Command:
    """Returns the command of this name; imports only the package that offers it. Raises `ConfigError`."""
    if name in COMMANDS:
        return COMMANDS[name]
    added = _added_commands()
    if name in added:
        return added[name]()
    if name in DISTRIBUTIONS:
        distribution, extra = DISTRIBUTIONS[name]
        raise ConfigError(
            f"{name}: is a command of {distribution}, which is not installed; pip install 'modelwright[{extra}]'"
        )
    hint = did_you_mean(name, [*COMMANDS, *added, *DISTRIBUTIONS])
    raise ConfigError(f"{name}: unknown command{hint} (modelwright --help lists them)")


def usable_commands() -> dict[str, Command]:
    """Returns the package's own commands and those that other packages add, except those that cannot be loaded."""
    usable = dict(COMMANDS)
    for name, load in _added_commands().items():
        with suppress(ConfigError):
            usable.setdefault(name, load())
    return usable


def _added_commands() -> dict[str, Callable[[], Command]]:
    return offered(COMMANDS_GROUP, Command, taken=tuple(COMMANDS))


def _guarded(command: Command, words: Sequence[str], *, is_last: bool) -> int:
    """Run the command and turn any ending into an exit code. is_last: the process ends with the command."""
    folder = os.environ.pop(EXIT_REPORT_DIR, "")  # not for what this process starts
    if folder:
        leave_with_parent()

    def complain(text: str, exit_code: int = ModelwrightError.exit_code) -> int:
        return write_exit_report(folder, text, exit_code) if folder else _complain(text, exit_code)

    def stopped(number: int) -> int:
        how = "interrupted" if number == signal.SIGINT else "stopped"
        return complain(f"{how}; {GOES_ON}" if command.is_resumable else how, 128 + number)

    with StopSignals(stopped, is_last=is_last, spared=command.spared) as signals:
        try:
            signals.listen()
            code = command.run(words)
            sys.stdout.flush()
            return code
        except ModelwrightError as error:
            return complain(str(error), error.exit_code)
        except KeyboardInterrupt:
            return stopped(signal.SIGINT)
        except SystemExit:
            if not signals.received:
                raise
            return stopped(signals.received[-1])
        except BrokenPipeError:
            # Python flushes stdout at exit once more and would fail again, so it gets another target.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:
            if signals.received:  # the signal interrupted a call that then failed
                return stopped(signals.received[-1])
            # Refusals of the operating system that a user can do something about; anything else is a bug.
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                where = error.filename or "writing"
                return complain(f"{where}: the disk is full; free some space and run the same command again")
            if isinstance(error, OSError) and error.errno in _ABOUT_PATHS and error.filename:
                return complain(f"{error.filename}: {error.strerror}; check the path and its permissions")
            if not folder:
                raise
            return write_exit_report(folder, traceback.format_exc(), 1)


def _complain(text: str, exit_code: int = ModelwrightError.exit_code) -> int:
    print(f"modelwright: {text}", file=sys.stderr)
    return exit_code


def _help(exit_code: int) -> int:
    entries = [(name, command.summary) for name, command in COMMANDS.items()]
    for name, load in _added_commands().items():
        try:
            entries.append((name, load().summary))
        except ConfigError as error:  # also one that has the name of an own command, which goes on working
            entries.append((name, " ".join(str(error).split())))
    shown = dict(entries)
    entries += [
        (name, f"not installed: pip install 'modelwright[{extra}]'")
        for name, (_, extra) in DISTRIBUTIONS.items()
        if name not in shown
    ]
    width = max(len(name) for name, _ in entries)
    print("usage: modelwright COMMAND [OPTIONS]\n")
    print("From raw text to a served, monitored language model.\n")
    for name, summary in entries:
        print(f"  {name:<{width}}  {summary}")
    print("\nFirst steps:  modelwright run quickstart     a model from this machine's own text, served, with a report")
    print("              modelwright run tiny           a small one in under a minute, without extras")
    print("              modelwright COMMAND --help     what a command takes")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
