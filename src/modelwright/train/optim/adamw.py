"""AdamW whose states take less of the device's memory: in 8 bits (Dettmers et al. 2022, block by block), in BF16 with
stochastic rounding, or in host memory (ZeRO-Offload: Ren et al. 2021).

Small states take 2.03 or 4 bytes per parameter instead of 8. A state is unpacked, updated by AdamW's formula in FP32
and packed again, one parameter at a time. From outside the states are FP32. ScaleBlocks and random bits follow the
position in the whole parameter, whoever holds it, so every layout makes the same updates. Packing an unpacked state
again changes no bit, so a checkpoint is lossless, and any layout or another AdamW can resume from it.

For states on the host, gradients are copied there, the host computes AdamW's step, and the step is copied back: 4 bytes
each way per parameter and update. Weights stay on the accelerator, where weight decay is applied.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from modelwright.core.config import derive_seed
from modelwright.ops.dtensor import TensorView, as_dtensor_like, local, max_over_shards, view_of


@dataclass(eq=False)
class StatesElsewhere(MutableMapping[Tensor, dict[str, Any]]):
    """`Optimizer.state` of an optimizer that keeps its states in another form or place. known: parameters that have
    states; shown: the states of one, raises `KeyError`; take: sets them, or removes them for None.
    """

    known: Callable[[], Collection[Tensor]]
    shown: Callable[[Tensor], dict[str, Any]]
    take: Callable[[Tensor, Mapping[str, Any] | None], None]

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self.shown(parameter)

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self.take(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self.take(parameter, None)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.known())

    def __len__(self) -> int:
        return len(self.known())


BLOCK = 256
"""Elements that share a scale."""
States = Literal["int8", "bf16"]


@dataclass(frozen=True)
class Packed:
    """A state in 8 bits, arranged by `ScaleBlocks`, or in BF16, in its own shape and without scales."""

    codes: Tensor
    scales: Tensor | None = None


class ScaleBlocks:
    """Groups the elements of this rank's part of a parameter that share a scale: `BLOCK` consecutive ones of the whole
    parameter.

    If every part has whole blocks, codes are [blocks, BLOCK], zero-padded, and scales [blocks, 1]. If some are cut,
    codes are flat, scales are those of all blocks from this rank's first to its last, and their maxima are taken over
    the ranks that have the rest.
    """

    def __init__(self, sharded: Tensor, *, are_cut: bool = False) -> None:
        self.sharded = sharded
        self.are_cut = are_cut
        if are_cut:
            view = view_of("", sharded)
            self._num = -(-view.full_shape.numel() // BLOCK)
            self._block_of = view.positions().reshape(-1).div_(BLOCK, rounding_mode="floor")
            ends = self._block_of[[0, -1]].tolist() if self._block_of.numel() else (0, -1)
            self._first, self._end = ends[0], ends[1] + 1

    def arrange(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)
        return flat if self.are_cut else F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)

    def maxima(self, arranged: Tensor) -> Tensor:
        """The largest of each block, of arranged values that are not negative."""
        if not self.are_cut:
            return arranged.amax(dim=1, keepdim=True)
        largest = arranged.new_zeros(self._num).scatter_reduce_(0, self._block_of, arranged, "amax")
        # A copy: a slice would keep the scales of the whole parameter in memory.
        return max_over_shards(largest, self.sharded)[self._first : self._end].clone()

    def spread(self, scales: Tensor) -> Tensor:
        """The scale of each arranged element."""
        return scales[self._block_of - self._first] if self.are_cut else scales

    def restore(self, arranged: Tensor, shape: torch.Size) -> Tensor:
        return arranged.view(-1)[: shape.numel()].view(shape)


def pack_signed(values: Tensor, blocks: ScaleBlocks) -> Packed:
    """Packs to int8: sign and square root of the magnitude in 127 levels of the block's largest, fine near zero."""
    arranged = blocks.arrange(values)
    scales = blocks.maxima(arranged.abs())
    parts = (arranged.abs() / blocks.spread(scales).clamp(min=torch.finfo(torch.float32).tiny)).sqrt_()
    return Packed((parts * 127.0).round_().mul_(arranged.sign()).to(torch.int8), scales)


def unpack_signed(packed: Packed, shape: torch.Size, blocks: ScaleBlocks) -> Tensor:
    assert packed.scales is not None
    parts = packed.codes.float() / 127.0
    return blocks.restore(parts * parts.abs() * blocks.spread(packed.scales), shape)


