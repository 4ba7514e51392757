"""The uses that a project pays for: training, serving, storage and traffic, as a user describes them in a YAML file."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelwright.core.config import ConfigError, load_yaml, parse
from modelwright_plan.cost.prices import Purchase

StorageClass = Literal["hot", "warm", "cold"]
NetworkPath = Literal["internet", "cross_zone", "cross_region"]


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name}: must be above 0, got {getattr(config, name)}")


def _check_not_negative(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name}: must not be negative, got {getattr(config, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainingUse:
    """A training job on a group of equal instances."""

    name: str
    instance: str
    hours: float
    """Hours of the whole group, without interruptions and without checkpoints."""
    count: int = 1
    """Number of instances in the group."""
    purchase: Purchase = "on_demand"
    """`spot` may be interrupted; `reserved_1y` and `reserved_3y` are paid for whole terms."""
    interruptions_per_hour: float = 0.0
    """Interruptions of the group (not of one instance) while it is spot."""
    checkpoint_stall_s: float = 0.0
    """Seconds for which a checkpoint stalls training (`checkpoint_stall_s` in metrics.jsonl)."""
    recovery_s: float = 0.0
    """Seconds from an interruption until training resumes (`down_s` in recoveries.jsonl)."""
    checkpoint_every_s: float = 0.0
    """Seconds of training between checkpoints; 0 for Daly's optimum."""

    def __post_init__(self) -> None:
        _check_positive(self, "hours", "count")
        _check_not_negative(self, "interruptions_per_hour", "checkpoint_stall_s", "recovery_s", "checkpoint_every_s")
        if self.interruptions_per_hour and self.purchase != "spot":
            raise ConfigError("interruptions_per_hour: only instances with purchase spot are interrupted; remove it")
        if self.interruptions_per_hour and not self.checkpoint_stall_s:
            raise ConfigError(
                "checkpoint_stall_s: give the stall of a checkpoint, from which the best interval follows"
            )


@dataclass(frozen=True, kw_only=True)
class ServingUse:
    """A service on as many instances as its load needs."""

    name: str
    instance: str
    months: float
    tokens_per_month: float
    """Tokens generated in a month."""
    tokens_per_s: float
    """Tokens that one instance generates in a second at full load."""
    utilization: float = 0.5
    """Mean load of an instance as a share of its full load; the rest is a reserve for peaks."""
    min_instances: int = 1
    purchase: Purchase = "on_demand"

    def __post_init__(self) -> None:
        _check_positive(self, "months", "tokens_per_s", "min_instances")
        _check_not_negative(self, "tokens_per_month")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization: must be above 0 and at most 1, got {self.utilization}; 0.5 is usual")


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A step of a storage lifecycle."""

    after_days: int
    """Days after the object was written."""
    storage_class: StorageClass


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Total bytes read from a storage class."""

    storage_class: StorageClass
    size_bytes: int

    def __post_init__(self) -> None:
        _check_not_negative(self, "size_bytes")


@dataclass(frozen=True, kw_only=True)
class StorageUse:
    """Data stored for some months."""

    name: str
    size_bytes: int
    """Size in bytes, for example `2TB` or `500GiB`."""
    months: float
    storage_class: StorageClass = "hot"
    """Storage class to which the data is written."""
    lifecycle: tuple[Transition, ...] = ()
    """Moves to other storage classes, in order."""
    retrievals: tuple[Retrieval, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, "size_bytes", "months")
        days = [0, *(step.after_days for step in self.lifecycle)]
        if any(later <= earlier for earlier, later in itertools.pairwise(days)):
            raise ConfigError(f"lifecycle: after_days must rise from above 0, got {days[1:]}")


@dataclass(frozen=True, kw_only=True)
class NetworkUse:
    """Monthly network traffic."""

    name: str
    path: NetworkPath
    bytes_per_month: int
    months: float

    def __post_init__(self) -> None:
        _check_positive(self, "months")
        _check_not_negative(self, "bytes_per_month")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All paid uses at one provider in one region."""

    name: str
    provider: str
    region: str
    training: tuple[TrainingUse, ...] = ()
    serving: tuple[ServingUse, ...] = ()
    storage: tuple[StorageUse, ...] = ()
    network: tuple[NetworkUse, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest value of an assumption, by its name in the table of sensitivity."""

    def __post_init__(self) -> None:
        names = [use.name for use in (*self.training, *self.serving, *self.storage, *self.network)]
        if not names:
            raise ConfigError("training: the workload is empty; add training, serving, storage or network")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"name: {', '.join(repeated)} is used more than once; each line needs a different name")


def load_workload(path: Path) -> Workload:
    """Reads a workload's YAML file. Raises `ConfigError` that names the file and the field."""
    data = load_yaml(path)
    try:
        return parse(Workload, {"name": path.stem} | data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
