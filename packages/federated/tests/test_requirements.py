"""What is asked of Flower: its version, and that it neither reports to its makers nor installs packages."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from modelwright.core.config import ConfigError
from modelwright_federated import flower
from rank_processes import all_well, start_process
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
def test_telemetry_is_off_when_flower_is_imported_by_this_package(tmp_path: Path) -> None:
    """In a process that has imported neither."""
    pytest.importorskip("flwr")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, warnings\n"
        "warnings.simplefilter('default')\n"  # Flower's own
        "for name in [name for name in os.environ if 'TELEMETRY' in name]:\n"
        "    del os.environ[name]\n"
        "assert not {'flwr', 'modelwright_federated'} & set(sys.modules)\n"
        "import modelwright_federated.server\n"
        "from flwr.supercore import telemetry\n"
        "print(telemetry.FLWR_TELEMETRY_ENABLED)\n"
    )
    (output,) = all_well([start_process(script).end()])
    assert output.split()[-1] == "0"


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
