"""What makes a step repeatable: its random streams, and sums in one order."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, which queues a stack trace for every kind of device that is absent (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `seed_generators` seeds."""
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def repeatable_convolutions() -> Generator[None]:
    """Within the block cuDNN sums gradients of convolutions in the same order in every run, which the fastest of its
    algorithms do not.
    """
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
