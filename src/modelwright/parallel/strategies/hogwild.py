"""Hogwild!: the processes of one host train one model in shared memory, without waiting for each other.

(Recht, Re, Wright and Niu 2011.) Each process draws the number of its next update from a shared counter, copies the
weights, computes the gradient of that whole batch on its copy, and applies it to the weights and optimizer states that
all share, without a lock: two processes that write the same element at the same moment may lose one of the two
changes. Between reading weights and changing them others have made some updates (the staleness, n - 1 on average with n
processes); a compensation of the gradient for that can be handed in.

What is exact: every number is drawn once, by one process; all processes meet at a stop that the loop asks for, when
every update drawn so far is made, and leave it with equal weights. A checkpoint made there is that of a synchronous run
and loads into one. What is not: the order in which updates reach the weights, so no two runs end with the same bits.

The optimizer's states are shared as well. With states of each process's own the momentum sees one gradient in n and
reaches n times as far back: 4 processes, 300 steps of a small model, held-out loss 5.02, 5.00 and 5.08 with shared
states, 5.10, 5.22 and 5.13 with own ones (three seeds; 4.40 to 4.65 without staleness). And a checkpoint would need n
of them.

Knows nothing about what an update does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.strategies.hogwild_counters import SLOTS, Ledger
from modelwright.parallel.mesh import Mesh, World, lay_out, single
from modelwright.parallel.optimizer_states import make_states
from modelwright.parallel.shared_memory import share
from modelwright.parallel.strategy import Done

Compensate = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]
"""(gradients, weights now, weights that the gradients belong to) -> gradients changed in place."""


class Hogwild:
    """`Turns` and `GradientTransport` of one process among those that share a model; all of them on one host.

    Use as a context manager around the run, on every process of `world` alike. Raises `ConfigError` when the processes
    are not on one host. A run ends with a `ModelwrightError` on the others when one process is lost.
    """

    divides = False

    def __init__(self, world: World, *, compensate: Compensate | None = None) -> None:
        self.mesh: Mesh = lay_out(single(world.device), ParallelConfig())
        self.world = world
        self.compensate = compensate
        self.bytes_sent = 0
        self._ledger = Ledger(world)
        self._parameters: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._shared: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._uncounted = 0
        self._made_when_read = self._staleness = 0

    def __enter__(self) -> "Hogwild":
        return self

    def __exit__(self, *error: object) -> None:
        self._ledger.close()

    def begin(self, optimizer: Optimizer, step: int) -> Optimizer:
        """Move what the optimizer changes into shared memory; its counts of steps follow the numbers of updates."""
        make_states(optimizer)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        places = [(optimizer.state[p], key) for p in self._parameters for key in optimizer.state[p] if key != "step"]
        self._counts = [optimizer.state[p]["step"] for p in self._parameters if "step" in optimizer.state[p]]
        self._uncounted = step - int(self._counts[0]) if self._counts else 0
        self._copies = [p.data for p in self._parameters]
        states = [state[key] for state, key in places]
        shared = share(self.world, [*self._copies, *states])
        self._shared = shared[: len(self._copies)]
        for (state, key), tensor in zip(places, shared[len(self._copies) :], strict=True):
            state[key] = tensor
        self._ledger.begin(step)
        return optimizer

    def updates(
        self, one_step: Callable[[int], Done], first: int, last: int, interrupted: Callable[[], bool]
    ) -> Iterator[Done]:
        self._ledger.open(first, min(last, first + SLOTS))
        while (number := self._ledger.draw()) is not None:
            self._read_weights(number)
            self._ledger.publish(number, one_step(number))
            if interrupted():
                self._ledger.stop_drawing()
            yield from self._ledger.news()
        yield from self._ledger.wait_for_all()
        self._read_weights(self._ledger.num_heard)
        self._ledger.meet()

    def part(self, gradients: list[Tensor]) -> list[Tensor]:
        return gradients

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def figures(self) -> Mapping[str, float]:
        return {"worker": self.world.rank, "staleness": self._staleness}

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Compensate the gradients; what is done to the parameters from here on is done to the shared ones."""
        self._staleness = self._ledger.num_made - self._made_when_read
        if self.compensate is not None:
            own = [p.grad for p in self._parameters if p.grad is not None]
            self.compensate(own, self._shared, self._copies)
        for parameter, weight in zip(self._parameters, self._shared, strict=True):
            parameter.data = weight

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @torch.no_grad()
    def _read_weights(self, number: int) -> None:
        """Bring this process's copy up to date, for update `number`."""
        self._made_when_read = self._ledger.num_made
        torch._foreach_copy_(self._copies, self._shared)  # pyright: ignore
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy
        for count in self._counts:
            count.fill_(number - self._uncounted)
