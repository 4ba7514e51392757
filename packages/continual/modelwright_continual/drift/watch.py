"""Follows a growing file of requests, checks each window once, and delivers alarms to a webhook."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import make_folder, write_atomic
from modelwright.core.config import ConfigError, DataError
from modelwright.core.progress import Progress
from modelwright.serve.ab.client import shown_host
from modelwright_continual.drift.check import DriftReport, check
from modelwright_continual.drift.config import WatchConfig
from modelwright_continual.drift.outbox import Outbox
from modelwright_continual.drift.recent import RecentWindows
from modelwright_continual.drift.reference import DriftReference
from modelwright_continual.drift.requests import RequestRecord, checked
from modelwright_continual.drift.webhook import post_json


@dataclass(frozen=True)
class _Window:
    """Records of a window, and the position of the next one."""

    records: list[RequestRecord]
    offset: int
    line: int


def watch(
    path: Path,
    reference: DriftReference,
    state_folder: Path,
    webhook: str,
    config: WatchConfig,
    progress: Progress,
    *,
    once: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Checks windows of the JSON Lines file `path` as it grows, until the process is stopped.

    webhook: the address, "" for none; once: end when all whole windows are checked and all alarms delivered; clock,
    sleep: in seconds, for tests. Raises `DataError` with file and line for an invalid request record, and `ConfigError`
    if the state belongs to another watch.
    """
    outbox = Outbox(state_folder)
    try:
        _claim(outbox, path, reference)
        courier = _Courier(outbox, webhook, config, progress, clock)
        while True:
            window = read_window(path, outbox.state.offset, outbox.state.line, reference.config.window_requests)
            if window is not None:
                _check_window(window, reference, outbox, config, progress)
            courier.deliver_due()
            # Catches up with the file before sleeping.
            if window is not None:
                continue
            if once and not (webhook and outbox.state.pending):
                return
            sleep(min(config.poll_s, courier.wait_s()))
    finally:
        outbox.close()


def _claim(outbox: Outbox, path: Path, reference: DriftReference) -> None:
    state = outbox.state
    if state.reference and state.reference != reference.digest:
        raise ConfigError(f"--state: {outbox.folder} belongs to another reference; give a new folder")
    if state.file and state.file != str(path.resolve()):
        raise ConfigError(f"--state: {outbox.folder} belongs to {state.file}; give a new folder for {path}")
    state.reference, state.file = reference.digest, str(path.resolve())


def read_window(path: Path, offset: int, line: int, num_requests: int) -> _Window | None:
    """Reads the next window of a JSON Lines file; None while it has too few complete lines. line: number of the line at
    `offset`.

    Raises `DataError` if the file has become shorter than `offset`.
    """
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: cannot be followed; give a .jsonl file, or use modelwright drift check")
    lines: list[bytes] = []
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) < offset:
                raise DataError(f"{path}: is shorter than the part that was read; watch a new file with a new --state")
            file.seek(offset)
            while len(lines) < num_requests and (text := file.readline()).endswith(b"\n"):
                lines.append(text)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; write it with modelwright requests export") from None
    if len(lines) < num_requests:
        return None
    numbered = ((f"{path}:{line + number}", text) for number, text in enumerate(lines))
    records = list(checked(_parsed(where, text) for where, text in numbered))
    return _Window(records, offset + sum(map(len, lines)), line + len(lines))


def _parsed(where: str, text: bytes) -> tuple[str, RequestRecord]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: is not valid JSON ({getattr(error, 'msg', error)}); correct the line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: holds a JSON {type(record).__name__} where an object is expected")
    return where, record


