"""Reading the libraries of this machine in several processes: the documents and order of reading in one."""

import json
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
    assert ids(engine=LocalProcesses(2)) == expected
