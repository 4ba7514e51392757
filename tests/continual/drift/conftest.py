"""Shared traffic and a frozen reference of it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drift_traffic import Traffic
from modelwright.continual.drift.config import DriftConfig
from modelwright.continual.drift.reference import Reference, freeze_reference

WINDOW = 500
CONFIG = DriftConfig(window_requests=WINDOW, run_length=50)


@pytest.fixture(scope="session")
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture(scope="session")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drift") / "reference"


@pytest.fixture(scope="session")
def reference(traffic: Traffic, reference_folder: Path) -> Reference:
    return freeze_reference(traffic.requests(6000, 1), None, reference_folder, CONFIG)


def write_requests(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
