"""The plan of a job on spot instances by Young's and Daly's formulas: the interval between checkpoints, the expected
time and cost; and the plan as a task of SkyPilot's managed jobs (`sky jobs launch task.yaml`).

A task is checked without SkyPilot or a network. Its machines get the source tree, from which they install the package,
and the file that the job runs.
"""

import json
import math
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError, did_you_mean
from modelwright.core.resources import PINNED_PYTHON, source_checkout
from modelwright.pipeline.estimate.cost import duration
from modelwright_plan.cost.bill import Swing, tornado, tornado_lines
from modelwright_plan.intervals import CheckpointCosts, daly_interval_s, expected_wall_s, young_interval_s
from modelwright_plan.run_cost import MeasuredRate

MOST_TIMES_THE_WORK = 100.0
"""Largest ratio of expected time to work. A job beyond it is refused: it would hardly ever end at any interval."""


@dataclass(frozen=True, kw_only=True)
class SpotJob:
    """A job with the rate of interruptions and the hourly prices of all its instances together."""

    work_s: float
    stall_s: float
    """Seconds for which a checkpoint stalls the work."""
    recovery_s: float | None
    """Seconds from an interruption until work resumes; None if unknown, so that time and cost are lower bounds."""
    mtbf_s: float
    """Mean seconds between interruptions."""
    spot_usd: float
    """US dollars an hour."""
    on_demand_usd: float

    def __post_init__(self) -> None:
        if not 0 < self.work_s < math.inf:
            raise ConfigError(f"--work-hours: must be above 0, got {self.work_s / 3600}")

    def wall_s(self, interval_s: float) -> float:
        """Computes the expected seconds until the job is done."""
        costs = CheckpointCosts(stall_s=self.stall_s, recovery_s=self.recovery_s or 0.0)
        return expected_wall_s(self.work_s, interval_s, costs, self.mtbf_s)

    def usd(self, interval_s: float) -> float:
        """Computes the expected cost. Replacement instances are assumed to be available at once; all are paid for as
        long as the job takes.
        """
        return self.wall_s(interval_s) * self.spot_usd / 3600


@dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """The interval between checkpoints, with the time and cost that result."""

    job: SpotJob
    young_s: float
    interval_s: float
    """Seconds of work between checkpoints: Daly's optimum, or the whole work if that is shorter."""
    wall_s: float
    usd: float
    on_demand_usd: float
    """Cost on instances that are never interrupted, with one checkpoint at the end."""
    measured: MeasuredRate | None
    """Measurement that the rate of interruptions comes from; None for a given rate."""


def plan_spot(job: SpotJob, measured: MeasuredRate | None = None) -> SpotPlan:
    """Chooses the interval. Raises `ConfigError` for a job that is interrupted too often to end."""
    interval_s = min(job.work_s, daly_interval_s(job.stall_s, job.mtbf_s))
    wall_s = job.wall_s(interval_s)
    if wall_s > MOST_TIMES_THE_WORK * job.work_s:
        raise ConfigError(
            f"--interruptions-per-hour: one in {duration(job.mtbf_s)} leaves hardly any time for work between "
            "recoveries; the job would take more than a hundred times its work"
        )
    return SpotPlan(
        job=job,
        young_s=young_interval_s(job.stall_s, job.mtbf_s),
        interval_s=interval_s,
        wall_s=wall_s,
        usd=job.usd(interval_s),
        on_demand_usd=(job.work_s + job.stall_s) * job.on_demand_usd / 3600,
        measured=measured,
    )


def spot_tornado(plan: SpotPlan, *, factor: float) -> list[Swing]:
    """Computes the expected cost if one assumption is `factor` times smaller or larger. The interval stays as chosen,
    because it is set before the truth is known.
    """
    job = plan.job
    changes = {
        "hours of work": lambda value: replace(job, work_s=value * 3600),
        "stall of a checkpoint, s": lambda value: replace(job, stall_s=value),
        "recovery, s": lambda value: replace(job, recovery_s=value),
        "hours between interruptions": lambda value: replace(job, mtbf_s=value * 3600),
        "spot price, $/h": lambda value: replace(job, spot_usd=value),
    }
    values = (job.work_s / 3600, job.stall_s, job.recovery_s, job.mtbf_s / 3600, job.spot_usd)
    ranges = {name: (value / factor, value * factor) for name, value in zip(changes, values, strict=True) if value}
    return tornado(ranges, lambda name, value: changes[name](value).usd(plan.interval_s))


def spot_text(plan: SpotPlan, swings: Sequence[Swing]) -> str:
    """Formats the interval, the expected time and cost, and the tornado."""
    job = plan.job
    if job.recovery_s is None:
        recovery, least = "what a recovery takes is unknown (--recovery-s)", "at least "
    else:
        recovery, least = f"a recovery takes {job.recovery_s:g} s", ""
    lines = [
        f"work             {duration(job.work_s)}; a checkpoint stalls it {job.stall_s:g} s, {recovery}",
        f"interruptions    one in {duration(job.mtbf_s)} on average",
        *([f"                 {plan.measured.text}"] if plan.measured else []),
        f"save every       {duration(plan.interval_s)} of work (Daly; by Young's first order {duration(plan.young_s)})",
        f"expected time    {least}{duration(plan.wall_s)} by Daly's model, in which instances are there again at once",
        f"cost             {least}${plan.usd:,.2f} on average; on demand from the start: ${plan.on_demand_usd:,.2f}",
        "",
        "What the cost depends on most:",
    ]
    return "\n".join([*lines, *tornado_lines(swings, plan.usd, top=len(swings))])


