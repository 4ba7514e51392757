"""The stored results of measured claims, as far as advice quotes them: the only place that reads them.

The files are written by the package `modelwright-claims`, which also knows whether code has changed since.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelwright.core.resources import hardware

_NEEDED = frozenset({"name", "kind", "figures", "machine", "conditions", "date"})
_SHOWN_CONDITIONS = 3


@dataclass(frozen=True, kw_only=True)
class MachineKind:
    """What decides whether a figure of one machine says something about another."""

    processor: str
    instruction_set: str
    accelerator: str = ""

    def __str__(self) -> str:
        return self.accelerator or f"{self.processor}, {self.instruction_set}"

    def is_like(self, other: "MachineKind") -> bool:
        """Whether both compute with the same kind of processor or accelerator."""
        return str(self) == str(other)


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One stored measurement of a claim on one machine."""

    claim: str
    verdict: str
    figures: Mapping[str, Mapping[str, Any]]
    conditions: Mapping[str, Any]
    machine: MachineKind
    date: datetime.date
    has_uncommitted_changes: bool
    file: str

    def age_days(self, today: datetime.date) -> int:
        return (today - self.date).days


def this_machine() -> MachineKind:
    """The kind of this machine, as records describe theirs."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return MachineKind(
        processor=hardware()["processor"],
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        accelerator=accelerator,
    )


def read_ledger(folder: Path) -> list[LedgerRow]:
    """The full measurements in a folder; none if there is no such folder. Files of other benchmarks, quick
    measurements and damaged files are passed over.
    """
    rows = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and record.keys() >= _NEEDED and not record.get("quick"):
                rows.append(_row(record, path.name))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            continue
    return rows


def evidence(row: LedgerRow, names: Sequence[str], *, here: MachineKind, today: datetime.date) -> str:
    """The named figures of a row with everything that qualifies them; "" if the row has none of them."""
    figures = [f"{name} {figure_text(row.figures[name])}" for name in names if name in row.figures]
    if not figures:
        return ""
    verdict = "verdict SHORT: it missed its target" if row.verdict == "short" else f"verdict {row.verdict}"
    where = str(row.machine)
    if not row.machine.is_like(here):
        where = f"ANOTHER KIND OF PROCESSOR ({where}; here {here})"
    age = f"{row.age_days(today)} days old" + (", uncommitted changes" if row.has_uncommitted_changes else "")
    conditions = [f"{name} {value}" for name, value in row.conditions.items()][:_SHOWN_CONDITIONS]
    return (
        f"{', '.join(figures)}; {verdict}; measured on {where}, {row.date.isoformat()} ({age}); "
        f"{', '.join(conditions)} ({row.file})"
    )


def figure_text(figure: Mapping[str, Any]) -> str:
    """The value, its spread and its unit."""
    spread = f" ± {figure['spread']:.2g}" if figure.get("spread") else ""
    return f"{figure['value']:.3g}{spread} {figure.get('unit', '')}".rstrip()


def _row(record: Mapping[str, Any], file: str) -> LedgerRow:
    machine = record["machine"]
    return LedgerRow(
        claim=record["name"],
        verdict=record["kind"],
        figures={name: figure for name, figure in record["figures"].items() if "value" in figure},
        conditions=record["conditions"],
        machine=MachineKind(
            processor=machine.get("processor", "unknown processor"),
            instruction_set=machine.get("instruction_set", "unknown instructions"),
            accelerator=machine.get("accelerator", ""),
        ),
        date=datetime.date.fromisoformat(record["date"]),
        has_uncommitted_changes=str(record.get("commit", "")).endswith("-dirty"),
        file=file,
    )
