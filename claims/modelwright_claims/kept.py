"""What a long measurement has found so far, in a file: a call that was interrupted goes on where it stopped.

A key says all that a value depends on. Knows nothing about what is measured.
"""

import hashlib
import json
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import modelwright
from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.core.resources import versions
from modelwright_claims.results import PACKAGES, machine


class Kept:
    """Values of JSON by key, written to `path` as they come, from any thread; with None they last as long as this.

    Raises `ArtifactError` for a file that holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._writing = Lock()
        self._values: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                self._values = dict(json.loads(path.read_text(encoding="utf-8")).items())
            except (ValueError, AttributeError) as error:
                raise ArtifactError(
                    f"{path}: is no record of a measurement ({error}); delete it to begin anew"
                ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        with self._writing:
            self._values[key] = value
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, json.dumps(self._values, indent=1))


def setup_digest() -> str:
    """Return 12 digits of the sources of both packages, the versions that they depend on and the machine.

    Runs that belong to one measurement share them.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([machine(), versions(*PACKAGES)], sort_keys=True).encode())
    for package in (Path(modelwright.__file__).parent, Path(__file__).parent):
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
            digest.update(f"{path.relative_to(package)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def file_digest(module: ModuleType) -> str:
    """Of one module's source, 12 digits: for what rests on nothing else that may change."""
    assert module.__file__ is not None
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]
