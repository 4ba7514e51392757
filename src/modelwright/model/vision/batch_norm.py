"""`BatchNorm`: batch normalization (Ioffe and Szegedy 2015) with statistics over all ranks that share a batch.

Moments and norm are computed in FP32 at least, whatever the format of the input. PyTorch's synchronized batch norm
needs an accelerator, and one batch that is not finite spoils its running statistics for good.

Legend: N images, C channels, H rows, W columns, R ranks.
"""

# PyTorch leaves the types of split open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gather = Callable[[Tensor], Tensor]
"""`(own [E]) -> vectors of all ranks [R, E]`, with gradients."""


def alone(own_E: Tensor) -> Tensor:
    """`Gather` of one process."""
    return own_E[None]


class BatchNorm(nn.Module):
    """Normalizes each channel over images and pixels; in evaluation by running statistics.

    The running statistics are buffers: equal on all ranks, part of checkpoints, and unchanged by a batch whose moments
    are not finite, because the update of such a batch is skipped (an overflow in FP16). momentum: the share of a batch
    in them; as in PyTorch they use the unbiased variance.
    """

    def __init__(self, num_channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(num_channels)), nn.Parameter(torch.zeros(num_channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(num_channels))
        self.register_buffer("running_var", torch.ones(num_channels))
        self.gather: Gather = alone

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Normalizes x, in its format. N may be 0 on some ranks."""
        wide_NCHW = x_NCHW.to(torch.promote_types(x_NCHW.dtype, torch.float32))
        if not self.training:
            mean_C, var_C = self.running_mean, self.running_var
            out_NCHW = F.batch_norm(wide_NCHW, mean_C, var_C, self.weight, self.bias, training=False, eps=self.eps)
            return out_NCHW.to(x_NCHW.dtype)
        if self.gather is alone and wide_NCHW.numel() > len(self.weight):
            # One process: PyTorch's own operator reads and writes x in its format and sums in FP32 at least, where the
            # operators below keep several wide copies. It refuses a single value for each channel. With a momentum of
            # 1 it leaves the batch's own statistics in these two tensors.
            mean_C, var_C = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
            out_NCHW = F.batch_norm(
                x_NCHW, mean_C, var_C, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )  # fmt: skip
            self._track(mean_C, var_C)
            return out_NCHW
        # Counts, means and sums of squared deviations of all ranks, merged by the formula of Chan et al. 1983, which,
        # unlike the mean of squares minus the square of the mean, does not cancel
        num_channels, num_values = len(self.weight), wide_NCHW.numel() // len(self.weight)
        own_mean_C = wide_NCHW.sum((0, 2, 3)) / max(1, num_values)
        own_squares_C = (wide_NCHW - own_mean_C[:, None, None]).square().sum((0, 2, 3))
        own_E = torch.cat([own_mean_C.new_full((1,), num_values), own_mean_C, own_squares_C])
        counts_R1, means_RC, squares_RC = self.gather(own_E).split([1, num_channels, num_channels], dim=1)
        count = counts_R1.sum().clamp(min=1)
        mean_C = (counts_R1 * means_RC).sum(0) / count
        squares_C = (squares_RC + counts_R1 * (means_RC - mean_C).square()).sum(0)
        # Unbiased for the running statistics, biased for the norm, as in PyTorch
        self._track(mean_C.detach(), squares_C.detach() / (count - 1).clamp(min=1))
        scale_C = self.weight * (squares_C / count + self.eps).rsqrt()
        centered_NCHW = wide_NCHW - mean_C[:, None, None]
        return (centered_NCHW * scale_C[:, None, None] + self.bias[:, None, None]).to(x_NCHW.dtype)

    def in_evaluation(self) -> tuple[Tensor, Tensor]:
        """Factors and offsets of the channels in evaluation, [C] each."""
        factors_C = self.weight * (self.running_var + self.eps).rsqrt()
        return factors_C, self.bias - self.running_mean * factors_C

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor) -> None:
        # Selected on the device: an `if` would wait for an accelerator in every layer
        is_finite = mean_C.isfinite().all() & var_C.isfinite().all()
        for running_C, now_C in ((self.running_mean, mean_C), (self.running_var, var_C)):
            moved_C = torch.lerp(running_C, now_C.to(running_C.dtype), self.momentum)
            running_C.copy_(torch.where(is_finite, moved_C, running_C))


@contextmanager
def statistics_over(module: nn.Module, gather: Gather) -> Generator[None]:
    """Within the block all batch norms of a module use statistics over the ranks that `gather` reaches."""
    norms = [one for one in module.modules() if isinstance(one, BatchNorm)]
    for norm in norms:
        norm.gather = gather
    try:
        yield
    finally:
        for norm in norms:
            norm.gather = alone
