"""What is asked of Flower: its version, and that it neither reports to its makers nor installs packages."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from modelwright.core.config import ConfigError
from modelwright_federated import flower
from refusals import config_error

FOLDER = Path(__file__).parents[1]


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (missing, r"is not installed; pip install 'modelwright\[federated\]'"),
        (lambda name: "1.43.0", r"Flower 1\.43\.0 is installed, and 1\.42\.x is needed; pip install"),
    ],
)
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, found, message: str) -> None:
    monkeypatch.setattr(flower, "version", found)
    with pytest.raises(ConfigError, match=message):
        flower.check_flower()


def test_the_installed_version_is_the_one_that_is_asked_for() -> None:
    """The check, the package's requirement and the environment agree."""
    pytest.importorskip("flwr")
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    (asked,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "flwr")
    assert asked.specifier.contains(version("flwr"))
    assert asked.specifier.contains(flower.SUPPORTED + "99")
    assert not asked.specifier.contains("1.43.0")
    flower.check_flower()


@pytest.mark.slow
def test_telemetry_is_off_when_flower_is_imported_by_this_package() -> None:
    pytest.importorskip("flwr")
    script = "import modelwright_federated.server; from flwr.supercore import telemetry as t; "
    script += "print(t.FLWR_TELEMETRY_ENABLED)"
    environment = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_no_app_starts_that_would_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    monkeypatch.delenv(flower.TELEMETRY, raising=False)
    with config_error("FLWR_TELEMETRY_ENABLED"):
        flower.check_flower()


def test_no_app_starts_where_packages_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    monkeypatch.setattr(sys, "argv", ["flwr-serverapp", flower.INSTALLS])
    with config_error("allow-runtime-dependency-installation"):
        flower.check_flower()
