"""Indicators of the number of bits that a part of the model needs, while it trains.

Fifteen indicators, of a part (the attention or the feed-forward layers of one block) unless they say otherwise:

    gradient_noise       simple noise scale of one batch, tr(Sigma) / |G|^2 (McCandlish et al. 2018, section 2.2): from
                         how far the gradient points where the average of the earlier ones does
    gradient_variance    spread of the gradient's norm over the measured steps, over its mean
    update_to_weight     size of an update over that of the weights
    overflow_share       gradients above FP16's largest value, at the present loss scale
    underflow_share      gradients below FP16's smallest, but not zero
    skipped_share        steps that were skipped for values that were not finite, while the part was in FP16
    weight_error, input_error, gradient_error
                         relative error of the codes of a format's products (each format has its own)
    sensitivity          relative rise of the loss when the part alone computes in a format, by trial; only of
                         formats that were tried
    loss_trend           of the run: slope of the logarithm of the loss over the decision's steps, above 0 when it rises
    norm_outliers        of the run: share of steps whose gradient norm is above thrice the median
    speed                seconds of a format over those of FP32 at the part's own shapes, measured at the start
    size                 bytes of the outputs of a format's products over those of FP32
    memory_pressure      of the machine: the largest share of its memory that was in use so far, on the fullest rank
"""

import math
import statistics
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from modelwright.model.decoder import Product
from modelwright.ops.dtensor import local
from modelwright.ops.lowp_linear import E4M3, FLOATS, GRIDS, Format, Role
from modelwright.ops.quantize import BLOCK, ROWWISE, TENSORWISE, dequantize, quantize
from modelwright.train.precision.apply import part_of
from modelwright.train.precision.policy import PrecisionConfig

MAX_ROWS = 128
"""Number of rows of weights, activations and gradients that errors are measured on."""
AT_ONCE = 2**18
"""Number of elements that a processor reads together: their magnitudes stay in its cache."""
OUTLIER = 3.0
EXPECTING = 3
"""Number of periods that an expected loss is computed from."""
SIGMAS = 3.0
"""Standard errors by which a loss must exceed the expected one to count as an excess."""
# Bounds the noise scale at 10^8: a smaller cosine is chance.
SMALLEST_COSINE = 1e-4
FP16_LARGEST, FP16_SMALLEST = 65504.0, 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Indicators:
    """The indicators of one part at one decision; by format if each format has its own."""

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
    size: Mapping[Format, float]
    memory_pressure: float


