"""One rank of a small regression in FP64 whose gradients arrive late; a script for `test_bounded_staleness`.

stale_ranks.py FOLDER: train in every case of CASES, each in one go and cut off and continued from its saved state.
Rank r writes its weights to FOLDER/<case>-rank<r>.pt and prints the bytes of each part.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from modelwright.optim.delay import compensate
from modelwright.parallel.gradient_sync import ExactTransport
from modelwright.parallel.mesh import World, join_world, world_apart
from modelwright.parallel.strategies.delayed import DelayedTransport, StalenessConfig

NUM_STEPS, RATE, RANKS = 12, 0.05, 2


@dataclass(frozen=True)
class Case:
    delay: int
    strength: float = 0.0


CASES = {"exact": Case(0), "late": Case(2), "compensated": Case(2, 10.0)}


def initial() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((4, 3), (3,), (3, 1))]


def share_of_gradient(weights: Sequence[Tensor], step: int, rank: int) -> list[Tensor]:
    """Rank's share of the gradient of a mean over 10 rows, 5 for each of two ranks."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = (torch.randn(5, width, generator=draw, dtype=torch.float64) for width in (4, 1))
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    error = torch.tanh(inputs @ leaves[0] + leaves[1]) @ leaves[2] - targets
    return list(torch.autograd.grad(error.square().sum() / 10, leaves))


def train(world: World, weights: list[Tensor], state: dict, *, case: Case, first: int, last: int) -> dict:
    """Steps `first` to below `last` on the weights in place; from and to the state of a transport."""
    with DelayedTransport(
        ExactTransport(world_apart(world)),
        StalenessConfig(delay=case.delay),
        weights=weights,
        compensate=partial(compensate, strength=case.strength) if case.strength else None,
    ) as transport:
        if state:
            transport.load_state_dict(state)
        for step in range(first, last):
            gradients = share_of_gradient(weights, step, world.rank)
            transport.reduce(gradients)
            world.sums([1.0])  # a collective of the loop's, beside those in the thread
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= RATE * gradient
        print(transport.bytes_sent)
        return transport.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with join_world(torch.device("cpu")) as world:
        for name, case in CASES.items():
            whole, cut = initial(), initial()
            train(world, whole, {}, case=case, first=0, last=NUM_STEPS)
            state = train(world, cut, {}, case=case, first=0, last=5)
            torch.save((cut, state), folder / f"state-{world.rank}.pt")
            cut, state = torch.load(folder / f"state-{world.rank}.pt")
            train(world, cut, state, case=case, first=5, last=NUM_STEPS)
            torch.save({"whole": whole, "cut": cut}, folder / f"{name}-rank{world.rank}.pt")


if __name__ == "__main__":
    main()
