"""What a user installs: the wheels alone, in empty environments, in an empty folder.

    python benchmarks/wheel_check.py [--extras all] [--core-only]

Builds the wheels of the main package and of all packages built onto it into dist/, installs them into a new environment
without extras, then into another one with `--extras` (default: all). In each, the recipe tiny runs, and a small Hugging
Face folder is fine-tuned on conversations. Without extras, every command of tests/every_command.py works or ends with
exit code 2 and one line that names the extra to install. With all of them, every command shows its help, text is
cleaned with all steps, a run serves its model and asks it, and docs/tutorials/fine-tune.md works from its first command
to its Python. Exit code 1 for anything else.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from every_command import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    RELAXED,
    command_lines,
    fault_of,
    write_inputs,
)
from wheel_tutorial import fault_of_tutorial, follow  # noqa: E402  # pyright: ignore[reportMissingImports]

PROJECTS = [ROOT, *(path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml")))]
NOT_BUILT = shutil.ignore_patterns(
    ".*", "*.egg-info", "benchmarks", "build", "dist", "docs", "examples", "packages", "runs", "tests"
)
MOST_S = 1800
ALONE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
"""Variables of the processes in a new environment, which must not find this checkout."""


def build_wheels(target: Path) -> list[Path]:
    """Builds a wheel of each project in `target`, which is emptied of older ones first."""
    target.mkdir(exist_ok=True)
    for old in target.glob("modelwright*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target)]
    # From copies: setuptools packs what an earlier build left in build/lib, even modules that are gone from the source.
    with tempfile.TemporaryDirectory() as copies:
        sources = [shutil.copytree(one, Path(copies, one.name), ignore=NOT_BUILT) for one in PROJECTS]
        subprocess.run([*command, *map(str, sources)], check=True)
    return sorted(target.glob("modelwright*.whl"))


def new_environment(folder: Path, wheels: Sequence[Path], extras: str) -> Path:
    """Installs the main wheel with `extras` (may be empty), with extras also the others, and returns the folder of the
    programs. Everything else comes from the package index, with the versions of constraints.txt.
    """
    venv.create(folder, with_pip=True)
    main = next(path for path in wheels if path.name.startswith("modelwright-"))
    # All by their files: a package of one of these names may be another project's on the index.
    others = [str(path) for path in wheels if path != main]
    wanted = [f"modelwright[{extras}] @ {main.as_uri()}", *others] if extras else [str(main)]
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip>=25,<26.2"], check=True, env=ALONE)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    version = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    # The build for processors alone, where the index has it: the other one brings gigabytes of CUDA with it.
    subprocess.run([*pip, f"torch=={version[1]}+cpu"], capture_output=True, env=ALONE)
    clients = ["openai"] if extras else []  # what the tutorial asks the server with
    subprocess.run([*pip, *constraints, *wanted, *clients], check=True, env=ALONE)
    return folder / "bin"


def write_conversations(path: Path) -> None:
    turns = [
        [{"role": "user", "content": f"What is {a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a in range(8)
        for b in range(8)
    ]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))


def faults(programs: Path, folder: Path, *, with_extras: bool) -> Iterator[str]:
    """Yields what does not work in the environment. folder: an empty one, to work in."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / "modelwright"), *words]
        return subprocess.run(
            command, cwd=folder, env=ALONE, capture_output=True, text=True, timeout=MOST_S, stdin=subprocess.DEVNULL
        )

    def shown(fault: str, name: str) -> None:
        print(f"{'FAILS' if fault else 'right'}  modelwright {name}", flush=True)

    write_inputs(folder)
    write_conversations(folder / "conversations.jsonl")
    tasks = [
        ("run", "tiny", "--name", "tiny"),
        ("export", "runs/tiny", "--to", "hf", "model"),
        ("finetune", "model", "conversations.jsonl", "--run-dir", "runs/tuned", "--sft.num_steps", "2"),
    ]
    if with_extras:
        tasks += [
            ("clean", "text.txt", "page.html", "--out", "cleaned", *RELAXED),
            ("run", "tiny", "--name", "tiny", "--stages", "serve_check,report"),
            ("completion", "bash"),
        ]
    for words in tasks:
        done = run(*words)
        fault = f"exit code {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}" if done.returncode else ""
        shown(fault, " ".join(words))
        if fault:
            yield f"{' '.join(words)}: {fault}"
            return
    if with_extras:
        (folder / "models").mkdir()
        (folder / "model").rename(folder / "models" / "mine")
        for name in ("examples.jsonl", "heldout.jsonl"):
            write_conversations(folder / name)
        try:
            told = follow(folder, str(programs / "python"), [str(programs / "modelwright")], ALONE)
            fault = fault_of_tutorial(told)
        except AssertionError as error:
            fault = str(error)
        shown(fault, "(docs/tutorials/fine-tune.md)")
        if fault:
            yield f"docs/tutorials/fine-tune.md: {fault}"
    help_ = run("--help")
    names = re.findall(r"^  (\w[\w-]*)  ", help_.stdout, re.MULTILINE)
    if len(names) < 10:
        yield f"--help lists {len(names)} commands:\n{help_.stdout}{help_.stderr}"
    tried = {name: ([name, "--help"], "") for name in names} if with_extras else command_lines(folder)
    for name, (words, extra) in tried.items():
        done = run(*words)
        fault = fault_of(extra, done.returncode, done.stderr)
        shown(fault, f"{name}{f' (needs {extra})' if extra else ''}")
        if fault:
            yield f"{name} {fault}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--extras", default="all", help="extras of the second environment (default: all)")
    parser.add_argument("--core-only", action="store_true", help="try the environment without extras only")
    options = parser.parse_args()
    wheels = build_wheels(ROOT / "dist")
    print(*(path.name for path in wheels), sep="\n", flush=True)
    found = []
    for extras in ("",) if options.core_only else ("", options.extras):
        with tempfile.TemporaryDirectory() as folder:
            print(f"== {f'modelwright[{extras}]' if extras else 'modelwright'}", flush=True)
            programs = new_environment(Path(folder) / "environment", wheels, extras)
            (place := Path(folder) / "work").mkdir()
            found += faults(programs, place, with_extras=bool(extras))
    print("\n".join(found) if found else "the wheels work")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
