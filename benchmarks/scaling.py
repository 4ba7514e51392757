"""How much faster training gets with more processes: the quickstart's own pretraining, one thread a process.

    python benchmarks/scaling.py [--processes 1 2] [--steps 30] [--repeats 3] [--run-dir DIR]

Data is prepared once, as `modelwright run quickstart` does it; then every run is `modelwright run DIR --nproc N` on a
copy of that folder, for some steps of the same global batch, the numbers of processes in turn. Tokens per second are
the median over the steps after the fifth, of the median run. Efficiency: tokens per second over those of one process,
divided by the number of processes. Target, fixed beforehand: 0.9 at two processes.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.records import column
from modelwright_claims.results import circumstances, machine_slug
from quickstart_runs import prepare, pretrain

RESULTS = Path(__file__).parent / "results"
FIRST_TIMED = 6
TARGET = 0.9


def measure(prepared: Path, folder: Path, num_processes: int, num_steps: int, batch_tokens: int) -> dict[str, float]:
    """One run on a copy of the prepared folder."""
    batch = ["--pretrain.batch_tokens", str(batch_tokens)] if batch_tokens else []
    settings = [
        "--nproc", str(num_processes), "--pretrain.num_steps", str(num_steps), "--pretrain.precision.policy", "fp32",
        *batch, "--pretrain.num_epochs", "0", "--pretrain.num_tokens", "0", "--pretrain.eval_every_steps", "0",
        "--validation_tokens", "2048",
    ]  # fmt: skip
    records = pretrain(prepared, folder, settings, threads=num_processes)
    median = {
        name: statistics.median(value for step, value in column(records, name) if step >= FIRST_TIMED)
        for name in ("tokens_per_s", "step_time_s", "comm_s")
    }
    losses = [value for _, value in column(records, "loss")]
    return {**median, "first_loss": losses[0], "last_loss": losses[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-tokens", type=int, default=0, help="another global batch than the quickstart's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run-dir", type=Path, help="keep the prepared data here")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    around = circumstances()
    with tempfile.TemporaryDirectory() as name:
        prepared = given.run_dir or Path(name) / "prepared"
        prepare(prepared)
        runs: dict[int, list[dict[str, float]]] = {}
        for repeat in range(given.repeats):
            for number in given.processes:
                result = measure(
                    prepared, Path(name) / f"run-{number}-{repeat}", number, given.steps, given.batch_tokens
                )
                runs.setdefault(number, []).append(result)
                print(number, {key: round(value, 4) for key, value in result.items()}, flush=True)
    rates = {number: statistics.median(run["tokens_per_s"] for run in result) for number, result in runs.items()}
    one = rates[min(rates)] / min(rates)
    efficiency = {number: rate / number / one for number, rate in rates.items()}
    print({number: f"{rates[number]:.0f} tokens/s, efficiency {efficiency[number]:.3f}" for number in rates})
    record = {
        "benchmark": "scaling", "target_at_2": TARGET, "steps": given.steps, "threads_a_process": 1,
        "batch_tokens": given.batch_tokens or "the quickstart's",
        "tokens_per_s": rates, "efficiency": efficiency, "runs": runs, **around,
    }  # fmt: skip
    given.results.mkdir(parents=True, exist_ok=True)
    batch = f"-{given.batch_tokens}" if given.batch_tokens else ""
    path = given.results / f"scaling{batch}-{machine_slug(around['machine'])}.json"
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