def spot_data(plan: SpotPlan, swings: Sequence[Swing]) -> dict[str, Any]:
    """Returns the plan as plain data, in seconds and dollars."""
    rate = plan.measured
    measured = {**vars(rate), "per_hour": rate.per_hour, "interval_per_hour": rate.interval} if rate else None
    return {
        "young_interval_s": plan.young_s,
        "interval_s": plan.interval_s,
        "recovery_is_known": plan.job.recovery_s is not None,
        "expected_wall_s": plan.wall_s,
        "usd": plan.usd,
        "on_demand_usd": plan.on_demand_usd,
        "sensitivity": [vars(swing) for swing in swings],
        **({"measured_rate": measured} if measured else {}),
    }


RENDEZVOUS_PORT = 29400
RUN_DIR = "/modelwright-runs"
"""Mount point of the bucket with the checkpoints."""
TARGET_DIR = "/modelwright-target"
"""Folder on the machines for the file that the job runs."""
UV = "~/.local/bin/uv"
"""Path of uv, which SkyPilot 0.14.1 installs on every machine. SkyPilot's own Python is older than ours."""
ENVIRONMENT = "~/modelwright-environment"
MOST_RESTARTS = 3
"""Largest number of restarts of a job that fails; interruptions do not count."""


RUN_EXTRAS = ("clean", "report", "serve", "tensorboard")
"""Optional dependencies that most recipes need."""


@dataclass(frozen=True, kw_only=True)
class SkyTask:
    """A task's command, and the machines that run it."""

    name: str
    target: str
    """Recipe or YAML file for `modelwright run`."""
    is_file: bool
    """True if the target is a file, which is copied to the machines."""
    extras: Sequence[str] = ()
    """Optional dependencies of the package that the job needs, beyond those of a usual run."""
    provider: str
    region: str
    instance: str
    num_nodes: int
    bucket: str
    """Name of the bucket that keeps the run directory over interruptions."""
    interval_s: float
    """Seconds of work between checkpoints."""
    falls_back: bool
    """True if on-demand instances may replace spot instances that are unavailable."""

    def plain(self) -> dict[str, Any]:
        """Returns the task's YAML as plain data. Raises `ConfigError` if the source tree to install from is missing,
        or, with the name of the field, for a field that SkyPilot would refuse.
        """
        resources: dict[str, Any] = {
            "infra": f"{self.provider}/{self.region}",
            "instance_type": self.instance,
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": MOST_RESTARTS},
        }
        if self.falls_back:
            resources["ordered"] = [{"use_spot": True}, {"use_spot": False}]
        else:
            resources["use_spot"] = True
        root = source_checkout("--skypilot")
        known = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        for extra in self.extras:
            if extra not in known:
                raise ConfigError(
                    f"--extras: {extra!r} is not an extra of the package{did_you_mean(extra, list(known))}"
                )
        target = f"{TARGET_DIR}/{Path(self.target).name}" if self.is_file else self.target
        mounts: dict[str, Any] = {RUN_DIR: {"name": self.bucket, "mode": "MOUNT"}}
        if self.is_file:
            mounts[target] = str(Path(self.target).resolve())
        # The commands of a task run in the source tree.
        package = f".[{','.join(dict.fromkeys([*RUN_EXTRAS, *self.extras]))}]"
        setup = (
            f"{UV} venv --allow-existing --python {PINNED_PYTHON} {ENVIRONMENT}\n"
            f"{UV} pip install --python {ENVIRONMENT}/bin/python -c constraints.txt {shlex.quote(package)}\n"
        )
        run = [
            *("run", target, "--run-dir", f"{RUN_DIR}/{self.name}"),
            *("--training.checkpoint_every_minutes", f"{self.interval_s / 60:.6g}"),
        ]
        command = f"{ENVIRONMENT}/bin/modelwright"
        if self.num_nodes > 1:
            endpoint = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{RENDEZVOUS_PORT}"'
            command += f" launch --nnodes {self.num_nodes} --rdzv-endpoint {endpoint}"
        task = {
            "name": self.name,
            "workdir": str(root),
            "num_nodes": self.num_nodes,
            "resources": resources,
            "file_mounts": mounts,
            "setup": setup,
            "run": f"{command} {shlex.join(run)}\n",
        }
        check_task(task)
        return task


def check_task(task: dict[str, Any]) -> None:
    """Raises `ConfigError` if the task has a field or a value that the schema does not allow."""
    import jsonschema  # which plans without a task do not need

    text = (files("modelwright_plan") / "skypilot_task.schema.json").read_text(encoding="utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    for error in validator.iter_errors(task):
        where = ".".join(map(str, error.absolute_path)) or "task"
        raise ConfigError(f"SkyPilot task: {where}: {error.message}")
