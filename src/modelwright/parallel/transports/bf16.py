"""Gradients in BF16 on the wire, summed in FP32. Knows nothing about losses or optimizers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modelwright.parallel.mesh import World
from modelwright.parallel.transports.feedback import Residual, flatten, write_back


class Bf16Transport:
    """A reduce-scatter by hand: every rank gets one chunk from all, adds in FP32 and sends the sum round.

    gloo's own BF16 all-reduce rounds every partial sum to 8 bits; here a value is rounded twice, whatever the number
    of ranks, and both errors are fed back: the first by the rank that rounded its share, the second by the rank that
    rounded the sum. `bytes_sent`: (n - 1) chunks of N / n BF16 values to the owners and as much for the sums, in all
    4 N (n - 1) / n bytes, half of what the exact transport sends of FP32 gradients.

    Values that are not finite reach all ranks as such and leave the residuals alone.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.residual = Residual()
        self.bytes_sent = 0

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.world.size == 1:
            self.residual.drain(gradients)
            return
        flat_N = flatten(gradients)
        left_N = self.residual.flat(gradients)
        if left_N is not None:
            flat_N += left_N
        numel, size = flat_N.numel(), self.world.size
        share_RC = torch.nn.functional.pad(flat_N, (0, -numel % size)).view(size, -1)
        rounded_RC = share_RC.bfloat16()
        sum_C = self._to_owners(rounded_RC).float().sum(dim=0)
        sums_RC = self._to_all(sum_C.bfloat16())
        write_back(sums_RC.float().view(-1)[:numel], gradients)
        if bool(sums_RC.isfinite().all()):
            error_RC = share_RC - rounded_RC.float()
            error_RC[self.world.rank] += sum_C - sums_RC[self.world.rank].float()
            self.residual.keep(error_RC.view(-1)[:numel], gradients)

    def _to_owners(self, chunks_RC: Tensor) -> Tensor:
        """Every rank's chunk of this rank's number. As bytes: not every backend knows BF16."""
        received_RC = torch.empty_like(chunks_RC)
        dist.all_to_all_single(received_RC.view(torch.uint8), chunks_RC.view(torch.uint8), group=self.world.group)
        self.bytes_sent += (self.world.size - 1) * chunks_RC[0].numel() * 2
        return received_RC

    def _to_all(self, chunk_C: Tensor) -> Tensor:
        self.bytes_sent += (self.world.size - 1) * chunk_C.numel() * 2
        return self.world.all_gather(chunk_C.view(torch.uint8)).view(torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self.residual.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residual.load_state_dict(state["residuals"])
