"""How long training stands still for a checkpoint: written beside it against written at once.

    python benchmarks/checkpoint_stall.py [--parameters 60] [--repeats 7] [--folder FOLDER]

One process; weights and AdamW's two moments in FP32, as many millions as asked. Stall: what `CheckpointWriter.save`
takes before it returns. Synchronous: until the checkpoint is whole on disk (copied, written, flushed, checksummed,
renamed). The two alternate; medians. The target is a stall below 5% of a synchronous checkpoint.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from modelwright.train.checkpoint.files import Best
from modelwright.train.checkpoint.reader import CheckpointReader
from modelwright.train.checkpoint.writer import CheckpointWriter, Snapshot
from modelwright_claims.results import circumstances

WIDTH = 1024


def measure(folder: Path, num_parameters: int, repeats: int) -> dict[str, float]:
    weights = {f"blocks.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(max(1, num_parameters // WIDTH**2))}
    optimizer = {name: {"exp_avg": weight * 0.1, "exp_avg_sq": weight**2} for name, weight in weights.items()}
    snapshot = Snapshot(step=0, weights=weights, state={"updates": {"optimizer": optimizer}})
    checkpoints = CheckpointWriter(CheckpointReader(folder, digest="d"), keep_last=1)
    checkpoints.reader.prepare()
    stalls, wholes = [], []
    for step in range(1, repeats + 2):
        started = time.perf_counter()
        checkpoints.save(Snapshot(step=step, weights=snapshot.weights, state=snapshot.state), best=Best())
        stall_s = time.perf_counter() - started
        checkpoints.wait()
        if step > 1:  # the first one gets its memory from the system
            stalls.append(stall_s)
            wholes.append(time.perf_counter() - started)
    checkpoints.close()
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    stall_s, whole_s = statistics.median(stalls), statistics.median(wholes)
    return {"bytes": num_bytes, "stall_s": stall_s, "synchronous_s": whole_s, "share": stall_s / whole_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60, help="millions")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(Path(folder), options.parameters * 10**6, options.repeats)
    print(json.dumps({**result, "target": 0.05, "circumstances": circumstances()}, indent=1))


if __name__ == "__main__":
    main()
