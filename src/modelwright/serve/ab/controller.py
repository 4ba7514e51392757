"""A/B tests in a running server: begins and ends them, gives requests their arm, takes B away when a guard says so."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from modelwright.core.errors import StorageError
from modelwright.serve.ab import experiment as tables
from modelwright.serve.ab.experiment import Experiment, ExperimentRequest
from modelwright.serve.ab.report import report_of
from modelwright.serve.ab.shadow import Shadows
from modelwright.serve.ab.state import Assignment, RequestEvent, arm_of
from modelwright.serve.account.database import Database, DatabaseWriter, WriterBusy, open_database
from modelwright.serve.account.exchange import Exchange, FeedbackRequest, FinishedRequest, Subject, pseudonym
from modelwright.serve.account.metrics import Metrics
from modelwright.serve.engines.worker import RETRY_AFTER_S
from modelwright.serve.errors import ApiError, shutting_down
from modelwright.serve.reload import Reloader
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Service

log = logging.getLogger("modelwright.serve")

T = TypeVar("T")


class RunningTest:
    """The `Arms` of a service while a test runs. `share`: of units that get B now."""

    def __init__(self, experiment: Experiment, candidate: ServedModel, shadows: Shadows | None) -> None:
        self.name = experiment.name
        self.share = experiment.share
        self.candidate = candidate
        self.shadows = shadows
        self._salt = experiment.salt
        self._unit = experiment.request.unit

    def assign(self, subject: Subject) -> Assignment | None:
        if self.shadows is not None:
            return None
        unit = pseudonym(self._salt, getattr(subject, self._unit))
        return Assignment(self.name, unit, arm_of(self._salt, unit, self.share), self.share)

    def request_arrived(self) -> None:
        if self.shadows is not None:
            self.shadows.give_way()


class Experiments:
    """An `ExchangeObserver` that also owns the tests. Belongs to the event loop, but for the constructor."""

    keeps_answers = True

    def __init__(self, service: Service, reloader: Reloader, location: str) -> None:
        """Raises `ConfigError` and `StorageError` if the database cannot be used."""
        self._service = service
        self._reloader = reloader
        self._running: RunningTest | None = None
        database = open_database(location, setting="requests.ab_state")
        tables.create_tables(database)
        self._writer = DatabaseWriter(
            "A/B tests",
            database,
            dropped=lambda reason, count: self._metrics.ab.uncounted.labels(reason).inc(count),
            housekeeping=lambda _: None,
        )

    async def start(self) -> None:
        """Go on with the test that was running when the server ended, however it ended; call before requests come."""
        self._writer.start()
        experiment = await self._call(tables.find_running)
        if experiment is None:
            return
        problem = ""
        if experiment.control_version != self._service.model.fingerprint:
            problem = "the server was started with another version in service"
        else:
            try:
                candidate = await self._load(experiment.request)
            except ApiError as error:
                problem = error.message
            else:
                if candidate.fingerprint == experiment.treatment_version:
                    self._put_in_service(experiment, candidate)
                    return
                await candidate.worker.stop()
                problem = f"{experiment.request.path} has another version than when the test began"
        log.error("the A/B test %s does not go on: %s", experiment.name, problem)
        await self._call(lambda database: tables.end(database, experiment.name, "interrupted", problem))

    async def close(self) -> None:
        """Write what is left, and stop B; the test itself goes on when the server is started again."""
        running, self._running = self._running, None
        if running is not None:
            await self._take_out(running)
            await running.candidate.worker.stop()
        await asyncio.to_thread(self._writer.close)

    async def begin(self, request: ExperimentRequest) -> dict[str, Any]:
        """Load B and start a test. Raises `ApiError` 409 while another one or a reload is under way or if the name is
        taken, 400 with the reason if B cannot be put in service.
        """
        async with self._reloader.exclusively():
            if self._running is not None:
                text = f"The test {self._running.name!r} is running; end it first with POST /admin/ab/end."
                raise ApiError(409, text, code="test_running")
            if any(one.name == request.name for one in await self._call(_all)):
                text = f"There has been a test {request.name!r}; choose another name."
                raise ApiError(409, text, param="name", code="name_taken")
            candidate = await self._load(request)
            experiment = Experiment(
                name=request.name,
                request=request,
                share=request.share,
                control_version=self._service.model.fingerprint,
                treatment_version=candidate.fingerprint,
            )
            try:
                await self._call(lambda database: tables.insert(database, experiment))
            except BaseException:
                await candidate.worker.stop()
                raise
            self._put_in_service(experiment, candidate)
            return report_of(experiment)

    async def set_share(self, share: float) -> dict[str, Any]:
        """Raises `ApiError` 404 without a test that is running, 409 if a guard ends it meanwhile."""
        running = self._require_test()
        if not await self._call(lambda database: tables.set_share(database, running.name, share)):
            raise _just_ended()
        running.share = share
        return await self._report(running.name)

    async def end(self, *, promote: bool) -> dict[str, Any]:
        """End the test with A in service, or with B. Raises `ApiError` 404 without a test that is running."""
        async with self._reloader.exclusively():
            running = self._require_test()
            status = "promoted" if promote else "ended"
            if not await self._call(lambda database: tables.end(database, running.name, status)):
                raise _just_ended()
            await self._withdraw(running, promote=promote)
            return await self._report(running.name)

    async def reports(self) -> list[dict[str, Any]]:
        """Reports on all tests, the newest first."""
        found = await self._call(_all)
        return await asyncio.to_thread(lambda: [report_of(experiment) for experiment in found])

    def ended(self, exchange: Exchange, finished: FinishedRequest) -> None:
        running, assignment = self._running, finished.assignment
        if running is not None and running.shadows is not None and finished.status == 200:
            running.shadows.add(exchange, finished)
        if assignment is None:
            return
        event = RequestEvent(
            arm=assignment.arm,
            share=assignment.share,
            is_error=finished.status >= 500 and not self._service.is_draining,
            latency_s=finished.latency_s,
        )
        self._metrics.ab.requests.labels(assignment.arm).inc()
        self._offer(
            assignment.experiment, lambda database: tables.take_request(database, finished.id, assignment, event)
        )

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        score = feedback.score
        if score is None:
            return False
        is_known, name, reason = await self._call(lambda database: tables.take_score(database, feedback.id, score))
        if reason:
            self._roll_back(name, reason)
        return is_known

    @property
    def _metrics(self) -> Metrics:
        return self._service.metrics

    async def _load(self, request: ExperimentRequest) -> ServedModel:
        """B, tried and started. Raises `ApiError`."""
        metrics = self._metrics if request.mode == "split" else Metrics(self._service.model_name)  # of users only
        candidate = await self._reloader.prepare(request.path, metrics)
        problem = _mismatch(self._service.model, candidate)
        if problem is not None:
            await candidate.worker.stop()
            raise problem
        return candidate

    def _put_in_service(self, experiment: Experiment, candidate: ServedModel) -> None:
        name = experiment.name
        shadows = None
        if experiment.request.mode == "shadow":
            shadows = Shadows(self._service, candidate, lambda what: self._count_shadow(name, what))
        self._running = self._service.arms = RunningTest(experiment, candidate, shadows)
        log.info("the A/B test %s runs: A %s, B %s", name, experiment.control_version, candidate.fingerprint)

    def _count_shadow(self, name: str, what: str) -> None:
        self._metrics.ab.shadows.labels(what).inc()
        self._offer(name, lambda database: tables.take_shadow(database, name, what))

    def _offer(self, name: str, task: Callable[[Database], str]) -> None:
        """Run a task that may say why the test of this name is over."""
        loop = asyncio.get_running_loop()

        def then(reason: str) -> None:
            if reason:
                with contextlib.suppress(RuntimeError):  # the loop has ended; the state says what happened
                    loop.call_soon_threadsafe(self._roll_back, name, reason)

        self._writer.offer(task, then)

    def _roll_back(self, name: str, reason: str) -> None:
        running = self._running
        if running is None or running.name != name:
            return
        log.warning("the A/B test %s is over, and A gets all requests: %s", name, reason)
        self._metrics.ab.rollbacks.labels(reason).inc()
        self._service.arms = self._running = None
        self._reloader.retire(running.candidate, before=self._take_out(running))

    async def _withdraw(self, running: RunningTest, *, promote: bool) -> None:
        """Out of service with one of both versions."""
        self._service.arms = self._running = None
        if not promote:
            self._reloader.retire(running.candidate, before=self._take_out(running))
            return
        await self._take_out(running)
        running.candidate.worker.metrics = self._metrics
        self._reloader.switch(running.candidate)

    async def _take_out(self, running: RunningTest) -> None:
        if running.shadows is not None:
            await running.shadows.close()

    def _require_test(self) -> RunningTest:
        if self._running is None:
            raise ApiError(404, "No A/B test is running; begin one with POST /admin/ab.", code="no_test")
        return self._running

    async def _report(self, name: str) -> dict[str, Any]:
        return next(report for report in await self.reports() if report["name"] == name)

    async def _call(self, task: Callable[[Database], T]) -> T:
        try:
            return await self._writer.call(task)
        except (WriterBusy, StorageError):
            raise shutting_down("The state of the A/B tests is busy; try again later.", RETRY_AFTER_S) from None


def _all(database: Database) -> list[Experiment]:
    return list(tables.experiments(database))


def _mismatch(control: ServedModel, candidate: ServedModel) -> ApiError | None:
    """Why B would refuse requests that A answers; None if it would not."""
    if control.info.scores or candidate.info.scores:
        text = "A/B tests compare models that generate text, and A or B scores texts instead; name another model."
        return ApiError(400, text, param="path", code="unsupported_task")
    context, needed = candidate.limits.context, control.limits.context
    if context < needed:
        text = f"B reads {context} tokens and A {needed}, so B would refuse requests; test one with A's context."
        return ApiError(400, text, param="path", code="context_too_small")
    return None


def _just_ended() -> ApiError:
    return ApiError(409, "A guard has just ended this test; look at /ab.json.", code="test_ended")
