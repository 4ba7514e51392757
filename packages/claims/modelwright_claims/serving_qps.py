"""Claim: a serving stack answers many times the requests per second of a naive server within 150 ms."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from modelwright.compress.gguf import export_gguf
from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.core.config import ModelwrightError
from modelwright.core.resources import num_usable_cores
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.recipes.load import recipe
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, untestable
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.launch import answer_of
from modelwright_claims.open_loop import Load, LoadResult, most_missing
from modelwright_claims.statistics import estimate, ratios

START_TIMEOUT_S = 180.0
MODEL = "quickstart"
ROUTE = "/v1/completions"
NAIVE, FP32, INT8 = "naive", "ours FP32", "ours INT8"
OPENVINO, LLAMA_CPP = RIVALS = "OpenVINO GenAI 8 bits", "llama.cpp 8 bits"
PROMPT_LENS = range(16, 49)
NUM_PROMPTS = 400
MOST_SEQS = 32
"""Answers in one step of an engine, equal to the number of llama.cpp's slots."""
GGUF = "q8_0.gguf"


@dataclass(frozen=True, kw_only=True)
class Files:
    """The models and prompts of the sides. model: a folder in the Hugging Face layout; prompts: texts of 16 to 48
    tokens.
    """

    model: Path
    int8: Path
    gguf: Path
    prompts: Sequence[str]

    def bodies(self, max_tokens: int) -> list[str]:
        """Requests for so many tokens each; no answer ends before."""
        fields = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0}
        return [json.dumps({**fields, "prompt": prompt}) for prompt in self.prompts]


def is_plain(tokenizer: Tokenizer, token: int) -> bool:
    """Return whether a token is printable ASCII and ends nothing."""
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


def commands(files: Files) -> dict[str, list[str]]:
    """Return the command of each server that can be started here. A `{port}` is a free one."""
    python = sys.executable
    serve = [python, "-m", "modelwright.cli.main", "serve"]
    ours = [f"--served-model-name={MODEL}", "--exit-with-parent", "--port=0", f"--max_wait_s={MAX_WAIT_S}"]
    many = [*ours, f"--engines={num_usable_cores()}"]  # so small a model answers the most with an engine a core
    found = {
        NAIVE: [python, "-m", "modelwright_claims.naive_server", str(files.model)],
        FP32: [*serve, str(files.model), *many],
        INT8: [*serve, str(files.int8), *many],
    }
    if importlib.util.find_spec("openvino_genai"):
        found[OPENVINO] = [*serve, str(files.model), "--backend=openvino:q8_0", *ours]
    program = llama_server()
    if program:
        threads = str(num_usable_cores())
        slots = ["--parallel", str(MOST_SEQS), "--ctx-size", str(MOST_SEQS * 512)]
        slots += ["--threads", threads, "--threads-batch", threads]
        found[LLAMA_CPP] = [program, "--model", str(files.gguf), "--port", "{port}", *slots]
    return found


def llama_server() -> str | None:
    """Return llama.cpp's server: the one that `make bench` builds beside this interpreter, or one on the path."""
    return shutil.which("llama-server", path=str(Path(sys.executable).parent)) or shutil.which("llama-server")


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
    """The address of a server that was given a port, when it reports its health."""
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
    """Another program could take it meanwhile; only for servers that cannot choose one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def versions_of_peers() -> Mapping[str, str]:
    """Return the versions for the record's conditions."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("fastapi", "uvicorn", "openvino-genai"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    program = llama_server()
    if program:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
        found["llama.cpp"] = (done.stdout + done.stderr).strip().partition("\n")[0]
    return found


RATIO_TARGET = 7.1
BOUND_S = 0.150
"""Bound on the 99th percentile of the latency of answers of `SHORT` tokens, as published."""
SHORT = 8
OVERLOAD, OVERLOAD_FACTOR, RECOVERY_TARGET_S = 3.0, 2.0, 5.0
MAX_WAIT_S = 0.05
"""Longest expected wait with which our server accepts a request: in an overload accepted answers should be quick."""
RESOLUTION = 1.05
"""A largest rate is one that holds, where `RESOLUTION` times as much does not."""
RATE, USUAL = "largest rate, ", ", Poisson, 8 tokens"
OVER_FP32 = "times the rate of our FP32, INT8"
MOST_TIMES = 6.0
"""Maximum length of a trial, as a multiple of its planned length, to reach its minimum number of requests."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a measurement. trial_s: of one rate, longer where it needs `min_requests`; sides: the servers that
    are compared, as far unchanged installed; the largest rate of each is measured in every round.
    """

    rounds: int
    trial_s: float
    min_requests: int
    overload_s: float
    saturation_s: float
    corpus_fraction: float
    sides: Sequence[str] = (NAIVE, INT8, FP32, *RIVALS)


