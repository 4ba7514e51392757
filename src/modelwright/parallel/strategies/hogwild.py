"""Hogwild!: the processes of one host train one model in shared memory, without waiting for each other.

(Recht, Re, Wright and Niu 2011.) Each process takes the number of its next update from a shared counter, copies the
weights, computes the gradient of that whole batch on its copy, and applies it to the shared weights and optimizer
states without a lock: two processes that write the same element at the same moment may lose one of the two changes.
Between reading and writing the weights other processes have made some updates (the staleness, n - 1 on average with n
processes); a compensation of the gradient can be passed in.

Exact: every number is drawn once, by one process. All processes meet at a stop that the trainer requests, when every
update drawn so far has been applied, and leave it with equal weights. A checkpoint made there is that of a synchronous
run and loads into one. Not exact: the order in which updates reach the weights, so no two runs end with the same bits.

The optimizer's states are shared as well. With separate states per process the momentum sees one gradient in n and
reaches n times as far back: 4 processes, 300 steps of a small model, held-out loss 5.02, 5.00 and 5.08 with shared
states, 5.10, 5.22 and 5.13 with own ones (three seeds; 4.40 to 4.65 without staleness). A checkpoint would also need n
of them.
"""

import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelwright.core.compatibility import GRADIENT_SUMS, OWN_WEIGHTS, PROMPT_GRADIENTS, SYNCHRONOUS_UPDATES
from modelwright.core.config import ModelwrightError
from modelwright.ops.dtensor import TensorView
from modelwright.parallel.mesh import World
from modelwright.parallel.strategies.shared_memory import make_states, share, shared_file
from modelwright.parallel.strategy import Compensate, Done, Replica, Strategy, Unscale

SLOTS = 256
"""Most updates between two meetings, and reports that are kept for processes that have not read them."""
SLOT_BYTES = 16 * 2**10
POLL_S = 0.0005
POLLS_PER_CHECK = 100
"""Polls of a waiting process between two checks that the others are alive."""
_DRAWN, _MADE, _STOPPED_PERIOD, _STOPPED_AT = range(4)
"""Places of the counters: updates drawn, updates made, the last period in which drawing was stopped, and where."""


class SharedCounters:
    """One process's view of the counters of updates that were drawn and applied, and their reports, in shared memory.

    The kernel's record locks guard the counters, and show which processes are alive: it releases those of a process
    that has ended, for any reason. `num_heard`: updates whose reports it has read, and the number
    of the next one in order.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        numbers = torch.zeros(4 + 2 * SLOTS, dtype=torch.int64)
        shared, texts = share(world, [numbers, torch.zeros(SLOTS, SLOT_BYTES, dtype=torch.uint8)])
        self._counters, self._written, self._lengths = (part.numpy() for part in shared.split([4, SLOTS, SLOTS]))
        self._texts = texts.numpy()
        # Byte 0 guards the counters; byte 1 + r is locked by process r as long as it lives.
        with shared_file(world, 1 + world.size) as path:
            self._file = os.open(path, os.O_RDWR)
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 1 + world.rank)
        self._period = self._limit = self.num_heard = 0

    @property
    def num_made(self) -> int:
        return int(self._counters[_MADE])

    def close(self) -> None:
        os.close(self._file)

    def begin(self, step: int) -> None:
        """Makes `step` the next number."""
        self.num_heard = step
        if self.world.is_first:
            self._counters[_DRAWN] = self._counters[_MADE] = step
            self._written[:] = -1
        self.meet()

    def open(self, first: int, last: int) -> None:
        """Starts a period in which the numbers from `first` to below `last` are drawn; the same on all processes."""
        assert first == self.num_heard, "the trainer and the counters disagree about how many updates were made"
        self._period += 1
        self._limit = last

    def draw(self) -> int | None:
        """Draws the next number; None if the period's numbers are used up or drawing was stopped."""
        with self._locked():
            number = int(self._counters[_DRAWN])
            if number >= self._end():
                return None
            self._counters[_DRAWN] = number + 1
        return number

    def stop_drawing(self) -> None:
        """Stops drawing in this period on all processes."""
        with self._locked():
            if self._counters[_STOPPED_PERIOD] != self._period:
                self._counters[_STOPPED_AT] = self._counters[_DRAWN]
                self._counters[_STOPPED_PERIOD] = self._period

    def publish(self, number: int, report: object) -> None:
        """Counts an update as applied and publishes its report."""
        text = json.dumps(report).encode()
        if len(text) > SLOT_BYTES:
            raise ValueError(f"the report of update {number} has {len(text)} bytes; the limit is {SLOT_BYTES}")
        slot = number % SLOTS
        self._texts[slot, : len(text)] = memoryview(text)
        with self._locked():
            self._lengths[slot] = len(text)
            self._written[slot] = number
            self._counters[_MADE] += 1

    def news(self) -> Iterator[Any]:
        """Yields the reports that this process has not read yet, in order, up to the first gap."""
        while True:
            slot = self.num_heard % SLOTS
            with self._locked():
                if self._written[slot] != self.num_heard:
                    return
                text = self._texts[slot, : self._lengths[slot]].tobytes()
            self.num_heard += 1
            yield json.loads(text)

    def wait_for_all(self) -> Iterator[Any]:
        """Yields `news` until all updates of this period are applied. Raises `ModelwrightError` if a process ended."""
        for attempt in itertools.count(1):
            yield from self.news()
            with self._locked():
                end = self._end()
            if self.num_heard >= end:
                return
            if attempt % POLLS_PER_CHECK == 0 and (lost := self._lost()):
                raise self._loss(lost)
            time.sleep(POLL_S)

    def meet(self) -> None:
        """Waits until all processes have arrived."""
        try:
            self.world.barrier()
        except RuntimeError as error:
            raise self._loss(self._lost()) from error

    def _end(self) -> int:
        stopped = self._counters[_STOPPED_PERIOD] == self._period
        return min(self._limit, int(self._counters[_STOPPED_AT])) if stopped else self._limit

    def _lost(self) -> list[int]:
        """Ranks of the processes that have ended: their locks can be taken."""
        lost = []
        for rank in range(self.world.size):
            if rank == self.world.rank:
                continue
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + rank)
            except OSError:
                continue
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + rank)
            lost.append(rank)
        return lost

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _loss(self, lost: list[int]) -> ModelwrightError:
        ranks = ", ".join(map(str, lost)) or "unknown"
        return ModelwrightError(
            f"a process that trains on the shared weights has ended (rank {ranks}); updates are complete up to "
            f"{self.num_heard}; run the same command again to resume from the last checkpoint"
        )


