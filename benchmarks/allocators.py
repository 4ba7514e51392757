"""Memory and time of training with its larger tensors in a heap of their own, compared with other allocators.

    python benchmarks/allocators.py [--sizes small medium] [--kinds glibc heap ...] [--rounds 3] [--steps 20]
    python benchmarks/allocators.py --sizes small --rounds 1 --steps 8 --results /tmp  # quick: resident memory only

Each run is a process of one thread: steps of THE loop on random tokens in packed rows, whose documents differ from step
to step, with an evaluation amid them. The kinds alternate:

    heap              what training does (`ops.tensor_heap`)
    fallback          what training does without a compiler: glibc maps blocks of 4 MiB and more one by one
    mapped            glibc with a mapping for every larger tensor, given back at once: no gaps, but page faults
    glibc             the C library as it is, without any setting of ours
    jemalloc          preloaded, as it is (Debian: libjemalloc2)
    jemalloc_pytorch  preloaded, with the settings of PyTorch's own launcher (torch.backends.xeon.run_cpu)
    jemalloc_kept     preloaded, freed memory is never given back
    tcmalloc          preloaded, as it is (Debian: libtcmalloc-minimal4)

Figures, medians over the rounds: `rss_peak_bytes`, the peak of the whole process while it trains, the one to compare
allocators by; `peak_bytes`, that above what the process held before the model (an allocator that keeps freed memory
held more), over the whole run, and `timed_peak_bytes` over the timed steps alone (those after the sixth); seconds of
the clock and of the processor, and minor page faults, a step, and their ratios to those of `heap` in the same round.
Losses must be equal to the bit. Writes
benchmarks/results/allocators-<machine>.json.
"""

import argparse
import contextlib
import ctypes.util
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import StageDir, write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.core.resources import ResourceUse, peak_resident_bytes
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.ops.tensor_heap import SWITCH
from modelwright.parallel.mesh import single
from modelwright.train import build
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.technique import StepInfo, observer
from modelwright_claims.results import circumstances, machine_slug

RESULTS = Path(__file__).parent / "results"
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
ENVIRONMENT = {
    "heap": ONE_HEAP,
    "fallback": {**ONE_HEAP, SWITCH: "0"},
    "mapped": {**ONE_HEAP, SWITCH: "0", "MALLOC_MMAP_THRESHOLD_": str(2**16)},
    "glibc": {},
    "jemalloc": {},
    "jemalloc_pytorch": {"MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto"},
    "jemalloc_kept": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {},
}
"""Environment variables of each kind of run."""
LIBRARIES = {
    "jemalloc": "jemalloc",
    "jemalloc_pytorch": "jemalloc",
    "jemalloc_kept": "jemalloc",
    "tcmalloc": "tcmalloc_minimal",
}
"""What is preloaded."""
OWN = ("heap", "fallback", "mapped")
"""The kinds in which training chooses its allocator; in the others it leaves the one that is there."""
FIRST_TIMED = 7
EVALUATION_AT = 6
SEQ_LEN = 256
VOCAB_SIZE = 8192
LAYERS, WIDTHS, BATCH_TOKENS = {"small": 4, "medium": 6}, {"small": 128, "medium": 384}, 4096
SHORTEST, LONGEST = 20, 200
"""Tokens of a document."""


@dataclass(frozen=True)
class PackedRows:
    """Random tokens; each row is full of documents of random lengths."""

    num_rows: int
    num_batches_per_epoch: int = 1000

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        draw = torch.Generator().manual_seed(index)
        shape = (self.num_rows, SEQ_LEN)
        tokens = torch.randint(VOCAB_SIZE, shape, generator=draw)
        segments, positions = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int64)
        for row in range(self.num_rows):
            start = number = 0
            while start < SEQ_LEN:
                length = int(torch.randint(SHORTEST, LONGEST, (), generator=draw))
                end = min(SEQ_LEN, start + length)
                segments[row, start:end], positions[row, start:end] = number, torch.arange(end - start)
                start, number = end, number + 1
        labels = tokens.roll(-1, dims=1)
        ends = torch.ones(shape, dtype=torch.bool)
        ends[:, :-1] = segments[:, 1:] != segments[:, :-1]
        labels[ends] = IGNORED
        return TokenBatch(input_ids_BT=tokens, labels_BT=labels, positions_BT=positions, segments_BT=segments)


class Measured(Exception):
    """Ends a run before its last checkpoint."""


