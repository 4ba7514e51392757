"""Claim: tiers and reading ahead shorten the wait for a batch of a slow store, next to litData and mosaicml-streaming.

What each side does is in `loading_worker`, the store in `slow_store`.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.resources import num_usable_cores
from modelwright.data.rows.cache.layout import ROWS_AT
from modelwright.data.rows.pack import PackConfig, pack
from modelwright_claims import loading_worker
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described, untestable
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.launch import answer_of
from modelwright_claims.loading_worker import AHEAD, CACHE, DIRECT, PACKAGES, PEERS, TIERS, Task
from modelwright_claims.open_loop import percentile
from modelwright_claims.slow_store import serving
from modelwright_claims.statistics import differences, estimate, ratios

RATIO_TARGET = 6.7
BUSY_TARGET = 92.0
STEP_MARGIN = 1.01
ALONE = "milliseconds of a step that computes alone"
LATENCY_S = 0.120
"""Each request to the store waits so long: the published latency before."""
BYTES_PER_S = 100e6
"""The bandwidth of the store, which all requests share."""
COMPUTE_S = 0.207
"""A step computes so long: with a wait of 18 ms it computes for 92% of the time, both as published."""
SEQ_LEN, BATCH_ROWS, SHARD_ROWS = 2048, 16, 128
VOCAB_SIZE, EOS_ID = 60_000, 1
EPOCHS = FIRST, SECOND = "first epoch", "second epoch"
NUM_EPOCHS = {DIRECT: 1, AHEAD: 1}
"""Sides that keep nothing read one epoch; the others read two."""
PEERS_PYTHON, DEFAULT_PYTHON = "MODELWRIGHT_LOADING_PEERS", ".venv-loading/bin/python"
"""The variable that names the interpreter of the peers' environment, and where `make .venv-loading/.ready` puts it."""
TIMEOUT_S = 900.0
P50, P99, SHARE, STEP, START = "p50 of the wait, ", "p99 of the wait, ", "computing, ", "step, ", "first batch, "


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The extent of a measurement. num_batches: of an epoch; sides: those of the product; all installed peers are
    added.
    """

    rounds: int
    num_batches: int
    compute_s: float
    sides: Sequence[str]


FULL = Plan(rounds=3, num_batches=128, compute_s=COMPUTE_S, sides=(DIRECT, AHEAD, TIERS, CACHE))
QUICK = Plan(rounds=1, num_batches=16, compute_s=0.05, sides=(DIRECT, CACHE))


@dataclass(frozen=True, kw_only=True)
class Interpreters:
    """Which interpreter runs the loader of which side. versions: of the peers that are installed."""

    peers: str
    versions: Mapping[str, str]

    def of(self, side: str) -> str:
        return self.peers if side in PEERS else sys.executable


def find_interpreters() -> Interpreters:
    """The peers' interpreter is asked which peers it has."""
    peers = os.environ.get(PEERS_PYTHON) or DEFAULT_PYTHON
    versions = _run(peers, "versions") if Path(peers).is_file() else {}
    return Interpreters(peers=peers, versions=versions)


