"""The processes of a command: signals that end one, and several that look like one from outside, with one message, one
exit code and one display.

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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from modelwright.core.config import ModelwrightError, Stopped

if TYPE_CHECKING:
    from modelwright.parallel.elastic import LaunchConfig

GRACE_S = 5.0
"""Time for a call into a library to return to Python, which alone can raise an exception."""
LEAVING_S = 120
"""Time for a process whose parent has gone to save or to finish answers."""


class StopSignals:
    """Within the block, from `listen` on, Ctrl-C raises `KeyboardInterrupt` and SIGTERM `SystemExit`. received: signals
    so far. If the block does not end within `GRACE_S` of a signal, because a call does not return or a library has
    swallowed the exception, `give_up` is called with the signal and the process ends at once. is_last: the process ends
    after the block, silently if a signal ended it; spared: signals that the command may survive. Does nothing outside
    the main thread, where Python handles no signals.
    """

    def __init__(self, give_up: Callable[[int], object], *, is_last: bool, spared: Sequence[int] = ()) -> None:
        self.received: list[int] = []
        self._give_up, self._is_last, self._spared = give_up, is_last, spared
        self._before: dict[signal.Signals, Any] = {}
        self._has_ended = threading.Event()
        self._pipe = self._pipe_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            reading, self._pipe = os.pipe()
            # Python's own signal handler writes to the pipe, which must never block it.
            os.set_blocking(self._pipe, False)
            self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reading,), name="stop", daemon=True).start()
        return self

    def listen(self) -> None:
        """Install the handlers. Call it where the exceptions that they raise are caught, because a signal may be
        pending.
        """
        if self._pipe == -1:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup, or a shell's background job: that stays so
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def __exit__(self, *error: object) -> None:
        if self._pipe == -1:
            return
        self._has_ended.set()
        # The handlers go first: a signal that comes after them must not raise into the code after the block.
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if self._is_last else handler)
        signal.set_wakeup_fd(self._pipe_before)
        os.close(self._pipe)  # which ends `_watch`

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Recorded before the exception: code that swallows it must not hide that a signal came.
        self.received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _watch(self, reading: int) -> None:
        """Runs in its own thread: Python writes the number of each signal to the pipe before any handler runs."""
        while came := os.read(reading, 1):
            number = came[0]
            if number not in self._spared and signal.getsignal(number) == self._on_signal:
                break
        os.close(reading)
        if came and not self._has_ended.wait(GRACE_S):
            try:
                self._give_up(came[0])
            finally:
                os._exit(128 + came[0])


def leave_with_parent() -> None:
    """Send SIGTERM to this process once its parent has changed, because a killed parent cannot notify anyone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVING_S)
        os._exit(Stopped.exit_code)  # it waits for other processes in a call that no signal interrupts

    threading.Thread(target=watch, daemon=True).start()


EXIT_REPORT_DIR = "MODELWRIGHT_LAST_WORDS"
"""Environment variable with the folder for exit reports; a process that finds it was started by `supervise`."""
BUG, USER, LOST, INTERRUPTED, STOPPED = 1, ModelwrightError.exit_code, 3, 130, Stopped.exit_code
"""Exit codes; LOST is `pipeline.process_group.PeerLost`'s."""
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
    config: "LaunchConfig", line: Sequence[str], *, threads: int, is_done: Callable[[], bool], say: Say = print_ending
) -> int:
    """Run the command line `modelwright LINE...` in the processes that `config` describes. threads: number for each
    process; is_done: returns true if the run has finished, which another host may know first; say: shows the
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
                where = config.rdzv_endpoint or "this host"
                return say(f"the hosts did not find each other at {where} ({type(error).__name__}: {error})", USER)
        if ending.closed:
            why = "was ended by another host, whose own message says why, or is an earlier one; choose another --run-id"
            return 0 if is_done() else say(f"the launch {config.run_id!r} {why}", USER)
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
    from modelwright.parallel.elastic import environment_with, torchrun_environment

    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with environment_with(torchrun_environment({EXIT_REPORT_DIR: reports}, threads=threads)):
            yield
    finally:
        logging.disable(level)
