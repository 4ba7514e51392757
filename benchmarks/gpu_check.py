"""On a CUDA machine: `make gpu-check` measures what the code does there, in parts of at most eight minutes.

- `parity`: the tests that bear on a GPU, and for each FP8 recipe whether the card has a kernel that agrees with the
  definition.
- `train`: THE loop on random tokens with 124 million and 1.1 billion parameters, in every format, eager and compiled:
  tokens/s, utilization against bare products measured next to it, memory and its plan, graph breaks, host
  synchronizations of a step.
- `peers`: the same step in a compiled nanoGPT, Hugging Face's Trainer (eager, compiled) and others (`peers.py`).
- `attention`: the fused kernel, variable-length attention and a mask of whole rows, forward and backward.
- `decode`: tokens/s of greedy answers at 1, 8 and 64 streams, by CUDA graphs, by PyTorch's operators one by one, and by
  `generate` of transformers.
- `recipes`: every recipe that needs no model with few steps, from its data to the report.
- `resume`: a run that is resumed in the middle ends with the same weights, to the bit; what a checkpoint costs one.

Needs torch and pytest as they are installed; nothing is downloaded, and cases that lack a package say so. Writes
`benchmarks/results/gpu-check-<card>.json` after each case; a further run goes on with what has no figures. Without a
GPU it says so and stops, unless asked for `--device cpu`.
"""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor

from gpu_check_record import Part, Record, in_order, run_part, table
from modelwright.core.artifacts import StageDir
from modelwright.core.config import derive_seed
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.infer import engine as engine_module
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.graph_decoder import BLOCK_LEN
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import save_model
from modelwright.objectives.next_token import NextToken
from modelwright.ops import cpu_kernels
from modelwright.ops.attention import document_mask, masked_attention, masked_capped_attention
from modelwright.ops.flex_attention import fused_packed_attention, packed_block_mask
from modelwright.ops.lowp_linear import E4M3, GRIDS, Recipe
from modelwright.ops.microbenchmark import matmul_rate
from modelwright.ops.quantize import has_fp8_kernel
from modelwright.parallel.mesh import single
from modelwright.pipeline.estimate import cost
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
TESTS = (
    *("core", "ops", "model", "train/optim", "train/precision", "train/memory", "infer"),
    "../packages/claims/tests/test_cuda.py",
)
NUM_DECODED = 128
DECODED_PROMPT_LEN = 256
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
    options.results.mkdir(parents=True, exist_ok=True)
    record = Record(path=options.results / f"gpu-check-{machine_slug(around['machine'])}.json", around=around)
    parts = {name: cases_of(options) for name, cases_of in PARTS.items() if name in options.parts}
    errors: list[str] = []
    for name in in_order(parts, record):
        errors += run_part(name, parts[name], record, limit_s=options.limit_s, again=options.again)
    print(table(record))
    print("\n".join(errors) or f"gpu-check: no errors; written to {record.path}")
    return int(bool(errors))


def parity_cases(options: argparse.Namespace) -> Part:
    """The tests that a GPU changes, by folder, and the card's FP8 kernels."""
    folders = {path.rpartition("/")[2]: ROOT / "tests" / path for path in TESTS}
    tests = {name: partial(run_tests, path) for name, path in folders.items()}
    return tests | {"fp8 kernels": lambda: fp8_kernels(options.device)}


def train_cases(options: argparse.Namespace) -> Part:
    """Every size in every way, and layers of the larger size beside their FP32 products."""
    rates = cache(lambda: product_rates(options.device))

    def trained(size: str, way: str, config: TrainConfig) -> dict[str, Any]:
        peak = rates()["fp32" if way.startswith("fp32") else "bf16"]
        return train_once(SIZES[size](options), config, options, peak)

    return {
        f"{size}, {way}": partial(trained, size, way, config)
        for size in SIZES
        for way, config in ways_to_train(options).items()
        if size != "1.1B" or options.device == "cuda"
    } | {"layers over FP32": lambda: product_speeds(options)}


