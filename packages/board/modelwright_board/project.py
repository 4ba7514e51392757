"""Names of recipes, commands and formats of the main package, its style sheet, and the keys of a key file. A child
process answers what needs PyTorch, which the board never loads.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from modelwright import __version__
from modelwright.core.config import ConfigError
from modelwright_board.files import as_object, parse_json

EXPORT_DTYPES = {"hf": (), "gguf": ("f16", "q8_0", "q4_0"), "onnx": (), "openvino": ()}
"""Formats of `modelwright export`, each with its number formats (`tests/test_project.py` compares them)."""
_ADMIN_KEYS = """
import json, sys
from pathlib import Path
from modelwright.core.config import ConfigError
from modelwright_board.files import as_object, parse_json
from modelwright.serve.keys import load_keys
try:
    print(json.dumps([one.sha256 for one in load_keys(Path(sys.argv[1])) if "admin" in one.scopes]))
except ConfigError as error:
    sys.exit(str(error))
"""


@cache
def recipe_names() -> Sequence[str]:
    """Names of the recipes, the one to begin with first."""
    found = Path(str(files("modelwright.recipes"))).glob("*.yaml")
    return sorted((path.stem for path in found), key=lambda name: (name != "quickstart", name))


@cache
def has_command(name: str) -> bool:
    """Returns True if a command of this name is installed."""
    # Not by `cli.main`, which imports all commands and with them a hundred megabytes.
    added = {one.name for one in entry_points(group="modelwright.commands")}
    return name in added or find_spec(f"modelwright.cli.{name}") is not None


@cache
def shared_style() -> str:
    """The style sheet that all pages of the project share."""
    return (files("modelwright.serve") / "static" / "pages.css").read_text(encoding="utf-8")


@cache
def plotly_script() -> Path:
    """The script of the installed package `plotly`."""
    return Path(str(files("plotly") / "package_data" / "plotly.min.js"))


def admin_keys(path: str) -> Sequence[str]:
    """Returns the SHA-256 of each key with the scope admin. Raises `ConfigError` if the file is wrong or has none."""
    asked = subprocess.run([sys.executable, "-c", _ADMIN_KEYS, path], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise ConfigError(asked.stderr.strip().splitlines()[-1])
    keys: list[str] = json.loads(asked.stdout)
    if not keys:
        raise ConfigError(
            f"keys_file: {path}: no key has the scope admin; make one with python -m modelwright.serve.keys NAME "
            "--scopes admin"
        )
    return keys


_asked: dict[Path, "subprocess.Popen[bytes]"] = {}
_REMEDIES = """
import json
from modelwright.data.clean.config import STEPS
print(json.dumps({reason: option for spec in STEPS for reason, option in spec.remedies.items()}))
"""


def recipe_settings(name: str, folder: Path) -> str:
    """Returns all settings of a recipe as YAML, "" until they are known."""
    command = ["-m", "modelwright.cli.entry", "config", name, "--plain"]
    return _answer(command, folder / f"recipe-{name}-{__version__}.yaml") if name in recipe_names() else ""


def cleaning_remedies(folder: Path) -> dict[str, str]:
    """Returns the options that keep what cleaning drops, by reason; empty until they are known."""
    text = _answer(["-c", _REMEDIES], folder / f"remedies-{__version__}.json")
    return {str(reason): str(option) for reason, option in as_object(parse_json(text)).items()}


def _answer(command: Sequence[str], path: Path) -> str:
    """Returns the output of a Python command, "" until it has ended. The command runs once, in a child process, because
    it loads libraries that the board does without, and its answer is kept in the file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        pass
    draft = Path(f"{path}.{os.getpid()}")
    child = _asked.get(path)
    if child is None:
        with open(draft, "wb") as file:
            line = [sys.executable, *command]
            _asked[path] = subprocess.Popen(line, stdout=file, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    elif child.poll() == 0 and draft.exists():
        draft.replace(path)
    return ""
