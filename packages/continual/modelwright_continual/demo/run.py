"""The demonstration: a first model in service, traffic that changes, and the loop that notices the change and updates
the model.

Everything runs as it does for a user: the server is a separate process that is queried over HTTP, the drift monitor
reads its request log, and the A/B test counts its answers. Only the users are synthetic (`traffic.py`). Every step is
skipped once it is done, so the same command resumes after `kill -9`.
"""

import json
import os
import secrets
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, is_finished, lock_folder
from modelwright.core.config import ModelwrightError, dump
from modelwright.core.progress import Progress
from modelwright.pipeline.run import execute
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.average import AVERAGE
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.pretrain import PRETRAIN
from modelwright.pipeline.stages.serve import start_server
from modelwright.serve.ab.client import AbClient
from modelwright.serve.account.database import open_database
from modelwright.serve.account.request_store import export_records
from modelwright.serve.config import RequestsConfig
from modelwright_continual.benchmark import Benchmark, freeze_benchmark, load_benchmark
from modelwright_continual.demo.size import DemoSize
from modelwright_continual.demo.texts import DemoTexts, write_texts
from modelwright_continual.demo.timeline import Timeline
from modelwright_continual.demo.traffic import DemoTraffic
from modelwright_continual.drift.config import DriftConfig
from modelwright_continual.drift.reference import freeze_reference
from modelwright_continual.drift.requests import read_requests
from modelwright_continual.drift_trigger import DriftTrigger
from modelwright_continual.floor import Floor, measure_floor
from modelwright_continual.loop import PROMOTION, AbTest, LoopRequest, LoopResult, move_link, run_loop
from modelwright_continual.update import UpdateRequest, quantized_folder

