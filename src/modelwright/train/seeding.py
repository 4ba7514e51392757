"""Random streams of a step."""

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, which queues a stack trace for every kind of device that is absent (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
