"""MLflow: the server that MLFLOW_TRACKING_URI names, else `mlflow.db`, a SQLite file in the stage's folder. Its client
alone is used, because the global "active run" would also record the command line, which may have secrets.
"""

import os
import re
import time
from collections.abc import Mapping

from modelwright.core.sinks.sink import SinkSpec, SinkStart

_PARAMS_PER_CALL = 100  # the most that MLflow's API takes
_REFUSED = re.compile(r"[^\w.\- :/]|(?<=/)/|^/|/$|(?<![^/])\.+(?![^/])", re.ASCII)
"""Parts of a name that MLflow refuses: other characters, and parts of a path that normalization would remove."""


class MlflowSink:
    """Writes one run of MLflow for each process that trains, with the tag `first_step`."""

    def __init__(self, start: SinkStart) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # or it reports its use to its makers
        from mlflow import MlflowClient, entities

        local = f"sqlite:///{start.folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
        self._metric = entities.Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "modelwright"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        tags = {"run": start.run, "stage": start.name, "first_step": start.first_step}
        self._run = self._client.create_run(experiment, tags=tags, run_name=f"{start.run}/{start.name}").info.run_id
        params = [entities.Param(accepted(name), value) for name, value in start.settings.items()]
        for place in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run, params=params[place : place + _PARAMS_PER_CALL])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(accepted(name), one, now, step) for name, one in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def accepted(name: str) -> str:
    """The name, which may be a user's, with `_` and the hexadecimal code for each character that MLflow refuses."""
    return _REFUSED.sub(lambda found: "".join(f"_{ord(one):x}" for one in found[0]), name)


MLFLOW = SinkSpec(name="mlflow", open=MlflowSink, package="mlflow", extra="mlflow")
