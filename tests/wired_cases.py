"""Cases for `train/wired_run.py`, and what they left behind."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from modelwright.core.records import column, read_records
from rank_processes import run_ranks

SCRIPT = Path(__file__).parent / "train" / "wired_run.py"
RARE = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
COPIES = {"parallel": {"share_memory": False}}


def case(name: str, folder: str = "", **rest: Any) -> dict[str, Any]:
    """Rest: settings, parallel, shape, mishap. Cases of one folder go on from each other's checkpoints."""
    settings = rest.pop("settings", {})
    return {"name": name, "folder": folder or name, "settings": settings, **rest}


def run_cases(folder: Path, cases: list[dict[str, Any]], *, size: int = 2) -> Path:
    """All of them on so many processes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(SCRIPT, folder, folder / "cases.json", size=size)
    return folder


def ended(runs: Path, name: str, rank: int = 0) -> dict[str, Any]:
    (path,) = runs.glob(f"*/{name}-{rank}.json")
    return json.loads(path.read_text())


def weights(runs: Path, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    (path,) = runs.glob(f"*/{name}-{rank}.safetensors")
    return load_file(path)


def losses(runs: Path, folder: str) -> list[float]:
    return values(runs, folder, "loss")


def values(runs: Path, folder: str, metric: str) -> list[float]:
    return [value for _, value in column(read_records(runs / folder / "metrics.jsonl"), metric)]
