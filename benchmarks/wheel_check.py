"""What a user installs: the wheels alone, in empty environments, in an empty folder.

    python benchmarks/wheel_check.py [--extras all] [--core-only]

Builds the wheels of the main package and of all packages built onto it into dist/, installs them into a new environment
without extras, then into another one with `--extras` (default: all). In each: the recipe tiny runs, a small Hugging
Face folder is fine-tuned on conversations, and every command shows its help. A command may end with exit code 2 and one
line that names the extra to install; anything else is a fault. Exit code 1 where one is found.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT, *(path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml")))]
EXTRA_LINE = re.compile(r"pip install .*\[[\w,-]+\]|pip install modelwright-\w+")
MOST_S = 1800


def build_wheels(target: Path) -> list[Path]:
    """Builds a wheel of each project in `target`, which is emptied of older ones first."""
    target.mkdir(exist_ok=True)
    for old in target.glob("modelwright*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target)]
    subprocess.run([*command, *map(str, PROJECTS)], check=True)
    return sorted(target.glob("modelwright*.whl"))


def new_environment(folder: Path, wheels: Sequence[Path], extras: str) -> Path:
    """Installs the main wheel with `extras` (may be empty) and returns the folder of the programs. The other wheels are
    found in dist/; everything else comes from the package index, with the versions of constraints.txt.
    """
    venv.create(folder, with_pip=True)
    main = next(path for path in wheels if path.name.startswith("modelwright-"))
    wanted = f"modelwright[{extras}] @ {main.as_uri()}" if extras else str(main)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip>=25,<26.2"], check=True)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    version = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    # The build for processors alone, where the index has it: the other one brings gigabytes of CUDA with it.
    subprocess.run([*pip, f"torch=={version[1]}+cpu"], capture_output=True)
    subprocess.run([*pip, *constraints, "--find-links", str(ROOT / "dist"), wanted], check=True)
    return folder / "bin"


def write_examples(folder: Path) -> None:
    turns = [
        [{"role": "user", "content": f"What is {a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a in range(8)
        for b in range(8)
    ]
    (folder / "examples.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))


def faults(programs: Path, folder: Path) -> Iterator[str]:
    """Yields what does not work in the environment. folder: an empty one, to work in."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / "modelwright"), *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MOST_S)

    write_examples(folder)
    for words in (
        ("run", "tiny", "--name", "tiny"),
        ("export", "runs/tiny", "--to", "hf", "model"),
        ("finetune", "model", "examples.jsonl", "--run-dir", "runs/tuned", "--sft.num_steps", "2"),
    ):
        done = run(*words)
        print(f"{'works' if not done.returncode else 'FAILS'}  modelwright {' '.join(words)}", flush=True)
        if done.returncode:
            yield f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            return
    shown = run("--help")
    names = re.findall(r"^  (\w[\w-]*)  ", shown.stdout, re.MULTILINE)
    if len(names) < 10:
        yield f"--help lists {len(names)} commands:\n{shown.stdout}{shown.stderr}"
    for name in names:
        done = run(name, "--help")
        says_extra = done.returncode == 2 and EXTRA_LINE.search(done.stderr)
        print(
            f"{'works' if not done.returncode else 'extra' if says_extra else 'FAILS'}  modelwright {name}", flush=True
        )
        if done.returncode and not says_extra:
            yield f"{name} --help: exit code {done.returncode}\n{done.stderr[-1500:]}"


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
            found += faults(programs, place)
    print("\n".join(found) if found else "the wheels work")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
