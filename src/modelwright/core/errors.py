"""Errors for the user: one sentence that names the problem and the remedy.

The command line prints the message of a `ModelwrightError` without a traceback; anything else is a bug and keeps its
traceback.
"""

import errno
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class ModelwrightError(Exception):
    """Something a user did or a machine refused; the text says what to do about it."""

    exit_code = 2


class ConfigError(ModelwrightError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range; the text starts with its path.

    code: a stable word for programs: `unknown` (no such setting), `missing`, `type`, `choice`, else `invalid`.
    """

    def __init__(self, text: str, *, code: str = "invalid") -> None:
        super().__init__(text)
        self.code = code

    @property
    def key(self) -> str:
        """Setting, option or file that the text is about; "" if it names none."""
        name, colon, _ = str(self).partition(": ")
        return name.removeprefix("--") if colon and " " not in name else ""


class DataError(ModelwrightError, ValueError):
    """Input data cannot be read; the text names the file and, where there is one, the line."""


class ArtifactError(ModelwrightError):
    """An artifact is missing, incomplete or of an unexpected kind."""


class ModelError(ModelwrightError, ValueError):
    """A model folder cannot be loaded: unsupported architecture, missing tensors, wrong shapes."""


class StorageError(ModelwrightError, OSError):
    """Writing failed (disk full, no permission); earlier files are untouched."""


class Stopped(ModelwrightError):
    """The process was asked to stop by a signal (SIGTERM unless told otherwise); finished work stays."""

    exit_code = 128 + signal.SIGTERM

    def __init__(self, text: str, number: int = signal.SIGTERM) -> None:
        super().__init__(text)
        self.exit_code = 128 + number


STOPPING = (Stopped, KeyboardInterrupt, SystemExit)
"""Exceptions that end work on request: `Stopped` in training; elsewhere, Ctrl-C and SIGTERM."""


@contextmanager
def prefix_errors(section: str) -> Generator[None]:
    """Convert a `ConfigError` about a field into one about that field of `section`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}", code=error.code) from None


@contextmanager
def writing(path: Path | str) -> Generator[None]:
    """Turn an operating system error while writing `path` into one clear `StorageError`; other errors pass through."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):  # which is an OSError too, from a nested `writing`
            raise
        if error.errno == errno.ENOSPC:
            raise StorageError(f"{path}: the disk is full; free some space and run the same command again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT):
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}); make it writable or write elsewhere"
            ) from error
        raise