def measure(setting: Setting) -> Measurement:
    """Every side reads one epoch or two in a separate process with nothing kept from before, in rounds."""
    if find_spec("s3fs") is None:
        return untestable("the product reads S3 with s3fs (pip install 'modelwright[remote]')")
    plan, started = QUICK if setting.quick else FULL, time.perf_counter()
    interpreters = find_interpreters()
    samples = dict[str, list[float]]()
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        folder = Path(name)
        with serving(folder / "store", latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as endpoint:
            task = prepare(folder, plan, interpreters, endpoint)
            for number in range(plan.rounds):
                for side in (*plan.sides, *interpreters.versions):
                    measured = read_side(side, task, interpreters)
                    add_samples(samples, side, measured)
                    setting.progress.note(f"round {number + 1} of {plan.rounds}, {side}: {describe(samples, side)}")
    return Measurement(
        samples={**samples, ALONE: [1000 * plan.compute_s]},
        conditions=described(__name__, plan=plan, task=task)
        | {
            "store": f"S3-compatible, on this machine; {1000 * LATENCY_S:.0f} ms a request, "
            f"{BYTES_PER_S / 1e6:.0f} MB/s in all",
            "rows": f"{plan.num_batches * BATCH_ROWS} of {SEQ_LEN} uint16 tokens in shards of {SHARD_ROWS}",
            "step": f"{task.num_products} products of {loading_worker.MATRIX_DIM}x{loading_worker.MATRIX_DIM} matrices "
            f"on one thread, {1000 * plan.compute_s:.0f} ms where nothing else runs",
            "cores": num_usable_cores(),
            "peers that are not installed": ", ".join(one for one in PEERS if one not in interpreters.versions)
            or "none",
            **{f"version of {PACKAGES[side]}": version for side, version in interpreters.versions.items()},
            "seconds": time.perf_counter() - started,
        },
    )


def prepare(folder: Path, plan: Plan, interpreters: Interpreters, endpoint: str) -> Task:
    """Write the rows in every format into the store's folder, and time the products of a step."""
    bucket, dice = folder / "store" / "rows", np.random.default_rng(0)
    num_rows = plan.num_batches * BATCH_ROWS
    rows = dice.integers(EOS_ID + 1, VOCAB_SIZE, (num_rows, SEQ_LEN)).astype(np.uint16)
    rows[:, -1] = EOS_ID  # so that each is a row of its own when it is packed
    np.save(folder / "rows.npy", rows)
    config = PackConfig(seq_len=SEQ_LEN, shard_bytes=SHARD_ROWS * rows[0].nbytes)
    pack(((row, None) for row in rows), bucket / "packed", config, vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    (bucket / "packed" / ROWS_AT).write_text(json.dumps({"url": "s3://rows/packed"}), encoding="utf-8")
    task = Task(
        url="s3://rows",
        endpoint=endpoint,
        rows=str(folder / "rows.npy"),
        packed=str(bucket / "packed"),
        scratch=str(folder / "scratch"),
        batch_rows=BATCH_ROWS,
        num_epochs=1,
        compute_s=plan.compute_s,
        num_products=1,
        num_workers=num_usable_cores(),
        shard_bytes=config.shard_bytes,
        eos_id=EOS_ID,
    )
    for side in interpreters.versions:
        target = bucket / PACKAGES[side]
        target.mkdir()
        _run(interpreters.of(side), "write", dataclasses.replace(task, scratch=str(target)), side)
    return dataclasses.replace(task, num_products=_run(sys.executable, "products", task, DIRECT))


def read_side(side: str, task: Task, interpreters: Interpreters) -> Mapping[str, list[list[float]]]:
    """Return the result of `loading_worker.read_epochs` for a side that begins with an empty folder."""
    with tempfile.TemporaryDirectory(dir=Path(task.rows).parent) as scratch:
        num_epochs = NUM_EPOCHS.get(side, len(EPOCHS))
        own = dataclasses.replace(task, scratch=scratch, num_epochs=num_epochs)
        return _run(interpreters.of(side), "read", own, side)


def arm_names(side: str) -> list[str]:
    """The arms of a side, one for each of its epochs."""
    return [f"{side}, {epoch}" for epoch in EPOCHS[: NUM_EPOCHS.get(side, len(EPOCHS))]]


def add_samples(samples: dict[str, list[float]], side: str, measured: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Add the figures of one round. The first batch of an epoch, before which processes and connections start, has its
    own figure.
    """
    for arm, waits, computed in zip(arm_names(side), measured["waits_s"], measured["computed_s"], strict=True):
        total_s = sum(waits[1:]) + sum(computed[1:])
        for name, value in (
            (P50, 1000 * percentile(waits[1:], 0.5)),
            (P99, 1000 * percentile(waits[1:], 0.99)),
            (SHARE, 100 * sum(computed[1:]) / total_s),
            (STEP, 1000 * total_s / len(waits[1:])),
            (START, 1000 * waits[0]),
        ):
            samples.setdefault(f"{name}{arm}", []).append(value)


def describe(samples: Samples, side: str) -> str:
    """The last round of a side in a line."""
    return "; ".join(
        f"{arm.rpartition(', ')[2]} p50 {samples[P50 + arm][-1]:.1f} ms, p99 {samples[P99 + arm][-1]:.1f} ms, "
        f"computing {samples[SHARE + arm][-1]:.0f}%"
        for arm in arm_names(side)
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment, (ahead,), (direct,) = Judgment(), arm_names(AHEAD), arm_names(DIRECT)
    for arm, epoch in zip(arm_names(CACHE), EPOCHS, strict=True):
        ours = samples[P99 + arm]
        with judgment.part():
            say = f"{epoch}: p99 of the wait {estimate(samples[P99 + ahead]).mean:.1f} ms with reading ahead alone, "
            say += f"{estimate(ours).mean:.1f} ms with the cache, {{0.mean:.1f}}x lower"
            ratio, what = ratios(samples[P99 + ahead], ours), f"{epoch}: p99 of the wait is lower by"
            judgment.ask(f"times lower p99, {epoch}", ratio, "x", ">=", RATIO_TARGET, what=what, say=say)
        judgment.note(f"times lower p99 than reading directly, {epoch}", ratios(samples[P99 + direct], ours), "x")
        with judgment.part():
            busy = estimate([100 * samples[ALONE][0] / step for step in samples[STEP + arm]])
            judgment.ask(f"share of a step that computing alone takes, {epoch}", busy, "%", ">=", BUSY_TARGET)
        for peer in PEERS:
            with judgment.part():
                waits, theirs = samples[f"{P99}{peer}, {epoch}"], f"{peer}, {epoch}"
                judgment.said.append(f"{peer} {estimate(waits).mean:.1f} ms")
                judgment.check(
                    f"{epoch}: p99 of the wait above that of {peer}", differences(ours, waits), 0.0, " ms", "<="
                )
                steps = ratios(samples[STEP + arm], samples[STEP + theirs])
                judgment.ask(f"time of a step to that of {theirs}", steps, "x", "<=", STEP_MARGIN)
    for name, unit in ((P99, "ms"), (P50, "ms"), (SHARE, "%"), (STEP, "ms"), (START, "ms")):
        judgment.show(samples, [name + arm for arm in names_between(samples, name)], unit)
    return judgment.verdict()


def _run(python: str, action: str, task: Task | None = None, side: str = "") -> Any:
    """Run `loading_worker` and return its result."""
    words = [action]
    with tempfile.TemporaryDirectory() as place:
        if task is not None:
            path = Path(place) / "task.json"
            path.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
            words += [str(path), side]
        command = [python, "-P", loading_worker.__file__, *words]
        environment = _environment(task.endpoint if task else "", is_ours=python == sys.executable)
        return answer_of(command, f"{side or python}: {action}", env=environment, timeout=TIMEOUT_S)


def _environment(endpoint: str, *, is_ours: bool) -> dict[str, str]:
    """A single thread for computing, and the address of the store under the name that each library reads."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if is_ours:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return environment | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,
    }


CLAIM = declared(__name__)
