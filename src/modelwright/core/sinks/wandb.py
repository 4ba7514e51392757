"""Weights & Biases: files in the stage's folder that `wandb sync` sends later, or with WANDB_MODE=online at once.

The library gets none of the texts that it would collect on its own: the command line, the environment, the output and
the source code may have secrets.
"""

import os
from collections.abc import Mapping
from typing import Any

from modelwright.core.sinks.sink import SinkSpec, SinkStart

PROJECT = "modelwright"


class WandbSink:
    """Writes one run of Weights & Biases for each process that trains, in a group named after the run."""

    def __init__(self, start: SinkStart) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers, with what the process was doing
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=start.run,
            name=f"{start.run}/{start.name}",
            config={**start.settings, "first_step": start.first_step},
            dir=str(start.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
            reinit="create_new",
            settings=wandb.Settings(
                console="off", save_code=False, disable_git=True, silent=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


WANDB = SinkSpec(name="wandb", open=WandbSink, package="wandb", extra="wandb")
