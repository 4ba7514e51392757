"""The request and feedback log: what was asked and answered, for monitoring and training. Finished requests come from
the event loop; a thread of its own replaces personal data by markers (the step `privacy` of cleaning) and writes.
"""

import logging
import time
from dataclasses import dataclass, field

from modelwright.core.errors import StorageError
from modelwright.data.clean.steps.privacy import Privacy, PrivacyConfig
from modelwright.data.document import Document
from modelwright.serve.account import request_store
from modelwright.serve.account.database import Database, DatabaseWriter, WriterBusy, open_database
from modelwright.serve.account.exchange import Exchange, FeedbackRequest, FinishedRequest, pseudonym
from modelwright.serve.account.metrics import Metrics
from modelwright.serve.account.request_store import RequestRecord
from modelwright.serve.config import RequestsConfig
from modelwright.serve.engines.worker import RETRY_AFTER_S
from modelwright.serve.errors import shutting_down

log = logging.getLogger("modelwright.serve")

DAY_S = 86_400.0


class RedactionFailed(Exception):
    """A check of the privacy step raised an exception, so the text may still hold personal data."""


@dataclass(frozen=True)
class TextRedaction:
    """Equal values of one record get the same marker."""

    _step: Privacy = field(default_factory=lambda: Privacy(PrivacyConfig()))

    def pair(self, prompt: str, answer: str) -> tuple[str, str]:
        """Both texts with markers. Raises `RedactionFailed`; cleaning continues here, because its texts are public."""
        meta = {"question": prompt, "answer": answer}
        document = Document(id="", text=f"{prompt}\n\n{answer}", kind="qa", split="open", source="", meta=meta)
        redacted = self._step.redact(document)
        failures = self._step.take_counts()["failed_validators"]
        if failures:
            raise RedactionFailed(", ".join(failures))
        return redacted.meta["question"], redacted.meta["answer"]

    def text(self, text: str) -> str:
        """The same for a text alone."""
        return self.pair(text, "")[0]


class RequestLog:
    """An `ExchangeObserver`. Texts are redacted in the writer's thread, before they reach the database."""

    keeps_answers = True

    def __init__(self, config: RequestsConfig, metrics: Metrics) -> None:
        """Raises `ConfigError` and `StorageError` if the database cannot be used."""
        self._config = config
        self._metrics = metrics
        self._redaction = TextRedaction()
        database = open_database(config.log, setting="requests.log")
        self._salt = request_store.create_tables(database)
        self._writer = DatabaseWriter("request log", database, dropped=self._dropped, housekeeping=self._prune)

    def start(self) -> None:
        self._writer.start()

    def close(self) -> None:
        """Write all queued records. Waits."""
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
        if most and request_store.num_since(database, user, finished.time - DAY_S) >= most:
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
        request_store.insert(database, record)
        return ""

    def _count(self, lost: str) -> None:
        if lost:
            self._dropped(lost, 1)
        else:
            self._metrics.request_log.logged.inc()

    def _set_feedback(self, database: Database, feedback: FeedbackRequest) -> bool:
        label, text = (value and self._redaction.text(value) for value in (feedback.label, feedback.text))
        return request_store.set_feedback(database, feedback.id, score=feedback.score, label=label, text=text)

    def _prune(self, database: Database) -> None:
        num_deleted = request_store.delete_before(database, time.time() - self._config.retention_days * DAY_S)
        if num_deleted:
            log.info("the request log's retention has deleted %d records", num_deleted)

    def _dropped(self, reason: str, count: int) -> None:
        self._metrics.request_log.unlogged.labels(reason).inc(count)
