"""Puts the modules of an objective into the model before it is laid out."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.core.seeds import derive_seed
from modelwright.model.decoder import Decoder, StoredParameters
from modelwright.parallel.deferred import is_deferred
from modelwright.train.objective import Objective


def attach_modules(model: Decoder, objective: Objective, seed: int) -> None:
    """Make the objective's modules `model.heads`, in place, initialized from the seed, so that every rank and every
    layout starts equal. A head that is there already is kept: an earlier stage has trained it. The decoder is frozen if
    the objective does not train it.
    """
    if not objective.trains_decoder:
        model.requires_grad_(False)
        model.heads.requires_grad_(True)
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(derive_seed(seed, "heads"))  # pyright: ignore[reportUnknownMemberType]
        modules = objective.own_modules(model.config)
    added = {name: module for name, module in modules.items() if name not in model.heads}
    deferred = is_deferred(model)
    values: dict[str, Tensor] = {}
    for name, module in added.items():
        module.to(model.head_weight.dtype)
        values |= {f"heads.{name}.{key}": value.detach() for key, value in module.named_parameters()}
        model.heads[name] = module
    if deferred and model.stored is not None:
        model.stored = _WithHeads(stored=model.stored, values={name: value.clone() for name, value in values.items()})
        model.heads.to("meta")


@dataclass(frozen=True, kw_only=True)
class _WithHeads(StoredParameters):
    """Weights on disk, and values of heads in memory."""

    stored: StoredParameters
    values: Mapping[str, Tensor]

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return self.values[name][part] if name in self.values else self.stored.read(name, part)
