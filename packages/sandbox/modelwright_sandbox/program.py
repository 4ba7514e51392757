"""The code in the process of a program, which runs like a script, followed by checks if there are any."""

import atexit
import io
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

REPORT_DESCRIPTOR = 3
"""Descriptor to which the results of checks are written, one per line."""


def run_program(source: str, checks: Sequence[str], key: str) -> NoReturn:
    """Runs a program and ends the process as Python ends a script: threads are joined, and exit handlers called.

    checks: statements that run after the program in its module; each that raises nothing is reported as passed. key:
    prefix of the report's lines, so that a program that writes to all of its descriptors does not pass by chance.
    """
    # Hides the sandbox's modules from the program, which cannot import them again: their folder is not on sys.path.
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    _open_streams()
    random.seed(0)  # the same program gets the same score again
    module = types.ModuleType("answer" if checks else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["answer.py"]
    exit_code = _execute(source, module.__dict__)
    for check in checks if exit_code == 0 else ():
        has_passed = _execute(check, module.__dict__, counts_exit=True) == 0
        os.write(REPORT_DESCRIPTOR, f"{key} {int(has_passed)}\n".encode())
    _end(exit_code)


def _end(exit_code: int) -> NoReturn:
    """Ends the process like a script, in the same order: threads, exit handlers, buffers. Like the processes of
    `multiprocessing`, it skips the interpreter's own clean-up, which would take longer than most programs.
    """
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the program
            exit_code = exit_code or 1
    os._exit(exit_code)


def _open_streams() -> None:
    """Opens new text streams on descriptors 0, 1 and 2, which the launcher's own streams do not use."""
    make: Callable[..., Any] = io.TextIOWrapper
    files = [os.fdopen(number, mode, closefd=False) for number, mode in enumerate(("rb", "wb", "wb"))]
    sys.stdin = sys.__stdin__ = make(files[0], encoding="utf-8", errors="surrogateescape")
    sys.stdout = sys.__stdout__ = make(files[1], encoding="utf-8", errors="surrogateescape")
    sys.stderr = sys.__stderr__ = make(files[2], encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _execute(source: str, namespace: dict[str, Any], *, counts_exit: bool = False) -> int:
    """Returns the exit code that a script with this source would have. counts_exit: an exit without error counts as a
    failure, too.
    """
    try:
        exec(compile(source, "answer.py", "exec", dont_inherit=True), namespace)
    except SystemExit as error:
        if counts_exit:
            return 1
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
