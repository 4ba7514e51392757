"""Selects the units to update: those with the strongest signals, and some of all others, so that none is excluded for
good.

The signal of a unit that is not selected dates from its last selection. It would never change, and a unit that was weak
once would be excluded forever (as with a published mask that is repeatedly multiplied by the next one: `shrunk_mask`).
Two mechanisms bring it back: every selection that skips it adds its signal once more, because what it misses
accumulates, and a share of the slots is drawn at random from all units that have none.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from modelwright.core.seeds import derive_seed


class Selector:
    """Selects among `num_units`. Units without a signal come before all others, in random order."""

    def __init__(self, num_units: int, *, seed: int, name: str, regrowth: float, feedback: bool) -> None:
        self.seed = seed
        self.name = name
        self.regrowth = regrowth
        self.feedback = feedback
        self.signals = torch.full((num_units,), math.inf)
        self.passed_over = torch.zeros(num_units)
        self.chosen = torch.ones(num_units, dtype=torch.bool)

    @property
    def num_units(self) -> int:
        return len(self.signals)

    def refresh(self, step: int, share: float, measured: Tensor | None) -> Tensor:
        """Select anew: the numbers of the selected units, in increasing order. measured: signals [num_units], of which
        those of the present selection are used; None selects at random.
        """
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "units", self.name, step))
        places = max(1, round(share * self.num_units))
        if measured is None:
            return self._take(torch.randperm(self.num_units, generator=draw)[:places])
        fresh = self.chosen & measured.isfinite()
        self.signals = torch.where(fresh, measured.to(self.signals), self.signals)
        worth = self.signals * (1.0 + self.passed_over) if self.feedback else self.signals
        worth = torch.where(worth.isinf(), torch.full_like(worth, torch.finfo(worth.dtype).max), worth)
        order = torch.randperm(self.num_units, generator=draw)  # units that are worth the same come in random order
        order = order[worth[order].argsort(descending=True, stable=True)]
        num_drawn = min(round(self.regrowth * places), self.num_units - places)
        rest = order[places - num_drawn :]
        drawn = rest[torch.randperm(len(rest), generator=draw)[:num_drawn]]
        return self._take(torch.cat([order[: places - num_drawn], drawn]))

    def _take(self, units: Tensor) -> Tensor:
        self.chosen = torch.zeros_like(self.chosen).index_fill_(0, units, True)
        self.passed_over = torch.where(self.chosen, torch.zeros_like(self.passed_over), self.passed_over + 1.0)
        return self.indices()

    def indices(self) -> Tensor:
        """The present selection, in increasing order."""
        return self.chosen.nonzero()[:, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"signals": self.signals, "passed_over": self.passed_over, "chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.signals, self.passed_over, self.chosen = (
            state[name].clone() for name in ("signals", "passed_over", "chosen")
        )


Signal = Literal["gradient", "momentum"]


def moment_signal(state: dict[str, Any], signal: Signal, betas: tuple[float, float], eps: float) -> Tensor | None:
    """Signal per element of a parameter, from its Adam state; None before its first update. `gradient`: the squared
    gradient, as a running average; `momentum`: the squared share of the gradients that points one way, m^2 / v, 1 if
    all gradients were equal and near 0 if they are noise. Both with Adam's bias correction.
    """
    if "exp_avg_sq" not in state or not float(state["step"]):
        return None
    num_updates = float(state["step"])
    square = state["exp_avg_sq"] / (1.0 - betas[1] ** num_updates)
    if signal == "gradient":
        return square
    mean = state["exp_avg"] / (1.0 - betas[0] ** num_updates)
    return mean.square() / (square + eps * eps)


def shrunk_mask(mask: Tensor, signal: Tensor, share: float) -> Tensor:
    """The published pseudo-code, kept as a warning: the new mask is the old one times the strongest units now. A unit
    that has left it never returns, and from one refresh to the next the mask can only lose units.
    """
    strongest = torch.zeros_like(mask).index_fill_(0, signal.topk(max(1, round(share * len(signal)))).indices, True)
    return mask & strongest
