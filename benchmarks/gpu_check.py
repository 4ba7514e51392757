"""On a CUDA machine: the tests that bear on it, the recipes, and how fast THE loop trains there: `make gpu-check`.

Needs torch and pytest as they are installed; nothing is downloaded. Runs every recipe that needs no model with few
steps, from its data to the report. Times training of a GPT-2-sized decoder (124 M parameters) on random tokens in FP32,
BF16, FP8 by each recipe of scaling and INT8, some with compiled blocks, and measures the bare matrix products beside
it, so that utilization is of what the card does and not of a data sheet; says for each FP8 recipe whether the card has
a kernel that agrees with the definition. Writes `benchmarks/results/gpu-check-<card>.json` after each part, with the
names of those that are done. Without a GPU it says so and stops, unless asked for `--device cpu`.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.ops.lowp_linear import E4M3, GRIDS, Recipe
from modelwright.ops.microbenchmark import matmul_rate
from modelwright.ops.quantize import has_fp8_kernel
from modelwright.parallel.mesh import single
from modelwright.recipes import load
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.controllers import measure_speeds
from modelwright.train.precision.policy import Fp8Config, Kind, PrecisionConfig
from modelwright.train.technique import StepInfo, observer
from modelwright_claims.results import circumstances, machine_slug

ROOT = Path(__file__).parents[1]
TESTS = ("core", "ops", "model", "optim", "precision", "memory", "infer", "../packages/claims/tests/test_cuda.py")
NUM_UNTIMED_STEPS = 10
RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise", "blockwise")
NEED_A_MODEL = {"finetune"}
WHOLE_RUNS = [name for name in load.RECIPES if name not in NEED_A_MODEL]
NUM_STEPS_OF_RUNS = 6


@dataclass(frozen=True, kw_only=True)
class RandomRows:
    """Batches of random tokens, two documents to a row: speed does not depend on the text."""

    vocab_size: int
    batch_rows: int
    seq_len: int
    num_batches_per_epoch: int = 1_000_000

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        generator = torch.Generator().manual_seed(derive_seed(0, "row", index))
        shape = (self.batch_rows, self.seq_len)
        tokens_BT = torch.randint(self.vocab_size, shape, generator=generator)
        place_T = torch.arange(self.seq_len)
        half = self.seq_len // 2
        segments_BT = (place_T >= half).int().expand(shape).contiguous()
        labels_BT = tokens_BT.roll(-1, dims=1)
        labels_BT[:, [half - 1, -1]] = IGNORED
        positions_BT = (place_T % half).expand(shape).contiguous()
        return TokenBatch(
            input_ids_BT=tokens_BT, labels_BT=labels_BT, positions_BT=positions_BT, segments_BT=segments_BT
        )


@dataclass
class Speeds:
    """Keeps step times and utilization."""

    every: int = 1
    steps: list[StepInfo] = field(default_factory=list)

    def observe(self, info: StepInfo) -> None:
        self.steps.append(info)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch finds no CUDA device here; run it on a machine with one")
        return 2
    stand_in_for_tensorboard()
    around = circumstances()
    path = options.results / f"gpu-check-{machine_slug(around['machine'])}.json"
    options.results.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"benchmark": "gpu-check", **around}
    for name in options.parts:
        started = time.perf_counter()
        record |= PARTS[name](options) | {"parts_done": [*record.get("parts_done", ()), name]}
        write_atomic(path, json.dumps(record, indent=1, default=float) + "\n")
        print(f"gpu-check: {name} took {time.perf_counter() - started:.0f} s, written to {path}", flush=True)
    errors = [*record.get("errors_of_recipes", {}).values(), *record.get("errors_of_training", {}).values()]
    return int(record.get("tests", {}).get("rc", 0)) or int(any(errors))


def recipes_part(options: argparse.Namespace) -> dict[str, Any]:
    """Every recipe that needs no model, side by side."""
    with ThreadPoolExecutor(len(WHOLE_RUNS)) as pool:
        errors = dict(zip(WHOLE_RUNS, pool.map(lambda name: run_recipe(name, options.device), WHOLE_RUNS), strict=True))
    print("recipes:", {name: error or "whole" for name, error in errors.items()})
    return {"errors_of_recipes": errors}


def speed_part(options: argparse.Namespace) -> dict[str, Any]:
    """The loop's speed in every format, beside bare products and layers."""
    rates = product_rates(options.device)
    speeds, failures = measure(options, rates)
    products, kernels = product_speeds(options), fp8_kernels(options.device)
    print("layers over FP32, casts included:", {name: round(ratio, 2) for name, ratio in products.items()})
    print("own FP8 kernels:", kernels)
    print("errors of training:", failures)
    return {
        "product_flops": rates,
        "training": speeds,
        "errors_of_training": failures,
        "layer_products_over_fp32": products,
        "fp8_kernels": kernels,
    }


