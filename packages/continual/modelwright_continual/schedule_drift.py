"""Drift on a schedule: every window of requests is compared once, with the reference of the model that answered it.

A reference describes requests at the time when a model came into service. So as soon as requests to a newly released
version arrive, a reference of the same size as the first one is frozen from them, and later windows are compared with
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modelwright.core.artifacts import RunDir, is_finished, read_manifest
from modelwright.core.config import ConfigError
from modelwright.core.progress import Progress
from modelwright.pipeline.models import find_model
from modelwright_continual.drift.reference import freeze_reference, load_reference
from modelwright_continual.drift.requests import RequestRecord, read_requests
from modelwright_continual.drift_trigger import DriftTrigger, check_records, position_of, write_reports

REFERENCE_FOLDER = "drift-reference"
Outcome = Literal["drift", "no_drift", "no_window", "no_reference"]
"""`no_window`: too few requests since the last check; `no_reference`: too few requests to the new version."""


@dataclass(frozen=True, kw_only=True)
class DriftState:
    """Drift state of a schedule. position: time and id of the last request that was compared or is in a reference;
    alarmed: features that have drifted since the last update; given: digest of the reference on the command line;
    reference: folder of the one in use, "" for that on the command line; version, release: name and run of the newest
    release whose reference is still missing.
    """

    position: Sequence[Any] = ()
    alarmed: Sequence[str] = ()
    given: str = ""
    reference: str = ""
    version: str = ""
    release: str = ""

    def released(self, version: str, run: RunDir) -> "DriftState":
        """Returns the state after an update whose model may come into service."""
        return replace(self, version=version, release=str(run.path.resolve()))

    def updated(self) -> "DriftState":
        """Returns the state after the update that an alarm led to, whatever its outcome."""
        return replace(self, alarmed=())


@dataclass(frozen=True, kw_only=True)
class ScheduledDrift:
    """Checks the requests of a schedule for drift."""

    trigger: DriftTrigger
    progress: Progress

    def check(self, state: DriftState, run: RunDir) -> tuple[DriftState, Outcome]:
        """Compares the windows since the last check; their reports are written to `run`, the run of the next update. If
        an alarm is pending already, nothing is compared.

        Raises `ConfigError` if the requests do not name the version that answered them, and `DataError` for invalid
        request records.
        """
        if state.alarmed:
            return state, "drift"
        digest = read_manifest(self.trigger.reference).digest
        if state.given != digest:  # a reference that a person has frozen takes the place of what was in use
            state = replace(state, given=digest, reference="", version="", release="")
        later = self._later(state)
        if state.version and self._is_in_service(state.version, later):
            state, is_frozen = self._frozen(state, later)
            if not is_frozen:
                return state, "no_reference"
            later = self._later(state)
        check = check_records(later, *self._reference(state.reference))
        if not check.reports:
            self.progress.note(f"schedule: {len(later):,} requests since the last check are no whole window")
            return state, "no_window"
        write_reports(run.create(), check)
        state = replace(state, position=check.position, alarmed=check.alarmed)
        return state, "drift" if check.alarmed else "no_drift"

    def _later(self, state: DriftState) -> list[RequestRecord]:
        records = read_requests(self.trigger.requests)
        return [record for record in records if position_of(record) > tuple(state.position)]

    def _is_in_service(self, version: str, later: Sequence[RequestRecord]) -> bool:
        """Returns whether any of the requests was answered by a released version. Raises `ConfigError` if no request
        names one.
        """
        versions = {record.get("version") for record in later}
        if later and not any(versions):
            raise ConfigError(
                f"--requests: {', '.join(self.trigger.requests)} do not say which version answered, so it is not known "
                "since when the new model has; freeze a reference of its requests (modelwright drift freeze), and name "
                "it with --drift-reference"
            )
        return version in versions

    def _frozen(self, state: DriftState, later: Sequence[RequestRecord]) -> tuple[DriftState, bool]:
        """Freezes the reference of the new version if enough of its requests have arrived; returns the state and
        whether it was.
        """
        given = load_reference(self.trigger.reference, self.trigger.model)
        needed = given.num_windows * given.config.window_requests
        records = [record for record in later if record.get("version") == state.version]
        folder = Path(state.release) / REFERENCE_FOLDER
        if len(records) < needed:
            self.progress.note(
                f"schedule: {len(records):,} of {needed:,} requests to {state.version} for its drift reference"
            )
            return state, False
        # It exists if a process was killed between freezing it and writing the state.
        if not is_finished(folder):
            freeze_reference(records[:needed], self._reference(str(folder))[1], folder, given.config, self.progress)
        position = position_of(records[needed - 1])
        return replace(state, reference=str(folder), position=position, version="", release=""), True

    def _reference(self, folder: str) -> tuple[Path, Path | None]:
        """Returns the folder of a reference and that of its model; the model is None if the first reference
        has none.
        """
        if not folder:
            return self.trigger.reference, self.trigger.model
        model = find_model(Path(folder).parent).source.folder if self.trigger.model else None
        return Path(folder), model