def _check_window(
    window: _Window, reference: DriftReference, outbox: Outbox, config: WatchConfig, progress: Progress
) -> None:
    """Checks a window and saves its result in one step: the new position together with the alarms to deliver."""
    state, recent = outbox.state, RecentWindows(outbox.state.recent)
    report = check(window.records, reference, recent=recent)
    state.recent = recent.statistics
    state.offset, state.line, state.windows = window.offset, window.line, state.windows + 1
    raised = fresh_features(report.alarmed, state.last_alarm, state.windows, config.cooldown_windows)
    if raised:
        state.last_alarm.update(dict.fromkeys(report.alarmed, state.windows))
        key = alarm_key(report)
        file = outbox.folder / "alarms" / f"{key}.json"
        make_folder(file.parent)
        # The file is written before the state, so that a saved alarm always has its report.
        write_atomic(file, json.dumps(report.as_json(), indent=1, ensure_ascii=False))
        outbox.put(key, message(report, key, state.windows, file))
        progress.note(f"window {state.windows}: {', '.join(report.alarmed)} drifted; {file}")
    elif report.alarm:
        progress.note(f"window {state.windows}: {', '.join(report.alarmed)} still drifted")
    outbox.save()


def fresh_features(
    alarmed: tuple[str, ...], last_alarm: Mapping[str, int], window: int, cooldown_windows: int
) -> list[str]:
    """Returns the features whose alarm is new: without an alarm within the cool-down. One is enough for a message."""
    return [name for name in alarmed if name not in last_alarm or window - last_alarm[name] > cooldown_windows]


def alarm_key(report: DriftReport) -> str:
    """Returns an id that depends on the window and the reference only, so that repeated deliveries of an alarm are
    recognized.
    """
    text = "\n".join([report.reference, report.first_id, report.last_id, str(report.num_requests)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def message(report: DriftReport, key: str, window: int, file: Path) -> dict[str, Any]:
    """Builds the webhook's message: figures and causes, but no text of a user, which is only in `file`. The key `text`
    is what chat services show.
    """
    drifted = [feature for feature in report.features if feature.alarm]
    return {
        "id": key,
        "text": f"Drift in window {window}: " + "; ".join(f"{one.name}: {one.cause}" for one in drifted),
        "window": window,
        "from_time": report.first_time,
        "to_time": report.last_time,
        "num_requests": report.num_requests,
        "num_sessions": report.num_sessions,
        "versions": report.versions,
        "reference": report.reference,
        "report": str(file.resolve()),
        "features": [
            {
                name: getattr(one, name)
                for name in ("name", "statistic", "p_value", "adjusted_p", "effect", "psi", "cause")
            }
            for one in drifted
        ],
    }


class _Courier:
    """Delivers pending messages in order, with a pause after each failure that doubles up to a limit. It never gives
    up: a message that cannot be delivered stays in the outbox.
    """

    def __init__(
        self, outbox: Outbox, webhook: str, config: WatchConfig, progress: Progress, clock: Callable[[], float]
    ) -> None:
        self._outbox, self._webhook, self._config, self._progress = outbox, webhook, config, progress
        self._clock = clock
        self._pause_s, self._due = config.first_retry_s, 0.0

    def deliver_due(self) -> None:
        while self._webhook and self._outbox.state.pending and self._clock() >= self._due:
            key, content = next(iter(self._outbox.state.pending.items()))
            problem = post_json(self._webhook, content, idempotency_key=key, timeout_s=self._config.timeout_s)
            if problem:
                self._due = self._clock() + self._pause_s
                self._progress.note(
                    f"{shown_host(self._webhook)} did not take alarm {key} ({problem}); again in {self._pause_s:.3g} s"
                )
                self._pause_s = min(2 * self._pause_s, self._config.max_retry_s)
            else:
                self._outbox.mark_delivered(key)
                self._pause_s = self._config.first_retry_s
                self._progress.note(f"alarm {key} delivered to {shown_host(self._webhook)}")

    def wait_s(self) -> float:
        """Returns the seconds until the next attempt, or until the next poll if nothing is pending."""
        if not (self._webhook and self._outbox.state.pending):
            return self._config.poll_s
        return max(0.0, self._due - self._clock())
