"""Run commands in this process as after `pip install modelwright`: nothing that only an extra brings can be imported.

Usage: python without_extras.py FILE [--all], a JSON list of command lines. Prints a JSON list of [exit code, errors].
With --all nothing is hidden, as after `pip install 'modelwright[all]'`.
"""

import contextlib
import importlib
import json
import os
import re
import sys
import tempfile
import tomllib
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

IMPORTED = (
    "modelwright.cli.main", "modelwright.data.clean.clean", "modelwright.pipeline.run", "modelwright.recipes.load",
    "modelwright.train.build",
)  # fmt: skip
"""Modules that most commands import, none of which needs an extra: importing them happens after extras are hidden."""


def core_distributions() -> set[str]:
    """Normalized names of what `modelwright` requires without extras, and what these require."""
    # From the file: what is installed in editable form may have been installed before the file was changed.
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found = {"modelwright"}
    todo = [re.match(r"[\w.-]+", requirement)[0] for requirement in project["dependencies"]]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.add(name)
            for requirement in metadata.requires(name) or ():
                if "extra ==" not in requirement:
                    todo.append(re.match(r"[\w.-]+", requirement)[0])
    return found


class Hiding:
    """A finder that does not find some top-level modules."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, *arguments: Any) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide_extras() -> None:
    core = core_distributions()
    normal = {name: re.sub(r"[-_.]+", "-", name).lower() for name in {d.name for d in metadata.distributions()}}
    owners = metadata.packages_distributions()
    hidden = {module for module, names in owners.items() if not core & {normal.get(name, name) for name in names}}
    hidden |= {path.name for path in Path(__file__).parents[1].glob("packages/*/modelwright_*")} | {
        "modelwright_claims"
    }
    sys.meta_path[:] = [Hiding(finder, hidden) for finder in sys.meta_path]
    from_name = metadata.Distribution.from_name.__func__

    def only_core(cls: type, name: str) -> metadata.Distribution:
        if re.sub(r"[-_.]+", "-", name).lower() not in core:
            raise metadata.PackageNotFoundError(name)
        return from_name(cls, name)

    metadata.Distribution.from_name = classmethod(only_core)
    all_points = metadata.entry_points

    def only_of_core(**selected: Any) -> Any:
        points = all_points(**selected)
        return points if not selected else [p for p in points if p.dist and normal.get(p.dist.name) in core]

    metadata.entry_points = only_of_core


def outcome(words: list[str]) -> tuple[int, str]:
    """The exit code and the errors of a command, in a process of its own."""
    with tempfile.TemporaryFile("w+") as errors:
        if (child := os.fork()) == 0:
            os.dup2(errors.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            code = 1
            try:
                from modelwright.cli.main import main

                code = main(words)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read()


if __name__ == "__main__":
    if "--all" not in sys.argv:
        hide_extras()
    for name in IMPORTED:  # once, and not in the process of each command
        importlib.import_module(name)
    print(json.dumps([outcome(words) for words in json.loads(Path(sys.argv[1]).read_text())]))