def peers_cases(options: argparse.Namespace) -> Part:
    """Other trainers at every size, each in a process of its own."""

    def peers(shape: ModelConfig) -> dict[str, Any]:
        fields = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "ffn_dim", "head_dim", "max_seq_len")
        model = {name: getattr(shape, name) for name in (*fields, "tie_embeddings")}
        steps = max(3, min(options.steps, 16))
        with tempfile.TemporaryDirectory() as folder:
            words = ["--device", options.device, "--compute", "bf16", "--repeats", "1", "--results", folder]
            words += ["--rows", str(options.rows), "--seq-len", str(options.seq_len), "--model", json.dumps(model)]
            run_script("peers.py", *words, "--steps", str(steps), "--warmup", str(steps // 3))
            (path,) = Path(folder).glob("*.json")
            record = json.loads(path.read_text(encoding="utf-8"))
        lacking = {name: f"not installed: {', '.join(of)}" for name, of in record["not_installed"].items()}
        return record["summary"] | lacking

    return {
        size: partial(peers, shape(options))
        for size, shape in SIZES.items()
        if size != "1.1B" or options.device == "cuda"
    }


def attention_cases(options: argparse.Namespace) -> Part:
    """Packed rows of several lengths, with and without a window and a soft cap."""
    shapes = [(1024, 0, 0.0), (4096, 0, 0.0), (4096, 1024, 0.0), (4096, 0, 50.0), (32_768, 0, 0.0)]
    if options.device == "cpu":
        shapes = [(256, 0, 0.0)]
    return {
        f"{row_len} tokens, window {window}, cap {cap:g}": partial(
            attention_speeds, row_len, window, cap, options.device
        )
        for row_len, window, cap in shapes
    }


def decode_cases(options: argparse.Namespace) -> Part:
    streams = (1, 8, 64) if options.device == "cuda" else (2,)
    return {f"{count} streams": partial(decode_speeds, count, options) for count in streams}


def recipe_cases(options: argparse.Namespace) -> Part:
    return {name: partial(run_recipe, name, options.device) for name in WHOLE_RUNS}


def resume_cases(options: argparse.Namespace) -> Part:
    ways = ways_to_train(options)
    return {way: partial(resumed, options, ways[way]) for way in ("fp32", "bf16 compiled")} | {
        "stall of a checkpoint": partial(checkpoint_stall, options, ways["bf16 compiled"])
    }


PARTS = {
    "parity": parity_cases,
    "train": train_cases,
    "peers": peers_cases,
    "attention": attention_cases,
    "decode": decode_cases,
    "recipes": recipe_cases,
    "resume": resume_cases,
}


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
        help="what to run; parts without figures come first",
    )
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds of a part")
    parser.add_argument("--again", action="store_true", help="repeat cases that have figures")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def stand_in_for_tensorboard() -> None:
    """A bare machine may lack tensorboardX; what the loop mirrors there is not part of this measurement."""
    if importlib.util.find_spec("tensorboardX") is None:
        writer = types.SimpleNamespace(add_scalar=lambda *_, **__: None, close=lambda: None)
        module: Any = types.ModuleType("tensorboardX")
        module.SummaryWriter = lambda *_, **__: writer
        sys.modules["tensorboardX"] = module


def run_tests(path: Path) -> dict[str, Any]:
    """The tests of one folder or file; `error` is their last line if any failed."""
    side_by_side = (
        ("-n", "auto", "--dist", "loadfile", "-p", "no:benchmark") if importlib.util.find_spec("xdist") else ()
    )
    command = [sys.executable, "-m", "pytest", "-q", *side_by_side, str(path)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    closing_line = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=one_thread) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            closing_line = line.strip() or closing_line
    return {"error" if tests.returncode else "tests": closing_line}


def run_script(name: str, *words: str) -> None:
    """Runs another benchmark; raises its last line of errors."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=with_absolute_imports())
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")


def run_recipe(name: str, device: str) -> dict[str, Any]:
    """A recipe from text to report with few steps in each training."""
    lengths = [f"--{stage.name}.num_steps={NUM_STEPS_OF_RUNS}" for stage in load.recipe(name).trainings]
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", name, "--run-dir", f"{folder}/run", f"--hardware.device={device}", *lengths]
        if "stdlib" in load.recipe(name).data.sources:
            words.append("--data.stdlib_fraction=0.05")
        command = [sys.executable, "-m", "modelwright.cli.main", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=with_absolute_imports())
    if not done.returncode:
        return {"whole": True}
    print(f"{name}:", done.stderr[-3000:])
    return {"error": done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"}


def with_absolute_imports() -> dict[str, str]:
    """The environment for a command in another folder, where relative entries of PYTHONPATH lead nowhere."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)}


def product_rates(device: str) -> dict[str, float]:
    """FLOP/s of a large square product by format."""
    edge = 4096 if device == "cuda" else 512
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {name: matmul_rate(edge, edge, edge, dtype=dtype, device=device) for name, dtype in formats.items()}


def shape_of(options: argparse.Namespace) -> ModelConfig:
    """124 million parameters by default: the shape of GPT-2 with gated layers."""
    return ModelConfig(
        vocab_size=options.vocab,
        num_layers=options.layers,
        model_dim=options.dim,
        num_heads=options.dim // 64,
        num_kv_heads=options.dim // 64,
        ffn_dim=options.dim * 8 // 3 // 64 * 64,
        head_dim=64,
        max_seq_len=options.seq_len,
    )


def large_shape(options: argparse.Namespace) -> ModelConfig:
    """1.1 billion parameters: the shape of TinyLlama (Zhang et al. 2024)."""
    return ModelConfig(
        vocab_size=32_000, num_layers=22, model_dim=2048, num_heads=32, num_kv_heads=4, ffn_dim=5632, head_dim=64,
        max_seq_len=options.seq_len, tie_embeddings=False,
    )  # fmt: skip


SIZES = {"124M": shape_of, "1.1B": large_shape}


def ways_to_train(options: argparse.Namespace) -> dict[str, TrainConfig]:
    """Formats, eager and compiled, most important first."""
    fp32 = TrainConfig(
        num_steps=options.steps,
        batch_tokens=options.rows * options.seq_len,
        learning_rate=3e-4,
        precision=PrecisionConfig(policy="fp32"),
        eval_every_steps=0,
        checkpoint_every_minutes=0,
        keep_best=False,
        compile=False,
    )
    formats = {"bf16": PrecisionConfig(policy="bf16_mixed")}
    for recipe in RECIPES:
        formats[f"fp8 {recipe}"] = PrecisionConfig(policy="fp8", fp8=Fp8Config(recipe=recipe))
    formats |= {"int8": PrecisionConfig(policy="int8"), "fp32": fp32.precision}
    eager = {name: replace(fp32, precision=precision) for name, precision in formats.items()}
    return {f"{name} compiled": replace(config, compile=True) for name, config in eager.items()} | eager


def attention_speeds(row_len: int, window: int, soft_cap: float, device: str) -> dict[str, Any]:
    """Milliseconds of forward and backward for 32,768 tokens in BF16, 16 heads of 64, 4 of them with keys; documents of
    a quarter of a row. Each way is compared with the fused kernel.
    """
    rows = max(1, (32_768 if device == "cuda" else 512) // row_len)
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(rows, row_len, heads, 64, device=device, dtype=dtype, generator=draw).requires_grad_(
            device == "cuda"
        )
        for heads in (16, 4, 4)
    )
    segments_BT = (torch.arange(row_len, device=device) // (row_len // 4)).expand(rows, row_len)
    mask = packed_block_mask(segments_BT, window)
    ways: dict[str, Callable[[], Tensor]] = {"fused": lambda: fused_packed_attention(q, k, v, mask, soft_cap)}
    if row_len <= 4096:
        whole_B1TT = document_mask(segments_BT, window)
        ways["mask"] = lambda: (
            masked_capped_attention(q, k, v, whole_B1TT, soft_cap)
            if soft_cap
            else masked_attention(q, k, v, whole_B1TT)
        )
    if device == "cuda" and not soft_cap and importlib.util.find_spec("torch.nn.attention.varlen"):
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        if "enable_gqa" in inspect.signature(varlen).parameters:
            starts = torch.arange(0, rows * row_len + 1, row_len // 4, device=device, dtype=torch.int32)
            longest, seen = row_len // 4, (window - 1 if window else -1, 0)
            bounds = (starts, starts, longest, longest)

            def by_length() -> Tensor:
                flat = (x.flatten(0, 1) for x in (q, k, v))
                return varlen(*flat, *bounds, window_size=seen, enable_gqa=True).unflatten(0, (rows, row_len))

            ways["varlen"] = by_length
    figures: dict[str, Any] = {}
    reference = ways["fused"]().detach().float()
    for name, way in ways.items():
        figures[f"{name}, difference"] = float((way().detach().float() - reference).abs().max())
        figures[f"{name}, ms"] = milliseconds(way, device)
    return figures


def decode_speeds(num_streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of NUM_DECODED greedy tokens after prompts of equal length, prompts included, and the share of tokens
    that are those of CUDA graphs: a random model's likeliest tokens are close, so that other orders of sums part them.
    """
    on_cuda = options.device == "cuda"
    shape = replace(shape_of(options), max_seq_len=DECODED_PROMPT_LEN + NUM_DECODED)
    model = Decoder(shape)
    model.init_weights(seed=0)
    model = model.to(options.device, torch.bfloat16 if on_cuda else torch.float32)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(shape.vocab_size, (num_streams, DECODED_PROMPT_LEN), generator=draw)
    ways: dict[str, Callable[[], list[list[int]]]] = {"operators": answered(model, prompts, graphs=False)}
    if on_cuda:
        ways = {"graphs": answered(model, prompts, graphs=True), **ways}
    figures: dict[str, Any] = {}
    if importlib.util.find_spec("transformers"):
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, Path(folder), pad_id=0)
            ways["transformers"] = generated(Path(folder), prompts.to(options.device), model.norm.weight.dtype)
    else:
        figures["transformers"] = "not installed"
    expected: list[list[int]] | None = None
    for name, way in ways.items():
        found = way()  # compiles and warms up
        expected = expected or found
        pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
        figures[f"{name}, equal tokens"] = sum(one == other for one, other in pairs) / len(pairs)
        seconds: list[float] = []
        for _ in range(3):
            started = time.perf_counter()
            way()
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        figures[f"{name}, tokens/s"] = num_streams * NUM_DECODED / statistics.median(seconds)
    return figures


def answered(model: Decoder, prompts_BT: Tensor, *, graphs: bool) -> Callable[[], list[list[int]]]:
    """Answers by our engine."""
    num_streams, prompt_len = prompts_BT.shape
    config = EngineConfig(
        max_num_seqs=num_streams,
        kv_cache_tokens=num_streams * (prompt_len + NUM_DECODED + BLOCK_LEN),
        enable_prefix_caching=False,  # each round computes its prompts
    )
    off = mock.patch.object(engine_module, "graph_decoder", return_value=(None, "not measured here"))
    with contextlib.nullcontext() if graphs else off:
        engine = Engine(model, config, head=model.logits)
    if graphs and engine.why_no_operator:
        raise RuntimeError(engine.why_no_operator)
    params = SamplingParams(max_tokens=NUM_DECODED, temperature=0.0)

    def answers() -> list[list[int]]:
        found: dict[str, list[int]] = {str(number): [] for number in range(num_streams)}
        for name, prompt in zip(found, prompts_BT.tolist(), strict=True):
            engine.add(name, prompt, params)
        while engine.has_work:
            for output in engine.step():
                found[output.request_id].append(output.token_id)
        return list(found.values())

    return answers


def generated(folder: Path, prompts_BT: Tensor, dtype: torch.dtype) -> Callable[[], list[list[int]]]:
    """Answers by `generate` of transformers."""
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(prompts_BT.device).eval()
    lengths = {"max_new_tokens": NUM_DECODED, "min_new_tokens": NUM_DECODED}

    def answers() -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                prompts_BT, attention_mask=torch.ones_like(prompts_BT), do_sample=False, pad_token_id=0, **lengths
            )
        return out[:, prompts_BT.shape[1] :].tolist()

    return answers


def milliseconds(way: Callable[[], Tensor], device: str, *, rounds: int = 20) -> float:
    """Median time of forward and backward, after three untimed rounds."""
    times: list[float] = []
    for number in range(3 + rounds):
        started = time.perf_counter()
        out = way()
        if out.requires_grad:
            out.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def resumed(options: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    """Trains, drops all checkpoints after the middle, trains again from there, and compares the weights."""
    half = max(1, NUM_STEPS_OF_RUNS // 2)
    config = replace(config, num_steps=2 * half, checkpoint_every_steps=half, keep_last=9)
    with tempfile.TemporaryDirectory() as folder:
        whole = trained_model(shape_of(options), config, options, Path(folder))
        for path in (Path(folder) / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > half:
                shutil.rmtree(path)
        again = trained_model(shape_of(options), config, options, Path(folder))
    pairs = list(zip(whole.parameters(), again.parameters(), strict=True))
    differing = sum(not torch.equal(one, other) for one, other in pairs)
    return {"parameters": len(pairs), **({"error": f"{differing} differ"} if differing else {"equal": True})}


def checkpoint_stall(options: argparse.Namespace, config: TrainConfig) -> dict[str, float]:
    """What a checkpoint costs training: `host_s`, for which `save` kept the host, and `device_s`, by which the steps
    after it took longer than as many before any. The second checkpoint: the first one gets its memory from the system.
    """
    every = 40 if options.device == "cuda" else 4
    config = replace(config, num_steps=3 * every, checkpoint_every_steps=every, keep_last=1, log_every_steps=1)
    speeds = Speeds()
    with tempfile.TemporaryDirectory() as folder:
        techniques = [observer("speeds", speeds.observe)]
        trained_model(shape_of(options), config, options, Path(folder), techniques=techniques)
        lines = StageDir(Path(folder)).metrics.read_text(encoding="utf-8").splitlines()
    stalls = [record["checkpoint_stall_s"] for record in map(json.loads, lines) if "checkpoint_stall_s" in record]
    times = [info.step_time_s for info in speeds.steps]
    before, after = times[every // 2 : every], times[2 * every : 2 * every + every // 2]
    return {"host_s": stalls[1], "device_s": sum(after) - sum(before), "step_s": statistics.median(before)}


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


def trained_model(
    shape: ModelConfig, config: TrainConfig, options: argparse.Namespace, folder: Path, **parts: Any
) -> Decoder:
    """Trains a new model by THE loop, or resumes in the folder."""
    source = RandomRows(vocab_size=shape.vocab_size, batch_rows=options.rows, seq_len=options.seq_len)
    model = Decoder(shape)
    model.init_weights(seed=0)
    job = TrainJob(
        model=model, objective=NextToken(source), config=config, num_steps=config.num_steps, stage=StageDir(folder),
        seed=0, name="gpu-check", input_digest="gpu-check", **parts,
    )  # fmt: skip
    train(job, single(options.device), SilentProgress())
    return model


def train_once(
    shape: ModelConfig, config: TrainConfig, options: argparse.Namespace, peak_flops: float
) -> dict[str, Any]:
    """Median speed after the first steps, memory, losses, and what would slow a compiled step: graph breaks, and
    operations in which the host waits for the device.
    """
    speeds, on_cuda = Speeds(), options.device == "cuda"
    torch.compiler.reset()
    breaks: Any = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            techniques = [observer("speeds", speeds.observe)]
            trained_model(shape, config, options, Path(folder), peak_flops=peak_flops, techniques=techniques)
        finally:
            if on_cuda:
                torch.cuda.set_sync_debug_mode("default")
    planned = cost.training_memory(
        shape,
        tokens_per_microbatch=config.batch_tokens // config.gradient_accumulation_steps,
        compute=config.precision.planned_as,
        num_microbatches=config.gradient_accumulation_steps,
        activations=config.activation_checkpointing,
        fused=cpu_kernels.are_used_on(options.device),
    )
    planned_bytes = planned.on_device(options.device).total
    peak_bytes = torch.cuda.max_memory_reserved() if on_cuda else 0
    timed = speeds.steps[min(NUM_UNTIMED_STEPS, len(speeds.steps) // 2) :]
    return {
        "tokens_per_s": statistics.median(info.tokens_per_s for info in timed),
        "mfu": statistics.median(info.mfu for info in timed),
        "peak_bytes": peak_bytes,
        "planned_bytes": planned_bytes,
        **({"planned_over_peak": planned_bytes / peak_bytes} if on_cuda else {}),
        "first_loss": speeds.steps[0].loss,
        "last_loss": speeds.steps[-1].loss,
        "graph_breaks": sum(breaks.values()),
        "synchronizations_per_step": sum("synchronizing" in str(one.message) for one in caught) / config.num_steps,
        "parameters": shape.num_parameters,
    }


if __name__ == "__main__":
    sys.exit(main())
