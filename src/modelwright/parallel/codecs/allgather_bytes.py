"""All-gather of messages of any length, and their cost."""

from torch import Tensor

from modelwright.parallel.mesh import World


def gather_bytes(world: World, message: Tensor) -> tuple[list[Tensor], int]:
    """The messages [bytes, uint8, on the CPU] of all ranks in their order, and the bytes that this rank sent.

    In a ring all-gather a rank forwards n - 1 messages, each padded to the longest one and preceded by its length (8
    bytes).
    """
    messages = world.gather_bytes(message)
    return messages, (world.size - 1) * (8 + max(map(len, messages)))
