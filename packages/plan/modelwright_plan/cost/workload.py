"""What is paid for: training, serving, storage and traffic of a project, as a user describes it in a YAML file."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelwright.core.config import load_yaml, parse
from modelwright.core.errors import ConfigError
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
    """Hours of the whole group, without interruptions and the checkpoints against them."""
    count: int = 1
    """Instances of the group."""
    purchase: Purchase = "on_demand"
    """`spot` may be interrupted; `reserved_1y` and `reserved_3y` are paid for whole terms."""
    interruptions_per_hour: float = 0.0
    """Interruptions of the group (not of one instance) while it is spot."""
    checkpoint_stall_s: float = 0.0
    """Seconds that training stands still for a checkpoint (`checkpoint_stall_s` in metrics.jsonl)."""
    recovery_s: float = 0.0
    """Seconds from an interruption until training goes on (`down_s` in recoveries.jsonl)."""
    checkpoint_every_s: float = 0.0
    """Seconds of training between checkpoints; 0 for Daly's optimum."""

    def __post_init__(self) -> None:
        _check_positive(self, "hours", "count")
        _check_not_negative(self, "interruptions_per_hour", "checkpoint_stall_s", "recovery_s", "checkpoint_every_s")
        if self.interruptions_per_hour and self.purchase != "spot":
            raise ConfigError("interruptions_per_hour: only instances with purchase spot are interrupted; remove it")
        if self.interruptions_per_hour and not self.checkpoint_stall_s:
            raise ConfigError("checkpoint_stall_s: give what a checkpoint costs, from which the best interval follows")


@dataclass(frozen=True, kw_only=True)
class ServingUse:
    """A service that answers a load with as many instances as it takes."""

    name: str
    instance: str
    months: float
    tokens_per_month: float
    """Generated tokens."""
    tokens_per_s: float
    """Generated tokens of one instance at full load."""
    utilization: float = 0.5
    """Share of an instance's full load that it has on average; the rest is room for peaks."""
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
    """Bytes read out of a storage class, in all."""

    storage_class: StorageClass
    size_bytes: int

    def __post_init__(self) -> None:
        _check_not_negative(self, "size_bytes")


@dataclass(frozen=True, kw_only=True)
class StorageUse:
    """Something that is stored for some time."""

    name: str
    size_bytes: int
    """For example `2TB` or `500GiB`."""
    months: float
    storage_class: StorageClass = "hot"
    """Where it is written to."""
    lifecycle: tuple[Transition, ...] = ()
    """When it moves to other classes, in order."""
    retrievals: tuple[Retrieval, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, "size_bytes", "months")
        days = [0, *(step.after_days for step in self.lifecycle)]
        if any(later <= earlier for earlier, later in itertools.pairwise(days)):
            raise ConfigError(f"lifecycle: after_days must rise from above 0, got {days[1:]}")


@dataclass(frozen=True, kw_only=True)
class NetworkUse:
    """Traffic of every month."""

    name: str
    path: NetworkPath
    bytes_per_month: int
    months: float

    def __post_init__(self) -> None:
        _check_positive(self, "months")
        _check_not_negative(self, "bytes_per_month")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All that is paid for, at one provider in one region."""

    name: str
    provider: str
    region: str
    training: tuple[TrainingUse, ...] = ()
    serving: tuple[ServingUse, ...] = ()
    storage: tuple[StorageUse, ...] = ()
    network: tuple[NetworkUse, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest value that an assumption may have, by its name in the table of sensitivity."""

    def __post_init__(self) -> None:
        names = [use.name for use in (*self.training, *self.serving, *self.storage, *self.network)]
        if not names:
            raise ConfigError("training: the workload is empty; add training, serving, storage or network")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"name: {', '.join(repeated)} is used more than once; each line needs a name of its own")


def load_workload(path: Path) -> Workload:
    """Read a workload's YAML file. Raises `ConfigError` that names the file and the field."""
    data = load_yaml(path)
    try:
        return parse(Workload, {"name": path.stem} | data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
