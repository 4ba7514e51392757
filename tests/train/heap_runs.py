"""Trains the cases of `test_tensor_heap_bits` with nearly all tensors in the heap: `heap_runs.py FOLDER`."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import tiny_run
import torch

from modelwright.core.records import column, read_records
from modelwright.objectives.next_token import NextToken
from modelwright.ops import tensor_heap

STEPS = {"num_steps": 8}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"gradient_accumulation_steps": 4},
    "recomputed": {"activation_checkpointing": {"mode": "full", "layers_per_segment": 1}},
    "in-backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "int8": {"optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "bf16": {"precision": {"policy": "bf16_mixed"}},
    "adapters": {"lora": {"r": 2, "base_format": "nf4"}},
    "out-of-memory": {},
}


def train(folder: Path, name: str) -> dict[str, Any]:
    """The SHA-256 of the final weights, and the losses."""
    inner = NextToken(tiny_run.Rows())
    objective = tiny_run.Full(inner, 3, 3, most_rows=2) if name == "out-of-memory" else inner
    tiny_run.run(folder, tiny_run.settings(**STEPS, **CASES[name]), objective=objective)
    weights = tiny_run.final_weights(folder, STEPS["num_steps"])
    digest = hashlib.sha256()
    for key in sorted(weights):
        digest.update(weights[key].contiguous().view(torch.uint8).numpy().tobytes())
    records = read_records(folder / "metrics.jsonl")
    return {
        "sha256": digest.hexdigest(),
        **{name: [value for _, value in column(records, name)] for name in ("loss", "grad_norm", "heldout_loss")},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    tensor_heap.LEAST_BYTES = 256  # tensors of the tiny model, too
    found = {name: train(Path(sys.argv[1]) / name, name) for name in CASES}
    figures = tensor_heap.heap_figures()
    print(json.dumps({"runs": found, "peak_bytes": figures.peak_bytes if figures else 0}))
