"""The running log: takes finished requests from the event loop and writes them from a thread of its own."""

import logging
import time

from modelwright.core.errors import StorageError
from modelwright.serve.database import Database, open_database
from modelwright.serve.database_writer import DatabaseWriter, WriterBusy
from modelwright.serve.errors import shutting_down
from modelwright.serve.exchange import Exchange, FinishedRequest, pseudonym
from modelwright.serve.metrics import Metrics
from modelwright.serve.protocol import FeedbackRequest
from modelwright.serve.request_log import store
from modelwright.serve.request_log.record import RequestRecord
from modelwright.serve.request_log.redaction import RedactionFailed, TextRedaction
from modelwright.serve.requests_config import RequestsConfig
from modelwright.serve.worker import RETRY_AFTER_S

log = logging.getLogger("modelwright.serve")

DAY_S = 86_400.0


class RequestLog:
    """An `ExchangeObserver`. Texts are redacted in the writer's thread, before they reach the database."""

    keeps_answers = True

    def __init__(self, config: RequestsConfig, metrics: Metrics) -> None:
        """Raises `ConfigError` and `StorageError` if the database cannot be used."""
        self._config = config
        self._metrics = metrics
        self._redaction = TextRedaction()
        database = open_database(config.log, setting="requests.log")
        self._salt = store.create_tables(database)
        self._writer = DatabaseWriter("request log", database, dropped=self._dropped, housekeeping=self._prune)

    def start(self) -> None:
        self._writer.start()

    def close(self) -> None:
        """Write what is left. Waits."""
        self._writer.close()

    def ended(self, exchange: Exchange, finished: FinishedRequest) -> None:
        self._writer.offer(lambda database: self._write(database, finished), self._count)

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        try:
            return await self._writer.call(lambda database: self._set_feedback(database, feedback))
        except (WriterBusy, RedactionFailed, StorageError):
            raise shutting_down("The feedback could not be written; try again later.", RETRY_AFTER_S) from None

    def _write(self, database: Database, finished: FinishedRequest) -> str:
        """Write a request; returns why it is not logged, "" if it is."""
        user = pseudonym(self._salt, finished.subject.user)
        most = self._config.max_per_user
        if most and store.num_since(database, user, finished.time - DAY_S) >= most:
            return "user_cap"
        try:
            prompt, answer = self._redaction.pair(finished.prompt, finished.answer)
        except RedactionFailed as error:
            log.error("a request was not logged: the check of %s has failed on it", error)
            return "redaction_failed"
        record = RequestRecord(
            id=finished.id,
            time=finished.time,
            session=pseudonym(self._salt, finished.subject.session),
            user=user,
            route=finished.route,
            model=finished.model,
            version=finished.version,
            arm=finished.assignment.arm if finished.assignment else "",
            prompt=prompt,
            answer=answer,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            finish_reason=finished.finish_reason,
            status=finished.status,
            ttft_s=finished.ttft_s,
            latency_s=finished.latency_s,
        )
        store.insert(database, record)
        return ""

    def _count(self, lost: str) -> None:
        if lost:
            self._dropped(lost, 1)
        else:
            self._metrics.request_log.logged.inc()

    def _set_feedback(self, database: Database, feedback: FeedbackRequest) -> bool:
        label, text = (value and self._redaction.text(value) for value in (feedback.label, feedback.text))
        return store.set_feedback(database, feedback.id, score=feedback.score, label=label, text=text)

    def _prune(self, database: Database) -> None:
        num_deleted = store.delete_before(database, time.time() - self._config.retention_days * DAY_S)
        if num_deleted:
            log.info("the request log's retention has deleted %d records", num_deleted)

    def _dropped(self, reason: str, count: int) -> None:
        self._metrics.request_log.unlogged.labels(reason).inc(count)
