"""What is said where Flower is missing, would report to its makers, or installs packages."""

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


def test_no_app_starts_where_packages_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TELEMETRY, "0")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(sys, "argv", ["flwr-serverapp", "--allow-runtime-dependency-installation"])
    with pytest.raises(ConfigError, match="export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"):
        importlib.import_module(MODULE)
