"""All-gather of messages of any length, and their cost."""

from torch import Tensor

from modelwright.parallel.mesh import World


def gather_bytes(world: World, message: Tensor) -> tuple[list[Tensor], int]:
    """The messages [bytes, uint8, on the CPU] of all ranks in their order, and the bytes that this rank sent.

    A rank sends its message to each of the n - 1 others, and its length (8 bytes) before.
    """
    return world.gather_bytes(message), (world.size - 1) * (8 + len(message))
