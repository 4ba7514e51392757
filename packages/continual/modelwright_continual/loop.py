"""The loop: drift -> update -> gate -> A/B test -> promotion.

Every step leaves a result that is written atomically, and is skipped if its result exists; so the same command
continues after `kill -9` and ends with the same weights. The server's state is read from the server: a test that it
already knows is not started a second time.
"""

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from modelwright.core.artifacts import (
    ArtifactError,
    RunDir,
    fsync_folder,
    is_finished,
    lock_folder,
    make_folder,
    read_manifest,
    write_artifact,
    write_atomic,
)
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.core.progress import Progress
from modelwright.serve.ab.client import AbClient, ServerUnreachable
from modelwright_continual.benchmark import load_benchmark
from modelwright_continual.drift_trigger import DriftTrigger, check_requests, write_reports
from modelwright_continual.floor import measure_floor, require_from_scratch
from modelwright_continual.gate.judge import FOLDER, VERDICT, GateConfig, Verdict, judge
from modelwright_continual.lineage import RELEASE_FOLDER, trace
from modelwright_continual.model_files import GATE_VERDICT, LINEAGE, NOT_OF_MODEL
from modelwright_continual.served import served_folder
from modelwright_continual.update import CarryOut, UpdateRequest, in_this_process, quantized_folder, run_update
from modelwright_continual.update_files import is_update

PROMOTION = "promotion.json"
LOCK_FOLDER = "loop"
"""Folder in the run that is locked while a process works on the update."""
_SLUG_CHARS, _DIGEST_CHARS = 22, 12
_UNREACHABLE_S = 600.0
"""Seconds for which a server may be unreachable while a test runs; a restart with a large model takes minutes."""
Ending = Literal["no_drift", "refused", "released", "rolled_back", "promoted"]


@dataclass(frozen=True, kw_only=True)
class AbTest:
    """Settings of the A/B test of a release. min_units: units in each arm after which the release is promoted, unless a
    guard has rolled it back before.
    """

    client: AbClient
    share: float = 0.1
    unit: Literal["session", "user"] = "session"
    min_units: int = 1000
    poll_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ConfigError(f"--share: must be above 0 and below 1, got {self.share:g}; 0.1 is usual")
        if self.min_units < 1 or self.poll_s <= 0:
            raise ConfigError("--min-units: must be at least 1, and --poll above 0")


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """Inputs of the whole loop. champion: the folder in service, None for that of the updated model's run; current:
    symbolic link to the release in service, moved at promotion; floor: train the capacity floor at the end; carry_out:
    function that carries out the runs of the update and of the floor, possibly in several processes.
    """

    update: UpdateRequest
    benchmark: Path
    run: RunDir
    champion: Path | None = None
    gate: GateConfig = field(default_factory=GateConfig)
    drift: DriftTrigger | None = None
    test: AbTest | None = None
    current: Path | None = None
    floor: bool = False
    carry_out: CarryOut = in_this_process


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Result of the loop. text: summary for the terminal; version: name of the release on a server."""

    ending: Ending
    text: str
    release: Path | None = None
    version: str = ""


def run_loop(request: LoopRequest, *, words: Sequence[str], progress: Progress) -> LoopResult:
    """Runs the loop, or its remaining steps. Raises the errors of its steps."""
    lock = request.run.create().path / LOCK_FOLDER
    make_folder(lock)
    with lock_folder(lock, "this update; wait for it"):
        if request.floor:
            require_from_scratch(request.update.model)
        result = _carried_out(request, words, progress)
        if not request.floor or result.ending == "no_drift":
            return result
        benchmark = load_benchmark(request.benchmark)
        floor = measure_floor(
            request.run, request.update.model, benchmark, words=words, progress=progress, carry_out=request.carry_out
        )
        return replace(result, text=f"{result.text}\n{floor.table()}")


def _carried_out(request: LoopRequest, words: Sequence[str], progress: Progress) -> LoopResult:
    run = request.run
    # Once the texts are prepared, the update continues whatever later requests look like.
    if request.drift and not is_update(run):
        check = check_requests(request.drift)
        write_reports(run, check)
        if not check.alarmed:
            return LoopResult(ending="no_drift", text="no window drifted; nothing is updated")
        progress.note(f"drift: {', '.join(check.alarmed)}")
    benchmark = load_benchmark(request.benchmark)
    champion = request.champion or served_folder(request.update.model)
    _check_promotion(request)
    run_update(request.update, benchmark, run, words=words, progress=progress, carry_out=request.carry_out)
    if was_promoted(run):  # the champion that it was judged against may be out of service by now
        release = run.path / RELEASE_FOLDER
        if request.current is not None:
            move_link(request.current, release.resolve())
        verdict = Verdict.read(run.path / FOLDER)
        return _with_release("promoted", verdict, release)
    verdict = judge(run, champion, benchmark, request.gate, progress)
    if not verdict.passed:
        return LoopResult(ending="refused", text=verdict.table())
    release = write_release(run)
    if request.test is None:
        return _with_release("released", verdict, release)
    report = ab_test(request.test, run, release, verdict, progress)
    if report["status"] != "promoted":
        text = f"A/B test {report['name']}: {report['status']} {report['reason']}".rstrip()
        return LoopResult(ending="rolled_back", text=f"{verdict.table()}\n{text}")
    record_promotion(run, release, report, request.current)
    return _with_release("promoted", verdict, release)


def _with_release(ending: Literal["released", "promoted"], verdict: Verdict, release: Path) -> LoopResult:
    text = f"{verdict.table()}\n{ending} {release}"
    return LoopResult(ending=ending, text=text, release=release, version=verdict.candidate_version)


def _check_promotion(request: LoopRequest) -> None:
    """Raises, before anything is trained, the errors that would prevent the promotion of the release."""
    if request.test is not None:
        # Any name will do: this fails if the server is unreachable or keeps no A/B tests.
        request.test.client.find("")
    if request.current is not None:
        _require_link(request.current)


def write_release(run: RunDir) -> Path:
    """Writes the judged model with its lineage and the gate's verdict as a folder that a server can load; reuses an
    existing folder of the same model.
    """
    source, folder = quantized_folder(run), run.path / RELEASE_FOLDER
    content = read_manifest(source, verify=True).content_digest
    verdict = read_manifest(run.path / FOLDER).content_digest
    if is_finished(folder):
        known = read_manifest(folder, kind=RELEASE_FOLDER, verify=True)
        if known.inputs == {"model": content, "gate": verdict}:
            return folder
    lineage = trace(source).as_json()
    with write_artifact(folder, kind=RELEASE_FOLDER, digest=content, inputs={"model": content, "gate": verdict}) as out:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in NOT_OF_MODEL:
                shutil.copyfile(path, out.path / path.name)
        write_atomic(out.path / LINEAGE, lineage)
        shutil.copyfile(run.path / FOLDER / VERDICT, out.path / GATE_VERDICT)
    return folder


def name_of_test(run: RunDir, verdict: Verdict, attempt: int) -> str:
    """Returns a name that depends on the run and the model, so that a later process finds the test again. attempt: from
    1.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", run.path.resolve().name.lower()).strip("-")[:_SLUG_CHARS] or "update"
    return f"{slug}-{verdict.candidate[:_DIGEST_CHARS]}-{attempt}"


