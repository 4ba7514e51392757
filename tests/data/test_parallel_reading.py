"""Work in several processes: the documents and order of reading in one, and no process for little work."""

import json
import os
import time
from typing import Any

import pytest

from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.workers import LocalProcesses


@pytest.mark.slow
def test_the_corpus_of_this_machine_is_the_same_from_processes() -> None:
    def ids(**options: Any) -> list[str]:
        config = SourceConfig(sources=("stdlib",), stdlib_fraction=0.03)
        return [document.to_json() for document in read_documents(config, report=SourceReport(), **options)]

    expected = ids()
    assert len({json.loads(line)["id"] for line in expected}) == len(expected) > 100
    assert ids(engine=LocalProcesses(2, start_after_s=0.0)) == expected


def _worker(seconds: float) -> int:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return os.getpid()


@pytest.mark.parametrize(("seconds", "num_here"), [(0.0, 8), (0.02, 3)])
def test_processes_start_only_once_the_work_has_shown_that_it_is_long(seconds: float, num_here: int) -> None:
    engine = LocalProcesses(2, start_after_s=0.05)
    workers = list(engine.map(_worker, [seconds] * 8))
    assert workers.count(os.getpid()) == num_here
    again = list(engine.map(_worker, [0.0] * 3))
    assert (os.getpid() in again) == (num_here == 8), "processes that run already are used at once"
