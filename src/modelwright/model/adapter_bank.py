"""Inference with several adapters of one base at once: every token uses the adapter of its sequence.

The rows of one adapter are gathered from the batch, multiplied by its factors and written back (the grouping of S-LoRA,
Sheng et al. 2023, without its kernels), so a token costs its own adapter only, however many are loaded. The rows are
padded to a multiple for which these products do not depend on the number of rows, so that the other adapters of a batch
never change a bit of an answer.

Legend: N tokens, P rows of one adapter with padding, I inputs, O outputs, R rank.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelwright.core.config import ConfigError, ModelError
from modelwright.model.adapters import ADAPTER
from modelwright.model.decoder import Decoder
from modelwright.model.low_rank import MAGNITUDE, A, B, LowRank
from modelwright.model.peft_folder import read_adapter
from modelwright.ops.lowp_linear import in_float
from modelwright.ops.matmul import multiply_add

BASE = ""
"""The name under which the model computes without an adapter."""


@dataclass(frozen=True)
class AdapterPart:
    """Factors of an adapter for one projection."""

    # b_OR includes the scale; lengths_O is DoRA's magnitudes over the lengths of rows, empty without DoRA
    a_RI: Tensor
    b_OR: Tensor
    lengths_O: Tensor

    def apply(self, x_PI: Tensor, out_PO: Tensor) -> Tensor:
        """Returns out_PO, the projection without bias, with the adapter's product for x_PI added."""
        out_PO = multiply_add(out_PO, in_float(out_PO.dtype, x_PI, self.a_RI), self.b_OR.to(out_PO.dtype))
        return out_PO * self.lengths_O.to(out_PO.dtype) if self.lengths_O.numel() else out_PO


@dataclass(frozen=True)
class PreparedAdapter:
    """Adapter that was read for one model, by projection. digest: SHA-256 of all its values."""

    parts: Mapping[str, AdapterPart]
    digest: str


@dataclass(frozen=True)
class AdapterRows:
    """Rows of a step that one adapter computes. padded_P: these rows, then the first one again up to a multiple."""

    own_N: Tensor
    padded_P: Tensor


class AdapterSet:
    """Adapters of a model, by name."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        # Numbers are never reused: cached results of a removed adapter must not pass for those of its successor by name
        self._numbers: dict[str, int] = {BASE: 0}
        self._next_number = itertools.count(1)
        self._row_multiples: dict[int, int] = {}
        self.digests: dict[str, str] = {}
        """Digests of the adapters that requests may name."""
        self._rows: dict[int, AdapterRows] = {}

    @property
    def names(self) -> list[str]:
        """Names that requests may use, without the base."""
        return list(self.digests)

    def number_of(self, name: str) -> int:
        """Returns the number of an adapter, 0 for the base. Raises `ConfigError` for an unknown name."""
        if name not in self._numbers:
            known = ", ".join(self.names) or "none are loaded"
            raise ConfigError(f"adapter: {name!r} is unknown; choose from {known}, or {BASE!r} for the model itself")
        return self._numbers[name]

    def add(self, name: str, adapter: PreparedAdapter, *, row_multiple: int = 1) -> None:
        """Adds an adapter. row_multiple: its rows are padded to a multiple. Raises `ConfigError` for a used name."""
        if name in self._numbers:
            raise ConfigError(f"adapters: the name {name!r} is in use; choose another")
        number = next(self._next_number)
        for projection, part in adapter.parts.items():
            module = self._model.projections()[projection]
            # A bank that belongs to another set of this model is replaced
            if not isinstance(module.adapter, AdapterBank) or module.adapter.rows is not self._rows:
                module.adapter = AdapterBank(self._rows)
            module.adapter.parts[number] = part
        self._numbers[name], self._row_multiples[number] = number, row_multiple
        self.digests[name] = adapter.digest

    def remove(self, name: str) -> None:
        """Closes an adapter to new requests; `drop_unused` frees it. Raises `ConfigError` for an unknown name."""
        self.number_of(name)
        if name != BASE:
            del self._numbers[name], self.digests[name]

    def drop_unused(self, in_use: Collection[int]) -> None:
        """Free the removed adapters whose numbers are not in `in_use`."""
        kept = {*self._numbers.values(), *in_use}
        gone = [number for number in self._row_multiples if number not in kept]
        if not gone:
            return
        for module in self._model.projections().values():
            if isinstance(module.adapter, AdapterBank):
                for number in gone:
                    module.adapter.parts.pop(number, None)
        for number in gone:
            del self._row_multiples[number]

    @contextmanager
    def chosen(self, numbers: Sequence[int], device: torch.device) -> Generator[None]:
        """Within the block tokens are computed with these adapters, one number for each token."""
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            if number:
                rows.setdefault(number, []).append(row)
        for number, own in rows.items():
            padded = own + [own[0]] * (-len(own) % self._row_multiples[number])
            self._rows[number] = AdapterRows(torch.tensor(own, device=device), torch.tensor(padded, device=device))
        try:
            yield
        finally:
            self._rows.clear()


class AdapterBank:
    """Adapters of one projection by their numbers. rows: tokens of each adapter; its owner changes it every step."""

    def __init__(self, rows: Mapping[int, AdapterRows]) -> None:
        self.parts: dict[int, AdapterPart] = {}
        self.rows = rows

    def __call__(self, x: Tensor, out: Tensor, row_blocks: Callable[[], Iterable[Tensor]]) -> Tensor:
        """Add the adapters' products for x [..., N, I] to `out` [..., N, O], the projection without bias, in place."""
        if not self.rows:
            return out
        x_NI, out_NO = x.flatten(0, -2), out.flatten(0, -2)
        for number, rows in self.rows.items():
            if number in self.parts:
                part = self.parts[number]
                x_PI, out_PO = x_NI.index_select(0, rows.padded_P), out_NO.index_select(0, rows.padded_P)
                out_PO = part.apply(x_PI, out_PO)
                out_NO.index_copy_(0, rows.own_N, out_PO[: len(rows.own_N)])
        return out_NO.view_as(out)


