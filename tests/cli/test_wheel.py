"""A new user with the wheel alone: docs/tutorials/fine-tune.md, first its five commands, then the ten lines of Python.

The wheel is built from this checkout and unpacked into a folder of its own; the libraries that pip would fetch are
those of this environment. benchmarks/wheel_check.py has pip fetch them, into empty environments.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_files import write_examples, write_model
from wheel_tutorial import fault_of_tutorial, follow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, in a folder to import from."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building writes into the checkout, so a copy of it is built
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source]
    subprocess.run([*pip, *map(str, build)], check=True, capture_output=True)
    (wheel,) = folder.glob("modelwright-*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", folder / "site", wheel]
    subprocess.run([*pip, *map(str, install)], check=True, capture_output=True)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_with_the_wheel_alone(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    write_model(tmp_path / "models" / "mine")
    write_examples(tmp_path / "examples.jsonl")
    write_examples(tmp_path / "heldout.jsonl", num_records=10)
    # The first command compiles what it imports for those after it.
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    where = [sys.executable, "-c", "import modelwright; print(modelwright.__file__)"]
    found = subprocess.run(where, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(site), "not the checkout"
    told = follow(tmp_path, sys.executable, [sys.executable, str(site / "bin" / "modelwright")], environment)
    assert fault_of_tutorial(told) == ""
    assert (tmp_path / "runs/from-python/sft/artifact/model.safetensors").is_file()
