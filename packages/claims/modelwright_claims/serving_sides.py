"""The servers that `serving_qps` compares, each in a process of its own, with the model of the quickstart's shape."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from modelwright.compress.gguf import export_gguf
from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.core.errors import ModelwrightError
from modelwright.core.resources import num_usable_cores
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.recipes.load import recipe

START_TIMEOUT_S = 180.0
MODEL = "quickstart"
ROUTE = "/v1/completions"
NAIVE, FP32, INT8 = "naive", "ours FP32", "ours INT8"
OPENVINO, LLAMA_CPP = RIVALS = "OpenVINO GenAI 8 bits", "llama.cpp 8 bits"
PROMPT_LENS = range(16, 49)
NUM_PROMPTS = 400
MOST_SEQS = 32
"""Answers in one step of an engine, as many as llama.cpp gets slots."""
GGUF = "q8_0.gguf"


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the sides serve. model: a folder in the Hugging Face layout; prompts: texts of 16 to 48 tokens."""

    model: Path
    int8: Path
    gguf: Path
    prompts: Sequence[str]

    def bodies(self, max_tokens: int, *, stream: bool = False) -> list[str]:
        """Requests for so many tokens each; no answer ends before."""
        fields = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        return [json.dumps({**fields, "prompt": prompt}) for prompt in self.prompts]


def write_files(folder: Path, *, fraction: float) -> Files:
    """Random weights, as speed does not depend on what they say, of a model that prefers no token that ends an answer.
    fraction: of the machine's own documentation and code that is read for tokenizer and prompts.
    """
    texts = [one.text for one in machine_corpus(fraction=fraction, skip=lambda reason, file: None)]
    config = recipe("quickstart").model
    tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=config.vocab_size))
    model = Decoder(config)
    model.init_weights(0)
    assert model.head is not None
    visible = [is_plain(tokenizer, token) for token in range(config.vocab_size)]
    model.head.weight.data[[token for token, shown in enumerate(visible) if not shown]] = 0
    save_model_folder(model, tokenizer, folder / MODEL)
    int8 = folder / "int8" / MODEL
    save_int8(quantize_model(model, Int8WeightsConfig()), int8)
    tokenizer.save(int8)
    gguf = export_gguf(folder / MODEL, folder / GGUF, number_format="q8_0", name=MODEL)
    return Files(model=folder / MODEL, int8=int8, gguf=gguf, prompts=prompts_of(texts, tokenizer))


def is_plain(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is printable ASCII and ends nothing."""
    if token >= tokenizer.vocab_size:
        return False
    text = tokenizer.token_text(token)
    return text.isascii() and text.isprintable() and not text.startswith("<|")


def prompts_of(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Beginnings of texts with all lengths of `PROMPT_LENS` in turn, each of another text."""
    prompts = list[str]()
    for text in texts:
        length = PROMPT_LENS[len(prompts) % len(PROMPT_LENS)]
        ids = tokenizer.encode(text[:1000])
        if len(ids) > length:
            prompts.append(tokenizer.decode(ids[:length]))
        if len(prompts) == NUM_PROMPTS:
            break
    return prompts


def commands(files: Files, num_open: int = 0) -> dict[str, list[str]]:
    """How each server that can be started here is started. num_open: answers that ours may have open at once, 0 for as
    many as by default. A `{port}` is a free one.
    """
    python = sys.executable
    serve = [python, "-m", "modelwright.cli.main", "serve"]
    ours = [f"--served-model-name={MODEL}", "--exit-with-parent", "--port=0"]
    many = [*ours, *_limits(num_open, num_usable_cores())]  # so small a model answers the most with an engine a core
    found = {
        NAIVE: [python, "-m", "modelwright_claims.naive_server", str(files.model)],
        FP32: [*serve, str(files.model), *many],
        INT8: [*serve, str(files.int8), *many],
    }
    if importlib.util.find_spec("openvino_genai"):
        one = [*ours, *_limits(num_open, 1)]
        found[OPENVINO] = [*serve, str(files.model), "--backend=openvino:q8_0", *one]
    program = shutil.which("llama-server")
    if program:
        threads = str(num_usable_cores())
        slots = ["--parallel", str(MOST_SEQS), "--ctx-size", str(MOST_SEQS * 512)]
        slots += ["--threads", threads, "--threads-batch", threads]
        found[LLAMA_CPP] = [program, "--model", str(files.gguf), "--port", "{port}", *slots]
    return found


def _limits(num_open: int, num_engines: int) -> list[str]:
    """Return the settings that allow `num_open` answers at once: up to `MOST_SEQS` in each engine's steps, the rest in
    the queue. 0: the defaults.
    """
    engines = [f"--engines={num_engines}"]
    if not num_open:
        return engines
    num_seqs = min(MOST_SEQS, max(1, num_open // num_engines))
    return [*engines, f"--engine.max_num_seqs={num_seqs}", f"--max_queued={max(0, num_open - num_engines * num_seqs)}"]


def missing_for_naive() -> str:
    """What has to be installed for the naive server, "" if nothing."""
    lacking = [name for name in ("fastapi", "transformers") if importlib.util.find_spec(name) is None]
    return f"the naive server needs {', '.join(lacking)} (pip install 'modelwright[peers]')" if lacking else ""


_ADDRESS = re.compile(r"https?://[\d.]+:\d+")


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[str]:
    """Start a server; gives the URL of its completions when it answers, and ends it."""
    port = _free_port() if "{port}" in command else 0
    words = [word.replace("{port}", str(port)) for word in command]
    threads = {name: str(num_usable_cores()) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **threads}
        )
        try:
            yield (_await_answers(process, port, log) if port else _await_line(process, log)) + ROUTE
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def require_length(side: str, url: str, body: str, num_tokens: int) -> None:
    """Raise `ModelwrightError` if a server's answer has another number of tokens: it would be compared with others that
    compute more or less.
    """
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as reply:
        found = json.load(reply)["usage"]["completion_tokens"]
    if found != num_tokens:
        raise ModelwrightError(f"{side}: an answer has {found} tokens, not {num_tokens}")


def _await_line(process: subprocess.Popen[str], log: Path) -> str:
    """The address that a server prints when it is ready."""
    found = list[str]()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.extend(_ADDRESS.findall(line))

    threading.Thread(target=read, daemon=True).start()
    _await(lambda: bool(found), process, log)
    return found[0]


def _await_answers(process: subprocess.Popen[str], port: int, log: Path) -> str:
    """The address of a server that was given a port, when it says that it is well."""
    url = f"http://127.0.0.1:{port}"

    def is_well() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    _await(is_well, process, log)
    return url


def _await(condition: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise ModelwrightError(f"{process.args}: the server does not start: {' / '.join(last)}")
        time.sleep(0.05)


def _free_port() -> int:
    """Another program could take it meanwhile; only for servers that cannot take one by themselves."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def versions_of_peers() -> Mapping[str, str]:
    """For the record's conditions."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("fastapi", "uvicorn", "openvino-genai"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    program = shutil.which("llama-server")
    if program:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
        found["llama.cpp"] = (done.stdout + done.stderr).strip().partition("\n")[0]
    return found
