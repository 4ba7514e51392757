"""`modelwright COMMAND ...`: finds the command, runs it, and turns its errors into one line and an exit code.

Exit codes: 0 done, 1 a bug (with traceback), 2 a user's or the machine's error, 3 another process of the run was lost,
4 drift was found, 5 an update was refused, 130 Ctrl-C, 143 SIGTERM.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from modelwright import __version__
from modelwright.cli import (
    augment,
    clean,
    commands,
    compare,
    config,
    continual,
    doctor,
    drift,
    evaluate,
    federated,
    finetune,
    lineage,
    lr_find,
    manifests,
    plan,
    requests,
    run,
    search,
    serving,
)
from modelwright.cli.completion import completion_parser, completion_script
from modelwright.cli.launch import EXIT_REPORT_DIR, GOES_ON, write_exit_report
from modelwright.cli.parsers import Command
from modelwright.cli.stopping import StopSignals
from modelwright.core.errors import ModelwrightError
from modelwright.core.suggest import did_you_mean

_ABOUT_PATHS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP
)  # fmt: skip

_RESUMABLE = ("run", "launch", "finetune", "search", "continual")
_SPARED: Mapping[str, tuple[int, ...]] = {"chat": (signal.SIGINT,)}
"""Signals that a command may outlive: Ctrl-C ends an answer."""

COMMANDS: dict[str, Command] = {
    "run": Command(
        run=run.run,
        parser=run.parser,
        settings=config.setting_names,
        targets=commands.recipe_names,
        summary="run a recipe, a YAML file, or a run directory again; resumes what was cut off",
    ),
    "finetune": Command(
        run=finetune.finetune,
        parser=finetune.parser,
        settings=config.setting_names,
        summary="fine-tune a model folder on your own examples",
    ),
    "compare": Command(run=compare.compare, parser=compare.parser, summary="compare two models on the same records"),
    "launch": Command(
        run=run.launch,
        parser=run.launch_parser,
        summary="run on several hosts, or with processes that may come and go",
    ),
    "evaluate": Command(
        run=evaluate.evaluate, parser=evaluate.parser, summary="evaluate a model on lm-eval's local task files"
    ),
    "clean": Command(
        run=clean.clean,
        parser=clean.parser,
        settings=clean.setting_names,
        summary="clean text into a folder, or explain what happened to a document",
    ),
    "augment": Command(
        run=augment.augment,
        parser=augment.parser,
        settings=augment.setting_names,
        summary="make changed copies of documents for training, or look at some",
    ),
    "recipes": Command(run=commands.recipes, parser=commands.recipes_parser, summary="list the recipes"),
    "config": Command(
        run=config.config,
        parser=config.config_parser,
        settings=config.setting_names,
        targets=commands.recipe_names,
        summary="print the configuration of a recipe or a YAML file, with documentation",
    ),
    "explain": Command(
        run=config.explain,
        parser=config.explain_parser,
        targets=config.setting_names,
        summary="explain a setting: its meaning, default and allowed values",
    ),
    "doctor": Command(
        run=doctor.doctor,
        parser=doctor.parser,
        targets=commands.recipe_names,
        summary="survey this machine, and say what limits a training on it",
    ),
    "plan": Command(
        run=plan.plan,
        parser=plan.parser,
        summary="plan a parallel layout, the memory of a training step, or what a project costs",
    ),
    "federated": Command(
        run=federated.federated,
        parser=federated.parser,
        summary="fine-tune a model over clients that keep their data",
    ),
    "drift": Command(
        run=drift.drift,
        parser=drift.parser,
        summary="watch whether requests still look as they did when the model was released",
    ),
    "continual": Command(
        run=continual.continual,
        parser=continual.parser,
        settings=config.setting_names,
        summary="update a served model: train on new texts, judge, test beside the old one, promote",
    ),
    "lineage": Command(
        run=lineage.lineage,
        parser=lineage.parser,
        summary="say which data, configuration, commits and models a model comes from",
    ),
    "lr-find": Command(
        run=lr_find.lr_find,
        parser=lr_find.parser,
        settings=config.setting_names,
        targets=commands.recipe_names,
        summary="propose a peak learning rate by a short sweep over rates",
    ),
    "search": Command(
        run=search.search,
        parser=search.parser,
        settings=config.setting_names,
        targets=commands.recipe_names,
        summary="search a model's shape, or hyperparameters, under budgets",
    ),
    "serve": Command(
        run=commands.serve,
        parser=commands.serve_parser,
        settings=serving.setting_names,
        summary="serve a run's model over HTTP, as the OpenAI API does",
    ),
    "manifests": Command(
        run=manifests.manifests,
        parser=manifests.parser,
        settings=serving.setting_names,
        summary="write files by which Docker Compose, Kubernetes or Ray Serve runs a server",
    ),
    "requests": Command(
        run=requests.requests,
        parser=requests.parser,
        summary="export the log of what a server was asked and has answered, or delete old records",
    ),
    "chat": Command(run=commands.chat, parser=commands.chat_parser, summary="talk to a run's model in the terminal"),
    "export": Command(
        run=commands.export,
        parser=commands.export_parser,
        summary="write a model as a Hugging Face folder, a GGUF file, or a graph for ONNX or OpenVINO",
    ),
    "report": Command(run=commands.report, parser=commands.report_parser, summary="write a run's report.html again"),
    "prove": Command(
        run=commands.prove, parser=commands.prove_parser, summary="measure the claims of the ledger on this machine"
    ),
    "completion": Command(
        run=lambda words: _completion(words),
        parser=completion_parser,
        summary="print shell completion for bash, zsh or fish",
    ),
}
"""The only list of the commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return _guarded("help", lambda _: _show(_help(), 0 if words else 2), [], is_last=argv is None)
    if words[0] == "--version":
        return _show(f"modelwright {__version__}", 0)
    if words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS)
        return _complain(f"{words[0]}: unknown command{hint} (modelwright --help lists them)")
    return _guarded(words[0], COMMANDS[words[0]].run, words[1:], is_last=argv is None)


