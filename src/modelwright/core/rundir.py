"""The run directory holds everything about one run.

<run>/run.json           command line, commit, versions, hardware
<run>/config.yaml        resolved configuration
<run>/<stage>/metrics.jsonl, log.txt, tensorboard/, checkpoints/, artifact/manifest.json (written last = done)
<run>/report.html
"""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from modelwright.core.artifacts import make_folder, write_atomic
from modelwright.core.errors import ArtifactError, ConfigError, ModelwrightError, writing

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class StageDir:
    """The folder of one stage."""

    path: Path

    @property
    def artifact(self) -> Path:
        return self.path / "artifact"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"


def read_stage_digest(folder: StageDir) -> str:
    """Returns the digest to which the stage's folder belongs, "" if nothing was started there."""
    return str(_read_stage(folder).get("digest", ""))


def read_attempts(folder: StageDir) -> list[dict[str, Any]]:
    """Returns all attempts at the stage, oldest first."""
    return list(_read_stage(folder).get("attempts", []))


def _read_stage(folder: StageDir) -> dict[str, Any]:
    """Reads `stage.json`; empty, so that the stage starts over, if it is missing or damaged."""
    try:
        result: Any = json.loads((folder.path / "stage.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    journal = cast(dict[str, Any], result) if isinstance(result, dict) else {}
    attempts: Any = journal.get("attempts")
    entries = cast(list[Any], attempts) if isinstance(attempts, list) else [None]
    return journal if all(isinstance(one, dict) and "state" in one for one in entries) else {}


@dataclass(frozen=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def info(self) -> Path:
        return self.path / "run.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)

    def check(self) -> None:
        """Raise `ConfigError` if no folder can exist at this path; creates nothing."""
        check_folder(self.path, "--run-dir")

    def create(self) -> "RunDir":
        """Create the folder. Raises `ConfigError` or `StorageError` if that fails."""
        self.check()
        make_folder(self.path)
        return self

    def read_info(self) -> dict[str, Any]:
        """Read `run.json`. Raises `ArtifactError` if it is missing or damaged."""
        try:
            info: Any = json.loads(self.info.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ArtifactError(f"{self.path}: is not a run directory (run.json cannot be read)") from None
        kinds = {"invocations": list, "stages": dict}
        result = cast(dict[str, Any], info) if isinstance(info, dict) else {}
        if not all(isinstance(result.get(name), kind) for name, kind in kinds.items()):
            raise ArtifactError(f"{self.info}: is damaged; remove it and run again, which writes a new one")
        return result

    def write_info(self, info: Mapping[str, Any]) -> None:
        write_atomic(self.info, json.dumps(info, indent=1, default=str))

    @contextmanager
    def lock(self) -> Generator[None]:
        """Hold the run for this process. Raises `ModelwrightError` when another process is working in it. The lock is
        the operating system's, so it is released even on kill -9.
        """
        with lock_folder(self.path, "this run; wait for it or choose another --run-dir"):
            yield


def check_folder(path: Path, option: str) -> None:
    """Raise `ConfigError` that names the option if no folder can exist at this path; creates nothing."""
    try:
        # The nearest folder that exists decides whether the path can be created.
        exists = path.exists()
        above = next((one for one in (path, *path.parents) if one.exists()), Path())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {path} is not a usable path ({error}); choose another one") from None
    if not above.is_dir():
        what = "is" if exists else f"lies below {above}, which is"
        raise ConfigError(f"{option}: {path} {what} a file, not a folder; choose another one")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written (permission denied); choose another one")


@contextmanager
def lock_folder(path: Path, remedy: str) -> Generator[None]:
    """Hold a folder for this process. Raises `ModelwrightError` if another process is working in it."""
    # "a+" does not truncate: until the lock is held, the file has the process id of its holder.
    with writing(path), open(path / LOCK_FILE, "a+") as file:
        try:
            # Not a file that exists while the run is held: that would outlive a killed process.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ModelwrightError(f"{path}: process {holder} is working in {remedy}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
