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

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelwright.core.compatibility import GRADIENT_SUMS, OWN_WEIGHTS, PROMPT_GRADIENTS, SYNCHRONOUS_UPDATES
from modelwright.ops.tensor_view import TensorView
from modelwright.parallel.mesh import World
from modelwright.parallel.shared_memory import share
from modelwright.parallel.strategies.hogwild_counters import SLOTS, SharedCounters
from modelwright.parallel.strategies.shared_memory import make_states
from modelwright.parallel.strategy import Compensate, Done, Replica, Strategy, Unscale


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

    def grad_norm(self, gradients: list[Tensor]) -> float:
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
