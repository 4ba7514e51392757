"""Every recipe, shortened, by two checkouts: do they end in the same bits?

    python benchmarks/same_bits.py OLD_CHECKOUT [NEW_CHECKOUT] [--recipes NAME ...]

Each recipe runs with a few steps and one thread, from the code of each checkout (its `src` and its packages), and is
exported as a Hugging Face folder, GGUF and ONNX. Compared are the bytes of kept documents, tokenizer, rows and weights,
the figures of every step that are no times, results of the evaluation, and the exports. A refactoring shows the word
"same" in every line; where a line differs, the log of the project says why. Exit code 1 where anything differs.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
STEPS = 6
SHORTER: Mapping[str, tuple[str, ...]] = {
    "quickstart": ("--minutes", "0", "--data.stdlib_fraction", "0.04"),
    "multimodal": (
        "--data.stdlib_fraction",
        "0.04",
    ),
    "continual-demo": ("--data.stdlib_fraction", "0.05"),
}
EXPORTS = ("hf", "gguf", "onnx")
CLOCKS = re.compile(r"(^|_)(time|seconds|ms|s|mfu|peak|joules|watts|kwh|energy|rss|memory|utilization|load)(_|$)")
"""Parts of the names of figures that are times, rates, or readings of the machine."""
DATA_FILES = ("*.jsonl", "*.jsonl.zst", "tokenizer.json", "*.bin", "*.npy")


def environment(checkout: Path) -> dict[str, str]:
    """One thread and that checkout's code, whatever is installed."""
    packages = [checkout / "src", checkout / "claims", *sorted(checkout.glob("packages/*"))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


def training_stages(checkout: Path, recipe: str) -> list[str]:
    """Stages of the recipe that have a number of steps, by that checkout's own listing."""
    shown = subprocess.run(
        [sys.executable, "-m", "modelwright.cli.entry", "config", recipe, "--plain"],
        env=environment(checkout), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    section, stages = "", []
    for line in shown.splitlines():
        if re.match(r"\w", line):
            section = line.partition(":")[0]
        elif re.match(r"  num_(steps|epochs):", line) and section not in stages:
            stages.append(section)
    return stages


def run(checkout: Path, recipe: str, folder: Path) -> Path:
    """Run the recipe and its exports in `folder`; returns the run directory. Raises `CalledProcessError`."""
    lengths = [word for stage in training_stages(checkout, recipe) for word in (f"--{stage}.num_steps", str(STEPS))]
    command = [sys.executable, "-m", "modelwright.cli.entry"]
    target = folder / f"run-{recipe}"  # not `recipe`: a source of that name would then be this folder
    # Said outright: a checkout may take all cores whatever OMP_NUM_THREADS is, and a sum has other bits on two threads.
    words = ["run", recipe, "--run-dir", str(target), "--hardware.num_threads", "1", *SHORTER.get(recipe, ()), *lengths]
    for more in (
        words,
        *(["export", str(target), "--to", one, str(folder / exported(recipe, one))] for one in EXPORTS),
    ):
        done = subprocess.run([*command, *more], env=environment(checkout), cwd=folder, capture_output=True, text=True)
        if done.returncode and more[0] == "run":
            raise SystemExit(f"{checkout}: {' '.join(more)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        if done.returncode:  # a model that has no such form: the refusal is compared
            (folder / f"{recipe}.{more[3]}.refused").write_text(done.stderr.replace(str(folder), ""))
    return target


def exported(recipe: str, form: str) -> str:
    return f"{recipe}.gguf" if form == "gguf" else f"{recipe}.{form}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def without_clocks(value: Any) -> Any:
    """A value of JSON without the fields that are times, rates or readings of the machine."""
    if isinstance(value, dict):
        return {name: without_clocks(one) for name, one in sorted(value.items()) if not CLOCKS.search(name)}
    return [without_clocks(one) for one in value] if isinstance(value, list) else value


def figures(path: Path) -> str:
    """Digest of a JSON file, or one with a JSON value per line, without clocks."""
    text = path.read_text(encoding="utf-8")
    values = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else [json.loads(text)]
    # When a checkpoint is written depends on the time; without its clock such a record has nothing but the step.
    kept = [value for value in map(without_clocks, values) if list(value) != ["step"]]
    return digest(json.dumps(kept).encode())


def weights(path: Path) -> str:
    """Digest of the tensors of a safetensors file, whatever their order and the header's metadata."""
    state = hashlib.sha256()
    try:
        tensors = load_file(path)
    except (KeyError, TypeError):  # BF16, which NumPy lacks: its bytes
        return digest(path.read_bytes())
    for name, value in sorted(tensors.items()):
        state.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
    return state.hexdigest()[:16]


def results(folder: Path, recipe: str) -> Iterator[tuple[str, str]]:
    """What the recipe left, by a name that is the same for both checkouts."""
    target = folder / f"run-{recipe}"
    for path in sorted(target.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or "/checkpoints/" in name or "/work/" in name:
            continue
        if path.name in ("metrics.jsonl", "results.json"):
            yield name, figures(path)
        elif path.suffix == ".safetensors":
            yield name, weights(path)
        elif "/artifact/" in name and any(path.match(pattern) for pattern in DATA_FILES):
            yield name, digest(path.read_bytes())
    for form in EXPORTS:
        path = folder / exported(recipe, form)
        refused = folder / f"{recipe}.{form}.refused"
        if refused.exists():
            yield f"{path.name} (refused)", digest(refused.read_bytes())
        for one in sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []:
            if one.is_file() and one.suffix in (".gguf", ".safetensors", ".onnx", ".json", ".data"):
                name = str(one.relative_to(folder))
                yield name, weights(one) if one.suffix == ".safetensors" else digest(one.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="+", type=Path, help="one or two checkouts; the second default is this one")
    parser.add_argument("--recipes", nargs="+", help="default: all recipes but `finetune`, which needs a model")
    options = parser.parse_args()
    old, new = (path.resolve() for path in ([*options.checkouts, ROOT])[:2])
    listed = subprocess.run(
        [sys.executable, "-m", "modelwright.cli.entry", "recipes"],
        env=environment(old), capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    recipes = options.recipes or [line.split()[0] for line in listed if not line.startswith("finetune")]
    differs = 0
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            sides = []
            for checkout, folder in ((old, Path(one)), (new, Path(other))):
                run(checkout, recipe, folder)
                sides.append(dict(results(folder, recipe)))
        for name in sorted(sides[0].keys() | sides[1].keys()):
            before, after = (side.get(name, "missing") for side in sides)
            differs += before != after
            print(f"{'same     ' if before == after else 'DIFFERENT'} {name}  {before} {after}", flush=True)
    print(f"{differs} of the compared results differ" if differs else "the same bits")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
