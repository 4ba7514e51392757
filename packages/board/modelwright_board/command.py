"""`modelwright board`: opens the page of a folder of runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError

KEYS_VARIABLE = "MODELWRIGHT_BOARD_KEYS"
"""Environment variable with the hashes of the keys that open the board: other users of the machine cannot read it."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "board",
        "Serve a local page for a folder of runs: look at data, start, watch, stop and compare runs, talk to models, "
        "export and serve them, and follow their drift. The page starts commands of `modelwright`, shows each of them "
        "first, and computes nothing itself.",
        example="modelwright board runs --port 7860",
    )
    parser.add_argument("runs", metavar="RUNS", nargs="?", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="port; 0 takes a free one (default: 7860)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to bind; any other than this machine's own needs "
        "--keys_file (default: 127.0.0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--keys_file", default="", metavar="FILE", help="keys as of `modelwright serve`; one with the scope admin "
        "opens the page, in place of the token in the printed URL",
    )  # fmt: skip
    parser.add_argument(
        "--exit-with-parent", type=int, default=0, metavar="PID",
        help="stop when this process, which started it, is gone",
    )  # fmt: skip
    return parser


def board(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port: must be 0 to 65535, got {options.port}")
    if options.host not in LOOPBACK and not options.keys_file:
        raise ConfigError(
            f"--host: {options.host} can be reached from other machines; give --keys_file FILE with a key of the scope "
            "admin (python -m modelwright.serve.keys NAME --scopes admin), or leave out --host"
        )
    for name in ("plotly", "uvicorn"):
        if find_spec(name) is None:
            raise ConfigError(f"board: {name} is not installed; pip install 'modelwright[board]'")
    # A fresh interpreter in place of this one, which has imported every command and with them a hundred megabytes.
    words = [options.runs, options.host, str(options.port), str(options.exit_with_parent)]
    sys.stdout.flush()
    environment = {**os.environ, KEYS_VARIABLE: " ".join(admin_keys(options.keys_file))}
    os.execve(sys.executable, [sys.executable, "-m", "modelwright_board.server", *words], environment)


def admin_keys(path: str) -> list[str]:
    """Returns the SHA-256 of each key with the scope admin. Raises `ConfigError` if the file is wrong or has none."""
    if not path:
        return []
    from modelwright.serve.keys import load_keys

    keys = [one.sha256 for one in load_keys(Path(path)) if "admin" in one.scopes]
    if not keys:
        raise ConfigError(
            f"keys_file: {path}: no key has the scope admin; make one with python -m modelwright.serve.keys NAME "
            "--scopes admin"
        )
    return keys


COMMAND = Command(name="board", run=board, parser=parser, summary="open a local page for runs: from data to A/B tests")
