"""Training runs that a command starts in separate processes, possibly on several hosts that come and go."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.cli.run import start_processes
from modelwright.core.config import ModelwrightError, Stopped

CONFIG_FILE = "launch.yaml"
"""File in the run's folder from which its processes read the configuration."""
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ProcessesFailed(ModelwrightError):
    """The processes of a run ended without finishing it."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class LaunchedRuns:
    """A `continual.update.CarryOut` that works like `modelwright launch`: lost processes restart from the last
    checkpoint, with as many copies of the model as divide the rows of a batch. start: a `LaunchConfig`; options: the
    command-line words that it was read from.

    Further hosts join with the same options: `modelwright launch ... run RUN_DIR/launch.yaml --run-dir RUN_DIR`.
    """

    start: Any
    options: Sequence[str]

    def __call__(self, config: Any, run: Any, *, origin: str, words: Sequence[str], progress: Any) -> None:
        """Carries out the run. Raises `Stopped` if this process was asked to stop, and `ProcessesFailed` for any other
        end than success.
        """
        from modelwright.core.artifacts import save_yaml
        from modelwright.pipeline.run import check_request, is_finished

        if is_finished(config, run, ()):
            return
        check_request(config, run, (), num_processes=self.start.processes * self.start.min_hosts, elastic=True)
        path = run.path / CONFIG_FILE
        save_yaml(path, config)
        progress.note(f"{origin}: {self.start.processes} processes train in {run.path}")
        said: list[str] = []

        def say(text: str, exit_code: int) -> int:
            if not exit_code:
                progress.note(text)
            said.append(text)
            return exit_code

        line = ["launch", *self.options, "run", str(path), "--run-dir", str(run.path)]
        code = start_processes(self.start, line, config, run, say=say)
        # Exit codes of 128 + n mean that signal n ended the processes, as in a shell.
        if code - 128 in _ASKED:
            raise Stopped(said[-1], code - 128)
        if code:
            raise ProcessesFailed(said[-1], code)
