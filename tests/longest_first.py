"""The files that take longest begin first, or the last of them would leave the other processes idle.

    make test ARGS=--record-seconds        writes what each file of the fast set took; `make test-slow` that of the slow

What was recorded is one machine's wall time, of which only the order counts.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("seconds_by_file.json")
SETS = {"not slow": "fast", "slow": "slow"}
"""The two sets of tests, by the expression of markers that selects each."""
LEAST_S = 10
"""Files that take less are not recorded; they come last, in the order of their names."""


class Recorder:
    """Sums what the tests of each file take, as the process that collects the reports sees it."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # pyright: ignore[reportArgumentType]

    def pytest_sessionfinish(self) -> None:
        recorded = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        longest = ((name, round(s)) for name, s in self._seconds.most_common() if s >= LEAST_S)
        recorded[self._name] = dict(longest)
        self._path.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help=f"write what each file took to {RECORDED.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record_seconds and "PYTEST_XDIST_WORKER" not in os.environ:
        if config.option.markexpr not in SETS:
            raise pytest.UsageError("--record-seconds is for one set: with -m slow or -m 'not slow'")
        config.pluginmanager.register(Recorder(RECORDED, SETS[config.option.markexpr]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    sets = [SETS[config.option.markexpr]] if config.option.markexpr in SETS else SETS.values()
    seconds = sum((Counter(recorded.get(name, {})) for name in sets), Counter[str]())
    items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])