KEY_VARIABLE = "MODELWRIGHT_DEMO_KEY"
"""Environment variable with an API key that is only valid while this process runs; an A/B test can be started by a
key's owner only."""
REPLAY = 0.25
_SLACK = 0.005
"""Loss on old texts that the choice of the average's weight may cause: a quarter of the gate's margin, because the
gate's whole confidence interval must lie within that margin."""
_START_TIMEOUT_S, _ANSWERS_TIMEOUT_S = 120.0, 600.0
_UPDATE = {"num_epochs": 1.0, "learning_rate": 2e-3, "batch_tokens": 2048, "eval_every_steps": 0}
"""Settings of the update's training, for a model of the first one's size."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The inputs and folders of the demonstration. config: of the first model's run; words: the command line, for
    run.json.
    """

    folder: Path
    config: RunConfig
    words: Sequence[str]
    progress: Progress
    size: DemoSize = field(default_factory=DemoSize)

    @property
    def texts(self) -> DemoTexts:
        return DemoTexts(self.folder / "texts")

    @property
    def first(self) -> RunDir:
        return RunDir(self.folder / "first")

    @property
    def update(self) -> RunDir:
        return RunDir(self.folder / "update")

    @property
    def current(self) -> Path:
        """Symbolic link to the model folder in service."""
        return self.folder / "current"

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.folder / "timeline.json")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The result of the demonstration. handsoff_s: seconds from the change of the traffic to the new model in service,
    None without a promotion; total_s: seconds from the first command to the end; num_answered: requests that were
    answered in the process in which the loop ended; failures: error messages of those that failed.
    """

    loop: LoopResult
    floor: Floor
    handsoff_s: float | None
    total_s: float
    num_answered: int
    failures: Sequence[str]


def run_demo(demo: Demo) -> DemoResult:
    """Runs the demonstration, or its remaining steps. Raises the errors of its steps."""
    RunDir(demo.folder).create()
    with lock_folder(demo.folder, "this demonstration; wait for it"):
        demo.timeline.mark("demonstration begun")
        write_texts(demo.texts.folder, demo.size)
        execute(demo.config, demo.first, only=(), origin="continual demo", words=demo.words, progress=demo.progress)
        demo.timeline.mark("first model trained")
        benchmark = _benchmark(demo)
        loop = _serve_and_update(demo, benchmark)
        floor = measure_floor(demo.update, demo.first.path, benchmark, words=demo.words, progress=demo.progress)
        demo.timeline.mark("capacity floor measured")
        return DemoResult(
            loop=loop,
            floor=floor,
            handsoff_s=_handsoff_s(demo),
            total_s=demo.timeline.span_s,
            **demo.timeline.figures(f"loop ended: {loop.ending}"),
        )


def _benchmark(demo: Demo) -> Benchmark:
    folder = demo.folder / "bench"
    if is_finished(folder):
        return load_benchmark(folder)
    return freeze_benchmark([demo.texts.heldout("old")], [demo.texts.heldout("new")], folder)


def _serve_and_update(demo: Demo, benchmark: Benchmark) -> LoopResult:
    if not demo.current.is_symlink():
        move_link(demo.current, quantized_folder(demo.first).resolve())
    key = os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(32))
    server = replace(read_run_config(demo.first.config).serve, port=0, api_key_env=KEY_VARIABLE)
    kept = RequestsConfig(log=str(_log(demo)), ab_state=str(demo.folder / "ab.sqlite"))
    with start_server(demo.current, server, demo.folder, _START_TIMEOUT_S, kept) as running:
        demo.timeline.mark("first model in service")
        prompts = {task: demo.texts.prompts(task) for task in demo.size.shifted}
        with DemoTraffic(running.url, key, prompts, {"old": 1.0, "new": 0.0}) as traffic:
            _freeze_reference(demo, traffic)
            # In place, because the threads of the traffic read this dict.
            traffic.shares |= demo.size.shifted
            demo.timeline.mark("users ask about new libraries")
            _export_shifted(demo, traffic)
            result = run_loop(
                _loop_request(demo, benchmark, AbClient(running.url, key)), words=demo.words, progress=demo.progress
            )
            if result.ending == "no_drift":
                raise ModelwrightError(f"{_shifted(demo)}: {result.text}, although users ask about other things now")
            if result.ending == "promoted":
                _require_served(running.url, demo)
    ending = f"loop ended: {result.ending}"
    demo.timeline.mark(ending, num_answered=traffic.num_answered, failures=traffic.failures)
    return result


def _loop_request(demo: Demo, benchmark: Benchmark, server: AbClient) -> LoopRequest:
    first = read_run_config(demo.first.config)
    return LoopRequest(
        update=UpdateRequest(
            model=demo.first.path,
            new=(demo.texts.train("new"),),
            replay=REPLAY,
            settings={
                "seed": first.seed,
                "hardware": dump(first.hardware),
                "training": {"precision": dump(first.training.precision)},
                "serve": dump(first.serve),
                PACK.name: {"seq_len": first.model.max_seq_len},
                PRETRAIN.name: _UPDATE,
                AVERAGE.name: {"margin": _SLACK},
            },
        ),
        benchmark=benchmark.folder,
        run=demo.update,
        champion=quantized_folder(demo.first),
        drift=DriftTrigger(reference=demo.folder / "drift", requests=(str(_shifted(demo)),)),
        test=AbTest(client=server, share=0.5, min_units=demo.size.min_units, poll_s=1.0),
        current=demo.current,
    )


def _freeze_reference(demo: Demo, traffic: DemoTraffic) -> None:
    """Freezes the drift reference while users ask about libraries that the model knows."""
    folder, requests = demo.folder / "drift", demo.folder / "reference.jsonl"
    if is_finished(folder):
        return
    since = demo.timeline.mark("users ask about old libraries")
    num_requests = demo.size.window * demo.size.num_windows
    _await_requests(demo, traffic, since, num_requests, requests)
    config = DriftConfig(window_requests=demo.size.window, run_length=demo.size.run_length)
    reference = freeze_reference(read_requests([str(requests)]), None, folder, config, demo.progress)
    demo.progress.note(f"drift: {reference.calibration_line()}")
    demo.timeline.mark("drift reference frozen", requests=num_requests)


def _export_shifted(demo: Demo, traffic: DemoTraffic) -> None:
    """Exports a window of the changed traffic."""
    if not _shifted(demo).exists():
        since = demo.timeline.mark("users ask about new libraries")
        _await_requests(demo, traffic, since, demo.size.window, _shifted(demo))
        demo.timeline.mark("window of changed traffic exported", requests=demo.size.window)


def _await_requests(demo: Demo, traffic: DemoTraffic, since: float, count: int, target: Path) -> None:
    """Waits until the server has logged `count` requests since a moment, then exports the first ones. Raises
    `ModelwrightError` if that takes too long.
    """
    deadline = time.monotonic() + _ANSWERS_TIMEOUT_S
    demo.progress.begin("requests", count, "requests")
    before = traffic.num_answered
    while (answered := traffic.num_answered - before) < count:
        demo.progress.advance(answered)
        if time.monotonic() > deadline:
            raise ModelwrightError(
                f"the server answered {answered:,} of {count:,} requests in {_ANSWERS_TIMEOUT_S:.0f} s "
                f"({len(traffic.failures)} failed); see {demo.folder / 'server.log'}"
            )
        time.sleep(0.1)
    partial = target.with_name(f"partial-{target.name}")
    _wait_until(lambda: _export(demo, since, partial) >= count, deadline, target)
    # Moved when complete, because `_export_shifted` treats an existing file as done.
    os.replace(partial, target)
    demo.progress.end()


def _wait_until(is_done: Callable[[], bool], deadline: float, target: Path) -> None:
    """Polls until `is_done`: the log is written after the answers are sent. Raises `ModelwrightError` after the
    deadline.
    """
    while not is_done():
        if time.monotonic() > deadline:
            raise ModelwrightError(f"{target}: the log has fewer requests than were answered")
        time.sleep(0.2)


def _export(demo: Demo, since: float, target: Path) -> int:
    database = open_database(str(_log(demo)), setting="requests.log", must_exist=True)
    try:
        return export_records(database, target, since=since, until=time.time(), progress=demo.progress)
    finally:
        database.close()


def _require_served(url: str, demo: Demo) -> None:
    """Raises `ModelwrightError` unless the server answers with the promoted model."""
    with urllib.request.urlopen(f"{url}/readyz", timeout=60) as reply:
        version = json.loads(reply.read())["version"]
    verdict = json.loads((demo.update.path / "gate" / "verdict.json").read_text(encoding="utf-8"))
    if version != verdict["candidate_version"]:
        raise ModelwrightError(
            f"the server answers with {version}, not with the promoted model; run the same command again, which starts "
            "the server with it"
        )


def _handsoff_s(demo: Demo) -> float | None:
    """Seconds from the change of the traffic to the promotion; None without a promotion."""
    path = demo.update.path / PROMOTION
    if not path.exists():
        return None
    moments: dict[str, Any] = demo.timeline.read()
    # The record is written once, at the promotion.
    return path.stat().st_mtime - moments["users ask about new libraries"]["time"]


def _log(demo: Demo) -> Path:
    return demo.folder / "requests.sqlite"


def _shifted(demo: Demo) -> Path:
    return demo.folder / "shifted.jsonl"
