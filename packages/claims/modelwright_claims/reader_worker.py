"""A reader of `silent_errors` in a separate process, run by path with the interpreter that has its tool.

    python -P reader_worker.py TRL|LLaMA-Factory|Axolotl < TASK.json

prints its result as the last line, in JSON: the version of the tool for an empty task, "" where it is not installed;
otherwise what it would train on, what it wrote and why it refused, for each file. `reader_tools` has the tools. Neither
imports anything of the product.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = {"TRL": "trl", "LLaMA-Factory": "llamafactory", "Axolotl": "axolotl"}
Read = Callable[[Mapping[str, Any], Path], Iterable[Any]]


def in_child(read: Read, case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Read a file in a forked process, whose output is kept: libraries warn once in a process, and some end theirs."""
    folder.mkdir()
    log, result = folder / "log.txt", folder / "result.json"
    child = os.fork()
    if not child:
        output = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        found: dict[str, Any] = {"examples": [], "error": ""}
        try:
            found["examples"] = [[list(ids), list(labels), bad] for ids, labels, bad in read(case, folder)]
        except BaseException as error:  # SystemExit as well
            found["error"] = f"{type(error).__name__}: {error}"
        result.write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"error": f"ended with {status}"}
    return {**found, "log": log.read_text(encoding="utf-8", errors="replace")}


def main(tool: str) -> None:
    task, result = json.load(sys.stdin), ""
    if task:
        # By its path: the folder of this file must not be on the path of modules, as it has one called statistics.
        read = runpy.run_path(str(Path(__file__).with_name("reader_tools.py")))["READERS"][tool](task)
        folder = Path(task["folder"])
        result = [in_child(read, case, folder / str(number)) for number, case in enumerate(task["cases"])]
    else:
        with suppress(PackageNotFoundError):
            result = version(PACKAGES[tool])
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
