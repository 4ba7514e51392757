"""Trainings of `kill_worker` that are killed by SIGKILL, after a step or while they write a checkpoint, and started
again in the same folder.
"""

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from modelwright.core.config import ModelwrightError
from modelwright_claims.kill_worker import FINAL, OURS, TRAINER, Task

WRITING = {
    OURS: ("checkpoints/step-{0:08d}.partial", "checkpoints/step-{0:08d}"),
    TRAINER: ("checkpoint-{0}", "checkpoint-{0}/trainer_state.json"),
}
"""What appears when a tool begins to write the checkpoint of a step, and what is there when it has written all of it:
a folder that gets its name then, or the file that comes last.
"""
OUTCOMES = OLDER, WRITTEN, FAILED, OTHER = (
    "same bits from an older checkpoint",
    "same bits from the checkpoint that was being written",
    "failed with an error",
    "ended with other bits",
)
"""How a training ends that was killed in a save and started again."""
RIGHT = (OLDER, WRITTEN)
STARTING, REDOING, STALLS = "start of the new process", "steps done twice", "stalls by saving"
REST, TWICE, WRITTEN_MB = "other differences", "number of steps done twice", "written"
PARTS = {STARTING: "s", REDOING: "s", STALLS: "s", REST: "s", TWICE: "", WRITTEN_MB: "MB"}
"""The parts of the time that a kill costs, and counts, with their units."""
KILLED_SAVE = 2
"""Number of the save in which a training is killed; the saves before it have left whole checkpoints."""
POLL_S, TIMEOUT_S = 0.0003, 900.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process. began, ended, steps: monotonic seconds of its start, its end and of each of its steps; code: as
    `Popen.returncode`; error: the last line of its errors; digest: of the weights that it ended with, or "".
    """

    began: float
    ended: float
    steps: Mapping[int, float]
    num_bytes: int
    code: int
    error: str
    digest: str

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def gaps(self) -> dict[int, float]:
        """Seconds from the end of each step to the end of the next one."""
        return {step: later - at for (step, at), (_, later) in pairwise(self.steps.items())}

    @property
    def end_s(self) -> float:
        """Seconds from the end of its last step to its own."""
        return self.ended - self.steps[max(self.steps)]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill after a step. seconds: of both processes; parts: as in `PARTS`."""

    seconds: float
    is_same: bool
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class KillInSave:
    """A kill in a save. is_half: it left a half-written checkpoint; error: the last line, where resuming failed."""

    outcome: str
    is_half: bool
    error: str


def run(tool: str, task: Task, out: Path, *, kill_at: int = 0, share: float | None = None) -> Run:
    """Run one process in the folder `out`. kill_at: the step after which it is killed, 0 for none; share: kill it in
    its second save, when this share of the time that its first one took has passed.
    """
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "modelwright_claims.kill_worker", tool, json.dumps(asdict(task)), str(out)]
    threads = {name: str(task.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    steps, began = dict[int, float](), time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **threads}) as process,
    ):
        late, ends = threading.Timer(TIMEOUT_S, process.kill), threading.Event()
        late.start()
        if share is not None:
            threading.Thread(target=_kill_in_save, args=(process.pid, ends, tool, task, out, share)).start()
        assert process.stdout is not None
        for line in process.stdout:
            step, at = json.loads(line)
            steps[step] = at
            if step == kill_at:
                process.kill()
        ends.set()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its counters are there until it is waited for
        ended = time.monotonic()
        written = Path(f"/proc/{process.pid}/io").read_text().partition("wchar: ")[2].split()[0]
        late.cancel()
        code = process.wait()
        errors.seek(0)
        error = ([line for line in errors.read().splitlines() if line.strip()] or [f"exit code {code}"])[-1]
    if ended - began > TIMEOUT_S:
        raise ModelwrightError(f"{tool}: a training did not end within {TIMEOUT_S:g} s")
    weights = out / FINAL / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if code == 0 else ""
    return Run(began=began, ended=ended, steps=steps, num_bytes=int(written), code=code, error=error, digest=digest)


def _kill_in_save(pid: int, ends: threading.Event, tool: str, task: Task, out: Path, share: float) -> None:
    """ends: set when the process has ended, which it does by itself only where it fails."""

    def await_path(form: str, save: int) -> float:
        while not _is_whole(out / form.format(save * task.save_every)) and not ends.wait(POLL_S):
            pass
        return time.monotonic()

    begun, written = WRITING[tool]
    took_s = -await_path(begun, KILLED_SAVE - 1) + await_path(written, KILLED_SAVE - 1)
    await_path(begun, KILLED_SAVE)
    if not ends.wait(share * took_s):
        os.kill(pid, signal.SIGKILL)


def _is_whole(path: Path) -> bool:
    """A file of JSON is whole when its last bracket is there."""
    return path.is_dir() or (path.is_file() and path.read_bytes().rstrip().endswith(b"}"))


def run_to_its_end(tool: str, task: Task) -> Run:
    """Train without a kill, in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=task.folder) as out:
        return _ended(run(tool, task, Path(out)), tool)


def kill_after(step: int, tool: str, task: Task, whole: Run) -> Kill:
    """Kill a training after a step and let it go on to its end. whole: the same one without checkpoints or a kill."""
    with tempfile.TemporaryDirectory(dir=task.folder) as out:
        first = _killed(run(tool, task, Path(out), kill_at=step), tool)
        again = _ended(run(tool, task, Path(out)), tool)
    last, resumed, step_s = max(first.steps), min(again.steps), statistics.median(whole.gaps.values())
    # Steps that are done twice count with the saves between them, so those are no stalls.
    saves = [(one, at, gap) for one in (first, again) for at, gap in one.gaps.items() if one is first or at >= last]
    stalls = [gap - step_s for _, at, gap in saves if task.save_every and at % task.save_every == 0]
    twice = max(0, last - resumed + 1)
    parts = {
        STARTING: again.steps[resumed] - again.began - step_s,
        REDOING: again.steps[last] - again.steps[resumed] + step_s if twice else 0.0,
        STALLS: sum(stalls) + again.end_s - whole.end_s,
    }
    seconds = first.seconds + again.seconds
    parts[REST] = seconds - whole.seconds - sum(parts.values())
    counts = {TWICE: twice, WRITTEN_MB: (first.num_bytes + again.num_bytes) / 1e6}
    return Kill(seconds=seconds, is_same=again.digest == whole.digest, parts=parts | counts)


def kill_in_save(share: float, tool: str, task: Task, whole: Run) -> KillInSave:
    """Kill a training while it writes a checkpoint (share: as for `run`), and start it again."""
    begun, written = (form.format(KILLED_SAVE * task.save_every) for form in WRITING[tool])
    with tempfile.TemporaryDirectory(dir=task.folder) as name:
        out = Path(name)
        _killed(run(tool, task, out, share=share), tool)
        is_half = (out / begun).exists() and not _is_whole(out / written)
        again = run(tool, task, out)
    if again.code:
        return KillInSave(outcome=FAILED, is_half=is_half, error=again.error.replace(f"{out}/", ""))
    right = OLDER if min(again.steps) <= KILLED_SAVE * task.save_every else WRITTEN
    return KillInSave(outcome=right if again.digest == whole.digest else OTHER, is_half=is_half, error="")


def _killed(one: Run, tool: str) -> Run:
    if one.code != -signal.SIGKILL:
        raise ModelwrightError(f"{tool}: a training ended before it was killed: {one.error}")
    return one


def _ended(one: Run, tool: str) -> Run:
    if one.code:
        raise ModelwrightError(f"{tool}: a training failed: {one.error}")
    return one
