"""Commands that the board has started. Each runs in its own session and outlives the board; its folder says all about
it: `job.json` (command line, process), `out`, `err`, and `code` when it has ended.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from modelwright_board.files import as_list, read_json, read_tail, read_text

MOST_JOBS = 300
"""Jobs that are kept; the oldest that have ended are removed."""
# The shell outlives the command by the moment that it takes to write its exit code; a signal to the group reaches both,
# and `trap :` lets the command alone end by it.
_SHELL = 'trap : INT TERM HUP; "$@"; code=$?; printf %s "$code" > "$MODELWRIGHT_JOB/code"'
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Job:
    """A command. words: without the program's name; screen, action: the button; run: name of the run that it works on,
    "" if none; pid, begun: of its session's leader; created: Unix seconds; code: exit code, None before its end;
    is_alive: True while its process exists.
    """

    id: str
    words: Sequence[str]
    screen: str
    action: str
    run: str
    pid: int
    begun: str
    created: float
    code: int | None = None
    is_alive: bool = False

    @property
    def state(self) -> str:
        if self.is_alive:
            return "running"
        if self.code is None:
            return "killed"
        return "done" if self.code == 0 else "stopped" if self.code in (130, 143) else "failed"

    @property
    def line(self) -> str:
        """The command line, to be pasted into a shell."""
        return command_line(self.words)

    def option(self, name: str, default: str = "") -> str:
        words = list(self.words)
        return words[words.index(name) + 1] if name in words[:-1] else default


def command_line(words: Sequence[str]) -> str:
    return shlex.join(["modelwright", *words])


class Jobs:
    """The jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: dict[str, Job] = {}
        """Jobs that have ended change no more, and an open page asks every second for all of them."""

    def start(self, words: Sequence[str], *, screen: str, action: str, run: str = "") -> Job:
        """Starts `modelwright WORDS` and returns at once. Raises `OSError`."""
        self._prune()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
        place = self.folder / name
        place.mkdir(parents=True)
        command = ["/bin/sh", "-c", _SHELL, "modelwright", sys.executable, "-m", "modelwright.cli.entry", *words]
        with open(place / "out", "wb") as out, open(place / "err", "wb") as err:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**os.environ, "MODELWRIGHT_JOB": str(place), "PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        self._children[name] = child
        job = Job(name, list(words), screen, action, run, child.pid, process_begin(child.pid), time.time())
        plain = {key: value for key, value in asdict(job).items() if key not in ("code", "is_alive")}
        (place / "job.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
        return job

    def get(self, name: str) -> Job | None:
        if not re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", name):
            return None
        if name in self._ended:
            return self._ended[name]
        plain = read_json(self.folder / name, "job.json")
        try:
            job = Job(
                name, [str(word) for word in as_list(plain["words"])], str(plain["screen"]), str(plain["action"]),
                str(plain["run"]), int(plain["pid"]), str(plain["begun"]), float(plain["created"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None
        code = read_text(self.folder / name, "code", most=10)
        # A number may belong to another process by now, which began at another time.
        is_alive = not code and bool(job.begun) and process_begin(job.pid) == job.begun
        if not is_alive:
            if child := self._children.pop(name, None):
                with suppress(subprocess.TimeoutExpired):  # not of a job whose files somebody has changed
                    child.wait(1)  # takes it out of the table of processes
            code = code or read_text(self.folder / name, "code", most=10)  # written between the two looks
        job = replace(job, code=int(code) if code.lstrip("-").isdigit() else None, is_alive=is_alive)
        if job.code is not None:
            self._ended[name] = job
        return job

    def all(self) -> list[Job]:
        """Returns the jobs, the newest first."""
        try:
            names = sorted((entry.name for entry in os.scandir(self.folder)), reverse=True)
        except OSError:
            return []
        return [job for name in names if (job := self.get(name))]

    def of(self, screen: str, *, action: str = "", run: str = "") -> list[Job]:
        """Returns the jobs of a screen, the newest first, of one action or run if it is given."""
        return [
            job for job in self.all()
            if job.screen == screen and action in ("", job.action) and run in ("", job.run)
        ]  # fmt: skip

    def stop(self, job: Job) -> bool:
        """Asks the job to end, as Ctrl-C does in a terminal; returns False if it has ended already."""
        if not job.is_alive:
            return False
        try:
            os.killpg(job.pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True

    def output(self, job: Job, *, most: int = 64_000) -> str:
        """Returns the tail of the output, standard error first, without control characters."""
        parts = [read_tail(self.folder / job.id, name, most=most) for name in ("err", "out")]
        return "\n".join(plain_text(part).strip("\n") for part in parts if part.strip())

    def result(self, job: Job) -> str:
        """Returns all that the job has printed on standard output."""
        return read_text(self.folder / job.id, "out")

    def _prune(self) -> None:
        for job in [job for job in self.all()[MOST_JOBS:] if not job.is_alive]:
            for name in ("job.json", "out", "err", "code"):
                (self.folder / job.id / name).unlink(missing_ok=True)
            self._ended.pop(job.id, None)
            with suppress(OSError):  # something else lies there
                (self.folder / job.id).rmdir()


def plain_text(text: str) -> str:
    """Returns a program's output as a terminal would leave it: the last of several lines written over each other."""
    return "\n".join(_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n"))


def process_begin(pid: int) -> str:
    """Returns when a process began, in a form that only serves to be compared; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return ""
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()
