"""What the board takes from the main package, all of it here: names of recipes, commands and formats, and the keys of a
key file. Anything that would load PyTorch is asked of a process of its own.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from modelwright import __version__
from modelwright.cli.main import usable_commands
from modelwright.core.errors import ConfigError

EXPORT_DTYPES = {"hf": (), "gguf": ("f16", "q8_0", "q4_0"), "onnx": (), "openvino": ()}
"""Formats of `modelwright export`, each with its number formats (`tests/test_project.py` compares them)."""
_ADMIN_KEYS = """
import json, sys
from pathlib import Path
from modelwright.core.errors import ConfigError
from modelwright.serve.keys import load_keys
try:
    print(json.dumps([one.sha256 for one in load_keys(Path(sys.argv[1])) if "admin" in one.scopes]))
except ConfigError as error:
    sys.exit(str(error))
"""


@cache
def recipe_names() -> Sequence[str]:
    """Names of the recipes, the first steps first."""
    found = sorted(Path(str(files("modelwright.recipes"))).glob("*.yaml"))
    first = ("tiny", "quickstart", "finetune")
    return sorted((path.stem for path in found), key=lambda name: (name not in first, name))


@cache
def has_command(name: str) -> bool:
    """Returns True if a command of this name is installed."""
    return name in usable_commands()


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


_asked: dict[str, "subprocess.Popen[bytes]"] = {}


def recipe_settings(name: str, folder: Path) -> str:
    """Returns all settings of a recipe as YAML, "" until they are known: they are asked of a process, once for each
    version of the package, and kept in `folder`.
    """
    if name not in recipe_names():
        return ""
    path = folder / f"recipe-{name}-{__version__}.yaml"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        pass
    child = _asked.get(name)
    if child is None:
        with open(f"{path}.draft", "wb") as file:
            command = [sys.executable, "-m", "modelwright.cli.entry", "config", name, "--plain"]
            _asked[name] = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    elif child.poll() == 0 and Path(f"{path}.draft").exists():
        Path(f"{path}.draft").replace(path)
    return ""
