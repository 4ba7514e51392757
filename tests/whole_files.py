"""How test files are given to the processes of pytest-xdist: whole, those that start Ray one after another, and none is
lost when a process dies.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling

STARTS_RAY = (
    "packages/federated/tests/test_simulation.py", "packages/search/tests/test_ray_tune.py",
    "tests/data/test_ray_tasks.py", "tests/serve/test_deploy_ray.py",
)  # fmt: skip
"""A cluster of Ray starts a process for each core, and gives up when one takes more than half a minute to start. Two
clusters on one machine, with the other tests, took that long."""

MOST_WAITING = 2
"""A process keeps its last test until it knows the next one, so it must have more than one."""


class WholeFiles(LoadFileScheduling):
    """`--dist loadfile`, mended for a process that dies.

    xdist gives the files of such a process to the others, those that it had finished, too, and only one file for each
    test that ends. A file without a test left makes the receiver wait for ever. The test during which it died was begun
    again; it has failed, and is not.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "files that start Ray" if file in STARTS_RAY else file

    def remove_node(self, node: Any) -> str | None:
        """Take a process off; returns the test during which it died, if it did not end by itself."""
        units = self.assigned_work.pop(node)
        unfinished = [(name, test) for name, unit in units.items() for test, is_done in unit.items() if not is_done]
        if not unfinished:
            return None
        name, died_in = unfinished[0]
        units[name][died_in] = True
        self.workqueue.update({name: unit for name, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: Any) -> None:
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= MOST_WAITING:
            if self.workqueue:
                self._assign_work_unit(node)
            else:
                node.shutdown()
