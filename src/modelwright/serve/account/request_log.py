"""The log of requests, answers and feedback, for monitoring and training. Finished requests come from the event loop; a
separate thread replaces personal data with markers (the cleaning step `privacy`) and writes them.
"""

import logging
import time
from dataclasses import dataclass, field

from modelwright.core.errors import StorageError
from modelwright.data.clean.steps.privacy import Privacy, PrivacyConfig
from modelwright.data.document import Document
from modelwright.serve.account import request_store
from modelwright.serve.account.database import Database, DatabaseWriter, WriterBusy, open_database
from modelwright.serve.account.metrics import Metrics
from modelwright.serve.account.request_store import RequestRecord
from modelwright.serve.config import RequestsConfig
from modelwright.serve.errors import shutting_down
from modelwright.serve.served_model import RETRY_AFTER_S
from modelwright.serve.service import Exchange, FeedbackRequest, FinishedRequest, pseudonym

log = logging.getLogger("modelwright.serve")

DAY_S = 86_400.0


class RedactionFailed(Exception):
    """A check of the privacy step raised an exception, so the text may still contain personal data."""


@dataclass(frozen=True)
class TextRedaction:
    """Replaces personal data with markers. Equal values of one record get the same marker."""

    _step: Privacy = field(default_factory=lambda: Privacy(PrivacyConfig()))

    def pair(self, prompt: str, answer: str) -> tuple[str, str]:
        """Redacts both texts. Raises `RedactionFailed` where cleaning continues, because its texts are public."""
        # one document for both texts, so that a name in the prompt and in the answer gets the same marker
        meta = {"question": prompt, "answer": answer}
        document = Document(id="", text=f"{prompt}\n\n{answer}", kind="qa", split="open", source="", meta=meta)
        redacted = self._step.redact(document)
        failures = self._step.take_counts()["failed_validators"]
        if failures:
            raise RedactionFailed(", ".join(failures))
        return redacted.meta["question"], redacted.meta["answer"]

    def text(self, text: str) -> str:
        """Redacts a single text. Raises `RedactionFailed`."""
        return self.pair(text, "")[0]


class RequestLog:
    """An `ExchangeObserver` that logs requests. The writer's thread redacts texts before they reach the database."""

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
        """Writes all queued records. Blocks."""
        self._writer.close()

    def ended(self, exchange: Exchange, finished: FinishedRequest) -> None:
        self._writer.offer(lambda database: self._write(database, finished), self._count)

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        redact = self._redaction.text
        try:
            return await self._writer.call(
                lambda database: request_store.set_feedback(
                    database,
                    feedback.id,
                    score=feedback.score,
                    label=feedback.label and redact(feedback.label),
                    text=feedback.text and redact(feedback.text),
                )
            )
        except (WriterBusy, RedactionFailed, StorageError):
            raise shutting_down("The feedback could not be written; try again later.", RETRY_AFTER_S) from None

    def _write(self, database: Database, finished: FinishedRequest) -> str:
        """Writes a request. Returns "", or the reason if it is not logged."""
        user = pseudonym(self._salt, finished.subject.user)
        # counted in the database, so that a restart does not reset the limit
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

    def _prune(self, database: Database) -> None:
        num_deleted = request_store.delete_before(database, time.time() - self._config.retention_days * DAY_S)
        if num_deleted:
            log.info("the request log's retention has deleted %d records", num_deleted)

    def _dropped(self, reason: str, count: int) -> None:
        self._metrics.request_log.unlogged.labels(reason).inc(count)
