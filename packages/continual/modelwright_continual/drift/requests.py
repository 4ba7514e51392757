"""Reading and validation of exported request records: JSON Lines or Parquet, one flat record per request."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from modelwright.core.config import DataError
from modelwright.data.sources.find_files import locate
from modelwright.data.sources.readers import File, Limit, read_jsonl, read_parquet

RequestRecord = Mapping[str, Any]
"""Exported request. The fields `id`, `time` (Unix seconds), `session`, `user`, `version`, `prompt`, `answer`,
`prompt_tokens`, `completion_tokens`, `feedback_label` and `feedback_score` are read; all but the first two may be null.
"""

_TEXTS = ("session", "user", "version", "prompt", "answer", "feedback_label")
_NUMBERS = ("prompt_tokens", "completion_tokens", "feedback_score")
_REQUIRED = ("id", "time", "session", "prompt")
_LIMIT = Limit(16 * 2**20, "leave the request out")
_END_OF_TIME = 32_503_680_000
"""Unix seconds of the year 3000; a larger time is in milliseconds."""
COLUMNS = ("id", "time", *_TEXTS, *_NUMBERS)


def read_requests(sources: Sequence[str]) -> list[RequestRecord]:
    """Reads all records of files, folders or patterns, in order of time. Raises `DataError` that names file
    and line.
    """
    for source in sources:
        if "://" not in source and not any(mark in source for mark in "*?[") and not Path(source).exists():
            raise DataError(f"{source}: no such file; write it with modelwright requests export")
    files = list(locate(tuple(sources), lambda reason, name: None))
    records = in_order(record for file in files for record in checked(_records(file)))
    if not records:
        raise DataError(
            f"{', '.join(sources)}: does not contain any request; write them with modelwright requests export"
        )
    return records


def in_order(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Sorts records by time, then by id, so that their order in a file does not matter."""
    return sorted(records, key=lambda record: (record["time"], record["id"]))


def checked(records: Iterable[tuple[str, RequestRecord]]) -> Iterator[RequestRecord]:
    """Yields the records. records: pairs of a record's location and the record. Raises `DataError` at the first one
    that is not a valid request or repeats an id.
    """
    places: dict[str, str] = {}
    for where, record in records:
        if problem := problem_of(record):
            raise DataError(f"{where}: {problem}")
        if earlier := places.get(record["id"]):
            raise DataError(f"{where}: request {record['id']!r} is also at {earlier}; export each request once")
        places[record["id"]] = where
        yield record


def problem_of(record: RequestRecord) -> str:
    """Describes the first problem of a record and its remedy; "" for a valid record."""
    for name in _REQUIRED:
        if name not in record:
            return f"has no {name!r}; export the requests with modelwright requests export"
    if not isinstance(record["id"], str) or not record["id"]:
        return f"id must be a text, got {record['id']!r}"
    if not _is_number(record["time"]):
        return f"time must be a number of seconds, got {record['time']!r}"
    if not 0 <= record["time"] < _END_OF_TIME:
        return f"time must be in seconds since 1970, got {record['time']!r}; divide milliseconds by 1000"
    for name in _TEXTS:
        if not isinstance(record.get(name), str | None):
            return f"{name} must be a text or null, got {type(record[name]).__name__}"
    for name in _NUMBERS:
        if record.get(name) is not None and not _is_number(record[name]):
            return f"{name} must be a number or null, got {record[name]!r}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _records(file: File) -> Iterator[tuple[str, RequestRecord]]:
    if file.extension == ".parquet":
        return read_parquet(file, complain, lambda schema: [name for name in COLUMNS if name in schema.names])
    if file.extension in (".jsonl", ".json"):
        return read_jsonl(file, complain, _LIMIT)
    raise DataError(f"{file.name}: is neither JSON Lines (.jsonl) nor Parquet (.parquet)")


def complain(reason: str, where: str, problem: str, remedy: str) -> NoReturn:
    """Raises `DataError`, since every record that cannot be read changes a distribution."""
    raise DataError(f"{where}: {problem}; {remedy}")
