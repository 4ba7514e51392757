"""Several adapters of one base at once: every token of a batch is computed with the adapter of its sequence.

All adapters of a projection are one: their A below each other, their B side by side. What a token's own adapter does
not own of A x is set to zero, so that rows of different adapters share two matrix products, and no row depends on which
adapters others use (the batching of S-LoRA, Sheng et al. 2023, without its kernels). For inference; nothing is trained.

Legend: N tokens, I inputs, O outputs, C ranks of all adapters together, K adapters.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from modelwright.core.errors import ConfigError
from modelwright.model.adapters import ADAPTER
from modelwright.model.decoder import Decoder
from modelwright.model.low_rank import MAGNITUDE, A, B, Factors, LowRank
from modelwright.model.peft_folder import ReadAdapter, read_adapter
from modelwright.ops.linear_gemms import multiply_add
from modelwright.ops.lowp_linear import in_float

BASE = ""
"""The name under which the model computes without an adapter."""


class AdapterChoice:
    """Which adapter each token is computed with. names: of the adapters, in their order."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.numbers = {BASE: 0, **{name: number for number, name in enumerate(names, start=1)}}
        self.of_tokens_N = torch.zeros(1, dtype=torch.long)
        """Numbers by token; one number stands for all tokens."""

    @property
    def names(self) -> list[str]:
        """The adapters, without the base."""
        return [name for name in self.numbers if name != BASE]

    def check(self, name: str) -> None:
        """Raise `ConfigError` for an unknown name."""
        if name not in self.numbers:
            known = ", ".join(self.names) or "none are loaded"
            raise ConfigError(f"adapter: {name!r} is unknown; choose from {known}, or {BASE!r} for the model itself")

    @contextmanager
    def chosen(self, names: Iterable[str], device: torch.device) -> Generator[None]:
        """Within the block tokens are computed with these adapters, one name for each token, or one for all."""
        if len(self.numbers) == 1:
            yield
            return
        before, self.of_tokens_N = self.of_tokens_N, torch.tensor([self.numbers[name] for name in names], device=device)
        try:
            yield
        finally:
            self.of_tokens_N = before


class AdapterBank(nn.Module):
    """The adapters of one projection.

    a_CI, b_OC: the factors, scales included. owners_C: the adapter that each column belongs to. lengths_KO: what each
    adapter multiplies the sum by, DoRA's magnitudes over the lengths of rows, 1 without; empty if none has DoRA.
    """

    def __init__(self, choice: AdapterChoice, a_CI: Tensor, b_OC: Tensor, owners_C: Tensor, lengths_KO: Tensor) -> None:
        super().__init__()
        self.choice = choice
        # part of no checkpoint and of no fingerprint: the model stays the one that it is
        self.register_buffer("a_CI", a_CI, persistent=False)
        self.register_buffer("b_OC", b_OC, persistent=False)
        self.register_buffer("owners_C", owners_C, persistent=False)
        self.register_buffer("lengths_KO", lengths_KO, persistent=False)
        self.a_CI: Tensor
        self.b_OC: Tensor
        self.owners_C: Tensor
        self.lengths_KO: Tensor

    def forward(self, x: Tensor, out: Tensor, row_blocks: Callable[[], Iterable[Tensor]]) -> Tensor:
        """x [..., N, I], out [..., N, O] of the projection without bias."""
        chosen_N = self.choice.of_tokens_N
        low = in_float(out.dtype, x, self.a_CI) * (self.owners_C == chosen_N[:, None])
        out = multiply_add(out, low, self.b_OC.to(out.dtype))
        return out * self.lengths_KO[chosen_N].to(out.dtype) if self.lengths_KO.numel() else out


def load_adapters(model: Decoder, folders: Mapping[str, Path]) -> AdapterChoice:
    """Load adapter folders beside each other, by name, in place; the model then computes each token with the adapter
    that the returned choice says, at first with none.

    Raises `ModelError` for a folder that does not fit the model, as `load_adapter` does, and `ConfigError` for a model
    whose projections cannot have adapters.
    """
    if not model.projections() or model.adapters.r:
        raise ConfigError(
            "adapters: need a model with floating-point weights and without adapters of its own; serve the model "
            "before it was quantized, and merge its adapters"
        )
    if BASE in folders:
        raise ConfigError(f"adapters: {BASE!r} is the name of the model itself; choose another")
    choice = AdapterChoice(folders)
    read = {name: read_adapter(model, folder) for name, folder in folders.items()}
    for name, projection in model.projections().items():
        held = {number: _one(model, one, name) for number, one in enumerate(read.values(), start=1)}
        present = {number: adapter for number, adapter in held.items() if adapter is not None}
        if present:
            projection.adapter = _bank(choice, present, projection.row_blocks, num_adapters=len(read))
    return choice


def _one(model: Decoder, read: ReadAdapter, name: str) -> LowRank | None:
    """One adapter of one projection, in the format of the model."""
    values = {own: read.values.get(f"{name}{ADAPTER}{own}") for own in (A, B, MAGNITUDE)}
    a_RI, b_OR, magnitude_O = values[A], values[B], values[MAGNITUDE]
    if a_RI is None or b_OR is None:
        return None
    like = model.norm.weight
    adapter = LowRank(
        a_RI.shape[1],
        b_OR.shape[0],
        a_RI.shape[0],
        scale=read.config.scale_of(name),
        dropout=0.0,
        has_magnitude=magnitude_O is not None,
    )
    adapter.load_state_dict({own: value for own, value in values.items() if value is not None})
    return adapter.to(like.device, like.dtype).requires_grad_(False)


@torch.no_grad()
def _bank(
    choice: AdapterChoice,
    adapters: Mapping[int, LowRank],
    row_blocks: Callable[[], Iterable[Tensor]],
    *,
    num_adapters: int,
) -> AdapterBank:
    factors: dict[int, Factors] = {number: one.factors() for number, one in adapters.items()}
    a_CI = torch.cat([one.a_RI for one in factors.values()])
    b_OC = torch.cat([factors[number].b_OR * one.scale for number, one in adapters.items()], dim=1)
    owners_C = torch.cat([torch.full((one.rank,), number, device=a_CI.device) for number, one in adapters.items()])
    lengths_KO = b_OC.new_empty(0)
    if any(one.has_magnitude for one in adapters.values()):
        lengths_KO = b_OC.new_ones(num_adapters + 1, b_OC.shape[0])
        for number, one in adapters.items():
            if one.has_magnitude:
                lengths_KO[number] = factors[number].magnitude_O / one.row_lengths(row_blocks(), factors[number])
    return AdapterBank(choice, a_CI, b_OC, owners_C, lengths_KO)
