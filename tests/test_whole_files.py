"""When a process of pytest-xdist dies, its test has failed and the tests after it run elsewhere."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from whole_files import STARTS_RAY, WholeFiles

TESTS = ["a.py::1", "a.py::2", "a.py::3", "b.py::1", "c.py::1", "d.py::1", "e.py::1", "f.py::1"]


class Node:
    """A process: the tests that it was sent, and whether it was told that no more will come."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert indices, "an empty file would make the process wait"
        self.sent += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduler(*nodes: Node) -> WholeFiles:
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: [f"{len(nodes)}*popen"])
    result = WholeFiles(config)
    for node in nodes:
        join(result, node)
    result.schedule()
    return result


def join(files: WholeFiles, node: Any) -> None:
    files.add_node(node)
    files.add_node_collection(node, TESTS)


def finish(files: WholeFiles, node: Any, most: int = len(TESTS)) -> None:
    """Run what the process was sent, and what it is sent meanwhile."""
    for _ in range(most):
        done = {test for unit in files.assigned_work[node].values() for test, is_done in unit.items() if is_done}
        waiting = [test for test in node.sent if test not in done]
        if not waiting:
            return
        files.mark_test_complete(node, TESTS.index(waiting[0]))


def test_the_rest_of_the_files_goes_to_another_process() -> None:
    first, second = Node("gw0"), Node("gw1")
    files = scheduler(first, second)
    assert (first.sent[:3], second.sent[0]) == (["a.py::1", "a.py::2", "a.py::3"], "b.py::1")
    finish(files, first, most=1)
    assert files.remove_node(first) == "a.py::2"
    finish(files, second)
    ran = {"a.py::1", *second.sent}
    assert ran == set(TESTS) - {"a.py::2"}, "the test that ended the process is not tried again"
    assert second.shutting_down
    assert files.tests_finished


def test_a_process_in_its_place_gets_what_the_others_cannot_take() -> None:
    """A process with only one test would wait for a second one for ever."""
    first, second, third = Node("gw0"), Node("gw1"), Node("gw2")
    files = scheduler(first, second)
    second.shutdown()
    assert files.remove_node(second) is not None
    assert files.remove_node(first) == "a.py::1"
    join(files, third)
    files.schedule()
    assert third.shutting_down or len(third.sent) > 2
    finish(files, third)
    assert files.tests_finished


def test_files_that_start_ray_run_in_one_process() -> None:
    files = scheduler(Node("gw0"), Node("gw1"))
    assert len({files._split_scope(f"{file}::test_a") for file in STARTS_RAY}) == 1
    assert files._split_scope("a.py::1") == "a.py"
    root = Path(__file__).parents[1]
    starts = re.compile(r"RayTasks\(\d|ray\.init\(|cluster\W+ray_tune|START_TIMEOUT_S")
    paths = [*root.glob("tests/**/test_*.py"), *root.glob("packages/*/tests/**/test_*.py")]
    found = {str(path.relative_to(root)) for path in paths if starts.search(path.read_text(encoding="utf-8"))}
    assert found - {str(Path(__file__).relative_to(root))} == set(STARTS_RAY), "the list names every such file"


def test_a_process_that_ends_by_itself_is_no_failure() -> None:
    first, second = Node("gw0"), Node("gw1")
    files = scheduler(first, second)
    for node in (first, second, first):
        finish(files, node)
    assert first.shutting_down
    assert files.remove_node(first) is None  # pyright: ignore[reportArgumentType]
