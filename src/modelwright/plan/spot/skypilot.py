"""A plan as a task of SkyPilot's managed jobs (`sky jobs launch task.yaml`), checked without SkyPilot or a network."""

import json
import shlex
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jsonschema

from modelwright.core.errors import ConfigError

RENDEZVOUS_PORT = 29400
RUN_DIR = "/modelwright-runs"
"""Where the bucket with the checkpoints is mounted."""
MOST_RESTARTS = 3
"""Restarts of a job that fails by itself; interruptions do not count."""


@dataclass(frozen=True, kw_only=True)
class SkyTask:
    """What the task is to run, and where."""

    name: str
    target: str
    """Recipe, YAML file or run directory for `modelwright run`."""
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
        """The task's YAML as plain data. Raises `ConfigError` that names the field that SkyPilot would refuse."""
        resources: dict[str, Any] = {
            "infra": f"{self.provider}/{self.region}",
            "instance_type": self.instance,
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": MOST_RESTARTS},
        }
        if self.falls_back:
            resources["ordered"] = [{"use_spot": True}, {"use_spot": False}]
        else:
            resources["use_spot"] = True
        task = {
            "name": self.name,
            "num_nodes": self.num_nodes,
            "resources": resources,
            "file_mounts": {RUN_DIR: {"name": self.bucket, "mode": "MOUNT"}},
            "setup": "pip install modelwright\n",
            "run": self._command() + "\n",
        }
        check_task(task)
        return task

    def _command(self) -> str:
        run = [
            *("run", self.target, "--run-dir", f"{RUN_DIR}/{self.name}"),
            *("--training.checkpoint_every_minutes", f"{self.interval_s / 60:.6g}"),
        ]
        if self.num_nodes == 1:
            return f"modelwright {shlex.join(run)}"
        endpoint = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{RENDEZVOUS_PORT}"'
        return f"modelwright launch --nnodes {self.num_nodes} --rdzv-endpoint {endpoint} {shlex.join(run)}"


def check_task(task: dict[str, Any]) -> None:
    """Raise `ConfigError` if the task has a field or a value that the schema does not know."""
    text = (files("modelwright.plan.spot") / "skypilot_task.schema.json").read_text(encoding="utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    for error in validator.iter_errors(task):
        where = ".".join(map(str, error.absolute_path)) or "task"
        raise ConfigError(f"SkyPilot task: {where}: {error.message}")
