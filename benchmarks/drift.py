"""The drift monitor on made-up traffic: the run-time between false alarms, and how soon injected shifts are found.

    python benchmarks/drift.py [--replays 100] [--trials 30] [--output benchmarks/results/drift.json]

A replay is 20,000 stationary requests in sessions (20 windows) that the reference has not seen; ten replays share a
reference of 20,000 requests. The band is the binomial one for the number of alarms at the set run length. The file has
what was measured so far after each step.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scipy.stats import beta, binom

from drift_traffic import Shift, Traffic
from modelwright.continual.drift.check import check_windows
from modelwright.continual.drift.config import DriftConfig
from modelwright.continual.drift.reference import DriftReference, freeze_reference
from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import hardware

REQUESTS = 20_000
REPLAYS_PER_REFERENCE = 10
WITHIN_WINDOWS = 3
SHIFTS = {
    "20% other language": Shift(other_language=0.2),
    "length x1.3": Shift(length=1.3),
    "rare topic 5%": Shift(rare_topic=0.05),
}


def frozen(traffic: Traffic, seed: int, config: DriftConfig) -> DriftReference:
    with tempfile.TemporaryDirectory() as folder:
        return freeze_reference(traffic.requests(REQUESTS, seed), None, Path(folder) / "reference", config)


def alarms(reference: DriftReference, traffic: Traffic, seed: int, count: int, shift: Shift) -> list[bool]:
    return [report.alarm for report in check_windows(traffic.requests(count, seed, shift=shift), reference)]


def power(traffic: Traffic, config: DriftConfig, shift: Shift, num_trials: int) -> dict[str, Any]:
    """The share of trials in which one of the first three windows alarms, with its exact 95% interval."""
    reference, num_found = frozen(traffic, 1_000_000, config), 0
    for trial in range(num_trials):
        seed = 2_000_000 + trial
        num_found += any(alarms(reference, traffic, seed, WITHIN_WINDOWS * config.window_requests, shift))
    low = float(beta.ppf(0.025, num_found, num_trials - num_found + 1)) if num_found else 0.0
    return {"trials": num_trials, "found": num_found, "power": num_found / num_trials, "low": low}


def stationary(traffic: Traffic, config: DriftConfig, num_replays: int, result: dict[str, Any], output: Path) -> None:
    """Count alarms over replays into `result`, writing it after each."""
    counts: list[int] = []
    stated: list[float] = []
    reference = None
    for replay in range(num_replays):
        if reference is None or replay % REPLAYS_PER_REFERENCE == 0:
            reference = frozen(traffic, replay, config)
            stated.append(reference.calibration.run_length)
        counts.append(sum(alarms(reference, traffic, 10_000 + replay, REQUESTS, Shift())))
        num_windows = len(counts) * (REQUESTS // config.window_requests)
        low, high = binom.interval(0.95, num_windows, 1 / config.run_length)
        result["stationary"] = {
            "replays": len(counts),
            "windows": num_windows,
            "alarms": sum(counts),
            "band": [int(low), int(high)],
            "inside": bool(low <= sum(counts) <= high),
            "stated_run_lengths": stated,
        }
        save(result, output)
        print(
            f"replay {replay + 1}: {sum(counts)} alarms in {num_windows} windows, band {low:.0f} to {high:.0f}",
            flush=True,
        )


def save(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--run-length", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/drift.json"))
    options = parser.parse_args()
    traffic, config = Traffic(), DriftConfig(run_length=options.run_length)
    began = time.process_time()
    result: dict[str, Any] = {"config": asdict(config), "machine": hardware(), "power": {}}
    for name, shift in SHIFTS.items():
        result["power"][name] = power(traffic, config, shift, options.trials)
        print(f"{name}: {result['power'][name]}", flush=True)
        save(result, options.output)
    stationary(traffic, config, options.replays, result, options.output)
    result["cpu_s"] = time.process_time() - began
    save(result, options.output)


if __name__ == "__main__":
    main()
