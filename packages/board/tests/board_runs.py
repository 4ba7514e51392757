"""Synthetic run folders, and a board in a child process."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx


def metric_lines(num_steps: int, seed: int = 0) -> Iterator[str]:
    for step in range(1, num_steps + 1):
        wave = math.sin(step * (1 + seed)) * 0.1
        yield (
            f'{{"step": {step}, "loss": {3 + 4 / math.sqrt(step) + wave:.12f}, "grad_norm": {1 + wave:.12f}, '
            f'"learning_rate": {1e-3 * (1 - step / (num_steps + 1)):.12g}, "num_tokens": 2048, '
            f'"tokens_per_s": {20000 + 1000 * wave:.8f}, "mfu": {0.3 + wave / 10:.12f}, "data_wait_s": 0.000459907998, '
            f'"comm_s": 0.00020323999706, "step_time_s": {0.05 + wave / 100:.12f}, "bytes_sent": 0, '
            f'"peak_flops": 126201196592.3894, "skipped": false, "executed_flops": 2315649024.0}}\n'
        )
        if step % 500 == 0:
            yield f'{{"step": {step}, "heldout_loss": {3.1 + 4 / math.sqrt(step)}, "eval_time_s": 0.05}}\n'


def make_run(root: Path, name: str, *, num_steps: int = 200, state: str = "done", seed: int = 0) -> Path:
    """Makes the folder of a run that has cleaned and pretrained."""
    run = root / name
    for stage in ("clean", "pretrain"):
        (run / stage / "artifact").mkdir(parents=True)
        attempt = {
            "started": f"2026-11-28T11:58:4{stage == 'pretrain':d}+00:00",
            "ranks": 1,
            "state": "done",
            "error": "",
        }
        attempt |= {"wall_s": 5.5, "cpu_s": 3.5, "peak_bytes": 584482816, "child_peak_bytes": 0}
        attempt["state"] = state if stage == "pretrain" else "done"
        (run / stage / "stage.json").write_text(json.dumps({"digest": "ab", "attempts": [attempt]}))
        (run / stage / "log.txt").write_text("2026-11-28T11:58:48+00:00 begins\n")
    (run / "pretrain" / "metrics.jsonl").write_text("".join(metric_lines(num_steps, seed)))
    (run / "pretrain" / "samples.jsonl").write_text(json.dumps({"step": 1, "loss": 6.6, "text": "once"}) + "\n")
    (run / "config.yaml").write_text(f"name: {name}\nseed: {seed}\npretrain:\n  learning_rate: 0.00{1 + seed}\n")
    words = ["modelwright", "run", "tiny", "--run-dir", str(run)]
    invocation = {"started": "2026-11-28T11:58:37+00:00", "command": words, "origin": "recipe tiny", "state": state}
    stages = {"clean": {}, "pretrain": {}}
    (run / "run.json").write_text(json.dumps({"name": name, "invocations": [invocation], "stages": stages}))
    return run


@dataclass
class BoardProcess:
    """A board in a process. root: its folder of runs; url: with the token."""

    root: Path
    url: str
    base: str
    process: subprocess.Popen[str]

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """Yields a client that the board knows, as a browser that has opened its URL."""
        with httpx.Client(base_url=self.base, timeout=60, follow_redirects=True) as client:
            assert client.get(self.url).status_code == 200
            yield client

    def memory_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]


@contextmanager
def running_board(root: Path, *words: str, port: int = 0, cwd: Path | None = None) -> Iterator[BoardProcess]:
    """Starts a board. words: options of `modelwright board`; without them, the process is the one that this command
    becomes, and does without the seconds in which the command line is loaded.
    """
    command = [sys.executable, "-m", "modelwright_board.server", str(root), "127.0.0.1", str(port), "0"]
    if words:
        command = [sys.executable, "-m", "modelwright.cli.entry", "board", str(root), "--port", str(port), *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=environment) as process:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("board"))
        board = BoardProcess(root, url, url.partition("?")[0].rstrip("/"), process)
        try:
            wait_for(lambda: httpx.get(board.base).status_code)
            yield board
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(30)


def wait_for(check, timeout_s: float = 60.0):
    """Returns the first true result of `check`."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            if result := check():
                return result
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.1)


def csrf_of(client: httpx.Client) -> str:
    found = re.search(r'name="csrf" content="(\w+)"', client.get("/").text)
    assert found
    return found[1]
