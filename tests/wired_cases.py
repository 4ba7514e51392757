"""Cases for `train/wired_run.py`, and what they left behind."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import wired_run
from safetensors.torch import load_file

from distributed import run_distributed
from modelwright.core.records import column, read_records

RARE = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
COPIES = {"parallel": {"shared_memory": False}}
GROUP_SIZE = 8
"""Minimum number of cases that run together on one process group."""


def case(name: str, folder: str = "", **rest: Any) -> dict[str, Any]:
    """Rest: settings, parallel, shape, mishap. Cases of one folder go on from each other's checkpoints."""
    settings = rest.pop("settings", {})
    return {"name": name, "folder": folder or name, "settings": settings, **rest}


@dataclass(frozen=True)
class Runs:
    """Cases and what they leave behind. The first test that asks for a case runs it and the others of its group."""

    root: Path
    cases: Sequence[dict[str, Any]]
    size: int = 2
    started: set[str] = field(default_factory=set)
    """Folders of cases that were run, or failed to: they are not run twice."""

    def folder(self, name: str) -> Path:
        """Return the folder of a case; `name` is the case's or the folder's."""
        folder = next((case["folder"] for case in self.cases if case["name"] == name), name)
        if folder not in self.started:
            group = next(group for group in self._groups() if folder in {case["folder"] for case in group})
            self.started.update(case["folder"] for case in group)
            run_distributed(wired_run.run_cases, self.size, self.root, group)
        return self.root / folder

    def _groups(self) -> list[list[dict[str, Any]]]:
        """Divide the cases so that those of one folder stay together, in their order."""
        groups: list[list[str]] = [[]]
        for folder in dict.fromkeys(case["folder"] for case in self.cases):
            if sum(case["folder"] in groups[-1] for case in self.cases) >= GROUP_SIZE:
                groups.append([])
            groups[-1].append(folder)
        return [[case for case in self.cases if case["folder"] in folders] for folders in groups]


def ended(runs: Runs, name: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((runs.folder(name) / f"{name}-{rank}.json").read_text())


def weights(runs: Runs, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(runs.folder(name) / f"{name}-{rank}.safetensors")


def losses(runs: Runs, folder: str) -> list[float]:
    return values(runs, folder, "loss")


def values(runs: Runs, folder: str, metric: str) -> list[float]:
    return [value for _, value in column(read_records(runs.folder(folder) / "metrics.jsonl"), metric)]
