"""Every precision policy trains the quickstart: held-out loss at equal tokens against FP32's.

    python benchmarks/policies.py [--steps 1300] [--policies fp32 bf16_mixed ...] [--threads N] [--prepared DIR]

Data is prepared once, as `modelwright run quickstart` does it; then every run is `modelwright run DIR` on a copy of it
with the quickstart's own model, rows, order and seed, its schedule over fewer steps where told so. Held-out losses are
those that the run itself measures at its end, in the run's own formats. Targets, fixed beforehand: within 1% of FP32,
eight-bit policies within 2%. One seed: how far two runs part that differ by a rounding alone is told by FP32 with two
microbatches, whose gradients are summed in another order. Runs that the results file for so many steps has are not made
again: delete it to begin anew. Calls for different policies may run side by side, each on cores of its own.
"""

import argparse
import fcntl
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.records import column
from modelwright_claims.results import circumstances, machine_slug
from quickstart_runs import prepare, pretrain

RESULTS = Path(__file__).parent / "results"
FP8_SCALING, FP8_RECIPE = "--pretrain.precision.fp8.scaling", "--pretrain.precision.fp8.recipe"
POLICIES: dict[str, list[str]] = {
    "fp32": ["fp32"],
    "fp32, two microbatches": ["fp32", "--pretrain.gradient_accumulation_steps", "2"],
    "bf16_mixed": ["bf16_mixed"],
    "fp16_mixed": ["fp16_mixed"],
    "pure_fp16": ["pure_fp16"],
    "hybrid": ["hybrid"],
    "fp8 tensorwise": ["fp8"],
    "fp8 tensorwise, delayed": ["fp8", FP8_SCALING, "delayed"],
    "fp8 rowwise": ["fp8", FP8_RECIPE, "rowwise"],
    "fp8 blockwise": ["fp8", FP8_RECIPE, "blockwise"],
    "int8": ["int8"],
}
"""What stands behind `--pretrain.precision.policy`."""
TARGET, TARGET_EIGHT = 1.0, 2.0
FIRST_TIMED = 6


def train(prepared: Path, folder: Path, name: str, num_steps: int, threads: int) -> dict[str, Any]:
    """One run on a copy of the prepared folder."""
    steps = ["--pretrain.num_steps", str(num_steps), "--pretrain.eval_every_steps", str(num_steps)]
    settings = [*steps, "--pretrain.precision.policy", *POLICIES[name]]
    records = pretrain(prepared, folder, settings, threads=threads)
    times = [value for step, value in column(records, "step_time_s") if step >= FIRST_TIMED]
    heldout = [value for _, value in column(records, "heldout_loss")]
    return {"heldout_loss": heldout[-1], "step_time_s": statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prepared", type=Path, help="keep the prepared data here")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    around = circumstances()
    path = given.results / f"policies-{given.steps}-steps-{machine_slug(around['machine'])}.json"
    result = runs_of(path)
    with tempfile.TemporaryDirectory() as folder:
        prepared = given.prepared or Path(folder) / "prepared"
        prepare(prepared)
        for name in dict.fromkeys(["fp32", *given.policies]):
            if name not in result:
                result[name] = train(prepared, Path(folder) / "run", name, given.steps, given.threads)
                gap = 100 * (result[name]["heldout_loss"] / result["fp32"]["heldout_loss"] - 1)
                result[name] |= {"above_fp32_percent": gap}
                result[name] |= {"commit": around["commit"]}
                result = add(path, result, {**around, "steps": given.steps, "threads": given.threads})
            print(name, result[name], flush=True)
    print(f"too far from FP32: {', '.join(too_far(result)) or 'none'}\n{path}")


def runs_of(path: Path) -> dict[str, dict[str, Any]]:
    """Those that the file has, another call's beside this one too."""
    return json.loads(path.read_text())["runs"] if path.exists() else {}


def add(path: Path, found: dict[str, dict[str, Any]], record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs of the file and of this call, which no other call can change between reading and writing."""
    named = {"benchmark": "policies", "target_percent": TARGET, "target_percent_eight_bits": TARGET_EIGHT}
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        runs = {**runs_of(path), **found}
        write_atomic(path, json.dumps({**named, **record, "runs": runs, "too_far": too_far(runs)}, indent=1) + "\n")
    finally:
        os.close(folder)
    return runs


def too_far(runs: dict[str, dict[str, Any]]) -> list[str]:
    limits = {name: TARGET_EIGHT if name.startswith(("fp8", "int8")) else TARGET for name in runs}
    return [name for name, run in runs.items() if run["above_fp32_percent"] > limits[name]]


if __name__ == "__main__":
    main()
