"""The drift monitor on made-up traffic: the run-time between false alarms, and how soon injected shifts are found.

    python benchmarks/drift.py [--replays 100] [--trials 60] [--results benchmarks/results]

A replay is 20,000 stationary requests in sessions (20 windows of 1,000), compared with a reference of 20,000 requests
that is its own, so replays are independent of each other. The windows of one replay are not, because they share the
reference: how often they alarm differs between references by as much as the interval says that `freeze` states. So the
band for the number of alarms is that of a beta-binomial sum, not of a binomial one. A trial of a shift is three
windows, compared with the reference of the replay of the same number; it is found if one of them alarms.

Exits with 1 unless the alarms lie inside their 95% band, and the lower end of the exact 95% interval of each shift's
power is at least 0.9: 60 trials of 60 give 0.94, 59 of 60 give 0.91. The record has what was measured so far after each
replay. On two cores it takes about a quarter of an hour, 15 s of a core for a replay with its trials.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

from drift_traffic import Shift, Traffic
from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import num_usable_cores
from modelwright_claims.results import circumstances, machine_slug
from modelwright_continual.drift.check import check_windows
from modelwright_continual.drift.config import DriftConfig
from modelwright_continual.drift.reference import DriftReference, freeze_reference

RESULTS = Path(__file__).parent / "results"
REQUESTS = 20_000
WITHIN_WINDOWS = 3
LEAST_POWER = 0.9
NUM_DRAWN = 100_000
"""Sums that the band is taken from."""
_Z95 = 1.959964
SHIFTS = {
    "20% other language": Shift(other_language=0.2),
    "length x1.3": Shift(length=1.3),
    "rare topic 5%": Shift(rare_topic=0.05),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """number: of the replay, from 0; has_trial: whether its reference is used for a trial of each shift."""

    number: int
    has_trial: bool
    config: DriftConfig


@dataclass(frozen=True, kw_only=True)
class Replay:
    """stated: run-time between false alarms that the reference states, with its 95% interval, in windows; alarms: of
    the windows without a shift; found: by shift.
    """

    stated: tuple[float, float, float]
    alarms: int
    found: dict[str, bool] = field(default_factory=dict[str, bool])


def replayed(job: Job) -> Replay:
    """The work of one process on one replay."""
    traffic, number, size = Traffic(), job.number, job.config.window_requests
    with tempfile.TemporaryDirectory() as folder:
        reference = freeze_reference(traffic.requests(REQUESTS, number), None, Path(folder) / "reference", job.config)
    one = reference.calibration
    trials = SHIFTS if job.has_trial else {}
    return Replay(
        stated=(one.run_length, one.low, one.high),
        alarms=sum(alarms(reference, traffic.requests(REQUESTS, 10_000 + number))),
        found={
            name: any(alarms(reference, traffic.requests(WITHIN_WINDOWS * size, 2_000_000 + number, shift=shift)))
            for name, shift in trials.items()
        },
    )


def alarms(reference: DriftReference, records: Sequence[Any]) -> Iterator[bool]:
    return (report.alarm for report in check_windows(records, reference))


def alarm_band(stated: Sequence[tuple[float, float, float]], num_windows: int) -> tuple[int, int]:
    """The 95% band of the alarms in `num_windows` windows with each reference. The rate of a reference has the mean
    that it states, and the relative deviation that its interval states.
    """
    rng = np.random.default_rng(0)
    total = np.zeros(NUM_DRAWN, dtype=np.int64)
    for run_length, low, high in stated:
        mean = 1 / run_length
        deviation = mean * np.log(high / low) / (2 * _Z95)
        concentration = mean * (1 - mean) / deviation**2 - 1
        rates = rng.beta(mean * concentration, (1 - mean) * concentration, NUM_DRAWN)
        total += rng.binomial(num_windows, rates)
    low, high = np.quantile(total, [0.025, 0.975], method="inverted_cdf")
    return int(low), int(high)


def summary(replays: Sequence[Replay], config: DriftConfig) -> dict[str, Any]:
    """What the record says of the replays so far."""
    num_windows = REQUESTS // config.window_requests
    num_alarms, band = sum(one.alarms for one in replays), alarm_band([one.stated for one in replays], num_windows)
    stationary = {
        "replays": len(replays),
        "windows": len(replays) * num_windows,
        "alarms": num_alarms,
        "alarms_of_replays": [one.alarms for one in replays],
        "stated": [one.stated for one in replays],
        "band": band,
        "passed": band[0] <= num_alarms <= band[1],
    }
    power = {name: _power([one.found[name] for one in replays if name in one.found]) for name in SHIFTS}
    passed = stationary["passed"] and all(one["passed"] for one in power.values())
    return {"stationary": stationary, "power": power, "passed": bool(passed)}


def _power(found: Sequence[bool]) -> dict[str, Any]:
    """With the lower end of the exact 95% interval (Clopper and Pearson 1934)."""
    num_found, num_trials = sum(found), len(found)
    low = float(beta.ppf(0.025, num_found, num_trials - num_found + 1)) if num_found else 0.0
    return {"trials": num_trials, "found": num_found, "low": low, "passed": low >= LEAST_POWER}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--trials", type=int, default=60, help="at most as many as replays")
    parser.add_argument("--run-length", type=float, default=100.0)
    parser.add_argument("--processes", type=int, default=num_usable_cores())
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    around, config = circumstances(), DriftConfig(run_length=options.run_length)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"drift-{machine_slug(around['machine'])}.json"
    jobs = [Job(number=n, has_trial=n < options.trials, config=config) for n in range(options.replays)]
    began, replays, found = time.monotonic(), list[Replay](), dict[str, Any]()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for replay in pool.imap(replayed, jobs):
            replays.append(replay)
            found = summary(replays, config)
            record = {"benchmark": "drift", "config": asdict(config), **found, "wall_s": time.monotonic() - began}
            write_atomic(path, json.dumps({**record, **around}, indent=1) + "\n")
            print(_line(found), flush=True)
    print("passed" if found["passed"] else "FAILED", path)
    return 0 if found["passed"] else 1


def _line(found: dict[str, Any]) -> str:
    one = found["stationary"]
    shifts = ", ".join(f"{name} {of['found']} of {of['trials']}" for name, of in found["power"].items())
    return f"{one['alarms']} alarms in {one['windows']} windows, band {one['band'][0]} to {one['band'][1]}; {shifts}"


if __name__ == "__main__":
    sys.exit(main())
