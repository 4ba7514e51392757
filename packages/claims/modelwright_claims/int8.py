"""Claim: integer inference on a CPU is several times as fast as eager FP32 and changes predictions hardly at all."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_model

from modelwright.compress.gguf import GgufFormat, export_gguf
from modelwright.compress.gptq import gptq
from modelwright.compress.int8 import (
    ActivationGrid,
    Agreement,
    Int8WeightsConfig,
    TrainedGrid,
    measure_agreement,
    quantize_model,
    quantize_to_grid,
    save_grid_model,
    save_int8,
)
from modelwright.core.config import ModelwrightError, derive_seed
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import save_model
from modelwright.ops import cpu_kernels
from modelwright.ops.int_grid import Codes, WeightGrid
from modelwright.parallel.mesh import single
from modelwright.recipes.load import recipe
from modelwright.train.techniques.fake_quantization import QuantizationAwareConfig, fake_quantization
from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment, Lacks
from modelwright_claims.statistics import Compare, Estimate, differences, exact, percent_saved, ratios
from modelwright_claims.training_run import Run, train_once

FOUR_BITS = WeightGrid(bits=4, granularity="group_32")
GRIDS = {"8 bits": WeightGrid(), "4 bits": FOUR_BITS}
"""Grids of quantization-aware training; activations are rounded per token."""
SERVED, NEAREST, GPTQ = "INT8 as served", "4 bits, nearest", "4 bits, GPTQ"
TRAINED = {bits: f"{bits}, trained on the grid" for bits in GRIDS}
VARIANTS = (SERVED, TRAINED["8 bits"], NEAREST, GPTQ, TRAINED["4 bits"])
HELDOUT_ROWS = 128
CALIBRATION_BATCHES, CALIBRATION_ROWS = 8, 8
MORE_RATE = 0.3
"""Rate of the steps that follow, with and without rounding, as a share of the first ones'. At the whole rate training
on a 4-bit grid ended further from FP32 than rounding afterwards (docs/log/models-and-alignment.md)."""


def _train(setting: Setting, size: workbench.Size, seed: int) -> tuple[Decoder, Mapping[str, Decoder]]:
    """Return the ends of one seed's training: the plain one, and those on the grids, by their bits."""
    first = Run(size=size, seed=seed)
    rate = MORE_RATE * size.learning_rate
    more = Run(size=replace(size, num_steps=size.num_steps // 2, learning_rate=rate), seed=seed, start_from=first)
    with tempfile.TemporaryDirectory(dir=setting.folder) as place:
        begin = Path(place) / "begin.safetensors"
        train_once(setting, first, single(workbench.device()), keep=begin)

        def end(name: str, grid: WeightGrid | None) -> Decoder:
            keep = Path(place) / f"{name}.safetensors"
            techniques = [partial(fake_quantization, QuantizationAwareConfig(weights=grid))] if grid else []
            train_once(setting, more, single(workbench.device()), begin=begin, keep=keep, techniques=techniques)
            model = Decoder(size.model_config(workbench.prepare_text(setting).vocab_size))
            load_model(model, keep)
            return model.eval()

        return end("plain", None), {name: end(name, grid) for name, grid in GRIDS.items()}


def _variants(
    setting: Setting, size: workbench.Size, plain: Decoder, on_grid: Mapping[str, Decoder]
) -> dict[str, Callable[[], Decoder]]:
    """Return how each model is made. All but the served one keep embedding and head unchanged."""

    def calibration() -> list[TokenBatch]:
        rows = workbench.packed_rows(setting, seq_len=size.seq_len, mode="best_fit", split="train")
        return list(islice(rows.batches(CALIBRATION_ROWS), CALIBRATION_BATCHES))

    return {
        SERVED: lambda: quantize_model(plain, Int8WeightsConfig(backend="int_mm")),
        NEAREST: lambda: _rounded(plain, FOUR_BITS),
        GPTQ: lambda: _rounded(plain, FOUR_BITS, gptq(plain, calibration(), FOUR_BITS)),
        **{TRAINED[bits]: partial(_rounded, model, GRIDS[bits]) for bits, model in on_grid.items()},
    }


def _rounded(model: Decoder, grid: WeightGrid, codes: Mapping[str, Codes] | None = None) -> Decoder:
    trained = TrainedGrid(weights=grid, activations="token")
    return quantize_to_grid(model, trained, codes=codes, choose=lambda matrices: "int_mm")


PEERS_PYTHON = "MODELWRIGHT_PEERS_PYTHON"
"""Environment variable with an interpreter for the engines that this environment does not have."""
WORKER = Path(__file__).with_name("inference_worker.py")
FOUR_BIT_FOLDERS: dict[str, ActivationGrid] = {"int4": "none", "int4-codes": "token"}
PROMPT_LEN = 32
NUM_WARMUPS = 2
"""Steps of a round that are not counted."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An engine with weights of one format. environment: changes to that of its process."""

    engine: str
    weights: str
    environment: Mapping[str, str] = field(default_factory=dict)


EAGER, TORCH, FP32, INT8 = "transformers, FP32", "PyTorch's operators, FP32", "Modelwright, FP32", "Modelwright, INT8"
INT4, INT4_CODES = "Modelwright, INT4", "Modelwright, INT4 with INT8 activations"
OWN = {
    TORCH: Arm(engine="own", weights="fp32", environment={cpu_kernels.SWITCH: "0"}),
    FP32: Arm(engine="own", weights="fp32"),
    INT8: Arm(engine="own", weights="int8"),
    INT4: Arm(engine="own", weights="int4"),
    INT4_CODES: Arm(engine="own", weights="int4-codes"),
}
EIGHT_BIT_RIVALS = {
    "OpenVINO GenAI, 8 bits": Arm(engine="openvino", weights="q8_0"),
    "ONNX Runtime GenAI, 8 bits": Arm(engine="onnxruntime", weights="int8"),
    "llama.cpp, 8 bits": Arm(engine="llama.cpp", weights="q8_0"),
}
FOUR_BIT_RIVALS = {
    "OpenVINO GenAI, 4 bits": Arm(engine="openvino", weights="q4_0"),
    "ONNX Runtime GenAI, 4 bits": Arm(engine="onnxruntime", weights="int4"),
    "llama.cpp, 4 bits": Arm(engine="llama.cpp", weights="q4_0"),
}
ARMS = {EAGER: Arm(engine="transformers", weights="fp32"), **OWN, **EIGHT_BIT_RIVALS, **FOUR_BIT_RIVALS}


def write_models(shape: ModelConfig, folder: Path) -> tuple[Decoder, dict[str, int]]:
    """Write one model, with drawn weights, in every format; returns it, and the bytes of its weight files by format."""
    model = Decoder(shape)
    model.init_weights(derive_seed(0, "weights"))
    model.eval()
    tokenizer = _tokenizer(shape.vocab_size)
    save_model(model, folder / "fp32")
    save_int8(quantize_model(model, Int8WeightsConfig()), folder / "int8")
    for name, activations in FOUR_BIT_FOLDERS.items():
        grid = TrainedGrid(weights=FOUR_BITS, activations=activations, int8_ends=True)
        save_grid_model(quantize_to_grid(model, grid, choose=lambda matrices: "int_mm"), grid, folder / name)
    for name in ("fp32", "int8", "int4", "int4-codes"):
        tokenizer.save(folder / name, max_length=shape.max_seq_len)
    formats: tuple[GgufFormat, ...] = ("q8_0", "q4_0")
    for number_format in formats:
        export_gguf(folder / "fp32", folder / f"{number_format}.gguf", number_format=number_format, name="claim")
    return model, {name: (folder / name / "model.safetensors").stat().st_size for name in ("fp32", "int8", "int4")}


def _tokenizer(vocab_size: int) -> Tokenizer:
    texts = [document.text for document in machine_corpus(fraction=0.1, skip=lambda reason, file: None)]
    return train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size))


