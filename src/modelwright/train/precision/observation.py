"""Measurements of every part of a model between two decisions on its formats; `indicators` has the formulas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from modelwright.ops.dtensor import local
from modelwright.ops.lowp_linear import Format
from modelwright.train.precision.apply import part_of
from modelwright.train.precision.indicators import (
    GradientStats,
    Momentum,
    Observer,
    ValueSample,
    error_of,
    sum_of_squares,
)
from modelwright.train.precision.policy import PrecisionConfig

Factor = Literal["weight", "input", "gradient"]
FACTORS: tuple[Factor, ...] = ("weight", "input", "gradient")
"""The factors of a layer's three products, each of which a format rounds."""
Errors = Mapping[tuple[str, Factor, Format], float]
"""Relative errors by part, factor and format."""


@dataclass
class Period:
    """The steps since the last decision. observer: observes inputs and gradients in the measured steps."""

    observer: Observer
    losses: list[float] = field(default_factory=list)
    """Losses of all steps, skipped ones included, except those whose loss jumped."""
    run_norms: list[float] = field(default_factory=list)
    """Norms of the whole gradient, of the same steps."""
    norms: dict[str, list[float]] = field(default_factory=dict)
    """Gradient norms of each part in the measured steps."""
    overflows: dict[str, int] = field(default_factory=dict)
    """Number of non-finite steps of each part while it computed in FP16."""

    def add_loss(self, loss: float, grad_norm: float) -> None:
        self.losses.append(loss)
        self.run_norms.append(grad_norm)

    def add_overflow(self, formats: Mapping[str, Format]) -> None:
        """Counts a non-finite step against the parts that were in FP16. formats: those in force at that step."""
        for part, chosen in formats.items():
            if chosen == "fp16":
                self.overflows[part] = self.overflows.get(part, 0) + 1

    def add_norms(self, sums: Mapping[str, GradientStats]) -> None:
        for part, total in sums.items():
            self.norms.setdefault(part, []).append(total.gradient**0.5)

    def skipped_share(self, part: str) -> float:
        """Fraction of the steps that overflowed while the part was in FP16."""
        return self.overflows.get(part, 0) / len(self.losses)

    def state_dict(self) -> dict[str, Any]:
        """The state except for the observer's errors, which differ from rank to rank."""
        return {
            "losses": list(self.losses),
            "run_norms": list(self.run_norms),
            "norms": {part: list(norms) for part, norms in self.norms.items()},
            "overflows": dict(self.overflows),
        }

    @staticmethod
    def from_state_dict(state: Mapping[str, Any], observer: Observer) -> "Period":
        norms = {part: list(values) for part, values in state["norms"].items()}
        return Period(observer, list(state["losses"]), list(state["run_norms"]), norms, dict(state["overflows"]))


@dataclass(frozen=True, kw_only=True)
class PartStatistics:
    """Sums statistics of weights and gradients over the tensors of each part and over all ranks."""

    parts: Sequence[str]
    """Names of the whole model's submodules, the same on all ranks."""
    config: PrecisionConfig
    names: Mapping[Tensor, str]
    """This rank's parameters."""
    num_holders: Sequence[int]
    """Number of ranks that hold each of them, which together count it once."""
    sum_over_ranks: Callable[[Sequence[float]], list[float]]
    """Sums element by element."""

    def gradients(self) -> dict[str, GradientStats]:
        """Measures only `gradient`, the squared norm of the gradients."""
        return self._reduced(lambda parameter, gradient: GradientStats(gradient=sum_of_squares(gradient)))

    def sums(self, momentum_of: Callable[[Tensor], Momentum | None], *, loss_scale: float) -> dict[str, GradientStats]:
        """Measures all statistics, in several passes over weights, gradients and moments. momentum_of: the optimizer's
        state of a parameter, None before its first update.
        """
        return self._reduced(
            lambda parameter, gradient: GradientStats.of(
                local(parameter.detach()), gradient, momentum_of(parameter), scale=loss_scale
            )
        )

    def _reduced(self, measure: Callable[[Tensor, Tensor], GradientStats]) -> dict[str, GradientStats]:
        own = dict.fromkeys(self.parts, GradientStats())
        for (parameter, name), holders in zip(self.names.items(), self.num_holders, strict=True):
            part = part_of(name.removesuffix(".weight"))
            if part in own and parameter.grad is not None:
                own[part] = own[part].plus(measure(parameter, local(parameter.grad)), 1.0 / holders)
        flat = self.sum_over_ranks([value for sums in own.values() for value in sums.values])
        width = len(GradientStats().values)
        return {part: GradientStats(*flat[i * width : (i + 1) * width]) for i, part in enumerate(self.parts)}

    def errors(self, observer: Observer, candidates: Sequence[Format]) -> Errors:
        """Mean relative error of each format in weights (measured now), inputs and gradients (observed)."""
        keys: list[tuple[str, Factor, Format]] = [
            (part, factor, chosen) for part in self.parts for factor in FACTORS for chosen in candidates
        ]
        # Sum and count of the errors of this rank's matrices, a sample of each.
        weights: dict[tuple[str, Format], tuple[float, int]] = {}
        for parameter, name in self.names.items():
            weight, part = local(parameter.detach()), part_of(name.removesuffix(".weight"))
            if weight.dim() != 2 or not weight.numel() or part not in self.parts:
                continue
            sample = ValueSample.of(weight)
            for chosen in candidates:
                total, count = weights.get((part, chosen), (0.0, 0))
                weights[part, chosen] = total + error_of(sample, chosen, "weight", self.config), count + 1
        own = [weights.get((part, chosen), (0.0, 0)) if factor == "weight" else observer.take(part, factor, chosen)
               for part, factor, chosen in keys]  # fmt: skip
        totals = self.sum_over_ranks([float(value) for pair in own for value in pair])
        return {key: totals[2 * i] / max(1.0, totals[2 * i + 1]) for i, key in enumerate(keys)}