class Hogwild(Strategy):
    """The strategy of one of the processes that share a model; all of them on one host.

    replica: on a mesh of this process alone. world: all processes. encode, decode: convert the result of a step to JSON
    values and back, for the other processes. Raises `ConfigError` if the processes are not on one host. If one process
    is lost, the run ends with a `ModelwrightError` on the others.
    """

    is_synchronous: ClassVar[bool] = False
    needs = frozenset[str]()
    breaks = frozenset({SYNCHRONOUS_UPDATES, PROMPT_GRADIENTS, GRADIENT_SUMS, OWN_WEIGHTS})

    def __init__(
        self,
        replica: Replica,
        world: World,
        *,
        compensate: Compensate | None = None,
        encode: Callable[[Any], Any] = lambda result: result,
        decode: Callable[[Any], Any] = lambda values: values,
    ) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self.world = world
        self.compensate = compensate
        self.encode = encode
        self.decode = decode
        self._counters = SharedCounters(world)
        self._parameters: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._shared: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._uncounted = 0
        self._made_when_read = self._staleness = 0

    def begin(self, step: int, num_steps: int) -> None:
        """Moves everything that the optimizer changes into shared memory; its step counts follow the update numbers."""
        optimizer = self.replica.optimizer
        make_states(optimizer)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        places = [(optimizer.state[p], key) for p in self._parameters for key in optimizer.state[p] if key != "step"]
        self._counts = [optimizer.state[p]["step"] for p in self._parameters if "step" in optimizer.state[p]]
        # Updates that were skipped count as steps of the run but not of the optimizer.
        self._uncounted = step - int(self._counts[0]) if self._counts else 0
        self._copies = [p.data for p in self._parameters]
        states = [state[key] for state, key in places]
        shared = share(self.world, [*self._copies, *states])
        self._shared = shared[: len(self._copies)]
        for (state, key), tensor in zip(places, shared[len(self._copies) :], strict=True):
            state[key] = tensor
        self._counters.begin(step)

    def steps(
        self, one_step: Callable[[int], Done], first: int, last: int, interrupted: Callable[[], bool]
    ) -> Iterator[Done]:
        self._counters.open(first, min(last, first + SLOTS))
        while (number := self._counters.draw()) is not None:
            self._read_weights(number)
            self._counters.publish(number, self.encode(one_step(number)))
            if interrupted():
                self._counters.stop_drawing()
            yield from map(self.decode, self._counters.news())
        yield from map(self.decode, self._counters.wait_for_all())
        self._read_weights(self._counters.num_heard)
        self._counters.meet()

    def reduce_gradients(self, unscale: Unscale) -> list[TensorView]:
        """Compensates the gradients; later changes to the parameters apply to the shared ones."""
        gradients = self.replica.gradients()
        unscale(gradients)
        views = self.replica.views_of(gradients)
        self._staleness = self._counters.num_made - self._made_when_read
        if self.compensate is not None:
            own = [p.grad for p in self._parameters if p.grad is not None]
            self.compensate(own, self._shared, self._copies)
        for parameter, weight in zip(self._parameters, self._shared, strict=True):
            parameter.data = weight
        return views

    def grad_norm(self, gradients: list[Tensor]) -> Tensor | float:
        return self.replica.norm(gradients)

    def optimizer_step(self) -> None:
        self.replica.optimizer.step()

    def metrics(self) -> Mapping[str, float]:
        return {"worker": self.world.rank, "staleness": self._staleness}

    def close(self) -> None:
        self._counters.close()

    @torch.no_grad()
    def _read_weights(self, number: int) -> None:
        """Refreshes this process's copy for update `number`."""
        self._made_when_read = self._counters.num_made
        torch._foreach_copy_(self._copies, self._shared)  # pyright: ignore
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy
        for count in self._counts:
            count.fill_(number - self._uncounted)
