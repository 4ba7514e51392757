"""Order, time and record of `make gpu-check`, which needs no GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "benchmarks" / "gpu_check_record.py"
spec = importlib.util.spec_from_file_location("gpu_check_record", SOURCE)
assert spec is not None
assert spec.loader is not None
checks = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = checks
spec.loader.exec_module(checks)


class Clock:
    """Time that passes only where a case says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record_at(path: Path):
    return checks.Record(path=path, around={"machine": "Card"})


def test_parts_without_figures_come_first(tmp_path: Path) -> None:
    record = record_at(tmp_path / "r.json")
    parts = {"a": {"1": dict, "2": dict}, "b": {"1": dict}, "c": {"1": dict}}
    record.add("a", "1", {"x": 1})
    record.add("b", "1", {"x": 1})
    record.add("c", "1", {"error": "out of memory"})
    assert checks.in_order(parts, record) == ["c", "a", "b"]


def test_a_case_that_would_not_fit_is_not_started(tmp_path: Path) -> None:
    clock, record, ran = Clock(), record_at(tmp_path / "r.json"), []

    def case(name: str, seconds: float):
        def run():
            ran.append(name)
            clock.now += seconds
            return {"x": seconds}

        return run

    part = {"1": case("1", 200), "2": case("2", 100), "3": case("3", 200), "4": case("4", 1)}
    assert checks.run_part("p", part, record, limit_s=480, again=False, clock=clock) == []
    assert ran == ["1", "2"]  # 300 s are gone, and a case may take 200 s
    checks.run_part("p", part, record, limit_s=480, again=False, clock=clock)
    assert ran == ["1", "2", "3", "4"]


def test_cut_off_loses_one_case_and_an_error_is_repeated(tmp_path: Path) -> None:
    path, ran = tmp_path / "r.json", []

    def broken():
        ran.append("broken")
        raise RuntimeError("no kernel")

    def cut_off():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checks.run_part("p", {"good": lambda: {"x": 1.5}, "broken": broken, "cut": cut_off}, record_at(path),
                        limit_s=480, again=False)  # fmt: skip
    stored = json.loads(path.read_text())["parts"]["p"]
    assert (stored["good"]["x"], stored["good"]["machine"]) == (1.5, "Card")
    assert "no kernel" in stored["broken"]["error"]
    assert "cut" not in stored
    errors = checks.run_part("p", {"good": cut_off, "broken": broken}, record_at(path), limit_s=480, again=False)
    assert ran == ["broken", "broken"]
    assert errors == ["p/broken: RuntimeError('no kernel')"]
    assert "| good | 1.5 |" in checks.table(record_at(path))