def _completion(words: Sequence[str]) -> int:
    """`modelwright completion`"""
    print(completion_script(COMMANDS, completion_parser().parse_args(words).shell))
    return 0


def _guarded(name: str, command: Callable[[Sequence[str]], int], words: Sequence[str], *, is_last: bool) -> int:
    """Run the command and turn whatever ends it into an exit code. is_last: the process ends with it."""
    folder = os.environ.pop(EXIT_REPORT_DIR, "")  # not for what this process starts
    if folder:
        commands.leave_with_parent()

    def complain(text: str, exit_code: int = ModelwrightError.exit_code) -> int:
        return write_exit_report(folder, text, exit_code) if folder else _complain(text, exit_code)

    def stopped(number: int) -> int:
        how = "interrupted" if number == signal.SIGINT else "stopped"
        return complain(f"{how}; {GOES_ON}" if name in _RESUMABLE else how, 128 + number)

    with StopSignals(stopped, is_last=is_last, spared=_SPARED.get(name, ())) as signals:
        try:
            signals.listen()
            code = command(words)
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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:
            if signals.received:  # the signal interrupted a call that then failed
                return stopped(signals.received[-1])
            if refusal := _refusal(error):
                return complain(refusal)
            if not folder:
                raise
            return write_exit_report(folder, traceback.format_exc(), 1)


def _refusal(error: Exception) -> str:
    """What the operating system refused, if a user can do something about it; "" for everything else."""
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'writing'}: the disk is full; free some space and run the same command again"
    if error.errno in _ABOUT_PATHS and error.filename:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    return ""


def _show(text: str, exit_code: int) -> int:
    print(text)
    return exit_code


def _complain(text: str, exit_code: int = ModelwrightError.exit_code) -> int:
    print(f"modelwright: {text}", file=sys.stderr)
    return exit_code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: modelwright COMMAND [OPTIONS]",
            "",
            "From raw text to a served, monitored language model.",
            "",
            *lines,
            "",
            "First steps:  modelwright run quickstart     a model from this machine's own text, served, with a report",
            "              modelwright run tiny           the same in under a minute, to see every stage",
            "              modelwright COMMAND --help     what a command takes",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
