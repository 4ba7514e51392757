"""Writes records of the log to a file, as JSON Lines or Parquet; the file appears whole or not at all."""

import json
import os
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from modelwright.core.artifacts import fsync_folder, make_folder
from modelwright.core.errors import ConfigError, writing
from modelwright.core.progress import Progress
from modelwright.serve.account import request_store
from modelwright.serve.account.database import Database
from modelwright.serve.account.request_store import RequestRecord

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

Groups = Iterable[list[RequestRecord]]


def export_records(database: Database, target: Path, *, since: float, until: float, progress: Progress) -> int:
    """Write the records from `since` on and before `until` (unix seconds); returns how many. Raises `ConfigError` for
    another ending than .jsonl and .parquet, `StorageError` if the file cannot be written.
    """
    if target.suffix not in _WRITERS:
        raise ConfigError(f"{target}: does not end in .jsonl or .parquet; give a file name that does")
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; give the name of a file")
    partial = target.with_name(target.name + ".partial")
    progress.begin("export", request_store.num_records(database, since=since, until=until), "records")
    count = 0

    def groups() -> Groups:
        nonlocal count
        found = request_store.records(database, since=since, until=until)
        while group := list(islice(found, _GROUP_RECORDS)):
            yield group
            count += len(group)
            progress.advance(count)

    try:
        make_folder(target.absolute().parent)
        with writing(target):
            partial.unlink(missing_ok=True)
            # as the log itself: what people asked is for the owner alone, whatever the umask and an earlier file say
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                _WRITERS[target.suffix](file, groups())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            fsync_folder(target.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)
        progress.end()
    return count


def _write_jsonl(file: BinaryIO, groups: Groups) -> None:
    for record in chain.from_iterable(groups):
        file.write(json.dumps(record.plain(), ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _write_parquet(file: BinaryIO, groups: Groups) -> None:
    with pq.ParquetWriter(file, SCHEMA) as writer:
        for group in groups:
            writer.write_table(pa.Table.from_pylist([record.plain() for record in group], schema=SCHEMA))


_WRITERS: dict[str, Callable[[BinaryIO, Groups], None]] = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
