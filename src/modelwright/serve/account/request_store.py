"""The tables of the request log, their records, and their export to a file as JSON Lines or Parquet. docs/serving.md
describes the fields for other programs. All functions must be called from the thread of the database.
"""

import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from modelwright.core.artifacts import fsync_folder, make_folder, writing
from modelwright.core.config import ConfigError
from modelwright.core.progress import Progress
from modelwright.data.sources.sources import OWN_AUTHOR
from modelwright.serve.account.database import Database


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request with its answer and the feedback on it."""

    id: str
    """Id of the answer in the client's reply."""
    time: float
    """Unix seconds."""
    session: str
    """Pseudonym, like `user`: HMAC-SHA-256 with the salt of the log."""
    user: str
    route: str
    """"chat" or "completion"."""
    model: str
    version: str
    """Version of the weights, with those of the adapter."""
    arm: str
    """Arm of the A/B test; "" without a test."""
    prompt: str
    answer: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    status: int
    ttft_s: float | None
    latency_s: float | None
    feedback_score: float | None = None
    feedback_label: str | None = None
    feedback_text: str | None = None
    answer_by: str = OWN_AUTHOR
    """Marks our own answers, which `data/sources.py` refuses as training text."""


FIELDS = tuple(field.name for field in fields(RequestRecord))

_TABLES = (
    """CREATE TABLE IF NOT EXISTS request_log (
        id VARCHAR(64) NOT NULL PRIMARY KEY, logged_at DOUBLE PRECISION NOT NULL, session_hash VARCHAR(64) NOT NULL,
        user_hash VARCHAR(64) NOT NULL, route VARCHAR(32) NOT NULL, model VARCHAR(255) NOT NULL,
        version VARCHAR(64) NOT NULL, arm VARCHAR(32) NOT NULL, prompt TEXT NOT NULL, answer TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, finish_reason VARCHAR(255) NOT NULL,
        status INTEGER NOT NULL, ttft_s DOUBLE PRECISION, latency_s DOUBLE PRECISION,
        feedback_score DOUBLE PRECISION, feedback_label VARCHAR(255), feedback_text TEXT,
        answer_by VARCHAR(64) NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS request_log_time ON request_log (logged_at)",
    "CREATE INDEX IF NOT EXISTS request_log_user ON request_log (user_hash, logged_at)",
    "CREATE TABLE IF NOT EXISTS request_log_secret (name VARCHAR(64) NOT NULL PRIMARY KEY, value TEXT NOT NULL)",
)

_RESERVED = {"time": "logged_at", "session": "session_hash", "user": "user_hash"}
"""Columns of fields whose names are reserved words of some database."""

COLUMNS = tuple(_RESERVED.get(name, name) for name in FIELDS)


def create_tables(database: Database) -> str:
    """Creates missing tables and returns the salt of the log's pseudonyms."""
    with database.transaction():
        for statement in _TABLES:
            database.execute(statement)
    # the salt lives with the records: another one would give known users and sessions new pseudonyms
    query = "SELECT value FROM request_log_secret WHERE name = 'salt'"
    with database.transaction():
        known = [value for (value,) in database.rows(query)]
        if known:
            return known[0]
        salt = secrets.token_hex(32)
        database.execute("INSERT INTO request_log_secret (name, value) VALUES ('salt', :salt)", {"salt": salt})
        return salt


def insert(database: Database, record: RequestRecord) -> None:
    values = dict(zip(COLUMNS, asdict(record).values(), strict=True))
    names = ", ".join(f":{column}" for column in COLUMNS)
    database.execute(f"INSERT INTO request_log ({', '.join(COLUMNS)}) VALUES ({names})", values)


def num_since(database: Database, user: str, since: float) -> int:
    """Returns the number of a user's records since a time."""
    query = "SELECT COUNT(*) FROM request_log WHERE user_hash = :user AND logged_at >= :since"
    return next(iter(database.rows(query, {"user": user, "since": since})))[0]


def set_feedback(
    database: Database, request_id: str, *, score: float | None, label: str | None, text: str | None
) -> bool:
    """Replaces the feedback of a record. Returns false for an unknown id."""
    statement = (
        "UPDATE request_log SET feedback_score = :score, feedback_label = :label, feedback_text = :text WHERE id = :id"
    )
    return database.execute(statement, {"id": request_id, "score": score, "label": label, "text": text}) > 0


def delete_before(database: Database, before: float) -> int:
    """Deletes older records and returns their number."""
    return database.execute("DELETE FROM request_log WHERE logged_at < :before", {"before": before})


def records(database: Database, *, since: float, until: float) -> Iterator[RequestRecord]:
    """Yields the records from `since` on and before `until`, oldest first."""
    query = (
        f"SELECT {', '.join(COLUMNS)} FROM request_log WHERE logged_at >= :since AND logged_at < :until "
        "ORDER BY logged_at, id"
    )
    for row in database.rows(query, {"since": since, "until": until}):
        yield RequestRecord(**dict(zip(FIELDS, row, strict=True)))


def num_records(database: Database, *, since: float, until: float) -> int:
    query = "SELECT COUNT(*) FROM request_log WHERE logged_at >= :since AND logged_at < :until"
    return next(iter(database.rows(query, {"since": since, "until": until})))[0]


_GROUP_RECORDS = 1024

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("time", pa.float64()),
        *((name, pa.string()) for name in ("session", "user", "route", "model", "version", "arm", "prompt", "answer")),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("status", pa.int64()),
        *((name, pa.float64()) for name in ("ttft_s", "latency_s", "feedback_score")),
        *((name, pa.string()) for name in ("feedback_label", "feedback_text", "answer_by")),
    ]
)


def export_records(database: Database, target: Path, *, since: float, until: float, progress: Progress) -> int:
    """Writes the records from `since` on and before `until` (Unix seconds) and returns their number. Raises
    `ConfigError` for a suffix other than .jsonl and .parquet, `StorageError` if the file cannot be written.
    """
    if target.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{target}: does not end in .jsonl or .parquet; give a file name that does")
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; give the name of a file")
    partial = target.with_name(target.name + ".partial")
    progress.begin("export", num_records(database, since=since, until=until), "records")
    count = 0

    def groups() -> Iterator[list[RequestRecord]]:
        nonlocal count
        found = records(database, since=since, until=until)
        while group := list(islice(found, _GROUP_RECORDS)):
            yield group
            count += len(group)
            progress.advance(count)

    try:
        make_folder(target.absolute().parent)
        with writing(target):
            partial.unlink(missing_ok=True)
            # like the log, only the owner can read it, whatever the umask and the mode of an earlier file
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                if target.suffix == ".jsonl":
                    for record in chain.from_iterable(groups()):
                        # lone surrogates of a model's text have no UTF-8 form
                        line = json.dumps(asdict(record), ensure_ascii=False)
                        file.write(line.encode("utf-8", "replace") + b"\n")
                else:
                    with pq.ParquetWriter(file, SCHEMA) as parquet:
                        for group in groups():
                            rows = [asdict(record) for record in group]
                            parquet.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                file.flush()
                os.fsync(file.fileno())
            # after the fsync of the content: otherwise a crash could leave an empty file under the final name
            os.replace(partial, target)
            fsync_folder(target.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)
        progress.end()
    return count