def tests_part(_options: argparse.Namespace) -> dict[str, Any]:
    """The tests that a GPU changes."""
    return {"tests": run_tests()}


PARTS = {"recipes": recipes_part, "speed": speed_part, "tests": tests_part}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tests and training speed on a CUDA machine.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="what to run, in this order; the record is written after each part and says which are done",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def stand_in_for_tensorboard() -> None:
    """A bare machine may lack tensorboardX; what the loop mirrors there is not part of this measurement."""
    if importlib.util.find_spec("tensorboardX") is None:
        writer = types.SimpleNamespace(add_scalar=lambda *_, **__: None, close=lambda: None)
        module: Any = types.ModuleType("tensorboardX")
        module.SummaryWriter = lambda *_, **__: writer
        sys.modules["tensorboardX"] = module


def run_tests() -> dict[str, Any]:
    """The floors that a GPU changes, and the tests that only run on one."""
    paths = [str(ROOT / "tests" / name) for name in TESTS]
    side_by_side = (
        ("-n", "auto", "--dist", "loadfile", "-p", "no:benchmark") if importlib.util.find_spec("xdist") else ()
    )
    command = [sys.executable, "-m", "pytest", *side_by_side, *(path for path in paths if Path(path).exists())]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    closing_line = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=one_thread) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            closing_line = line.strip() or closing_line
    return {"rc": tests.returncode, "closing_line": closing_line}


def run_recipe(name: str, device: str) -> str:
    """A recipe from text to report with few steps in each training; its error, or ""."""
    lengths = [f"--{stage.name}.num_steps={NUM_STEPS_OF_RUNS}" for stage in load.recipe(name).trainings]
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", name, "--run-dir", f"{folder}/run", f"--hardware.device={device}", *lengths]
        if "stdlib" in load.recipe(name).data.sources:
            words.append("--data.stdlib_fraction=0.05")
        command = [sys.executable, "-m", "modelwright.cli.main", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=with_absolute_imports())
    if not done.returncode:
        return ""
    print(f"{name}:", done.stderr[-3000:])
    return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"