def ab_test(test: AbTest, run: RunDir, release: Path, verdict: Verdict, progress: Progress) -> dict[str, Any]:
    """Starts the A/B test of a release, or finds it, and waits for its end; returns its report. Raises
    `ModelwrightError` if the server compares other models than the gate did.
    """
    report = _begun(test, run, release, verdict)
    _require_judged(test, report, verdict)
    progress.begin("A/B test", test.min_units, test.unit + "s")
    last_seen = time.monotonic()
    while report["status"] == "running":
        fewest = min(report["sample_ratio"]["units"].values())
        progress.advance(min(fewest, test.min_units))
        try:
            if fewest >= test.min_units:
                report = _promoted(test, report)
            else:
                time.sleep(test.poll_s)
                report = test.client.find(report["name"]) or report
            last_seen = time.monotonic()
        except ServerUnreachable:
            if time.monotonic() - last_seen > _UNREACHABLE_S:
                raise
            time.sleep(test.poll_s)
    progress.end()
    return report


def _begun(test: AbTest, run: RunDir, release: Path, verdict: Verdict) -> dict[str, Any]:
    """Returns the report of this release's test on the server, or starts one; a test that a restart interrupted is
    repeated.
    """
    for attempt in itertools.count(1):
        name = name_of_test(run, verdict, attempt)
        report = test.client.find(name)
        if report is None:
            return test.client.begin(name, str(release.resolve()), share=test.share, unit=test.unit)
        if report["status"] != "interrupted":
            return report
    raise AssertionError("attempts never end")


def _promoted(test: AbTest, report: dict[str, Any]) -> dict[str, Any]:
    """Promotes the release, unless a guard or a person has ended the test already; returns the latest report."""
    try:
        return test.client.end(promote=True)
    # Also a ModelwrightError, but `ab_test` waits for the server to return.
    except ServerUnreachable:
        raise
    except ModelwrightError:
        latest = test.client.find(report["name"])
        if latest is None or latest["status"] == "running":
            raise
        return latest


def _require_judged(test: AbTest, report: dict[str, Any], verdict: Verdict) -> None:
    judged = {"A": verdict.champion_version, "B": verdict.candidate_version}
    if report["versions"] == judged:
        return
    # A test of other models than the gate's must not lead to a promotion.
    if report["status"] == "running":
        test.client.end(promote=False)
    raise ModelwrightError(
        f"A/B test {report['name']}: the server compares {report['versions']}, the gate judged {judged}; name the "
        "folder in service with --champion"
    )


def record_promotion(run: RunDir, release: Path, report: dict[str, Any], current: Path | None) -> None:
    """Records the promotion, then moves the link. The record comes first: if the champion is given by the link, it is a
    different model once the link has moved.
    """
    plain = {"release": str(release.resolve()), "content": read_manifest(release).content_digest, "test": report}
    write_atomic(run.path / PROMOTION, json.dumps(plain, indent=1))
    if current is not None:
        move_link(current, release.resolve())


def was_promoted(run: RunDir) -> bool:
    """Returns whether the run's quantized model was promoted. Raises `ArtifactError` for a damaged record."""
    path, release = run.path / PROMOTION, run.path / RELEASE_FOLDER
    if not path.exists() or not is_finished(release):
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["content"]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); remove it to ask the server again") from None
    manifest = read_manifest(release, kind=RELEASE_FOLDER, verify=True)
    return (
        manifest.content_digest == content
        and manifest.inputs["model"] == read_manifest(quantized_folder(run)).content_digest
    )


def move_link(link: Path, target: Path) -> None:
    """Points `link` to `target` atomically, so that it always exists. Raises `ConfigError` if it is not a symbolic
    link.
    """
    _require_link(link)
    make_folder(link.parent)
    fresh = link.with_name(link.name + ".tmp")
    fresh.unlink(missing_ok=True)
    # A rename replaces the old link atomically; removing and creating it would leave a moment without one.
    os.symlink(target, fresh)
    os.replace(fresh, link)
    fsync_folder(link.parent)


def _require_link(link: Path) -> None:
    if link.exists() and not link.is_symlink():
        raise ConfigError(f"--current: {link} is not a symbolic link, so it is not replaced; choose another path")
