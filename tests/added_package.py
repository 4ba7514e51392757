"""A distribution outside of the repository, in a folder of the import path: one module and its entry points."""

import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import pytest


def add_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, entries: Mapping[str, Mapping[str, str]]
) -> None:
    """entries: by entry-point group, the names that the package adds and the attributes of its module behind them."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {module}:{a}\n" for n, a in names.items()) for group, names in entries.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)


def add_agent_routes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the routes of `packages/agents` where only its checkout is on the path, without an installation."""
    names = {"list_tools": "LIST_TOOLS", "call_tool": "CALL_TOOL", "responses": "ROUTE"}
    if not {entry.name for entry in entry_points(group="modelwright.routes")} & {*names}:
        source = "from modelwright_agents.tools import CALL_TOOL, LIST_TOOLS\n"
        source += "from modelwright_agents.responses import ROUTE\n"
        add_package(folder / "routes", monkeypatch, "agent_routes", source, {"modelwright.routes": names})
