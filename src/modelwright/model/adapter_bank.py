"""Several adapters of one base at once: every token of a batch is computed with the adapter of its sequence.

The rows of one adapter are taken out of the batch, multiplied by its factors and put back (the grouping of S-LoRA,
Sheng et al. 2023, without its kernels), so a token costs its own adapter only, however many are loaded. The rows are
padded to a multiple for which these products do not depend on the number of rows; then neither the adapters that others
use nor those that come and go change a bit of an answer. For inference; nothing is trained.

Legend: N tokens, P rows of one adapter with padding, I inputs, O outputs, R rank.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError, ModelError
from modelwright.model.adapters import ADAPTER
from modelwright.model.decoder import Decoder
from modelwright.model.low_rank import MAGNITUDE, A, B, LowRank
from modelwright.model.peft_folder import ReadAdapter, read_adapter
from modelwright.ops.linear_gemms import multiply_add
from modelwright.ops.lowp_linear import in_float

BASE = ""
"""The name under which the model computes without an adapter."""


@dataclass(frozen=True)
class AdapterPart:
    """What an adapter does to one projection. b_OR: scale included; lengths_O: what the sum is multiplied by, DoRA's
    magnitudes over the lengths of rows; empty without DoRA.
    """

    a_RI: Tensor
    b_OR: Tensor
    lengths_O: Tensor

    def apply(self, x_PI: Tensor, out_PO: Tensor) -> Tensor:
        low_PR = in_float(out_PO.dtype, x_PI, self.a_RI)
        out_PO = multiply_add(out_PO, low_PR, self.b_OR.to(out_PO.dtype))
        return out_PO * self.lengths_O.to(out_PO.dtype) if self.lengths_O.numel() else out_PO


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that was read for one model, by projection. digest: of all its values."""

    parts: Mapping[str, AdapterPart]
    digest: str


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a step that one adapter computes. padded_P: the rows, and the first one again up to a multiple."""

    own_N: Tensor
    padded_P: Tensor


class AdapterSet:
    """The adapters of a model, by name; each has a number that no other one ever gets, so that what was computed with
    one is not taken for that of another with the same name.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._numbers: dict[str, int] = {BASE: 0}
        self._next_number = itertools.count(1)
        self._row_multiples: dict[int, int] = {}
        self.digests: dict[str, str] = {}
        """Digests of the adapters that requests may name."""
        self._rows: dict[int, AdapterRows] = {}

    @property
    def names(self) -> list[str]:
        """Those that requests may name, without the base."""
        return list(self.digests)

    def number_of(self, name: str) -> int:
        """0 for the base. Raises `ConfigError` for an unknown name."""
        if name not in self._numbers:
            known = ", ".join(self.names) or "none are loaded"
            raise ConfigError(f"adapter: {name!r} is unknown; choose from {known}, or {BASE!r} for the model itself")
        return self._numbers[name]

    def add(self, name: str, adapter: PreparedAdapter, *, row_multiple: int = 1) -> None:
        """From now on requests may name it. row_multiple: to which its rows are padded. Raises `ConfigError` for a name
        that is in use.
        """
        if name in self._numbers:
            raise ConfigError(f"adapters: the name {name!r} is in use; choose another")
        number = next(self._next_number)
        for projection, part in adapter.parts.items():
            module = self._model.projections()[projection]
            if not isinstance(module.adapter, AdapterBank) or module.adapter.rows is not self._rows:
                module.adapter = AdapterBank(self._rows)
            module.adapter.parts[number] = part
        self._numbers[name], self._row_multiples[number] = number, row_multiple
        self.digests[name] = adapter.digest

    def remove(self, name: str) -> None:
        """No request may name it any more; `drop_unused` frees it. Raises `ConfigError` for an unknown name."""
        self.number_of(name)
        if name != BASE:
            del self._numbers[name], self.digests[name]

    def drop_unused(self, in_use: Collection[int]) -> None:
        """Free the adapters that were removed and that no number in `in_use` stands for."""
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
            padding = [own[0]] * (-len(own) % self._row_multiples[number])
            self._rows[number] = AdapterRows(
                torch.tensor(own, device=device), torch.tensor(own + padding, device=device)
            )
        try:
            yield
        finally:
            self._rows.clear()


class AdapterBank:
    """The adapters of one projection by their numbers. rows: which tokens are computed with which one; its owner
    changes it from step to step.
    """

    def __init__(self, rows: Mapping[int, AdapterRows]) -> None:
        self.parts: dict[int, AdapterPart] = {}
        self.rows = rows

    def __call__(self, x: Tensor, out: Tensor, row_blocks: Callable[[], Iterable[Tensor]]) -> Tensor:
        """x [..., N, I], out [..., N, O] of the projection without bias, which is overwritten."""
        if not self.rows:
            return out
        x_NI, out_NO = x.flatten(0, -2), out.flatten(0, -2)
        for number, rows in self.rows.items():
            if number in self.parts:
                x_PI, before_PO = x_NI.index_select(0, rows.padded_P), out_NO.index_select(0, rows.padded_P)
                after_PO = self.parts[number].apply(x_PI, before_PO)
                out_NO.index_copy_(0, rows.own_N, after_PO[: len(rows.own_N)])
        return out_NO.view_as(out)


def load_adapters(model: Decoder, folders: Mapping[str, Path]) -> dict[str, PreparedAdapter]:
    """Read adapter folders for one model, by name. Raises like `prepare_adapter`, and `ConfigError` for the name of the
    model itself.
    """
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
            "adapters: need a model with floating-point weights and without adapters of its own; serve the model "
            "before it was quantized, and merge its adapters"
        )
    read = read_adapter(model, folder)
    parts = dict(_parts(model, read))
    hashed = hashlib.sha256()
    for name, part in parts.items():
        for tensor in (part.a_RI, part.b_OR, part.lengths_O):
            plain = tensor.cpu().contiguous()
            hashed.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
            hashed.update(plain.view(-1).view(torch.uint8).numpy().data)
    return PreparedAdapter(parts, hashed.hexdigest())


def _parts(model: Decoder, read: ReadAdapter) -> Iterator[tuple[str, AdapterPart]]:
    """In the format of the model."""
    like = model.norm.weight
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
        factors = adapter.to(like.device, like.dtype).requires_grad_(False).factors()
        lengths_O = b_OR.new_empty(0, dtype=like.dtype)
        if adapter.has_magnitude:
            lengths_O = factors.magnitude_O / adapter.row_lengths(projection.row_blocks(), factors)
        yield name, AdapterPart(factors.a_RI, factors.b_OR * adapter.scale, lengths_O)
