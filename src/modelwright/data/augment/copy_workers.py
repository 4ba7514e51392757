"""Processes that make the copies of batches ahead of the training step."""

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from modelwright.core.errors import ModelwrightError
from modelwright.data.augment.row_copies import CopyJob, CopyRecipe, CopyResult, make_copies
from modelwright.data.workers import follow_parent

_MOST_BREAKS = 3


class CopyWorkers:
    """Makes the copies of numbered batches in `num_workers` processes, which start with the first job; 0: in this
    process, when they are taken. A process that is killed is replaced and its jobs are done again.
    """

    def __init__(self, recipe: CopyRecipe, num_workers: int) -> None:
        self.recipe = recipe
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[int, CopyJob] = {}
        self._futures: dict[int, Future[CopyResult]] = {}
        self._num_breaks = 0

    def submit(self, number: int, job: CopyJob) -> None:
        """Begin with a batch, unless the same job has been begun."""
        if not self.num_workers or self._jobs.get(number) == job:
            return
        if number in self._jobs:
            self._drop(number)
        self._jobs[number] = job
        try:
            self._begin(number)
        except BrokenProcessPool:
            self._restart()

    def take(self, number: int, job: CopyJob) -> CopyResult:
        """The copies of a batch; waits for them. What was begun for earlier batches is given up. Raises
        `ModelwrightError` if processes are killed repeatedly.
        """
        if not self.num_workers:
            return make_copies(self.recipe, job)
        for early in [one for one in self._jobs if one < number]:
            self._drop(early)
        self.submit(number, job)
        while True:
            try:
                result = self._futures[number].result()
            except BrokenProcessPool:
                self._restart()
                continue
            self._drop(number)
            return result

    def close(self) -> None:
        """End the processes; the next job starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
        self._jobs.clear()
        self._futures.clear()

    def _begin(self, number: int) -> None:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of PyTorch hold
            self._pool = ProcessPoolExecutor(self.num_workers, context, initializer=_start_worker)
        self._futures[number] = self._pool.submit(make_copies, self.recipe, self._jobs[number])

    def _restart(self) -> None:
        jobs = dict(self._jobs)
        while True:
            self._num_breaks += 1
            if self._num_breaks == _MOST_BREAKS:
                raise ModelwrightError(
                    f"processes that augment documents were killed {_MOST_BREAKS} times, perhaps for lack of memory; "
                    "lower augmentation.num_workers, or choose methods without a model"
                )
            self.close()
            self._jobs = dict(jobs)
            try:
                for number in jobs:
                    self._begin(number)
            except BrokenProcessPool:
                continue
            return

    def _drop(self, number: int) -> None:
        self._futures.pop(number).cancel()
        del self._jobs[number]


def _start_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # a method's model must not take the cores of the training
    follow_parent()
