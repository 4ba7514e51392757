"""A plan as a task of SkyPilot's managed jobs (`sky jobs launch task.yaml`), checked without SkyPilot or a network.

The machines get the source tree, from which they install the package, and the file that the job runs.
"""

import json
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from modelwright.core.checkout import PINNED_PYTHON, source_checkout
from modelwright.core.errors import ConfigError
from modelwright.core.suggest import did_you_mean

RENDEZVOUS_PORT = 29400
RUN_DIR = "/modelwright-runs"
"""Where the bucket with the checkpoints is mounted."""
TARGET_DIR = "/modelwright-target"
"""Where the machines find a file that the job runs."""
UV = "~/.local/bin/uv"
"""SkyPilot puts uv there on every machine (0.14.1). Its own Python is older than ours."""
ENVIRONMENT = "~/modelwright-environment"
MOST_RESTARTS = 3
"""Restarts of a job that fails by itself; interruptions do not count."""


@dataclass(frozen=True, kw_only=True)
class SkyTask:
    """What the task is to run, and where."""

    name: str
    target: str
    """Recipe or YAML file for `modelwright run`."""
    is_file: bool
    """Whether the target is a file, which the machines get."""
    extras: Sequence[str] = ()
    """Of the package, which the job needs."""
    provider: str
    region: str
    instance: str
    num_nodes: int
    bucket: str
    """Name of the bucket that keeps the run directory over interruptions."""
    interval_s: float
    """Seconds of work between checkpoints."""
    falls_back: bool
    """Whether on-demand instances are taken where there are no spot instances."""

    def plain(self) -> dict[str, Any]:
        """The task's YAML as plain data. Raises `ConfigError` if there is no source tree to install from, or one that
        names the field that SkyPilot would refuse.
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
        check_extras(self.extras, root)
        mounts: dict[str, Any] = {RUN_DIR: {"name": self.bucket, "mode": "MOUNT"}}
        if self.is_file:
            mounts[self._target_there] = str(Path(self.target).resolve())
        task = {
            "name": self.name,
            "workdir": str(root),
            "num_nodes": self.num_nodes,
            "resources": resources,
            "file_mounts": mounts,
            "setup": self._setup(),
            "run": self._command() + "\n",
        }
        check_task(task)
        return task

    @property
    def _target_there(self) -> str:
        """The target on the job's machines."""
        return f"{TARGET_DIR}/{Path(self.target).name}" if self.is_file else self.target

    def _setup(self) -> str:
        """Installs the package from the source tree, in which the commands of a task are executed."""
        package = f".[{','.join(self.extras)}]" if self.extras else "."
        return (
            f"{UV} venv --allow-existing --python {PINNED_PYTHON} {ENVIRONMENT}\n"
            f"{UV} pip install --python {ENVIRONMENT}/bin/python -c constraints.txt {shlex.quote(package)}\n"
        )

    def _command(self) -> str:
        run = [
            *("run", self._target_there, "--run-dir", f"{RUN_DIR}/{self.name}"),
            *("--training.checkpoint_every_minutes", f"{self.interval_s / 60:.6g}"),
        ]
        if self.num_nodes == 1:
            return f"{ENVIRONMENT}/bin/modelwright {shlex.join(run)}"
        endpoint = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{RENDEZVOUS_PORT}"'
        launch = f"{ENVIRONMENT}/bin/modelwright launch --nnodes {self.num_nodes} --rdzv-endpoint {endpoint}"
        return f"{launch} {shlex.join(run)}"


def check_extras(extras: Sequence[str], root: Path) -> None:
    """Raise `ConfigError` for an extra that the source tree's package does not have."""
    known = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            raise ConfigError(f"--extras: {extra!r} is no extra of the package{did_you_mean(extra, list(known))}")


def check_task(task: dict[str, Any]) -> None:
    """Raise `ConfigError` if the task has a field or a value that the schema does not know."""
    text = (files("modelwright_plan.spot") / "skypilot_task.schema.json").read_text(encoding="utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    for error in validator.iter_errors(task):
        where = ".".join(map(str, error.absolute_path)) or "task"
        raise ConfigError(f"SkyPilot task: {where}: {error.message}")
