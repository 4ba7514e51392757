"""Traffic and a frozen reference of it, shared by all tests."""

from pathlib import Path

import pytest

from continual_requests import CONFIG
from drift_traffic import Traffic
from modelwright_continual.drift.reference import DriftReference, freeze_reference


@pytest.fixture(scope="session")
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture(scope="session")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drift") / "reference"


@pytest.fixture(scope="session")
def reference(traffic: Traffic, reference_folder: Path) -> DriftReference:
    return freeze_reference(traffic.requests(6000, 1), None, reference_folder, CONFIG)