FULL = Plan(
    rounds=3, trial_s=10, min_requests=100, overload_s=10, saturation_s=3,
    corpus_fraction=0.3,
)  # fmt: skip
QUICK = Plan(
    rounds=1, trial_s=1.5, min_requests=10, overload_s=2, saturation_s=1,
    corpus_fraction=0.05, sides=(NAIVE, INT8),
)  # fmt: skip


def run_elsewhere(load: Load) -> LoadResult:
    """Run the load from a separate process."""
    command = [sys.executable, "-m", "modelwright_claims.open_loop"]
    return LoadResult(**answer_of(command, "the load generator", text=json.dumps(dataclasses.asdict(load))))


class Bench:
    """Loads on the servers that run. urls: by side."""

    def __init__(self, setting: Setting, plan: Plan, files: Files, urls: Mapping[str, str]) -> None:
        self.setting = setting
        self.plan = plan
        self.files = files
        self.urls = urls
        self.samples: dict[str, list[float]] = {}
        self.saturation: dict[str, float] = {}
        self.num_trials = 0
        self.lag_s = 0.0

    def load(self, side: str, rate: float, seconds: float) -> Load:
        """Seeds differ from trial to trial."""
        self.num_trials += 1
        least = self.plan.min_requests
        return Load(
            url=self.urls[side],
            bodies=self.files.bodies(SHORT),
            rate=rate,
            num_requests=max(1, min(max(least, round(rate * seconds)), math.ceil(MOST_TIMES * rate * seconds))),
            seed=self.num_trials,
            bound_s=BOUND_S,
        )

    def run(self, load: Load) -> LoadResult:
        result = run_elsewhere(load)
        self.lag_s = max(self.lag_s, result.lag_s)
        return result

    def holds(self, side: str, rate: float) -> bool:
        """Return whether the 99th percentile stays within the bound at this rate, and every answer arrives."""
        load = self.load(side, rate, self.plan.trial_s)
        result = self.run(dataclasses.replace(load, most_missing=most_missing(load.num_requests)))
        if result.was_stopped:
            self.settle(side)
        return not result.was_stopped

    def settle(self, side: str) -> None:
        """Wait until a server has worked off an overload, which the naive one computes for nobody."""
        body = self.files.bodies(1)[:1]
        self.run(Load(url=self.urls[side], bodies=body, rate=0, num_requests=2, num_connections=1, timeout_s=120))

    def saturate(self, side: str) -> float:
        """Answers per second of a closed loop of 32 connections; measured once."""
        if side not in self.saturation:
            load = Load(
                url=self.urls[side], bodies=self.files.bodies(SHORT), rate=0, num_requests=16,
                num_connections=32, timeout_s=120,
            )  # fmt: skip
            guess = self.run(load).answers_per_s
            load = dataclasses.replace(load, num_requests=max(16, round(guess * self.plan.saturation_s)))
            self.saturation[side] = self.run(load).answers_per_s
        return self.saturation[side]

    def measure_rate(self, side: str) -> float:
        """The largest rate, which becomes a sample."""
        most = self.saturate(side)
        rate = largest_rate(lambda rate: self.holds(side, rate), 0.4 * most, most)
        if not rate:
            raise ModelwrightError(f"{side}: no rate holds; the machine is too busy to measure this")
        self.samples.setdefault(f"{RATE}{side}{USUAL}", []).append(rate)
        self.setting.progress.note(f"{side}: {rate:.1f}/s")
        return rate

    def overload(self, side: str) -> None:
        """Offer three times the largest rate, and then less than it."""
        largest, seconds = self.largest(side), self.plan.overload_s
        usual = self.run(self.load(side, largest, self.plan.trial_s))
        over = self.run(self.load(side, OVERLOAD * largest, seconds))
        after = self.run(self.load(side, 0.7 * largest, RECOVERY_TARGET_S + 3))
        accepted, refused = (float(over.statuses.get(status, 0)) for status in ("200", "429"))
        for name, value in {
            "p99 at the largest rate": usual.p99_s,
            "p99 of accepted answers": over.p99_s,
            "accepted": accepted,
            "refused with 429": refused,
            "anything else": sum(over.statuses.values()) - accepted - refused,
            "seconds until recovery": recovery_s(after.misses),
        }.items():
            self.samples.setdefault(f"overload: {name}", []).append(value)

    def largest(self, side: str) -> float:
        """The mean over the rounds so far."""
        return estimate(self.samples[f"{RATE}{side}{USUAL}"]).mean


