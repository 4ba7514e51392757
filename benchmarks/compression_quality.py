"""What compressed gradients cost: held-out loss and bytes of each transport, at equal tokens.

    python benchmarks/compression_quality.py --folder runs/quality            all methods, three seeds
    python benchmarks/compression_quality.py --folder runs/quality --methods exact,three-level-local --seeds 0

Starts `--ranks` real processes of one thread each. Finished runs are kept in `<folder>` and not made again. Times are
not measured here; `taskset -c 0` keeps the ranks on one core.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.progress import SilentProgress
from modelwright_claims.claim import Setting
from modelwright_claims.gradient_compression import CONTINUED, METHODS, continued_runs, fresh_runs, make_runs
from modelwright_claims.workbench import Size


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: mean held-out loss, its gap to exact (paired by seed) in percent, and bytes removed."""
    exact = {run["seed"]: run for run in runs if run["name"] == "exact"}
    lines = ["| transport | held-out loss | gap, mean (each seed) | bytes removed |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(run["name"] for run in runs):
        local = [run for run in runs if run["name"] == name and run["seed"] in exact]
        gaps = [100 * (run["heldout_loss"] / exact[run["seed"]]["heldout_loss"] - 1) for run in local]
        removed = 100 * (1 - statistics.fmean(run["bytes_sent"] / exact[run["seed"]]["bytes_sent"] for run in local))
        loss = statistics.fmean(run["heldout_loss"] for run in local)
        each = ", ".join(f"{gap:+.2f}" for gap in gaps)
        lines.append(f"| {name} | {loss:.4f} | {statistics.fmean(gaps):+.2f}% ({each}) | {removed:.2f}% |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--continued", type=float, default=0.0, help="rate of runs from the end of exact ones")
    given = parser.parse_args()
    size = Size(
        model_dim=given.dim, num_layers=2, seq_len=given.seq, batch_rows=given.rows, num_steps=given.steps,
        learning_rate=given.rate,
    )  # fmt: skip
    methods, seeds = given.methods.split(","), [int(seed) for seed in given.seeds.split(",")]
    (given.folder / "text").mkdir(parents=True, exist_ok=True)
    setting = Setting(quick=False, folder=given.folder / "text", progress=SilentProgress(), kept=given.folder)
    if not given.continued:
        print(table(make_runs(setting, fresh_runs(methods, seeds, size, given.ranks))))
        return
    runs = fresh_runs(["exact"], seeds, size, given.ranks)
    runs |= continued_runs(methods, seeds, size, given.ranks, learning_rate=given.continued)
    result = make_runs(setting, runs)
    print(f"before: {[round(run['heldout_loss'], 4) for run in result if run['regime'] != CONTINUED]}")
    print(table([run for run in result if run["regime"] == CONTINUED]))


if __name__ == "__main__":
    main()
