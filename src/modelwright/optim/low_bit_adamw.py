"""AdamW with small states: 8 bits (Dettmers et al. 2022, block by block) or BF16 with stochastic rounding.

2.03 or 4 bytes per parameter instead of 8. A state is unpacked, updated by AdamW's formula in FP32 and packed again,
one parameter at a time. From outside the states are FP32. Packing an unpacked state again changes no bit, so a
checkpoint is lossless and independent of blocks, and any layout or another AdamW can resume from it.
"""

import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from modelwright.ops.dtensor import as_dtensor_like, local

BLOCK = 256
"""Elements that share a scale."""
States = Literal["int8", "bf16"]


@dataclass(frozen=True)
class Packed:
    """A state in 8 bits: codes [blocks, BLOCK] and scales [blocks, 1], or in BF16, with its own shape and no scales."""

    codes: Tensor
    scales: Tensor | None = None


def pack_signed(values: Tensor) -> Packed:
    """int8: the sign and the square root of the magnitude in 127 levels relative to the block's largest, fine near
    zero.
    """
    blocks = _blocks(values)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    parts = (blocks.abs() / scales.clamp(min=torch.finfo(torch.float32).tiny)).sqrt_()
    return Packed((parts * 127.0).round_().mul_(blocks.sign()).to(torch.int8), scales)


def unpack_signed(packed: Packed, shape: torch.Size) -> Tensor:
    assert packed.scales is not None
    parts = packed.codes.float() / 127.0
    return _shaped(parts * parts.abs() * packed.scales, shape)


def pack_square(values: Tensor) -> Packed:
    """uint8: the fourth root in 255 levels relative to the block's largest; positive values stay positive, because they
    are divisors.
    """
    blocks = _blocks(values)
    scales = blocks.amax(dim=1, keepdim=True)
    parts = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).sqrt_().sqrt_()
    codes = (parts * 255.0).round_().clamp_(min=1.0)
    return Packed(torch.where(blocks > 0, codes, 0.0).to(torch.uint8), scales)


def unpack_square(packed: Packed, shape: torch.Size) -> Tensor:
    assert packed.scales is not None
    parts = packed.codes.float() / 255.0
    return _shaped(parts.square_().square_() * packed.scales, shape)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """BF16, rounded up or down with probabilities that preserve the mean; values that BF16 can represent are
    unchanged.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class LowBitAdamW(Optimizer):
    """AdamW with the `Optimizer` interface; `state` reads and takes FP32 tensors, like AdamW's. The random bits of
    `bf16` depend on the step number alone, so that replicas of a parameter stay equal on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        states: States = "int8",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__([{**group} for group in groups], defaults)
        self.states: States = states
        self.packed: dict[Tensor, tuple[Tensor, Packed, Packed]] = {}
        self.state = _Unpacked(self)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, local(parameter.grad), group)

    def unpacked(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step and FP32 moments of this rank's shard; zeros for a parameter that has none yet."""
        weight = local(parameter)
        if parameter not in self.packed:
            zeros = torch.zeros_like(weight, dtype=torch.float32)
            return torch.zeros(()), zeros, zeros.clone()
        step, first, second = self.packed[parameter]
        if self.states == "bf16":
            return step, first.codes.float(), second.codes.float()
        return step, unpack_signed(first, weight.shape), unpack_square(second, weight.shape)

    def pack(self, parameter: Tensor, step: Tensor, first: Tensor, second: Tensor) -> None:
        """Store these FP32 moments of this rank's shard."""
        if self.states == "int8":
            self.packed[parameter] = step, pack_signed(first), pack_square(second)
            return
        draw = torch.Generator(first.device).manual_seed(int(step))
        rounded = (Packed(round_stochastically(moment, draw)) for moment in (first, second))
        self.packed[parameter] = step, *rounded  # pyright: ignore[reportArgumentType]

    def _change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        weight, (beta_1, beta_2) = local(parameter), group["betas"]
        step, first, second = self.unpacked(parameter)
        step = step + 1
        first.lerp_(gradient.float(), 1 - beta_1)
        second.mul_(beta_2).addcmul_(gradient.float(), gradient.float(), value=1 - beta_2)
        self.pack(parameter, step, first, second)
        count = float(step)
        root = second.sqrt_().div_(math.sqrt(1 - beta_2**count)).add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(first.to(weight.dtype), root.to(weight.dtype), value=-group["lr"] / (1 - beta_1**count))


class _Unpacked(MutableMapping[Tensor, dict[str, Any]]):
    """The states by parameter in AdamW's form: step, exp_avg and exp_avg_sq, FP32, laid out like the parameter."""

    def __init__(self, optimizer: LowBitAdamW) -> None:
        self.optimizer = optimizer

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if parameter not in self.optimizer.packed:
            raise KeyError(parameter)
        step, first, second = self.optimizer.unpacked(parameter)
        return {
            "step": step,
            "exp_avg": as_dtensor_like(parameter, first),
            "exp_avg_sq": as_dtensor_like(parameter, second),
        }

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        first, second = (local(state[name]).float() for name in ("exp_avg", "exp_avg_sq"))
        self.optimizer.pack(parameter, torch.as_tensor(state["step"]).float().cpu(), first, second)

    def __delitem__(self, parameter: Tensor) -> None:
        del self.optimizer.packed[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.optimizer.packed)

    def __len__(self) -> int:
        return len(self.optimizer.packed)


def _blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _shaped(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.view(-1)[: shape.numel()].view(shape)
