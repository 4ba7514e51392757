"""What tells how many bits a part of the model needs, while it trains.

Fourteen indicators, of a part (the attention or the feed-forward layers of one block) unless they say otherwise:

    gradient_noise       variance of the gradient over its square, from Adam's moments (McCandlish et al. 2018)
    gradient_variance    spread of the gradient's norm over the measured steps, over its mean
    update_to_weight     size of an update over that of the weights
    overflow_share       gradients above FP16's largest value, at the present loss scale
    underflow_share      gradients below FP16's smallest, but not zero
    skipped_share        steps that were skipped for values that were not finite, while the part was in FP16
    weight_error, input_error, gradient_error
                         what a format loses of them, relative (each format has its own)
    sensitivity          relative rise of the loss when the part alone computes in a format, by trial; only of
                         formats that were tried
    loss_trend           of the run: slope of the logarithm of the loss over the decision's steps, above 0 when it rises
    norm_outliers        of the run: share of steps whose gradient norm is above thrice the median
    speed                seconds of a format over those of FP32 at the part's own shapes, measured at the start
    memory_pressure      of the machine: share of its memory that is in use

Knows no rank: sums over ranks are taken where they are known.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from modelwright.model.decoder import Product
from modelwright.ops.formats import E4M3, FLOATS, Format, quantisation_error
from modelwright.ops.scaled import ROWWISE
from modelwright.precision.model import part_of

MAX_ROWS = 128
"""Rows of activations and gradients that errors are measured on."""
OUTLIER = 3.0
EXPECTING = 3
"""Periods that an expected loss rests on."""
SIGMAS = 3.0
"""Standard errors above what was expected from which a loss is in excess."""
FP16_LARGEST, FP16_SMALLEST = 65504.0, 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Signs:
    """The indicators of one part at one decision; by format where a format has its own."""

    gradient_noise: float
    gradient_variance: float
    update_to_weight: float
    overflow_share: float
    underflow_share: float
    skipped_share: float
    weight_error: Mapping[Format, float]
    input_error: Mapping[Format, float]
    gradient_error: Mapping[Format, float]
    sensitivity: Mapping[Format, float]
    loss_trend: float
    norm_outliers: float
    speed: Mapping[Format, float]
    memory_pressure: float


def error_of(x: Tensor, chosen: Format) -> float:
    """What a format loses of [..., K] values, relative, by the finest groups that its products here use."""
    rows = some_rows(x).float()
    if chosen in FLOATS:
        lost, whole = (rows.to(FLOATS[chosen]).float() - rows).square().sum(), rows.square().sum()
        return float((lost / whole).sqrt()) if whole > 0 else 0.0
    return quantisation_error(rows, torch.int8 if chosen == "int8" else E4M3, ROWWISE)


def some_rows(x: Tensor) -> Tensor:
    """At most about `MAX_ROWS` of [..., K] values."""
    rows = x.detach().flatten(0, -2) if x.dim() > 2 else x.detach()
    return rows[:: max(1, rows.shape[0] // MAX_ROWS)]


@cache
def rounding_error(chosen: Format) -> float:
    """`error_of` normally distributed values: what values have lost that come in a narrow format already."""
    return error_of(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), chosen)


@dataclass
class Observer:
    """Looks at what goes into the products of a model and at the gradients that come back.

    errors: sum and count of relative errors by (part, "input" or "gradient", format).
    """

    candidates: Sequence[Format]
    errors: dict[tuple[str, str, Format], tuple[float, int]] = field(default_factory=dict)

    def watched(self, name: str, product: Product) -> Product:
        """The same product, with a look at what goes through it."""
        part = part_of(name)

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            self._see(part, "input", x)
            y = product(x, weight)
            if y.requires_grad:
                y.register_hook(lambda gradient: self._see(part, "gradient", gradient))
            return y

        return multiply

    def _see(self, part: str, what: str, values: Tensor) -> None:
        """Values of a step that overflowed, which is skipped, tell nothing; a format that overflows where they do not
        loses all of them."""
        rows = some_rows(values)
        if not bool(rows.isfinite().all()):
            return
        for chosen in self.candidates:
            lost = min(1.0, error_of(rows, chosen))
            if values.dtype != torch.float32 and chosen in FLOATS:
                lost = max(lost, rounding_error(chosen))
            total, count = self.errors.get((part, what, chosen), (0.0, 0))
            self.errors[part, what, chosen] = total + lost, count + 1

    def take(self, part: str, what: str, chosen: Format) -> tuple[float, int]:
        return self.errors.get((part, what, chosen), (0.0, 0))


@dataclass(frozen=True)
class Sums:
    """What is added up over a part's tensors and over ranks; `of` measures one tensor."""

    gradient: float = 0.0
    overflows: float = 0.0
    underflows: float = 0.0
    elements: float = 0.0
    first_moment: float = 0.0
    second_moment: float = 0.0
    update: float = 0.0
    weight: float = 0.0

    @staticmethod
    def of(
        weight: Tensor,
        gradient: Tensor,
        moments: tuple[Tensor, Tensor] | None,
        *,
        rate: float,
        eps: float,
        scale: float,
    ) -> "Sums":
        """Of one tensor with its gradient; moments: Adam's, None before its first step."""
        magnitudes = gradient.abs() * scale
        first = second = update = 0.0
        if moments is not None:
            mean, square = moments
            first, second = float(mean.square().sum()), float(square.sum())
            update = rate * rate * float((mean / (square.sqrt() + eps)).square().sum())
        return Sums(
            gradient=float(gradient.square().sum()),
            overflows=float((magnitudes > FP16_LARGEST).sum()),
            underflows=float(((magnitudes > 0) & (magnitudes < FP16_SMALLEST)).sum()),
            elements=float(gradient.numel()),
            first_moment=first,
            second_moment=second,
            update=update,
            weight=float(weight.square().sum()),
        )

    def plus(self, other: "Sums", share: float = 1.0) -> "Sums":
        """share: of the other, for a tensor that several ranks hold."""
        return Sums(*(a + share * b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(vars(self).values())

    @property
    def gradient_noise(self) -> float:
        """Second moment over the square of the first: about 1 + noise over signal. 1 before there are moments."""
        return max(1.0, self.second_moment / self.first_moment) if self.first_moment > 0 else 1.0

    @property
    def update_to_weight(self) -> float:
        return math.sqrt(self.update / self.weight) if self.weight > 0 else 0.0


def variation(norms: Sequence[float]) -> float:
    """Standard deviation over mean; 0 of fewer than two."""
    if len(norms) < 2:
        return 0.0
    mean = statistics.fmean(norms)
    return statistics.pstdev(norms) / mean if mean > 0 else 0.0


def trend(losses: Sequence[float]) -> float:
    """Slope of the logarithm of the losses over all of them, by least squares: -0.1 means 10% less at the end."""
    logs = [math.log(loss) for loss in losses if loss > 0 and math.isfinite(loss)]
    if len(logs) < 3:
        return 0.0
    places = range(len(logs))
    middle, mean = statistics.fmean(places), statistics.fmean(logs)
    slope = sum((x - middle) * (y - mean) for x, y in zip(places, logs, strict=True))
    return slope / sum((x - middle) ** 2 for x in places) * (len(logs) - 1)


@dataclass(frozen=True)
class Level:
    """The finite losses of one period: their mean, and their variance about their own trend, from what each differs by
    from the one before (von Neumann 1941), which a slope hardly touches."""

    mean: float
    variance: float
    count: int

    @staticmethod
    def of(losses: Sequence[float]) -> "Level | None":
        """None of fewer than two."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        if len(finite) < 2:
            return None
        differences = statistics.fmean((b - a) ** 2 for a, b in pairwise(finite))
        return Level(statistics.fmean(finite), differences / 2, len(finite))


def loss_excess(past: Sequence[Level], now: Level) -> float:
    """What the loss of a period lies above what the periods before it led to expect, relative; 0 where that is within
    `SIGMAS` standard errors, or where there is no past.

    A loss falls ever more slowly, so the expected fall is the last one, times its ratio to the one before it. Of any
    sum of a constant, powers of the step and exponentials that decay (whose falls are log-convex) that is never more
    than the fall to come, so that without noise there is no excess.
    """
    if not past:
        return 0.0
    falls = [before.mean - after.mean for before, after in pairwise(past[-EXPECTING:])]
    slowing = min(1.0, falls[1] / falls[0]) if len(falls) == 2 and min(falls) > 0 else 0.0
    fall = slowing * falls[-1] if slowing else 0.0
    expected = past[-1].mean - fall
    weights = [1.0 / now.count, (1.0 + slowing) ** 2 / past[-1].count]
    weights += [slowing**2 / past[-2].count] if slowing else []
    variance = statistics.fmean(level.variance for level in past[-EXPECTING:])
    excess = now.mean - expected
    return excess / expected if excess > SIGMAS * math.sqrt(variance * sum(weights)) and expected > 0 else 0.0


def outlier_share(norms: Sequence[float]) -> float:
    finite = [norm for norm in norms if math.isfinite(norm)]
    if not finite:
        return float(bool(norms))
    limit = OUTLIER * statistics.median(finite)
    return sum(norm > limit or not math.isfinite(norm) for norm in norms) / len(norms)


def relative_rise(exact: float, narrow: float) -> float:
    """Of a loss; a value that is not finite counts as a doubling."""
    return (narrow - exact) / exact if math.isfinite(narrow) and 0 < exact < math.inf else 1.0
