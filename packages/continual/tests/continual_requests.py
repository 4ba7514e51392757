"""Settings and files of requests for the tests of the drift monitor."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modelwright_continual.drift.config import DriftConfig

WINDOW = 500
CONFIG = DriftConfig(window_requests=WINDOW, run_length=50)


def write_requests(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
