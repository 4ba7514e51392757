"""Messages of any length from every rank to every rank, and what they cost. Knows nothing about their content."""

import torch
from torch import Tensor

from modelwright.parallel.mesh import World


def gather_bytes(world: World, message: Tensor) -> tuple[list[Tensor], int]:
    """The messages [bytes, uint8, on the CPU] of all ranks in their order, and the bytes that this rank sent.

    Collectives want equal lengths: lengths cross first (8 bytes), then every message padded to the longest. In a ring
    all-gather a rank passes on n - 1 messages, each of that length.
    """
    lengths = world.all_gather(torch.tensor(len(message), device=world.device)).tolist()
    longest = max(lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=world.device)
    padded[: len(message)] = message.to(world.device)
    gathered = world.all_gather(padded).cpu() if longest else padded.cpu().expand(world.size, 0)
    messages = [row[:length] for row, length in zip(gathered, lengths, strict=True)]
    return messages, (world.size - 1) * (8 + longest)
