"""The cost of offloading activations: FLOPs that could be computed while a byte moves there or back."""

import torch

from modelwright.ops.microbenchmark import seconds_of
from modelwright.train.memory.offload import Store

NUM_TENSORS, TENSOR_BYTES = 32, 8 * 2**20


def measure_flops_per_byte(store: Store, device: torch.device, flops_per_s: float) -> float:
    """FLOPs that could be computed while a byte moves to this store. flops_per_s: of a training step. Files pass
    through the page cache, as they do in training.
    """
    tensors = [torch.ones(TENSOR_BYTES // 4, device=device) for _ in range(NUM_TENSORS)]

    def move_all() -> None:
        fetches = [store.put(one) for one in tensors]
        for fetch in reversed(fetches):
            fetch()

    return flops_per_s * seconds_of(move_all, device) / (2 * NUM_TENSORS * TENSOR_BYTES)
