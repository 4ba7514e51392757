"""Results of finished runs, kept so that an interrupted measurement goes on where it stopped."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import modelwright
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import digest, dump
from modelwright.core.errors import ArtifactError
from modelwright.core.resources import versions
from modelwright_claims.results import PACKAGES, machine


class RunCache:
    """Plain data by key, one JSON file each; the key says everything that the value depends on.

    Any thread may read and write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: Any, suffix: str = ".json") -> Path:
        """Return the file that belongs to a key; other suffixes are for what cannot be JSON, such as weights."""
        return self.folder / f"{digest(key)[:24]}{suffix}"

    def __contains__(self, key: Any) -> bool:
        return self.path(key).exists()

    def __getitem__(self, key: Any) -> Any:
        path = self.path(key)
        try:
            return json.loads(path.read_text(encoding="utf-8"))["value"]
        except (ValueError, LookupError, TypeError) as error:
            raise ArtifactError(f"{path}: is no result of a run ({error!r}); delete it to make the run again") from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(key), json.dumps({"key": dump(key), "value": dump(value)}) + "\n")

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; make and keep it first where there is none."""
        if key not in self:
            self[key] = make()
        return self[key]


def setup_digest(modules: Sequence[ModuleType]) -> str:
    """Return 12 digits of what all runs of one measurement share.

    That is the sources of the product and of these modules, the versions of what they depend on, the machine and the
    number of threads.
    """
    setup = [machine(), torch.get_num_threads(), versions(*PACKAGES)]
    text = hashlib.sha256(json.dumps(setup, sort_keys=True).encode())
    package = Path(modelwright.__file__).parent
    sources = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    for module in modules:
        assert module.__file__ is not None
        sources.append(Path(module.__file__))
    for path in sources:
        name = path.relative_to(package) if path.is_relative_to(package) else path.name
        text.update(f"{name}\n".encode())
        text.update(path.read_bytes())
    return text.hexdigest()[:12]
