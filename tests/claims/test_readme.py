"""The README's own commands, run as they stand with the small recipe in place of the demo's."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPE = "quickstart"


def commands() -> list[list[str]]:
    """The commands of every code block marked to be run, words as a shell would see them."""
    blocks = re.findall(r"<!-- run -->\n```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def run(words: list[str], folder: Path, timeout_s: int = 280) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A place with what the commands name, and a finished run of the demo's command with the small recipe."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("README.md", "CONTRIBUTING.md", "docs"):
        (place / name).symlink_to(ROOT / name)
    words = [sys.executable, "-m", "modelwright.cli.main", "run", "tiny"]
    done = run(words, place)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (place / "runs/tiny/report.html").is_file()
    return place


def test_some_commands_are_marked():
    assert len(commands()) >= 6
    assert all(words[0] == "modelwright" for words in commands())


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_command_works(words, folder):
    small = [word.replace(RECIPE, "tiny") for word in words[1:]]
    own_run = small[0] == "run" and "--dry-run" not in small
    extra = ["--run-dir", "runs/own", "--data.builtin_fraction", "0.03"] if own_run else []
    done = run([sys.executable, "-m", "modelwright.cli.main", *small, *extra], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_demo_runs_the_demo():
    """`make demo` itself, with an installed environment taken as given."""
    environment = sys.prefix
    assumed = [f"--assume-old={environment}/{stamp}" for stamp in (".installed", ".torch")]
    dry = run(["make", "-n", "--no-print-directory", "-C", str(ROOT), *assumed, f"VENV={environment}", "demo"], ROOT)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.strip().splitlines()[-1] == f"{environment}/bin/modelwright run quickstart"


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_test_runs_the_tests():
    dry = run(["make", "-n", "--no-print-directory", "-C", str(ROOT), "test"], ROOT)
    assert dry.stdout.strip().splitlines()[-1].endswith("-m pytest")


def test_every_file_that_is_named_exists():
    named = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [path for path in named if not path.startswith("http") and not (ROOT / path).exists()]
    assert missing in ([], ["docs/report.png"])


def test_the_tree_names_every_package():
    packages = {path.parent.name for path in (ROOT / "src/modelwright").glob("*/__init__.py")}
    assert {name for name in packages if f"{name}/" not in README} == set()
