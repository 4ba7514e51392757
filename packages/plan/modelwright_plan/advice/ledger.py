"""The stored results of measured claims, as far as advice names them: the only place that reads them.

The files are written by the package `modelwright-claims`, which also knows whether code has changed since.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelwright.core.resources import hardware

_NEEDED = frozenset({"name", "kind", "figures", "machine", "date"})


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One stored measurement of a claim on one machine."""

    claim: str
    verdict: str
    machine: str
    """The kind of processor or accelerator: only on one of this kind does the verdict say much about another."""
    date: str
    file: str


def this_machine() -> str:
    """The kind of this machine, as rows describe theirs."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return accelerator or f"{hardware()['processor']}, {torch.backends.cpu.get_cpu_capability()}"


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


def _row(record: Mapping[str, Any], file: str) -> LedgerRow:
    machine = record["machine"]
    processor = machine.get("processor", "unknown processor")
    instructions = machine.get("instruction_set", "unknown instructions")
    return LedgerRow(
        claim=record["name"],
        verdict=record["kind"],
        machine=machine.get("accelerator", "") or f"{processor}, {instructions}",
        date=record["date"],
        file=file,
    )