class Process:
    """The running engine of an arm."""

    def __init__(self, process: "subprocess.Popen[str]", version: str) -> None:
        self._process = process
        self.version = version

    def seconds(self, num_streams: int, prompt_len: int, num_new: int) -> list[float]:
        """Seconds until all streams have their first token, prompts included, and for each further one. Raises
        `ModelwrightError` if the engine ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says it
            self._process.stdin.write(json.dumps([num_streams, prompt_len, num_new]) + "\n")
            self._process.stdin.flush()
        return _answer(self._process)


def _answer(process: "subprocess.Popen[str]") -> "list[float]":
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ModelwrightError(f"{process.args}: the engine ended with {process.wait()}; its messages are above")
    return json.loads(line)


@contextmanager
def running(arms: Mapping[str, Arm], folder: Path, threads: int) -> Iterator[tuple[dict[str, Process], dict[str, str]]]:
    """The processes of the arms that are installed, and why the others are missing."""
    processes: dict[str, Process] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name, arm in arms.items():
            for interpreter in dict.fromkeys([sys.executable, os.environ.get(PEERS_PYTHON, sys.executable)]):
                command = [interpreter, "-P", str(WORKER), arm.engine, arm.weights, str(folder), str(threads)]
                environment = {**os.environ, **dict.fromkeys(THREADS, str(threads)), **arm.environment}
                process = stack.enter_context(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
                )
                stack.callback(process.kill)
                ready: Mapping[str, str] = _answer(process)  # type: ignore[assignment]
                if "version" in ready:
                    processes[name] = Process(process, ready["version"])
                    missing.pop(name, None)
                    break
                missing[name] = ready["missing"]
        yield processes, missing


def paces(
    processes: Mapping[str, Process], streams: Sequence[int], *, prompt: int, num_steps: int, turn: int
) -> dict[str, dict[str, float]]:
    """Tokens per second of each arm in one round: by number of decoding streams, and of a prompt, unless it is 0. turn:
    the round, which decides who begins.
    """
    names = list(processes)
    found: dict[str, dict[str, float]] = {}
    for num_streams in streams:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times = processes[name].seconds(num_streams, PROMPT_LEN, 1 + NUM_WARMUPS + num_steps)
            pace = num_streams / statistics.median(times[1 + NUM_WARMUPS :])
            found.setdefault(decoding(num_streams), {})[name] = pace
    for name in names[turn % len(names) :] + names[: turn % len(names)] if prompt else ():
        found.setdefault(prefill(prompt), {})[name] = prompt / processes[name].seconds(1, prompt, 1)[0]
    return found


def decoding(num_streams: int) -> str:
    """The name of a case."""
    return f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}"


def prefill(num_tokens: int) -> str:
    """The name of a case."""
    return f"prefill, {num_tokens} tokens"


SPEED_TARGET = 3.1
"""INT8 over the fastest engine in FP32 at one stream, as published."""
PREFILL_TARGET = 1.5
"""INT8 over the fastest engine in FP32 in reading a prompt, where products of many rows leave less to gain."""
RIVAL_TARGET = 0.9
"""Share of the speed of the fastest other engine with weights of as many bits."""
ACCURACY_TARGET = 0.8
"""Percent of the accuracy that INT8 may lose, as published."""
SIZE_TARGET = 2.4
STREAMS = (1, 8, 32)
PROMPT = 256
LARGE = ModelConfig(
    vocab_size=12_288, num_layers=12, model_dim=768, num_heads=12, num_kv_heads=4, ffn_dim=2048, head_dim=64,
    max_seq_len=512, tie_embeddings=False,
)  # fmt: skip
"""Its weights do not fit a processor's cache, as those of the quickstart do: memory bounds its steps."""
LARGE_CASE = f"{decoding(1)}, {LARGE.num_parameters / 1e6:.0f} million parameters"
CASES = (*(decoding(count) for count in STREAMS), prefill(PROMPT), LARGE_CASE)
NUM_ROUNDS = 7
NUM_STEPS = 24
"""Timed tokens of each stream in a round."""
NUM_SEEDS = 5
LOSS, ACCURACY, BYTES = "held-out loss, ", "accuracy, ", "bytes on disk, "
ORIGINAL = "FP32"


