"""Drift as the condition of an update: requests are compared with a frozen reference, window by window."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, write_atomic
from modelwright.core.config import ConfigError
from modelwright_continual.drift.check import DriftReport, check_windows
from modelwright_continual.drift.reference import load_reference
from modelwright_continual.drift.requests import RequestRecord, read_requests

DRIFT_FILE = "drift.json"
Position = tuple[Any, ...]
"""Time and id of a request; () sorts before every request."""


@dataclass(frozen=True, kw_only=True)
class DriftTrigger:
    """Condition that requests have drifted from a reference. model: the model that the reference was frozen with."""

    reference: Path
    requests: tuple[str, ...]
    model: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DriftCheck:
    """Reports of whole windows of requests. position: of the last request in a whole window."""

    reports: Sequence[DriftReport]
    position: Position = ()

    @property
    def alarmed(self) -> tuple[str, ...]:
        """Features that drifted in any window."""
        return tuple(dict.fromkeys(name for report in self.reports for name in report.alarmed))


def check_requests(trigger: DriftTrigger) -> DriftCheck:
    """Checks all requests that a trigger names. Raises `ConfigError` if they do not fill a window."""
    records = read_requests(trigger.requests)
    check = check_records(records, trigger.reference, trigger.model)
    if not check.reports:
        size = load_reference(trigger.reference, trigger.model).config.window_requests
        raise ConfigError(
            f"{', '.join(trigger.requests)}: {len(records):,} requests do not fill a window of {size:,}; wait for more"
        )
    return check


def check_records(records: Sequence[RequestRecord], reference: Path, model: Path | None) -> DriftCheck:
    """Checks the whole windows of records, which must be in order of time."""
    loaded = load_reference(reference, model)
    reports = list(check_windows(records, loaded))
    num_checked = len(reports) * loaded.config.window_requests
    return DriftCheck(reports=reports, position=position_of(records[num_checked - 1]) if reports else ())


def position_of(record: RequestRecord) -> Position:
    return (record["time"], record["id"])


def write_reports(run: RunDir, check: DriftCheck) -> None:
    """Writes the reports into the run that they lead to. They contain examples of users' texts."""
    write_atomic(run.path / DRIFT_FILE, json.dumps([report.as_json() for report in check.reports], indent=1))
