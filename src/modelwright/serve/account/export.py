"""Exports records of the request log to a file, as JSON Lines or Parquet. The file appears complete or not at all."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
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
    """Writes the records from `since` on and before `until` (Unix seconds) and returns their number. Raises
    `ConfigError` for a suffix other than .jsonl and .parquet, `StorageError` if the file cannot be written.
    """
    if target.suffix not in (".jsonl", ".parquet"):
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
            # like the log, only the owner can read it, whatever the umask and the mode of an earlier file
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                _write(file, groups(), target.suffix)
                file.flush()
                os.fsync(file.fileno())
            # after the fsync of the content: otherwise a crash could leave an empty file under the final name
            os.replace(partial, target)
            fsync_folder(target.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)
        progress.end()
    return count


def _write(file: BinaryIO, groups: Groups, suffix: str) -> None:
    if suffix == ".jsonl":
        for record in chain.from_iterable(groups):
            # lone surrogates of a model's text have no UTF-8 form
            file.write(json.dumps(asdict(record), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        return
    with pq.ParquetWriter(file, SCHEMA) as writer:
        for group in groups:
            writer.write_table(pa.Table.from_pylist([asdict(record) for record in group], schema=SCHEMA))