def pack_square(values: Tensor, blocks: ScaleBlocks) -> Packed:
    """Packs to uint8: the fourth root in 255 levels of the block's largest; positive values, as divisors, stay so."""
    arranged = blocks.arrange(values)
    scales = blocks.maxima(arranged)
    parts = (arranged / blocks.spread(scales).clamp(min=torch.finfo(torch.float32).tiny)).sqrt_().sqrt_()
    codes = (parts * 255.0).round_().clamp_(min=1.0)
    return Packed(torch.where(arranged > 0, codes, 0.0).to(torch.uint8), scales)


def unpack_square(packed: Packed, shape: torch.Size, blocks: ScaleBlocks) -> Tensor:
    assert packed.scales is not None
    parts = packed.codes.float() / 255.0
    return blocks.restore(parts.square_().square_() * blocks.spread(packed.scales), shape)


def random_16_bits(view: TensorView, seed: int) -> Tensor:
    """Draws for each element of a part a number below 2^16, int32, that depends only on its position in the whole
    tensor and on the seed: MurmurHash3's finalizer (Appleby 2011) of both. Products wrap around, as in the original.
    """
    bits = view.positions(torch.int32).mul_(_signed(0x9E3779B1)).add_(_signed(seed & 0xFFFFFFFF))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # >> keeps the sign, the original's does not
        bits *= _signed(factor)
    return bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _signed(value: int) -> int:
    """The int32 with these 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds to BF16, up or down with probabilities that preserve the mean; values that BF16 can represent are
    unchanged. noise: 16 random bits for each value, int32.
    """
    # -65536 is 0xFFFF0000: BF16 is the upper half of FP32. The sum may carry over to infinity, as rounding up does.
    rounded = ((values.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class LowBitAdamW(Optimizer):
    """AdamW with the `Optimizer` interface; `state` reads and takes FP32 tensors, like AdamW's.

    names: of the parameters in the whole model. The random bits of `bf16` are a function of a parameter's name, the
    step and the position in the whole parameter.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        names: Mapping[Tensor, str],
        states: States = "int8",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__([{**group} for group in groups], defaults)
        self.states: States = states
        self.names = names
        self.packed: dict[Tensor, tuple[Tensor, Packed, Packed]] = {}
        self._are_cut: dict[Tensor, bool] = {}
        self.state = StatesElsewhere(lambda: self.packed, self._shown, self._take)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have gradients."""
        changed = ((p, group) for group in self.param_groups for p in group["params"] if p.grad is not None)
        for parameter, group in changed:
            gradient, weight, (beta_1, beta_2) = local(parameter.grad), local(parameter), group["betas"]
            step, first, second = self.unpacked(parameter)
            step = step + 1
            first.lerp_(gradient.float(), 1 - beta_1)
            second.mul_(beta_2).addcmul_(gradient.float(), gradient.float(), value=1 - beta_2)
            self.pack(parameter, step, first, second)  # before `second` becomes its root below
            count = float(step)
            root = second.sqrt_().div_(math.sqrt(1 - beta_2**count)).add_(group["eps"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(first.to(weight.dtype), root.to(weight.dtype), value=-group["lr"] / (1 - beta_1**count))

    def unpacked(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step and FP32 moments of this rank's shard; zeros for a parameter before its first update."""
        weight = local(parameter)
        if parameter not in self.packed:
            zeros = torch.zeros_like(weight, dtype=torch.float32)
            return torch.zeros(()), zeros, zeros.clone()
        step, first, second = self.packed[parameter]
        if self.states == "bf16":
            return step, first.codes.float(), second.codes.float()
        blocks = self._blocks(parameter)
        return step, unpack_signed(first, weight.shape, blocks), unpack_square(second, weight.shape, blocks)

    def pack(self, parameter: Tensor, step: Tensor, first: Tensor, second: Tensor) -> None:
        """Stores these FP32 moments of this rank's shard. Called on all ranks that hold a part of the parameter."""
        if self.states == "int8":
            blocks = self._blocks(parameter)
            self.packed[parameter] = step, pack_signed(first, blocks), pack_square(second, blocks)
            return
        name = self.names[parameter]
        view = view_of(name, parameter)
        noise = (random_16_bits(view, derive_seed(int(step), name, moment)) for moment in ("first", "second"))
        rounded = [Packed(round_stochastically(moment, next(noise))) for moment in (first, second)]
        self.packed[parameter] = step, rounded[0], rounded[1]

    def _shown(self, parameter: Tensor) -> dict[str, Any]:
        """The states in AdamW's form: step, exp_avg and exp_avg_sq, FP32, laid out like the parameter."""
        if parameter not in self.packed:
            raise KeyError(parameter)
        step, first, second = self.unpacked(parameter)
        moments = {"exp_avg": as_dtensor_like(parameter, first), "exp_avg_sq": as_dtensor_like(parameter, second)}
        return {"step": step, **moments}

    def _take(self, parameter: Tensor, state: Mapping[str, Any] | None) -> None:
        if state is None:
            del self.packed[parameter]
            return
        first, second = (local(state[name]).float() for name in ("exp_avg", "exp_avg_sq"))
        self.pack(parameter, torch.as_tensor(state["step"]).float().cpu(), first, second)

    def _blocks(self, parameter: Tensor) -> ScaleBlocks:
        """The blocks of a parameter, which are cut if the layout cuts one on any rank. The first call for a parameter
        is collective, on all ranks that hold a part of it.
        """
        if parameter not in self._are_cut:
            view, is_cut = view_of("", parameter), False
            divided = [dim for dim, part in enumerate(view.index) if part.stop - part.start < view.full_shape[dim]]
            if divided:
                # Consecutive elements of the part run over the last divided dimension and those behind it.
                dim = divided[-1]
                inner, part = math.prod(view.full_shape[dim + 1 :]), view.index[dim]
                first, last, full = part.start * inner, part.stop * inner, view.full_shape[dim] * inner
                ends_whole = last % BLOCK == 0 or (dim == 0 and last == full)
                is_cut = first < last and not (first % BLOCK == 0 and ends_whole and (dim == 0 or full % BLOCK == 0))
            if isinstance(parameter, DTensor):
                is_cut = bool(max_over_shards(torch.tensor(float(is_cut), device=view.tensor.device), parameter))
            self._are_cut[parameter] = is_cut
        return ScaleBlocks(parameter, are_cut=self._are_cut[parameter])


HOST = torch.device("cpu")


class OffloadedAdamW(Optimizer):
    """AdamW with the `Optimizer` interface: parameter groups of `params` and `weight_decay`, states by parameter,
    `step`. Gives AdamW's weights up to the rounding of one addition.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__([{**group} for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._steps = {parameter: _host_buffer(local(parameter)) for parameter in parameters}
        self._gradients: dict[Tensor, Tensor] = {}
        on_host = [{"params": [self._steps[parameter] for parameter in group["params"]]} for group in self.param_groups]
        # It updates the steps, which start each update at zero; decay needs the weights, so it is applied to them.
        self._inner = AdamW(on_host, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self.state = StatesElsewhere(  # pyright: ignore[reportAttributeAccessIssue]
            lambda: [p for p, step in self._steps.items() if self._inner.state.get(step)], self._shown, self._take
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have gradients."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
            for parameter in group["params"]:
                self._steps[parameter].zero_()
                self._steps[parameter].grad = None
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    if parameter not in self._gradients:
                        self._gradients[parameter] = _host_buffer(gradient)
                    on_host = self._gradients[parameter].copy_(gradient, non_blocking=True)
                    self._steps[parameter].grad = on_host
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the copies must have arrived before the host reads them
        self._inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = local(parameter)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(self._steps[parameter].to(weight.device, non_blocking=True))

    def _shown(self, parameter: Tensor) -> dict[str, Any]:
        """The host's states of a parameter, sharing memory, laid out like it. Raises `KeyError` before a step."""
        own = self._inner.state.get(self._steps[parameter])
        if not own:
            raise KeyError(parameter)
        return {name: value if name == "step" else as_dtensor_like(parameter, value) for name, value in own.items()}

    def _take(self, parameter: Tensor, state: Mapping[str, Any] | None) -> None:
        """Moves set states to the host at once, so that a resumed run needs no more memory; None removes them."""
        step = self._steps[parameter]
        self._inner.state.pop(step, None)
        if state is not None:
            self._inner.state[step] = {name: local(value).to(HOST).clone() for name, value in state.items()}


def _host_buffer(like: Tensor) -> Tensor:
    # Pinned, because only copies to pinned memory can overlap with the accelerator's work.
    return torch.zeros(like.shape, dtype=like.dtype, device=HOST, pin_memory=like.is_cuda)
