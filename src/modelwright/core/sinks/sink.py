"""`MetricSink`: takes the numbers of a training to where people compare runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from modelwright.core.config import flatten


@dataclass(frozen=True, kw_only=True)
class SinkStart:
    """What a sink knows of the training. A process that resumes a training opens its sinks anew.

    run, name: of the run and of the stage; folder: of the stage, for local files; first_step: the first step of this
    process; settings: flat, without secrets.
    """

    run: str
    name: str
    folder: Path
    first_step: int = 0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


class MetricSink(Protocol):
    """An open sink. It may fail and be slow: `QueuedSink` keeps that from the training."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step; they may be infinite or NaN."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """A kind of sink. package: what it imports, with the extra of this package that installs it; "" for none."""

    name: str
    open: Callable[[SinkStart], MetricSink]
    package: str = ""
    extra: str = ""


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings by dotted names, each value as text."""
    return {name: str(value) for name, value in flatten(settings)}
