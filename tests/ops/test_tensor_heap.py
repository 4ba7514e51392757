"""The heap for larger tensors: places against the twin, threads, forks, pages that go back, machines without it."""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import heap_process
import pytest

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.ops import tensor_heap
from modelwright.ops.tensor_heap import SWITCH, built
from rank_processes import all_well, start_process, wait_for

linux = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None, reason="is built on Linux, by g++"
)
MIB = 2**20


def said_by(name: str, **environment: str) -> dict[str, Any]:
    """What a check of `heap_process` returns."""
    started = start_process(Path(heap_process.__file__), name, environment=environment)
    (output,) = all_well(wait_for([started]))
    return json.loads(output.splitlines()[-1])


@linux
def test_places_are_those_of_the_twin():
    said = said_by("twin")
    assert said["peak"] <= said["mapped"] < 1.3 * said["peak"]


@linux
def test_small_tensors_stay_in_the_usual_heap():
    assert said_by("small") == {"living": 0, "kept": 100}


@linux
def test_threads_that_free_what_others_made_keep_all_values():
    assert said_by("threads") == {"wrong": 0, "living": 0}


@linux
def test_a_fork_amid_an_allocation_leaves_a_heap_that_works():
    assert said_by("fork") == {"failed": 0}


@linux
def test_pages_stay_until_they_are_given_back():
    said = said_by("pages")
    assert said["freed"] > said["full"] - 10 * MIB
    assert said["returned"] < said["full"] - 190 * MIB


@linux
def test_memory_that_leaves_pytorch():
    assert all(said_by("numpy_and_pickle").values())


@linux
def test_the_variable_leaves_the_usual_heap_which_returns_larger_blocks():
    said = said_by("off", **{SWITCH: "0"})
    assert said == {"used": False, "returned": True, "figures": False}


@linux
def test_without_a_compiler_the_usual_heap_serves(tmp_path):
    said = said_by("off", CXX="no-such-compiler -O1", XDG_CACHE_HOME=str(tmp_path))
    assert said == {"used": False, "returned": True, "figures": False}


@linux
def test_a_compiler_that_is_missing_is_named_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")  # this process keeps its own heap as it is
    assert tensor_heap._library.__wrapped__() is None
    assert f"cannot be built with 'no-such-compiler'; set {SWITCH}=0" in caplog.text


def test_a_value_without_meaning_is_refused(monkeypatch):
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(ConfigError, match=f"{SWITCH}: must be 0 or 1, got 'yes'"):
        tensor_heap._library.__wrapped__()


@linux
def test_it_is_built_once(tmp_path):
    first = built(tmp_path)
    before = first.stat().st_mtime_ns
    assert built(tmp_path) == first
    assert first.stat().st_mtime_ns == before


@linux
def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ModelwrightError, match=r"cannot be built with 'false'.*CXX"):
        built(tmp_path)