def measure(setting: Setting) -> Measurement:
    """Quality on models that are trained here; speed and size at the quickstart's shape, where they are its own."""
    size, threads = workbench.size(setting), torch.get_num_threads()
    heldout = workbench.packed_rows(setting, seq_len=size.seq_len, mode="best_fit", split="test")
    tokens_BT = next(heldout.batches(16 if setting.quick else HELDOUT_ROWS)).input_ids_BT
    quality = []  # each variant beside the plain end of its seed
    for seed in range(1 if setting.quick else NUM_SEEDS):
        plain, on_grid = _train(setting, size, seed)
        variants = {name: make() for name, make in _variants(setting, size, plain, on_grid).items()}
        quality.append({name: measure_agreement(plain, one, tokens_BT) for name, one in variants.items()})
    shape = recipe("quickstart").model
    num_rounds, num_steps = (2, 6) if setting.quick else (NUM_ROUNDS, NUM_STEPS)
    rounds: list[dict[str, Mapping[str, float]]] = [{} for _ in range(num_rounds)]
    sizes, versions, missing = dict[str, int](), dict[str, str](), dict[str, str]()
    for model, streams, prompt in ((shape, STREAMS, PROMPT), (shape if setting.quick else LARGE, STREAMS[:1], 0)):
        with tempfile.TemporaryDirectory(dir=setting.folder) as place:
            _, num_bytes = write_models(model, Path(place))
            with running(ARMS, Path(place), threads) as (processes, absent):
                versions |= {name: process.version for name, process in processes.items()}
                missing |= absent
                for turn in range(-1, num_rounds):  # the first warms up
                    note = f"int8: round {turn + 1} of {num_rounds}, {len(processes)} engines in turn"
                    setting.progress.note(f"{note}, {model.num_parameters} parameters")
                    found = paces(processes, streams, prompt=prompt, num_steps=num_steps, turn=turn)
                    if turn >= 0:
                        rounds[turn] |= found if prompt else {LARGE_CASE: found[decoding(1)]}
        sizes = sizes or num_bytes
    conditions: dict[str, str | int | float | bool] = {
        "speed and size": f"{shape.num_parameters} parameters, width {shape.model_dim}, drawn weights; one stream also "
        f"with {LARGE.num_parameters}, width {LARGE.model_dim}",
        "threads of each engine": threads,
        "instruction set": cpu_kernels.instruction_set(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **{f"version of {name}": version for name, version in versions.items()},
        **{f"not at hand: {name}": why for name, why in missing.items()},
        **{f"quality: {key}": value for key, value in size.describe().items()},
        "quality: more steps": f"{size.num_steps // 2}, at {MORE_RATE:g} of the rate",
        "quality: 4 bits": f"activations per token, embedding and head as they are; {SERVED} has all in INT8",
    }
    return measurement(quality, rounds, sizes, conditions)


def measurement(
    quality: Sequence[Mapping[str, Agreement]],
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
    num_bytes: Mapping[str, int],
    conditions: Conditions,
) -> Measurement:
    """Return speeds, sizes and the models' agreement on the same text. quality: of each seed, by variant; rounds:
    tokens per second by case and engine.
    """
    samples: dict[str, list[float]] = {}
    for case in rounds[0]:
        for name in rounds[0][case]:
            samples[f"{case}, {name}"] = [one[case][name] for one in rounds]
    samples |= {f"{BYTES}{name}": [float(of)] for name, of in num_bytes.items()}
    first = next(iter(quality[0]))
    samples[f"{LOSS}{ORIGINAL}"] = [one[first].reference_loss for one in quality]
    samples[f"{ACCURACY}{ORIGINAL}"] = [one[first].reference_accuracy for one in quality]
    for name in quality[0]:
        samples[f"{LOSS}{name}"] = [one[name].int8_loss for one in quality]
        samples[f"{ACCURACY}{name}"] = [one[name].int8_accuracy for one in quality]
    return Measurement(samples=samples, conditions={**conditions, "held-out tokens": quality[0][SERVED].num_tokens})


def _fastest(samples: Samples, case: str, names: Iterable[str]) -> str:
    """Return the name of the fastest of those that were measured. Raises `Lacks` if none was."""
    means = {name: statistics.fmean(samples[f"{case}, {name}"]) for name in names if f"{case}, {name}" in samples}
    if not means:
        raise Lacks(f"another engine in {case}: none of {', '.join(names)} was at hand (see {PEERS_PYTHON})")
    return max(means, key=lambda name: means[name])


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()

    def faster(case: str, own: Iterable[str], others: Iterable[str], limit: float) -> None:
        """Ask that the fastest of our engines is so many times as fast as the fastest of the others."""
        with judgment.part():
            name, other = _fastest(samples, case, own), _fastest(samples, case, others)
            ratio, say = ratios(samples[f"{case}, {name}"], samples[f"{case}, {other}"]), f"{name} is {{0.mean:.2f}}x"
            what, say = f"{name} over {other} in {case}", f"{say} {other} in {case}"
            judgment.ask(f"{name} over {other}, {case}", ratio, "x", ">=", limit, what=what, say=say)

    def beside_fp32(compare: Compare, what: str, name: str) -> Estimate:
        return compare(samples[f"{what}{name}"], samples[f"{what}{ORIGINAL}"])

    for case, limit in ((decoding(1), SPEED_TARGET), (LARGE_CASE, SPEED_TARGET), (prefill(PROMPT), PREFILL_TARGET)):
        faster(case, [INT8], [FP32, TORCH, EAGER], limit)
    for case in CASES:
        faster(case, [INT8], EIGHT_BIT_RIVALS, RIVAL_TARGET)
        faster(case, [INT4, INT4_CODES], FOUR_BIT_RIVALS, RIVAL_TARGET)
    what, say = "accuracy that INT8 loses", "INT8 as served loses {0.mean:.2f}% of the accuracy"
    lost = partial(beside_fp32, percent_saved, ACCURACY, SERVED)
    judgment.ask("", lost, "%", "<=", ACCURACY_TARGET, what=what, say=say)
    for name in VARIANTS:
        judgment.note(f"accuracy lost, {name}", partial(beside_fp32, percent_saved, ACCURACY, name), "%")
        judgment.note(f"held-out loss above FP32, {name}", partial(beside_fp32, differences, LOSS, name), "nats")
    with judgment.part():
        trained = TRAINED["4 bits"]
        for rounding in (NEAREST, GPTQ):
            gain = differences(samples[f"{LOSS}{rounding}"], samples[f"{LOSS}{trained}"])
            name, what = f"held-out loss below that of {rounding}, {trained}", "what training on the grid gains over"
            judgment.ask(name, gain, "nats", ">", 0.0, what=f"{what} {rounding}")
            judgment.said.append(f"{trained}: {-gain.mean:+.4f} nats beside {rounding}")
    with judgment.part():
        fp32, int8, int4 = (samples[f"{BYTES}{name}"][0] for name in ("fp32", "int8", "int4"))
        judgment.ask("size ratio", exact(fp32 / int8), "x", ">=", SIZE_TARGET, what="size", say="{0.mean:.2f}x smaller")
        judgment.ask("size ratio, INT4", fp32 / int4, "x")
    judgment.show(samples, [f"{case}, {name}" for case in CASES for name in ARMS], "tokens/s")
    missing = [name for name in ARMS if f"not at hand: {name}" in conditions]
    if missing:
        judgment.said.append(f"not at hand: {', '.join(missing)}")
    return judgment.verdict()


CLAIM = declared(__name__)
