"""A/B tests in a running server: begins and ends them, assigns requests to arms, rolls B back when a guard fires.

In shadow tests B answers copies of requests while the server is idle. Requests of users come first: a copy that is
being computed when one arrives is aborted at once and started again later.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from modelwright.core.artifacts import StorageError
from modelwright.serve.ab import experiment as tables
from modelwright.serve.ab.experiment import Assignment, Experiment, ExperimentRequest, RequestEvent, arm_of, report_of
from modelwright.serve.account.database import Database, DatabaseWriter, WriterBusy, open_database
from modelwright.serve.account.monitoring import Metrics
from modelwright.serve.errors import ApiError, log, shutting_down
from modelwright.serve.generation import Generation
from modelwright.serve.keys import ANYONE, Caller
from modelwright.serve.reload import Reloader
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Arms, Exchange, FeedbackRequest, FinishedRequest, Service, Subject, pseudonym

MOST_WAITING = 64
"""Most copies in the queue. Further ones are dropped, and counted."""
MOST_ATTEMPTS = 5
IDLE_POLL_S = 0.02
PREEMPTED = 499
"""Status that tells a preempted copy from one that failed."""


T = TypeVar("T")


@dataclass
class RunningTest:
    """The test that runs. `share`: current share of units that get B; `shadows`: None in a split test."""

    experiment: Experiment
    share: float
    candidate: ServedModel
    shadows: "Shadows | None"

    def assign(self, subject: Subject) -> Assignment | None:
        if self.shadows is not None:  # a shadow test answers no user with B
            return None
        test = self.experiment
        unit = pseudonym(test.salt, getattr(subject, test.request.unit))
        return Assignment(test.name, unit, arm_of(test.salt, unit, self.share), self.share)


class Experiments:
    """An `ExchangeObserver` that also owns the tests. Except for the constructor, it belongs to the event loop."""

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
            dropped=lambda reason, count: self._service.metrics.ab_uncounted.labels(reason).inc(count),
            housekeeping=lambda _: None,
        )

    async def start(self) -> None:
        """Resumes the test that was running when the server stopped or crashed. Call it before requests arrive."""
        self._writer.start()
        experiment = await self._call(tables.find_running)
        if experiment is None:
            return
        # counts of other weights must not be added to those of this test, so both versions have to be the same
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
                await candidate.worker.client.stop()
                problem = f"{experiment.request.path} has another version than when the test began"
        log.error("the A/B test %s does not go on: %s", experiment.name, problem)
        await self._call(lambda database: tables.end(database, experiment.name, "interrupted", problem))

    async def close(self) -> None:
        """Stops B and writes all queued counts. The test itself stays open: the next `start` resumes it."""
        running, self._running = self._running, None
        if running is not None:
            await self._take_out(running)
            await running.candidate.worker.client.stop()
        await asyncio.to_thread(self._writer.close)

    async def begin(self, request: ExperimentRequest) -> dict[str, Any]:
        """Loads B and starts a test. Raises `ApiError` 409 while another test or a reload is in progress or if the name
        is taken, 400 with the reason if B cannot be put in service.
        """
        async with self._reloader.exclusively():
            if self._running is not None:
                running = self._running.experiment.name
                text = f"The test {running!r} is running; end it first with POST /admin/ab/end."
                raise ApiError(409, text, code="test_running")
            if any(test.name == request.name for test in await self._call(lambda db: list(tables.experiments(db)))):
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
                # stored before any request can be assigned to it: counts refer to the row
                await self._call(lambda database: tables.insert(database, experiment))
            except BaseException:
                await candidate.worker.client.stop()
                raise
            self._put_in_service(experiment, candidate)
            return report_of(experiment)

    async def set_share(self, share: float) -> dict[str, Any]:
        """Changes B's share. Raises `ApiError` 404 if no test is running, 409 if a guard has ended it meanwhile."""
        running = self._require_test()
        name = running.experiment.name
        if not await self._call(lambda database: tables.set_share(database, name, share)):
            raise _just_ended()
        running.share = share
        return await self._report(name)

    async def end(self, *, promote: bool) -> dict[str, Any]:
        """Ends the test with A in service, or B to promote it. Raises `ApiError` 404 if no test is running."""
        async with self._reloader.exclusively():
            running = self._require_test()
            name, status = running.experiment.name, "promoted" if promote else "ended"
            if not await self._call(lambda database: tables.end(database, name, status)):
                raise _just_ended()
            self._service.arms = self._running = None
            if promote:
                # copies in progress use metrics of their own; they end before B's worker counts answers to users
                await self._take_out(running)
                running.candidate.worker.metrics = self._service.metrics
                self._reloader.switch(running.candidate)
            else:
                self._reloader.retire(running.candidate, before=self._take_out(running))
            return await self._report(name)

    async def reports(self) -> list[dict[str, Any]]:
        """Returns the reports on all tests, newest first."""
        experiments = await self._call(lambda database: list(tables.experiments(database)))
        # intervals are found by bisection, which would block the event loop
        return await asyncio.to_thread(lambda: [report_of(experiment) for experiment in experiments])

    def ended(self, exchange: Exchange, finished: FinishedRequest) -> None:
        running, assignment = self._running, finished.assignment
        if running is not None and running.shadows is not None and finished.status == 200:
            running.shadows.add(exchange, finished)
        if assignment is None:
            return
        event = RequestEvent(
            arm=assignment.arm,
            share=assignment.share,
            # a server that shuts down answers 503 in both arms, which says nothing about B
            is_error=finished.status >= 500 and not self._service.is_draining,
            latency_s=finished.latency_s,
        )
        self._service.metrics.ab_requests.labels(assignment.arm).inc()
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

    async def _load(self, request: ExperimentRequest) -> ServedModel:
        """Loads, tries and starts B. Raises `ApiError` if it would refuse requests that A answers."""
        # metrics count what users get, so copies of requests are counted apart and shown nowhere
        metrics = self._service.metrics if request.mode == "split" else Metrics(self._service.model_name)
        candidate = await self._reloader.prepare(request.path, metrics)
        control = self._service.model
        context, needed = candidate.limits.context, control.limits.context
        if control.info.scores or candidate.info.scores:
            text = "A/B tests compare models that generate text, and A or B scores texts instead; name another model."
            problem = ApiError(400, text, param="path", code="unsupported_task")
        elif context < needed:
            text = f"B reads {context} tokens and A {needed}, so B would refuse requests; test one with A's context."
            problem = ApiError(400, text, param="path", code="context_too_small")
        else:
            return candidate
        await candidate.worker.client.stop()
        raise problem

    def _put_in_service(self, experiment: Experiment, candidate: ServedModel) -> None:
        name = experiment.name
        shadows = None
        if experiment.request.mode == "shadow":
            shadows = Shadows(self._service, candidate, lambda outcome: self._count_shadow(name, outcome))
        self._running = running = RunningTest(experiment, experiment.share, candidate, shadows)
        self._service.arms = Arms(candidate, running.assign, shadows.give_way if shadows else lambda: None)
        log.info("the A/B test %s runs: A %s, B %s", name, experiment.control_version, candidate.fingerprint)

    def _count_shadow(self, name: str, outcome: str) -> None:
        self._service.metrics.ab_shadows.labels(outcome).inc()
        self._offer(name, lambda database: tables.take_shadow(database, name, outcome))

    def _offer(self, name: str, task: Callable[[Database], str]) -> None:
        """Queues a task of the database's thread that returns why the test of this name has to end, or ""."""
        loop = asyncio.get_running_loop()

        def then(reason: str) -> None:
            if reason:
                with contextlib.suppress(RuntimeError):  # the loop has ended; the state says what happened
                    loop.call_soon_threadsafe(self._roll_back, name, reason)

        self._writer.offer(task, then)

    def _roll_back(self, name: str, reason: str) -> None:
        running = self._running
        if running is None or running.experiment.name != name:  # several queued requests may report the same rollback
            return
        log.warning("the A/B test %s is over, and A gets all requests: %s", name, reason)
        self._service.metrics.ab_rollbacks.labels(reason).inc()
        self._service.arms = self._running = None
        self._reloader.retire(running.candidate, before=self._take_out(running))

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
            raise shutting_down("The state of the A/B tests is busy; try again later.") from None


