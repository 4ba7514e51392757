"""Several processes that look like one from outside: one message, one exit code, one display.

A process started here writes its exit report (message, exit code) to a folder instead of the terminal. When all have
ended, or before they are restarted, the reports that tell the cause are shown. An error that a person must fix ends the
run on all hosts; after any other failure the processes are restarted as often as the configuration allows.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelwright.core.errors import ModelwrightError, Stopped

EXIT_REPORT_DIR = "MODELWRIGHT_LAST_WORDS"
"""Environment variable with the folder for exit reports; a process that finds it was started by `supervise`."""
BUG, USER, LOST, INTERRUPTED, STOPPED = 1, ModelwrightError.exit_code, 3, 130, Stopped.exit_code
"""Exit codes; LOST is `pipeline.ranks.PeerLost`'s."""
GOES_ON = "what was finished stays, the same command goes on from there"
Say = Callable[[str, int], int]
"""Shows a text to the user; takes the text and the exit code, 0 for a remark, and returns the exit code."""
_TELLING = (USER, BUG, STOPPED, INTERRUPTED, LOST)
"""Exit codes, those that tell the cause of an ending first: a lost process is the effect of another's error."""


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """Ending of one process."""

    rank: int
    time_s: float
    exit_code: int
    text: str


class Refused(ModelwrightError):
    """A process met an error that would occur again after a restart."""


def is_started() -> bool:
    """True if this process is already one of several, whoever started them."""
    return "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """True if this process is alone or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def write_exit_report(folder: str, text: str, exit_code: int) -> int:
    """Write this process's exit report unless the processes that would read it are gone; returns the exit code."""
    words = ExitReport(rank=int(os.environ.get("RANK", "0")), time_s=time.time(), exit_code=exit_code, text=text)
    temporary = Path(folder) / f"{os.getpid()}.tmp"
    with suppress(FileNotFoundError):
        temporary.write_text(json.dumps(asdict(words)), encoding="utf-8")
        temporary.rename(temporary.with_suffix(".json"))  # readers take whole reports only
    return exit_code


def read_exit_reports(folder: Path) -> list[ExitReport]:
    """Read the exit reports, those that tell the cause first."""
    result = [ExitReport(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    ranked = {code: place for place, code in enumerate(_TELLING)}
    # Later errors follow from the first one; of the processes that were asked to stop, the first rank speaks.
    return sorted(
        result,
        key=lambda one: (
            ranked.get(one.exit_code, len(ranked)),
            one.time_s if one.exit_code in (USER, BUG) else one.rank,
        ),
    )


def print_ending(text: str, exit_code: int) -> int:
    """Print to the terminal: the usual `Say`."""
    print(text.rstrip() if exit_code == BUG else f"modelwright: {text}", file=sys.stderr, flush=True)
    return exit_code


def supervise(
    config: Any, line: Sequence[str], *, threads: int, is_done: Callable[[], bool], say: Say = print_ending
) -> int:
    """Run the command line `modelwright LINE...` in the processes of a `parallel.elastic.LaunchConfig`. threads: number
    for each process; is_done: returns true if the run has finished, which another host may know first; say: shows the
    message that one process would have shown. Returns the exit code of one process.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError

    from modelwright.parallel.elastic import launch

    with tempfile.TemporaryDirectory(prefix="modelwright-") as name:
        folder = Path(name)
        with _started_by_torchrun(name, threads):
            try:
                ending = launch(
                    config,
                    "modelwright.cli.main",
                    line,
                    logs=folder / "logs",
                    before_restart=lambda: _before_restart(folder, say),
                )
            except Refused as error:
                return say(str(error), USER)
            except RendezvousError as error:
                where = config.rendezvous or "this host"
                return say(f"the hosts did not find each other at {where} ({type(error).__name__}: {error})", USER)
        if ending.closed:
            closed = (
                "was ended by another host, whose own message says why, or is an earlier run's; choose another --name"
            )
            return 0 if is_done() else say(f"the run {config.name!r} {closed}", USER)
        if not ending.failed and not ending.asked:
            return 0
        return _tell(folder, ending.killed, ending.asked, say)


def _before_restart(folder: Path, say: Say) -> None:
    """Report why the processes are restarted. Raises `Refused` if they must not be."""
    words = read_exit_reports(folder)
    # Reports are of one attempt; those of the next one must not be mixed with them.
    for path in folder.glob("*.json"):
        path.unlink()
    if words and words[0].exit_code == USER:
        raise Refused(words[0].text)
    reason = words[0].text.strip().splitlines()[-1] if words and words[0].exit_code == BUG else ""
    say(f"a process was lost, or the hosts have changed{f' ({reason})' if reason else ''}; starting again", 0)


def _tell(folder: Path, killed: Mapping[int, int], asked: int, say: Say) -> int:
    """Show how the run ended and return the exit code."""
    words = read_exit_reports(folder)
    cause = words[0] if words else None
    # An error that a person must fix comes first: it also explains processes that were killed after it.
    if cause and cause.exit_code == USER:
        return say(cause.text, USER)
    if killed:
        rank, number = next(iter(killed.items()))
        reason = f"process {rank} was ended by {signal.Signals(number).name}"
        hint = " (was there too little memory?)" if number == signal.SIGKILL else ""
        return say(f"{reason}{hint}; {GOES_ON}", 128 + number)
    is_stop = cause is None or cause.exit_code in (STOPPED, INTERRUPTED)
    if cause and cause.exit_code != BUG and asked:
        return say(cause.text if is_stop else f"stopped; {GOES_ON}", 128 + asked)
    if cause:
        return say(cause.text, cause.exit_code)
    return say(f"stopped; {GOES_ON}", 128 + (asked or signal.SIGTERM))


@contextmanager
def _started_by_torchrun(reports: str, threads: int) -> Iterator[None]:
    """Changes the environment that torch passes to the processes that it starts, and silences torchrun's own reports of
    failed processes. reports: folder for their exit reports.
    """
    from modelwright.parallel.elastic import torchrun_environment

    environment, level = dict(os.environ), logging.root.manager.disable
    os.environ.update(torchrun_environment({EXIT_REPORT_DIR: reports}, threads=threads))
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(environment)
