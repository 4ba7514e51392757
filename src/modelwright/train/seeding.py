"""Repeatable steps: their random streams, and gradient sums in one order."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, but without the stack trace that it queues for every absent kind of device (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `seed_generators` seeds."""
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def repeatable_convolutions() -> Generator[None]:
    """Within the block cuDNN sums gradients of convolutions in the same order in every run."""
    before = torch.backends.cudnn.deterministic  # the fastest of its algorithms add in any order
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