@dataclass
class Meter:
    """Reads figures after every step and ends the run after the last."""

    last: int
    every: int = 1
    records: list[dict[str, Any]] = field(default_factory=list)
    use: ResourceUse = field(default_factory=ResourceUse)
    peak_bytes: int = 0

    def observe(self, info: StepInfo) -> None:
        peak, faults = peak_resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.peak_bytes = max(self.peak_bytes, peak)
        result = {"peak_bytes": peak, "faults": faults, "step_s": info.step_time_s, "loss": info.loss}
        result["cpu_s"] = time.process_time()
        self.records.append(result)
        if info.step == self.last:
            raise Measured
        self.use.__enter__()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def train(size: str, *, num_steps: int) -> Meter:
    width = WIDTHS[size]
    shape = ModelConfig(
        vocab_size=VOCAB_SIZE, num_layers=LAYERS[size], model_dim=width, num_heads=width // 64,
        num_kv_heads=width // 64, head_dim=64, ffn_dim=64 * round(width / 24),
        max_seq_len=SEQ_LEN, tie_embeddings=False,
    )  # fmt: skip
    config = TrainConfig(
        num_steps=num_steps + 1,
        batch_tokens=BATCH_TOKENS,
        precision=PrecisionConfig(policy="fp32"),
        eval_every_steps=EVALUATION_AT,
        keep_best=False,
        checkpoint_every_minutes=0.0,
    )
    model, meter, rows = Decoder(shape), Meter(num_steps), PackedRows(BATCH_TOKENS // SEQ_LEN)
    model.init_weights(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Measured):
        meter.use.__enter__()
        build.train(
            TrainJob(
                model=model,
                objective=NextToken(rows),
                config=config,
                num_steps=num_steps + 1,
                stage=StageDir(Path(folder)),
                seed=0,
                name="allocators",
                input_digest="allocators",
                heldout=[rows.batch(10_000)],
                techniques=[observer("meter", meter.observe)],
            ),
            single(),
            SilentProgress(),
        )
    return meter


def run(size: str, kind: str, num_steps: int) -> dict[str, Any]:
    """In this process; a small model first, so that libraries have made their own buffers."""
    torch.set_num_threads(1)
    library = LIBRARIES.get(kind, "")
    if library not in Path("/proc/self/maps").read_text(encoding="utf-8"):
        raise SystemExit(f"{kind}: lib{library} was not preloaded")
    if kind not in OWN:
        build.use_tensor_heap = lambda: False  # pyright: ignore[reportPrivateImportUsage]
    train("small", num_steps=4)
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    meter = train(size, num_steps=num_steps)
    timed = meter.records[FIRST_TIMED - 1 :]
    each = {name: [b[name] - a[name] for a, b in itertools.pairwise(timed)] for name in ("faults", "cpu_s")}
    return {
        "rss_peak_bytes": meter.peak_bytes,
        "peak_bytes": meter.peak_bytes - before,
        "timed_peak_bytes": max(one["peak_bytes"] for one in timed) - before,
        "step_s": statistics.median(one["step_s"] for one in timed),
        "cpu_s": statistics.median(each["cpu_s"]),
        "faults_a_step": statistics.median(each["faults"]),
        "losses": [one["loss"] for one in meter.records],
    }


def shared_library(kind: str) -> str:
    """The file name of what is preloaded for this kind, "" for nothing."""
    if kind not in LIBRARIES:
        return ""
    result = ctypes.util.find_library(LIBRARIES[kind])
    if result is None:
        raise SystemExit(f"{kind}: lib{LIBRARIES[kind]} is not installed; install it or choose other --kinds")
    return result


def started(size: str, kind: str, num_steps: int) -> dict[str, Any]:
    preload = {"LD_PRELOAD": shared_library(kind)} if kind in LIBRARIES else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **ENVIRONMENT[kind], **preload}
    command = [sys.executable, __file__, "--one", size, kind, "--steps", str(num_steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare(size: str, kinds: Sequence[str], num_rounds: int, num_steps: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(num_rounds):
        first = number % len(kinds)
        for kind in [*kinds[first:], *kinds[:first]]:
            runs[kind].append(started(size, kind, num_steps))
            shown = {name: value for name, value in runs[kind][-1].items() if name != "losses"}
            print(size, kind, json.dumps(shown), flush=True)
    names = ("rss_peak_bytes", "peak_bytes", "timed_peak_bytes", "step_s", "cpu_s", "faults_a_step")
    result: dict[str, Any] = {
        kind: {name: statistics.median(one[name] for one in runs[kind]) for name in names} for kind in kinds
    }
    for kind in kinds:
        for name in ("rss_peak_bytes", "step_s", "cpu_s") if "heap" in kinds else ():
            pairs = zip(runs[kind], runs["heap"], strict=True)
            result[kind][f"{name}_over_heap"] = [round(one[name] / heap[name], 3) for one, heap in pairs]
    result["losses_equal"] = len({tuple(one["losses"]) for kind in kinds for one in runs[kind]}) == 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--kinds", nargs="+", default=list(ENVIRONMENT), choices=list(ENVIRONMENT))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one[0], options.one[1], options.steps)))
        return
    if options.steps < FIRST_TIMED + 1:
        parser.error(
            f"--steps: at least {FIRST_TIMED + 1}, for two steps are timed at least, from step {FIRST_TIMED} on"
        )
    for kind in options.kinds:
        shared_library(kind)  # fail before an hour of measuring, not amid it
    torch.set_num_threads(1)
    around = circumstances()
    result = {size: compare(size, options.kinds, options.rounds, options.steps) for size in options.sizes}
    shape = {"layers": LAYERS, "widths": WIDTHS, "seq_len": SEQ_LEN, "batch_tokens": BATCH_TOKENS}
    record = {
        "benchmark": "allocators",
        "shape": shape,
        "rounds": options.rounds,
        "steps": options.steps,
        **result,
        **around,
    }
    path = options.results / f"allocators-{machine_slug(around['machine'])}.json"
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
