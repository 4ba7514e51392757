"""Databases of the server: SQLite files in WAL mode through the standard library, all others through SQLAlchemy.

Statements have named parameters (`:name`), which both accept. `DatabaseWriter` writes from a separate thread with a
bounded queue, so the event loop never waits for a disk.
"""

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from modelwright.core.artifacts import StorageError, writing
from modelwright.core.config import ConfigError
from modelwright.serve.errors import log

T = TypeVar("T")

FROM_ENVIRONMENT = "env:"
"""Prefix of a location that names an environment variable, because URLs with passwords belong in no config file."""

QUEUE_TASKS = 4096
BATCH_TASKS = 128
"""Most tasks per transaction."""
HOUSEKEEPING_PERIOD_S = 3600.0

_BUSY_TIMEOUT_S = 30.0
_FETCH_ROWS = 256
_OWNER_ONLY = 0o600

Values = Mapping[str, Any]


def open_database(location: str, *, setting: str, must_exist: bool = False) -> "Database":
    """Opens a file, a SQLAlchemy URL, or the location in an environment variable (`env:NAME`). setting: name of the
    setting in messages.

    Raises `ConfigError` if the variable, package or file does not exist, or if a URL shows a password; `StorageError`
    if the database cannot be used.
    """
    url = location
    if location.startswith(FROM_ENVIRONMENT):
        name = location.removeprefix(FROM_ENVIRONMENT)
        url = os.environ.get(name, "")
        if not url:
            raise ConfigError(f"{setting}: the environment variable {name} is not set; set it to a path or a URL")
    if "://" not in url:
        path = Path(url)
        if must_exist and not path.is_file():
            raise ConfigError(f"{setting}: {path}: no such database; give the file that a server has written")
        return SqliteDatabase(path)
    try:
        import sqlalchemy
        from sqlalchemy import exc
    except ImportError:
        raise ConfigError(
            f"{setting}: a database URL needs SQLAlchemy and the driver of the database; "
            "pip install 'modelwright[requests-log]', or give a path for SQLite"
        ) from None
    try:
        parsed = sqlalchemy.make_url(url)
        if parsed.password is not None and url == location:  # a URL from the environment may have one
            text = "the URL has a password, which configs would keep"
            raise ConfigError(f"{setting}: {text}; put the URL into an environment variable and write env:NAME")
        engine = sqlalchemy.create_engine(parsed, hide_parameters=True)
        return UrlDatabase(engine.connect(), parsed.render_as_string(hide_password=True))
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting}: the driver {error.name} is not installed; pip install {error.name}") from None
    except exc.ArgumentError:
        raise ConfigError(f"{setting}: is not a SQLAlchemy URL such as postgresql+psycopg://host/database") from None
    except exc.SQLAlchemyError as error:
        raise StorageError(f"{setting}: the database cannot be used ({_reason(error)}); check the URL") from None


def _reason(error: Exception) -> str:
    """Returns the first line of a driver's message. Further lines repeat the statement and its values."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


@contextmanager
def _refusals(place: Path | str, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        text = f"{place}: the database refuses this ({_reason(error)})"
        raise StorageError(f"{text}; check the path or URL, and that no other program locks the database") from error


class SqliteDatabase:
    """A file that only its owner can read. Committed rows survive `kill -9`; deleted rows are overwritten.

    It is for one thread at a time. All methods raise `StorageError` if SQLite reports an error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                # created before SQLite opens it, which would use the umask's mode
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, _OWNER_ONLY))
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            # NORMAL in WAL mode may lose the last commits in a power failure, but not in a crash of the process
            for setting in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
                self._connection.execute(f"PRAGMA {setting}")
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"{path}: cannot be used as a database ({error}); remove it or give another path"
            ) from None

    def execute(self, statement: str, values: Values | Sequence[Values] = ()) -> int:
        """Runs a statement, once for each entry of a list of values. Returns the number of changed rows."""
        with _refusals(self.path, sqlite3.Error):
            if isinstance(values, Mapping) or not values:
                return self._connection.execute(statement, values or {}).rowcount
            return self._connection.executemany(statement, values).rowcount

    def rows(self, statement: str, values: Values = {}) -> Iterator[tuple[Any, ...]]:  # noqa: B006
        """Yields the rows of a query, which are fetched lazily."""
        with _refusals(self.path, sqlite3.Error):
            cursor = self._connection.execute(statement, values)
        # the context manager must not be open at a yield: it would convert errors of the caller
        while True:
            with _refusals(self.path, sqlite3.Error):
                rows = cursor.fetchmany(_FETCH_ROWS)
            if not rows:
                return
            yield from rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits the statements of the block together, or rolls them back on an exception."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # some errors, such as a full disk, have ended it
                self.execute("ROLLBACK")
            raise

    def vacate(self) -> None:
        """Erases deleted rows from disk: moves the journal, which may contain them, into the file."""
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._connection.close()


