"""What is said where Flower is missing, or would report to its makers."""

import importlib
import sys
from types import ModuleType

import pytest

from modelwright.core.errors import ConfigError

MODULE, TELEMETRY = "modelwright.federated.flower", "FLWR_TELEMETRY_ENABLED"


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TELEMETRY, "0")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(ConfigError, match=r"pip install 'modelwright\[flower\]'"):
        importlib.import_module(MODULE)


def test_telemetry_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TELEMETRY, raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "flwr", ModuleType("flwr"))
    with pytest.raises(ConfigError, match="export FLWR_TELEMETRY_ENABLED=0"):
        importlib.import_module(MODULE)