@dataclass(frozen=True)
class ValueSample:
    """A sample of [N, K] values, FP32: rows at equal distances, and adjacent rows. Of all values: the largest magnitude
    of each column, and the mean square.
    """

    rows_RK: Tensor
    block_RK: Tensor
    maxima_K: Tensor
    mean_square: Tensor

    @staticmethod
    def of(values: Tensor) -> "ValueSample":
        """Samples [..., K] values with at least one row."""
        all_NK = values.detach().flatten(0, -2) if values.dim() > 2 else values.detach()
        num_rows = all_NK.shape[0]
        start = (num_rows - 1) // 2 // MAX_ROWS * MAX_ROWS  # a multiple of the rows of a block of scales
        maxima, squares = [], []
        # In chunks only on a CPU, for its cache.
        is_on_cpu = all_NK.device.type == "cpu"
        for piece_PK in all_NK.split(max(1, AT_ONCE // all_NK.shape[1])) if is_on_cpu else (all_NK,):
            magnitudes_PK = piece_PK.abs().float()
            maxima.append(magnitudes_PK.amax(0))
            squares.append(magnitudes_PK.square_().sum())
        return ValueSample(
            all_NK[:: max(1, num_rows // MAX_ROWS)].float(),
            all_NK[start : start + MAX_ROWS].float(),
            torch.stack(maxima).amax(0),
            torch.stack(squares).sum() / all_NK.numel(),
        )


def error_of(sample: ValueSample, chosen: Format, role: Role, config: PrecisionConfig) -> float:
    """The relative quantization error of values, with the codes and grids by which products read them as `role`.

    Products in eight bits read all values twice, in rows and transposed; the larger error counts. Scales are those of
    all values (for blocks, of the block; for delayed scaling, the present ones; for a weight that ranks share, of its
    shard).
    """
    if chosen in FLOATS:
        return _float_error(sample.rows_RK, FLOATS[chosen])
    eight = config.int8 if chosen == "int8" else config.fp8
    sides = [False] if role != "weight" and eight.wgrad_high_precision else [False, True]
    if chosen == "int8":
        dtype, grid = torch.int8, ROWWISE
    else:
        by_row, by_square = GRIDS[config.fp8.recipe]
        dtype = config.fp8.gradient_dtype if role == "grad" else E4M3
        grid = by_square if role == "weight" else by_row
    rows, errors = sample.block_RK if BLOCK in grid else sample.rows_RK, list[float]()
    for transposed in sides:
        x = rows.T if transposed else rows
        maxima = None
        if grid == TENSORWISE:
            maxima = sample.maxima_K.max().view(1, 1)
        elif grid == ROWWISE and transposed:
            maxima = sample.maxima_K.unsqueeze(1)
        codes, scales = quantize(x, grid, dtype, maxima=None if maxima is None else lambda _, fixed=maxima: fixed)
        lost = dequantize(codes, scales, grid) - x
        squares = lost.square()
        if chosen == "int8" and role == "grad" and config.int8.stochastic_rounding:
            # Expected error: a value at distance d of a step s from the nearest code loses s^2 d (1 - d) on average.
            squares = dequantize(torch.ones_like(codes), scales, grid) * lost.abs() - squares
        # INT8's steps along a column are the same for small and large rows, so their error is a share of all rows'
        # squares, not of the sample's.
        is_shared = chosen == "int8" and transposed
        errors.append(_share(squares, sample.mean_square * x.numel() if is_shared else x.square().sum()))
    return max(errors)


def _float_error(x: Tensor, dtype: torch.dtype) -> float:
    return _share((x.to(dtype).float() - x).square(), x.square().sum())


def _share(lost_squares: Tensor, whole: Tensor) -> float:
    """Square root of the squared error over the squared values, 0 for zeros."""
    return float((lost_squares.sum() / whole).sqrt()) if whole > 0 else 0.0


@cache
def rounding_error(chosen: Format) -> float:
    """The error of normally distributed values: the loss of values that already come in a narrow format."""
    return _float_error(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), FLOATS[chosen])


ObservedErrors = dict[tuple[str, str, Format], tuple[float, int]]
"""Sum and count of relative errors by (part, "input" or "gradient", format)."""


@dataclass
class Observer:
    """Observes the inputs of a model's products and the gradients that come back. config: how products read their
    factors; last: the last observed input, which several products may read, with its errors.
    """

    candidates: Sequence[Format]
    config: PrecisionConfig
    errors: ObservedErrors = field(default_factory=dict)
    last: tuple[weakref.ref[Tensor], Mapping[Format, float]] | None = None

    def watched(self, name: str, product: Product) -> Product:
        """Wraps a product with an observation of its input and its output's gradient."""
        part = part_of(name)

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            # Observed once for all products that read the same tensor one after the other.
            if self.last is None or self.last[0]() is not x:
                self.last = weakref.ref(x), self._lost(x, "x")
            self._add(part, "input", self.last[1])
            y = product(x, weight)
            if y.requires_grad:
                y.register_hook(lambda gradient: self._add(part, "gradient", self._lost(gradient, "grad")))
            return y

        return multiply

    def _lost(self, values: Tensor, role: Role) -> Mapping[Format, float]:
        """Errors by format; none for a step that overflowed. A format that overflows alone loses all values."""
        if not values.numel():
            return {}
        sample, result = ValueSample.of(values), {}
        if not bool(sample.maxima_K.isfinite().all()):
            return {}
        for chosen in self.candidates:
            lost = min(1.0, error_of(sample, chosen, role, self.config))
            if values.dtype != torch.float32 and chosen in FLOATS:
                lost = max(lost, rounding_error(chosen))
            result[chosen] = lost
        return result

    def _add(self, part: str, what: str, lost: Mapping[Format, float]) -> None:
        for chosen, share in lost.items():
            total, count = self.errors.get((part, what, chosen), (0.0, 0))
            self.errors[part, what, chosen] = total + share, count + 1


def sum_of_squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.float()).double().square())


@dataclass(frozen=True)
class Momentum:
    """An optimizer's state of a tensor. average: of its earlier gradients, up to a factor; kept_noise: the fraction of
    one gradient's variance that is left in it; update: sum of squares of the next change of the weights, without decay.
    """

    average: Tensor
    kept_noise: float
    update: float


def kept_noise(beta: float, num_updates: int) -> float:
    """Sum of squared weights of an exponential average from zero over this many gradients, over their sum's square."""
    left = beta**num_updates
    return (1 - beta) / (1 + beta) * (1 + left) / (1 - left)


@dataclass(frozen=True)
class GradientStats:
    """Statistics that are summed over a submodule's tensors and over ranks; `of` measures one tensor."""

    gradient: float = 0.0
    overflows: float = 0.0
    underflows: float = 0.0
    elements: float = 0.0
    average: float = 0.0
    agreement: float = 0.0
    kept_noise: float = 0.0
    update: float = 0.0
    weight: float = 0.0

    @staticmethod
    def of(weight: Tensor, gradient: Tensor, momentum: Momentum | None, *, scale: float) -> "GradientStats":
        """Measures a tensor and its gradient. scale: loss scale of the gradient; momentum: None before an update."""
        magnitudes = gradient.abs() * scale
        square, average, agreement, kept_noise, update = sum_of_squares(gradient), 0.0, 0.0, 0.0, 0.0
        if momentum is not None:
            mean = momentum.average.to(gradient.device)
            average, agreement = sum_of_squares(mean), float((mean * gradient).sum())
            kept_noise, update = momentum.kept_noise * square, momentum.update
        return GradientStats(
            gradient=square,
            overflows=float((magnitudes > FP16_LARGEST).sum()),
            underflows=float(((magnitudes > 0) & (magnitudes < FP16_SMALLEST)).sum()),
            elements=float(gradient.numel()),
            average=average,
            agreement=agreement,
            kept_noise=kept_noise,
            update=update,
            weight=sum_of_squares(weight),
        )

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(vars(self).values())

    @property
    def gradient_noise(self) -> float:
        """tr(Sigma) / |G|^2 = B; 0 before there is an average.

        For a gradient and an average of earlier ones that keeps the share c of their noise, the cosine is about 1 /
        sqrt((1 + B) (1 + c B)), regardless of scaling (clipping, an average that started at zero). A gradient that
        changes direction reads as noise, and chance limits the estimate for more noise than the square root of elements
        over c.
        """
        if not self.average * self.gradient > 0:
            return 0.0
        cosine = max(SMALLEST_COSINE, self.agreement / math.sqrt(self.average * self.gradient))
        kept, excess = self.kept_noise / self.gradient, max(0.0, cosine**-2 - 1.0)
        # The positive root of (1 + B) (1 + c B) = cosine^-2, in the form without cancellation.
        return 2 * excess / (1 + kept + math.sqrt((1 + kept) ** 2 + 4 * kept * excess))

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
class LossLevel:
    """The finite losses of one period: their mean, and their variance about their own trend, from successive
    differences (von Neumann 1941), which a slope hardly affects.
    """

    mean: float
    variance: float
    count: int

    @staticmethod
    def of(losses: Sequence[float]) -> "LossLevel | None":
        """Mean and variance of some losses; None for fewer than two."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        if len(finite) < 2:
            return None
        differences = statistics.fmean((b - a) ** 2 for a, b in pairwise(finite))
        return LossLevel(statistics.fmean(finite), differences / 2, len(finite))


def loss_excess(past: Sequence[LossLevel], now: LossLevel) -> float:
    """The relative excess of a period's loss over the prediction from the earlier periods; 0 within `SIGMAS` standard
    errors, or without history.

    A loss falls ever more slowly, so the predicted fall is the last one, times its ratio to the one before it. For any
    sum of a constant, powers of the step and decaying exponentials (whose falls are log-convex) that never exceeds the
    actual fall, so that without noise the excess is 0.
    """
    if not past:
        return 0.0
    falls = [before.mean - after.mean for before, after in pairwise(past[-EXPECTING:])]
    slowing = min(1.0, falls[1] / falls[0]) if len(falls) == 2 and min(falls) > 0 else 0.0
    fall = slowing * falls[-1] if slowing else 0.0
    expected = past[-1].mean - fall
    # Variance of now - (1 + r) last + r earlier, the prediction with the ratio r of the falls.
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
    """Relative rise of a loss; a non-finite value counts as a doubling."""
    return (narrow - exact) / exact if math.isfinite(narrow) and 0 < exact < math.inf else 1.0


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

    def state_dict(self) -> dict[str, Any]:
        """The state except for the observer's errors, which differ from rank to rank."""
        return {
            "losses": list(self.losses),
            "run_norms": list(self.run_norms),
            "norms": {part: list(norms) for part, norms in self.norms.items()},
            "overflows": dict(self.overflows),
        }


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

    def sums(self, measure: Callable[[Tensor, Tensor], GradientStats]) -> dict[str, GradientStats]:
        """The statistics of each part. measure: those of a parameter and its gradient, in this rank's part of it."""
        own = dict.fromkeys(self.parts, GradientStats())
        for (parameter, name), holders in zip(self.names.items(), self.num_holders, strict=True):
            part = part_of(name.removesuffix(".weight"))
            if part in own and parameter.grad is not None:
                values = measure(parameter, local(parameter.grad)).values
                share = 1.0 / holders  # a tensor that several ranks hold counts once
                own[part] = GradientStats(*(a + share * b for a, b in zip(own[part].values, values, strict=True)))
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
        # Those of inputs and gradients have been observed.
        own = [
            weights.get((part, chosen), (0.0, 0))
            if factor == "weight"
            else observer.errors.get((part, factor, chosen), (0.0, 0))
            for part, factor, chosen in keys
        ]
        totals = self.sum_over_ranks([float(value) for pair in own for value in pair])
        return {key: totals[2 * i] / max(1.0, totals[2 * i + 1]) for i, key in enumerate(keys)}
