"""The engines that generate side by side, each in a process of its own (`inference_worker.py`), on the same weights.

An engine that is not installed beside this interpreter is looked for beside the one that `PEERS_PYTHON` names.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.compress.gguf import GgufFormat, export_gguf
from modelwright.compress.int8 import (
    Int8WeightsConfig,
    TrainedGrid,
    quantize_model,
    quantize_to_grid,
    save_grid_model,
    save_int8,
)
from modelwright.compress.integer_linear import ActivationGrid
from modelwright.core.errors import ModelwrightError
from modelwright.core.seeds import derive_seed
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model
from modelwright.ops import cpu_kernels
from modelwright.ops.int_grid import WeightGrid

PEERS_PYTHON = "MODELWRIGHT_PEERS_PYTHON"
"""Environment variable: an interpreter with the engines that are not installed beside this one."""
WORKER = Path(__file__).with_name("inference_worker.py")
FOUR_BITS = WeightGrid(bits=4, granularity="group_32")
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
    """Tokens per second of each arm in one round: by number of decoding streams, and of a prompt. turn: the round,
    which decides who begins.
    """
    names = list(processes)
    found: dict[str, dict[str, float]] = {}
    for num_streams in streams:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times = processes[name].seconds(num_streams, PROMPT_LEN, 1 + NUM_WARMUPS + num_steps)
            pace = num_streams / statistics.median(times[1 + NUM_WARMUPS :])
            found.setdefault(decoding(num_streams), {})[name] = pace
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        found.setdefault(prefill(prompt), {})[name] = prompt / processes[name].seconds(1, prompt, 1)[0]
    return found


def decoding(num_streams: int) -> str:
    """The name of a case."""
    return f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}"


def prefill(num_tokens: int) -> str:
    """The name of a case."""
    return f"prefill, {num_tokens} tokens"