def _storable(values: Values) -> dict[str, Any]:
    """Replaces the character NUL, which PostgreSQL rejects in text."""
    return {name: one.replace("\0", "\ufffd") if isinstance(one, str) else one for name, one in values.items()}


@dataclass
class UrlDatabase:
    """Any database of SQLAlchemy, with the methods of `SqliteDatabase`. name: its URL without the password."""

    _connection: Any
    name: str

    def execute(self, statement: str, values: Values | Sequence[Values] = ()) -> int:
        from sqlalchemy import exc, text

        plain = _storable(values) if isinstance(values, Mapping) else [_storable(one) for one in values]
        with _refusals(self.name, exc.SQLAlchemyError), self.transaction():
            return self._connection.execute(text(statement), plain or None).rowcount

    def rows(self, statement: str, values: Values = {}) -> Iterator[tuple[Any, ...]]:  # noqa: B006
        from sqlalchemy import exc, text

        with _refusals(self.name, exc.SQLAlchemyError), self.transaction():
            # options of this statement alone: those of a connection persist, and a server-side cursor rejects INSERT
            options = {"yield_per": _FETCH_ROWS}
            with closing(self._connection.execute(text(statement), values, execution_options=options)) as result:
                yield from map(tuple, result)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        from sqlalchemy import exc

        if self._connection.in_transaction():  # `execute` inside a transaction joins it
            yield
            return
        with _refusals(self.name, exc.SQLAlchemyError), self._connection.begin():
            yield

    def vacate(self) -> None:
        """Does nothing, because a database server removes deleted rows on its own schedule."""

    def close(self) -> None:
        self._connection.close()
        self._connection.engine.dispose()


Database = SqliteDatabase | UrlDatabase

Task = Callable[[Database], T]
"""Reads and writes inside a transaction. It may be called again after the transaction was rolled back."""


class WriterBusy(Exception):
    """The queue is full."""


@dataclass
class _Queued:
    task: Task[Any]
    then: Callable[[Any], None] = lambda result: None
    result: "Future[Any]" = field(default_factory=Future)


class DatabaseWriter:
    """Runs tasks in the order of their arrival. The database belongs to its thread from `start` on.

    dropped: called from any thread with the reason ("queue_full", "failed") and number of lost tasks. housekeeping: run
    at the start and every hour.
    """

    def __init__(
        self, name: str, database: Database, *, dropped: Callable[[str, int], None], housekeeping: Task[None]
    ) -> None:
        self._name = name
        self._database = database
        self._dropped = dropped
        self._housekeeping = housekeeping
        self._queue: queue.Queue[_Queued | None] = queue.Queue(QUEUE_TASKS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, task: Task[T], then: Callable[[T], None] = lambda result: None) -> bool:
        """Queues a task without waiting. Returns false, and counts it as dropped, if the queue is full. then: called
        with the committed result in the writer's thread.
        """
        try:
            self._queue.put_nowait(_Queued(task, then))
        except queue.Full:
            self._dropped("queue_full", 1)
            return False
        return True

    async def call(self, task: Task[T]) -> T:
        """Returns the committed result of a task. Raises `WriterBusy`, and any exception of the task."""
        entry = _Queued(task)
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            raise WriterBusy from None
        # a caller who is canceled must not cancel the future, which the writer's thread is going to set
        return await asyncio.shield(asyncio.wrap_future(entry.result))

    def close(self) -> None:
        """Runs all queued tasks and closes the database. Blocks."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open, due = True, time.monotonic()
        while is_open:
            entries: list[_Queued | None] = []
            if time.monotonic() >= due:
                entries.append(_Queued(self._housekeeping))
                due = time.monotonic() + HOUSEKEEPING_PERIOD_S
            else:
                with contextlib.suppress(queue.Empty):
                    entries.append(self._queue.get(timeout=max(0.0, due - time.monotonic())))
            # waiting tasks share a transaction, so that a burst of them needs one commit
            while len(entries) < BATCH_TASKS and not self._queue.empty():
                entries.append(self._queue.get())
            is_open = None not in entries
            self._run_tasks([entry for entry in entries if entry is not None])
        self._database.close()

    def _run_tasks(self, entries: Sequence[_Queued]) -> None:
        """Runs tasks in one transaction. If one fails, each is run again in a separate one, so only it is lost."""
        try:
            with self._database.transaction():
                results = [entry.task(self._database) for entry in entries]
        except Exception as error:
            if len(entries) > 1:
                for entry in entries:
                    self._run_tasks([entry])
            elif entries:
                self._dropped("failed", 1)
                # only the error's type is logged, because its text may repeat the user's text that was to be written
                log.error("%s: could not be written (%s)", self._name, type(error.__cause__ or error).__name__)
                entries[0].result.set_exception(error)
            return
        # after the commit, so that nobody hears of a result that a crash can still undo
        for entry, result in zip(entries, results, strict=True):
            entry.result.set_result(result)
            entry.then(result)