def load_adapters(model: Decoder, folders: Mapping[str, Path]) -> dict[str, PreparedAdapter]:
    """Read adapter folders for one model, by name. Raises as `prepare_adapter` does, and `ConfigError` for `BASE`."""
    if BASE in folders:
        raise ConfigError(f"adapters: {BASE!r} is the name of the model itself; choose another")
    prepared: dict[str, PreparedAdapter] = {}
    for name, folder in folders.items():
        try:
            prepared[name] = prepare_adapter(model, folder)
        except ModelError as error:
            raise ModelError(f"adapters: {name}: {error}") from None
    return prepared


@torch.no_grad()
def prepare_adapter(model: Decoder, folder: Path) -> PreparedAdapter:
    """Read an adapter folder for a model without changing the model.

    Raises `ModelError` for a folder that does not fit the model, as `load_adapter` does, and `ConfigError` for a model
    whose projections cannot have adapters.
    """
    if not model.projections() or model.adapters.r:
        raise ConfigError(
            "adapters: need a model with floating-point weights and no attached adapters; serve the model "
            "before it was quantized, and merge its adapters"
        )
    read = read_adapter(model, folder)
    read.require_low_rank(folder)
    like, parts, digest = model.norm.weight, dict[str, AdapterPart](), hashlib.sha256()
    for name, projection in model.projections().items():
        values = {own: read.values.get(f"{name}{ADAPTER}{own}") for own in (A, B, MAGNITUDE)}
        a_RI, b_OR, magnitude_O = values[A], values[B], values[MAGNITUDE]
        if a_RI is None or b_OR is None:
            continue
        adapter = LowRank(
            a_RI.shape[1],
            b_OR.shape[0],
            a_RI.shape[0],
            scale=read.config.scale_of(name),
            dropout=0.0,
            has_magnitude=magnitude_O is not None,
        )
        adapter.load_state_dict({own: value for own, value in values.items() if value is not None})
        # The factors take the model's format before the lengths are computed, as for an adapter that is attached
        factors = adapter.to(like.device, like.dtype).requires_grad_(False).factors()
        lengths_O = b_OR.new_empty(0, dtype=like.dtype)
        if adapter.has_magnitude:
            lengths_O = factors.magnitude_O / adapter.row_lengths(projection.row_blocks(), factors)
        parts[name] = AdapterPart(factors.a_RI, factors.b_OR * adapter.scale, lengths_O)
        for tensor in (factors.a_RI, parts[name].b_OR, lengths_O):
            plain = tensor.cpu().contiguous()
            digest.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return PreparedAdapter(parts, digest.hexdigest())
