"""`modelwright clean` on 50,000 made-up documents with each engine: do both write the same files, also when a worker is
killed, and when the command itself is killed and started again?

    python benchmarks/clean_engines.py                                    some minutes on two cores
    python benchmarks/clean_engines.py --documents 4000 --folder /tmp     a smoke run
    python benchmarks/clean_engines.py --judge benchmarks/results/clean_engines-MACHINE.json

The documents are those of `clean_scale.py`. SIGKILL comes when a quarter of the shards is measured, for a worker at the
first moment from then on at which it is at work. Of the shards that were measured before the command was killed, those
count as done again whose file is written by the command that resumes: every file is linked to a second name before, and
writing would change its time.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from clean_scale import RESULTS, descendants, write_documents
from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import num_usable_cores
from modelwright.data.clean.clean import SHARD_DOCUMENTS, measured
from modelwright.data.clean.folder import DROPPED, ORDER, REPORT, kept_files
from modelwright_claims.results import circumstances, machine_slug

DOCUMENTS = 50_000
PROGRAM = ("-m", "modelwright.cli.main")
LOCAL, RAY, WORKER_KILLED, COMMAND_KILLED = "local", "ray", "ray, a worker killed", "ray, the command killed"
RAY_TASK = b"ray::_in_folder"
"""The name of a process while it is at work on a shard (`modelwright.data.workers`)."""
LOOK_EVERY_S = 0.02


class Command:
    """`modelwright clean` as a process, perhaps disturbed; closing it ends the process. Ends the program with its error
    if it fails.
    """

    def __init__(
        self, source: Path, out: Path, engine: str, settings: Sequence[str], program: Sequence[str] = PROGRAM
    ) -> None:
        self._words = [sys.executable, *program, "clean", str(source), "--out", str(out), "--engine", engine, *settings]
        self._out, self._errors = out, out.with_name(f"{out.name} errors")
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["OMP_NUM_THREADS"] = "1"
        with open(self._errors, "wb") as errors:
            return subprocess.Popen(self._words, env=environment, stdout=subprocess.DEVNULL, stderr=errors)

    def finish(self) -> None:
        if self._process.wait():
            raise SystemExit(self._errors.read_text(errors="replace")[-3000:])

    def shards(self, at_least: int = 0) -> list[Path]:
        """The files of measured shards, as soon as there are so many."""
        while True:
            markers = sorted(self._out.glob(f"work/*/*.{measured(0)}.json"))
            if len(markers) >= at_least:
                return [marker.with_suffix(".npz") for marker in markers]
            self._look_again()

    def kill_worker(self) -> None:
        while True:
            for pid in descendants(self._process.pid):
                if _name(pid).startswith(RAY_TASK):
                    os.kill(pid, signal.SIGKILL)
                    return
            self._look_again()

    def kill(self) -> None:
        """Returns when its workers have ended, too, which takes a second; two agents of Ray end after a minute."""
        started = list(descendants(self._process.pid))
        self._process.kill()
        self._process.wait()
        while any(_name(pid).startswith(RAY_TASK) for pid in started):
            time.sleep(LOOK_EVERY_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def start_again(self) -> None:
        self._process = self._started()

    def _look_again(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit("the command ended before it could be disturbed; give more --documents")
        time.sleep(LOOK_EVERY_S)


def _name(pid: int) -> bytes:
    """What a process calls itself, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def undisturbed(command: Command, at_least: int, links: Path) -> dict[str, int]:
    command.finish()
    return {}


def with_a_worker_killed(command: Command, at_least: int, links: Path) -> dict[str, int]:
    shards_before = len(command.shards(at_least))
    command.kill_worker()
    command.finish()
    return {"shards_before": shards_before}


def with_the_command_killed(command: Command, at_least: int, links: Path) -> dict[str, int]:
    command.shards(at_least)
    command.kill()
    linked = {links / path.name: path for path in command.shards()}
    for link, path in linked.items():
        link.hardlink_to(path)
    times = {link: link.stat().st_mtime_ns for link in linked}
    command.start_again()
    command.finish()
    again = sum(link.stat().st_mtime_ns != time_ns for link, time_ns in times.items())
    return {"shards_before": len(times), "done_again": again}


RUNS: Mapping[str, tuple[str, Callable[[Command, int, Path], dict[str, int]]]] = {
    LOCAL: ("local", undisturbed),
    RAY: ("ray", undisturbed),
    WORKER_KILLED: ("ray", with_a_worker_killed),
    COMMAND_KILLED: ("ray", with_the_command_killed),
}


def measure(count: int, seed: int, folder: Path, settings: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run with its wall time, what was disturbed, and the SHA-256 of its files."""
    source = folder / "documents.jsonl"
    write_documents(source, count, seed)
    for name, (engine, run) in RUNS.items():
        out, links = folder / name, folder / f"{name} links"
        links.mkdir()
        started = time.perf_counter()
        with closing(Command(source, out, engine, settings)) as command:
            facts = run(command, max(1, count // SHARD_DOCUMENTS // 4), links)
        wall_s = round(time.perf_counter() - started, 2)
        files = [*(file for of_split in kept_files(out).values() for file in of_split.values()), ORDER, DROPPED, REPORT]
        hashes = {file: hashlib.sha256((out / file).read_bytes()).hexdigest() for file in files}
        kept = json.loads((out / REPORT).read_text())["kept"]
        num_kept = sum(entry["documents"] for splits in kept.values() for entry in splits.values())
        yield name, {"wall_s": wall_s, **facts, "kept": num_kept, "sha256": hashes}


def verdicts(record: Mapping[str, Any]) -> Iterator[str]:
    """What the record says to each part of the target."""
    runs = record["runs"]
    for name in (RAY, WORKER_KILLED, COMMAND_KILLED):
        hashes, own = runs[LOCAL]["sha256"], runs[name]["sha256"]
        differing = [file for file in hashes if own.get(file) != hashes[file]]
        text = f"files of {name!r} that differ from those of {LOCAL!r}: {', '.join(differing) or 'none'}"
        yield _verdict(not differing, text)
    before, again = runs[COMMAND_KILLED]["shards_before"], runs[COMMAND_KILLED]["done_again"]
    yield _verdict(
        before > 0 and not again, f"of {before} shards measured before the command was killed, {again} again"
    )


def _verdict(holds: bool, text: str) -> str:
    return f"{'met' if holds else 'short'}: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--workers", type=int, default=num_usable_cores())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for documents and results while they are needed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--judge", type=Path, help="print the verdicts of a record and stop")
    given, settings = parser.parse_known_args()
    if given.judge:
        print("\n".join(verdicts(json.loads(given.judge.read_text()))))
        return
    around, runs = circumstances(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = ["--clean.num_workers", str(given.workers), *settings]
        for name, run in measure(given.documents, given.seed, Path(folder), options):
            runs[name] = run
            print(f"{name}: {json.dumps({key: run[key] for key in run if key != 'sha256'})}", flush=True)
    record = {"benchmark": "clean_engines", "documents": given.documents, "workers": given.workers, "runs": runs}
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / f"clean_engines-{machine_slug(around['machine'])}.json"
    write_atomic(path, json.dumps({**record, "settings": settings, **around}, indent=1) + "\n")
    print("\n".join(verdicts(record)), f"\n{path}")


if __name__ == "__main__":
    main()