def _just_ended() -> ApiError:
    return ApiError(409, "A guard has just ended this test; look at /ab.json.", code="test_ended")


@dataclass
class _Copy:
    exchange: Exchange
    answer: str
    num_attempts: int = 0


class Shadows:
    """The queue of copies and its task. Belongs to the event loop. counted: called with each copy's outcome."""

    def __init__(self, service: Service, candidate: ServedModel, counted: Callable[[str], None]) -> None:
        self._service = service
        self._candidate = candidate
        self._counted = counted
        self._caller = Caller(ANYONE)
        self._waiting: deque[_Copy] = deque()
        self._some = asyncio.Event()
        self._current: Generation | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, exchange: Exchange, finished: FinishedRequest) -> None:
        """Queues a copy of a request that A has answered."""
        if len(self._waiting) >= MOST_WAITING:
            self._counted("dropped")
            return
        self._waiting.append(_Copy(exchange, finished.answer))
        self._some.set()

    def give_way(self) -> None:
        """Aborts the copy that is being computed, because a user's request has arrived."""
        if self._current is not None:
            # the error first: a stream that is only closed looks like an answer that has ended
            self._current.stream.put_error(ApiError(PREEMPTED, "A user's request has arrived."))
            self._current.stream.close()

    async def close(self) -> None:
        self.give_way()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            # polled, because nothing signals that the last answer to a user has finished
            if not self._is_idle():
                await asyncio.sleep(IDLE_POLL_S)
                continue
            copy = self._waiting.popleft()
            outcome = await self._answer(copy)
            if outcome == "preempted" and copy.num_attempts < MOST_ATTEMPTS:
                self._waiting.appendleft(copy)
            else:
                self._counted(outcome)
            if not self._waiting:
                self._some.clear()

    def _is_idle(self) -> bool:
        worker = self._service.worker
        return not worker.num_open and not worker.num_held and not self._service.is_draining

    async def _answer(self, copy: _Copy) -> str:
        copy.num_attempts += 1
        try:
            generation = await copy.exchange.open_on(self._candidate, self._caller)
            self._current = generation
            # opening yields to the event loop, so a user's request may have come before there was anything to abort
            if not self._is_idle():
                self.give_way()
            await generation.complete()
        except ApiError as error:
            if error.status == PREEMPTED:
                return "preempted"
            return "failed" if error.status >= 500 else "refused"
        except Exception:  # a bug that one request meets; the copies of others go on
            log.exception("a copy of a request could not be answered")
            return "failed"
        finally:
            if self._current is not None:
                self._current.stream.close()
            self._current = None
        answers = generation.answers
        if not all(answer.finish_reason for answer in answers):
            return "preempted"
        if copy.exchange.asked.temperature == 0:  # sampled answers differ even from the same weights
            is_same = "\n\n".join(answer.new_text for answer in answers) == copy.answer
            self._counted("same" if is_same else "different")
        return "answered"