def with_absolute_imports() -> dict[str, str]:
    """The environment for a command in another folder, where relative entries of PYTHONPATH lead nowhere."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)}


def product_rates(device: str) -> dict[str, float]:
    """FLOP/s of a large square product by format."""
    edge = 4096 if device == "cuda" else 512
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {name: matmul_rate(edge, edge, edge, dtype=dtype, device=device) for name, dtype in formats.items()}


def measure(options: argparse.Namespace, rates: dict[str, float]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Train in each way; return the median speed after the first steps, utilization, memory and last loss of those that
    worked, and the errors of the others.
    """
    shape = ModelConfig(
        vocab_size=options.vocab,
        num_layers=options.layers,
        model_dim=options.dim,
        num_heads=options.dim // 64,
        num_kv_heads=options.dim // 64,
        ffn_dim=options.dim * 8 // 3 // 64 * 64,
        head_dim=64,
        max_seq_len=options.seq_len,
    )
    fp32 = TrainConfig(
        num_steps=options.steps,
        batch_tokens=options.rows * options.seq_len,
        learning_rate=3e-4,
        precision=PrecisionConfig(policy="fp32"),
        eval_every_steps=0,
        checkpoint_every_minutes=0,
        keep_best=False,
    )
    bf16 = replace(fp32, precision=PrecisionConfig(policy="bf16_mixed"))
    ways = {"fp32": fp32, "bf16": bf16, "bf16 compiled": replace(bf16, compile=True)}
    ways["int8"] = replace(fp32, precision=PrecisionConfig(policy="int8"))
    for recipe in RECIPES:
        fp8 = replace(fp32, precision=PrecisionConfig(policy="fp8", fp8=Fp8Config(recipe=recipe)))
        ways |= {f"fp8 {recipe}": fp8, f"fp8 {recipe} compiled": replace(fp8, compile=True)}
    speeds: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    for name, config in ways.items():
        try:
            found = train_once(shape, config, options, rates["fp32" if name == "fp32" else "bf16"])
            speeds[name] = found
            print(f"{name:22} {found['tokens_per_s']:12,.0f} tokens/s  {found['mfu']:6.1%} of the product rate  "
                  f"{found['peak_bytes'] / 2**30:.1f} GiB  loss {found['last_loss']:.3f}", flush=True)  # fmt: skip
        except Exception as error:
            traceback.print_exc()
            failures[name] = repr(error)
    return speeds, failures


def product_speeds(options: argparse.Namespace) -> dict[str, float]:
    """Times as fast as FP32: forward and backward of a feed-forward layer of width 4096 on 8,192 tokens."""
    wide, rows = (4096, 8192) if options.device == "cuda" else (128, 64)
    model = Decoder(ModelConfig(vocab_size=8, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8,
                                head_dim=8, max_seq_len=8))  # fmt: skip
    shapes: dict[Kind, list[tuple[int, int]]] = {"ffn": [(4 * wide, wide), (wide, 4 * wide)]}
    result: dict[str, float] = {}
    for recipe in RECIPES:
        formats = ModelPrecision(model, PrecisionConfig(policy="bf16_mixed", fp8=Fp8Config(recipe=recipe)))
        seconds = measure_speeds(formats, shapes, ("fp32", "bf16", "fp8", "int8"), num_rows=rows,
                                 device=torch.device(options.device))  # fmt: skip
        result |= {name: seconds["ffn", "fp32"] / seconds["ffn", name] for name in ("bf16", "int8")}
        result[f"fp8 {recipe}"] = seconds["ffn", "fp32"] / seconds["ffn", "fp8"]
    return result


def fp8_kernels(device: str) -> dict[str, bool]:
    """Whether the card's own product serves a recipe's forward pass; else its definition is computed."""
    return {
        recipe: has_fp8_kernel(torch.device(device), E4M3, E4M3, GRIDS[recipe], torch.bfloat16) for recipe in RECIPES
    }


def train_once(
    shape: ModelConfig, config: TrainConfig, options: argparse.Namespace, peak_flops: float
) -> dict[str, float]:
    source = RandomRows(vocab_size=shape.vocab_size, batch_rows=options.rows, seq_len=options.seq_len)
    model, speeds = Decoder(shape), Speeds()
    model.init_weights(seed=0)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        train(
            TrainJob(
                model=model,
                objective=NextToken(source),
                config=config,
                num_steps=config.num_steps,
                stage=StageDir(Path(folder)),
                seed=0,
                name="gpu-check",
                input_digest="gpu-check",
                peak_flops=peak_flops,
                techniques=[observer("speeds", speeds.observe)],
            ),
            single(options.device),
            SilentProgress(),
        )
    timed = speeds.steps[min(NUM_UNTIMED_STEPS, len(speeds.steps) // 2) :]
    return {
        "tokens_per_s": statistics.median(info.tokens_per_s for info in timed),
        "mfu": statistics.median(info.mfu for info in timed),
        "peak_bytes": torch.cuda.max_memory_allocated() if options.device == "cuda" else 0,
        "first_loss": speeds.steps[0].loss,
        "last_loss": speeds.steps[-1].loss,
        "parameters": shape.num_parameters,
    }


if __name__ == "__main__":
    sys.exit(main())