def largest_rate(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest rate that holds, by bisection on its logarithm, to within `RESOLUTION`. low, high: a guess at rates
    that hold and do not. 0 if not even a hundredth of `low` holds.
    """
    least = low / 100
    while not holds(low):
        low, high = low / 2, low
        if low < least:
            return 0.0
    while holds(high):
        low, high = high, 1.5 * high
    while high / low > RESOLUTION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def recovery_s(misses: Sequence[float]) -> float:
    """After how many seconds the first whole second without a missed bound begins. misses: their times, ascending."""
    began = 0.0
    for at in misses:
        if at - began >= 1:
            break
        began = at
    return began


def measure(setting: Setting) -> Measurement:
    """Every side's server runs all the time, and one at a time gets load."""
    lacking = [name for name in ("fastapi", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        return untestable(f"the naive server needs {', '.join(lacking)} (pip install 'modelwright-claims[peers]')")
    plan = QUICK if setting.quick else FULL
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        folder = Path(name)
        texts = [one.text for one in machine_corpus(fraction=plan.corpus_fraction, skip=lambda reason, file: None)]
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
        files = Files(model=folder / MODEL, int8=int8, gguf=gguf, prompts=prompts_of(texts, tokenizer))
        available = commands(files)
        sides = {side: command for side, command in available.items() if side in plan.sides}
        with ExitStack() as stack:
            urls = {
                side: stack.enter_context(running(command, folder / f"{number}.log"))
                for number, (side, command) in enumerate(sides.items())
            }
            for side, url in urls.items():
                body = files.bodies(SHORT)[0]
                request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as reply:
                    found = json.load(reply)["usage"]["completion_tokens"]
                if found != SHORT:
                    raise ModelwrightError(f"{side}: an answer has {found} tokens, not {SHORT}")
            bench = Bench(setting, plan, files, urls)
            run_all(bench)
    return Measurement(
        samples=bench.samples,
        conditions={
            "model": "shape of the recipe quickstart, random weights, greedy, no answer ends early",
            "prompts": f"{len(files.prompts)} texts of {PROMPT_LENS[0]} to {PROMPT_LENS[-1]} tokens, each another one",
            "cores": num_usable_cores(),
            "load": "open loop from another process on the same cores; latencies from the planned time of a request",
            "longest wait that ours accepts in s": MAX_WAIT_S,
            "engines of ours": num_usable_cores(),
            "requests of a trial": f"{plan.trial_s:g} s, at least {plan.min_requests}",
            "largest lag of the load generator in ms": 1000 * bench.lag_s,
            "trials": bench.num_trials,
            "peers that are not installed": ", ".join(sorted(set(RIVALS) - available.keys())) or "none",
            **{f"version of {name}": version for name, version in versions_of_peers().items()},
            "seconds": time.perf_counter() - started,
        },
    )


def run_all(bench: Bench) -> None:
    """The sides alternate in every round."""
    for number in range(bench.plan.rounds):
        bench.setting.progress.note(f"round {number + 1} of {bench.plan.rounds}")
        for side in bench.urls:
            bench.measure_rate(side)
        bench.overload(INT8)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    naive, int8 = samples[f"{RATE}{NAIVE}{USUAL}"], samples[f"{RATE}{INT8}{USUAL}"]
    say = f"{{0.mean:.2f}}x the naive server's rate at p99 < {1000 * BOUND_S:.0f} ms"
    judgment.ask("times the naive rate, INT8", ratios(int8, naive), "x", ">=", RATIO_TARGET, what="rate", say=say)
    judgment.note("times the naive rate, FP32", lambda: ratios(samples[f"{RATE}{FP32}{USUAL}"], naive), "x")
    judgment.note(OVER_FP32, lambda: ratios(int8, samples[f"{RATE}{FP32}{USUAL}"]), "x")
    for rival in RIVALS:
        with judgment.part():
            against, what = ratios(int8, samples[f"{RATE}{rival}{USUAL}"]), f"INT8 over the rate of {rival}"
            judgment.ask(f"times the rate of {rival}, INT8", against, "x", ">=", 1.0, what=what)
    judgment.show(samples, [f"{RATE}{side}{USUAL}" for side in names_between(samples, RATE, USUAL)], "/s")
    with judgment.part():
        accepted, after = "overload: p99 of accepted answers", "overload: seconds until recovery"
        judgment.show(samples, [accepted], "ms", 1000)
        judgment.show(samples, ["overload: accepted", "overload: refused with 429"])
        others = sum(samples["overload: anything else"])
        judgment.require(others == 0, f"{others:.0f} requests of an overload had neither 200 nor 429")
        over, what = ratios(samples[accepted], samples["overload: p99 at the largest rate"]), f"{accepted}, times that"
        judgment.ask(f"{what} at the largest rate", over, "x", "<=", OVERLOAD_FACTOR)
        judgment.ask("overload: until recovery", estimate(samples[after]), "s", "<=", RECOVERY_TARGET_S)
    return judgment.verdict()


CLAIM = declared(__name__)
