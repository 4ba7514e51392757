"""Decides periodically which parts of a model compute in which format, from the indicators of a run.

An estimate of damage (`damage`) predicts what a format would cost a part; the speed of formats (a layer's three
products at the shapes of the run, casts included), measured once, predicts what it would gain. A controller weighs
both: fixed rules, a contextual bandit that learns from the results of its choices (LinUCB, Li et al. 2010), or a
schedule by steps that ignores indicators. A change needs a sufficient gain and a cooldown (hysteresis), has a readable
reason, and is reverted if the loss jumps.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from modelwright.core.config import ConfigError
from modelwright.ops.lowp_linear import Format
from modelwright.ops.microbenchmark import in_turn, own_clock, seconds_of
from modelwright.train.precision.apply import ModelPrecision, fp32_products
from modelwright.train.precision.indicators import Indicators
from modelwright.train.precision.policy import AdaptiveConfig, Kind, PrecisionConfig

EMA = 0.9  # a mean over about ten steps, which one bad batch hardly moves
ROOMY = 0.9
"""Memory pressure below which a change has to make a part faster by `min_speedup`, and from which bytes count."""
_FEATURES = 11


@dataclass(frozen=True)
class FormatChoice:
    """A format for a part, and the reason."""

    chosen: Format
    reason: str


def error(signs: Indicators, chosen: Format) -> float:
    """The relative error of a layer's three products in a format."""
    parts = (signs.weight_error, signs.input_error, signs.gradient_error)
    return math.sqrt(sum(part.get(chosen, 0.0) ** 2 for part in parts))


def damage(signs: Indicators, chosen: Format) -> float:
    """Estimated damage of a format, approximately as a share of the loss; 0 for FP32.

    Rounding adds noise to a gradient that is already noisy, so it counts by the part that exceeds that noise; a weight
    whose rounding hides many updates moves late; FP16 also loses values that over- or underflow, and the steps that are
    skipped because of them. A rise of the loss that was measured when the part was tried counts unchanged. Instability
    (norms that vary, outliers, a rising loss) makes all of it worse.
    """
    if chosen == "fp32":
        return 0.0
    visible = error(signs, chosen) / math.sqrt(1.0 + signs.gradient_noise)
    hidden = signs.weight_error.get(chosen, 0.0) / max(signs.update_to_weight, 1e-9)
    late = 1.0 + 0.1 * math.log10(max(1.0, hidden))
    lost = 10 * signs.overflow_share + signs.underflow_share + signs.skipped_share
    out_of_range = lost if chosen == "fp16" else 0.0
    unrest = 1.0 + signs.gradient_variance + signs.norm_outliers + max(0.0, signs.loss_trend)
    return unrest * (late * visible + out_of_range + max(0.0, signs.sensitivity.get(chosen, 0.0)))


def shortage(signs: Indicators) -> float:
    """Memory pressure: 0 while there is plenty, 1 if all is used. Measurements of a machine differ slightly from run to
    run, which must not change decisions while nothing is short.
    """
    return min(1.0, max(0.0, (signs.memory_pressure - ROOMY) / (1.0 - ROOMY)))


@dataclass
class Rules:
    """Chooses the fastest format whose damage is tolerable; under memory pressure the smallest, then the fastest."""

    config: AdaptiveConfig

    def propose(self, part: str, signs: Indicators, present: Format, candidates: Sequence[Format]) -> FormatChoice:
        harm = {chosen: damage(signs, chosen) for chosen in candidates}
        allowed: list[Format] = [chosen for chosen in candidates if harm[chosen] <= self.config.tolerance]
        is_short = signs.memory_pressure >= ROOMY
        best = min(allowed, key=lambda chosen: (signs.size[chosen] if is_short else 0.0, signs.speed[chosen]))
        if harm[present] > self.config.tolerance:
            return FormatChoice(best, f"damage of {present} {harm[present]:.3g} is above {self.config.tolerance:g}")
        if is_short:
            bytes_of = f"{signs.size[best]:g} of FP32's bytes, {present} {signs.size[present]:g}"
            return FormatChoice(
                best, f"{bytes_of}: {signs.memory_pressure:.0%} of memory in use, damage {harm[best]:.3g}"
            )
        if signs.speed[present] < self.config.min_speedup * signs.speed[best]:
            return FormatChoice(present, f"{best} would not be {self.config.min_speedup:g}x as fast")
        gain = signs.speed[present] / signs.speed[best]
        return FormatChoice(best, f"{gain:.2f}x as fast as {present}, damage {harm[best]:.3g}")

    def learn(self, part: str, signs: Indicators, chosen: Format, loss_excess: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def features(signs: Indicators, chosen: Format) -> np.ndarray:
    """The bandit's features of a part and a format, each about in [0, 1]."""
    lost = (signs.overflow_share, signs.underflow_share, signs.skipped_share)
    values = (
        1.0,
        min(1.0, 10 * error(signs, chosen)),
        1 / math.sqrt(1.0 + signs.gradient_noise),
        min(1.0, signs.gradient_variance),
        min(1.0, 100 * signs.update_to_weight),
        min(1.0, max(-1.0, 10 * signs.sensitivity.get(chosen, 0.0))),
        min(1.0, max(-1.0, signs.loss_trend)),
        min(1.0, signs.speed[chosen]),
        max(lost),
        signs.norm_outliers,
        shortage(signs) * (1.0 - signs.size[chosen]),
    )
    return np.array(values)


@dataclass
class Bandit:
    """Learns for each format a linear estimate of its reward, and explores where it is uncertain (LinUCB, disjoint
    arms).

    Reward: the share of FP32's time saved, and of its bytes to the degree that memory is short, less `damage_penalty`
    times the damage: the estimate's, and the excess of the loss over its expected value since the choice was made. The
    reward is capped by the known shares less the estimated damage, so that a format that could not win is not tried.
    """

    config: AdaptiveConfig
    precision: dict[str, np.ndarray] = field(default_factory=dict)
    rewards: dict[str, np.ndarray] = field(default_factory=dict)

    def _arm(self, chosen: str) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.precision.setdefault(chosen, np.eye(_FEATURES)),
            self.rewards.setdefault(chosen, np.zeros(_FEATURES)),
        )

    def propose(self, part: str, signs: Indicators, present: Format, candidates: Sequence[Format]) -> FormatChoice:
        bounds: dict[Format, float] = {}
        for chosen in candidates:
            precision, rewards = self._arm(chosen)
            seen, inverse = features(signs, chosen), np.linalg.inv(precision)
            hoped = float(inverse @ rewards @ seen + self.config.exploration * math.sqrt(seen @ inverse @ seen))
            bounds[chosen] = min(hoped, self.reward(signs, chosen, 0.0))
        best = max(candidates, key=lambda chosen: bounds[chosen])
        return FormatChoice(best, f"reward of up to {bounds[best]:.3g} expected, {bounds[present]:.3g} of {present}")

    def reward(self, signs: Indicators, chosen: Format, loss_excess: float) -> float:
        harm = damage(signs, chosen) + max(0.0, loss_excess)
        saved = 1.0 - min(1.0, signs.speed[chosen]) + shortage(signs) * (1.0 - signs.size[chosen])
        return saved - self.config.damage_penalty * harm

    def learn(self, part: str, signs: Indicators, chosen: Format, loss_excess: float) -> None:
        precision, rewards = self._arm(chosen)
        seen = features(signs, chosen)
        precision += np.outer(seen, seen)
        rewards += self.reward(signs, chosen, loss_excess) * seen

    def state_dict(self) -> dict[str, Any]:
        return {
            "precision": {name: value.tolist() for name, value in self.precision.items()},
            "rewards": {name: value.tolist() for name, value in self.rewards.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.precision = {name: np.array(value) for name, value in state["precision"].items()}
        self.rewards = {name: np.array(value) for name, value in state["rewards"].items()}


Controller = Rules | Bandit
"""Proposes a format for a part with `propose`; `learn` receives the result of the last proposal."""


def scheduled(
    config: AdaptiveConfig, step: int, parts: Sequence[str], widest: Mapping[str, Format]
) -> dict[str, Format]:
    """The formats of a schedule at a step: feed-forward parts first, from the middle of the model outward."""
    share = [0.0, *(share for start, share in config.schedule if start <= step)][-1]
    middle = (len(parts) - 1) / 2
    order = sorted(parts, key=lambda part: (not part.endswith(".ffn"), abs(parts.index(part) - middle)))
    narrow = set(order[: round(share * len(parts))])
    return {part: config.low_precision if part in narrow else widest[part] for part in parts}


@dataclass
class PrecisionSwitcher:
    """The present formats of all parts, with hysteresis, a fallback, and a reason for each change.

    widest: the format that a part finally falls back to (the policy's). probe: the relative rise of the loss with a
    part in a format, None if unknown; a format other than FP32 is chosen only if its rise is known. offered: the
    candidates that are worthwhile at present.
    """

    config: AdaptiveConfig
    widest: dict[str, Format]
    controller: Controller
    probe: Callable[[str, Format], float | None]
    offered: tuple[Format, ...] = field(init=False)
    formats: dict[str, Format] = field(default_factory=dict)
    good: dict[str, Format] = field(default_factory=dict)
    resting: dict[str, int] = field(default_factory=dict)
    mean_loss: float = 0.0
    last_signs: dict[str, Indicators] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Changes since they were last taken."""

    def __post_init__(self) -> None:
        self.offered = self.config.candidates
        self.formats = self.formats or dict(self.widest)
        self.good = self.good or dict(self.widest)

    def see_loss(self, step: int, loss: float) -> bool:
        """Call every step; returns True if the loss jumped, so that formats were reverted to the last good ones."""
        excess = loss / self.mean_loss - 1.0 if self.mean_loss > 0 else 0.0
        jumped = not math.isfinite(loss) or excess > self.config.revert_on_loss_rise
        if math.isfinite(loss):
            self.mean_loss = EMA * self.mean_loss + (1 - EMA) * loss if self.mean_loss else loss
        narrow = {part for part, chosen in self.formats.items() if chosen != self.widest[part]}
        if not jumped or not narrow:
            return False
        back = self.good if self.good != self.formats else self.widest
        harm = min(1.0, excess) if math.isfinite(excess) else 1.0
        for part in sorted(narrow):
            # Learned only from formats that are reverted: they may have caused the jump.
            if part in self.last_signs and back[part] != self.formats[part]:
                self.controller.learn(part, self.last_signs.pop(part), self.formats[part], harm)
            self._switch(step, part, FormatChoice(back[part], f"the loss jumped to {loss:.4g}"))
            self.resting[part] = self.config.cooldown_decisions
        self.good = dict(self.formats)
        return True

    def decide(self, step: int, signs: Mapping[str, Indicators], loss_excess: float) -> None:
        """Decides for all parts, in one order. loss_excess: the loss above the prediction from the earlier periods."""
        self.last_signs, last_signs = {}, self.last_signs
        if loss_excess <= self.config.revert_on_loss_rise:
            self.good = dict(self.formats)
        for part, seen in signs.items():
            self.last_signs[part] = seen
            if part in last_signs:
                lost = seen.skipped_share if self.formats[part] == "fp16" else 0.0
                self.controller.learn(part, last_signs[part], self.formats[part], loss_excess + lost)
            if self.resting.get(part, 0) > 0:
                self.resting[part] -= 1
                continue
            # A proposal counts once the rise of the loss with it is known; a new rise may change the proposal.
            present = self.formats[part]
            candidates: list[Format] = ["fp32", self.widest[part], present, *self.offered]
            candidates = list(dict.fromkeys(candidates))
            while True:
                known = self.last_signs[part]
                choice = self.controller.propose(part, known, present, candidates)
                if choice.chosen in ("fp32", present, *known.sensitivity):
                    break
                rise = self.probe(part, choice.chosen)
                if rise is None:
                    candidates.remove(choice.chosen)
                else:
                    sensitivity = {**known.sensitivity, choice.chosen: rise}
                    self.last_signs[part] = replace(known, sensitivity=sensitivity)
            if choice.chosen != self.formats[part]:
                self._switch(step, part, choice)
                self.resting[part] = self.config.cooldown_decisions

    def follow(self, step: int, formats: Mapping[str, Format]) -> None:
        """Applies the formats of a schedule."""
        for part, chosen in formats.items():
            if chosen != self.formats[part]:
                self._switch(step, part, FormatChoice(chosen, "by schedule"))

    def take_changes(self) -> list[dict[str, Any]]:
        taken, self.changes = self.changes, []
        return taken

    def _switch(self, step: int, part: str, choice: FormatChoice) -> None:
        if choice.chosen == self.formats[part]:
            return
        self.changes.append(
            {"step": step, "part": part, "from": self.formats[part], "to": choice.chosen, "reason": choice.reason}
        )
        self.formats[part] = choice.chosen

    def state_dict(self) -> dict[str, Any]:
        return {
            "formats": dict(self.formats),
            "good": dict(self.good),
            "resting": dict(self.resting),
            "mean_loss": self.mean_loss,
            "last_signs": {
                part: {
                    name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(signs).items()
                }
                for part, signs in self.last_signs.items()
            },
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.formats, self.good = dict(state["formats"]), dict(state["good"])
        self.resting = {part: int(count) for part, count in state["resting"].items()}
        self.mean_loss = float(state["mean_loss"])
        self.last_signs = {part: Indicators(**signs) for part, signs in state["last_signs"].items()}
        self.controller.load_state_dict(state["controller"])


REPEATS = 5
Shape = tuple[int, int]
"""Outputs and inputs of a projection."""


@dataclass(frozen=True)
class DtypeTimings:
    """Measurements made once, at the start of the run."""

    seconds: Mapping[tuple[Kind, Format], float]
    """Seconds of forward and backward for a kind of submodule in a format."""
    memory_pressure: float
    """Fraction of the machine's memory in use before the run or by weights, gradients and moments, not activations."""

    def worthwhile(self, config: PrecisionConfig, widest: Set[Format], memory_pressure: float) -> tuple[Format, ...]:
        """The candidates by which a part in one of the formats `widest` might gain.

        They are fast enough here or, under memory pressure, take fewer bytes however slow they are. Considering any
        other would cost time in every period for nothing.
        """
        candidates: tuple[Format, ...] = config.adaptive.candidates
        kinds: set[Kind] = {kind for kind, _ in self.seconds}
        largest = max(map(config.relative_bytes, widest))
        is_short = memory_pressure >= ROOMY
        smaller = [chosen for chosen in candidates if is_short and config.relative_bytes(chosen) < largest]
        gain = config.adaptive.min_speedup if not smaller and widest == {"fp32"} else 1.0
        return tuple(
            chosen
            for chosen in candidates
            if chosen in smaller
            or any(self.seconds[kind, "fp32"] >= gain * self.seconds[kind, chosen] for kind in kinds)
        )


def measure_speeds(
    formats: ModelPrecision,
    shapes: Mapping[Kind, Sequence[Shape]],
    candidates: Sequence[Format],
    *,
    num_rows: int,
    device: torch.device,
) -> dict[tuple[Kind, Format], float]:
    """Measures seconds of forward and backward by kind and format, interleaved, best of a few. num_rows: tokens."""

    def seconds(chosen: Format, of_kind: Sequence[Shape]) -> float:
        return sum(_seconds(formats, chosen, shape, num_rows, device) for shape in of_kind)

    measures: dict[tuple[Kind, Format], Callable[[], float]] = {
        (kind, chosen): partial(seconds, chosen, of_kind) for kind, of_kind in shapes.items() for chosen in candidates
    }
    return {key: min(times) for key, times in in_turn(measures, num_rounds=REPEATS).items()}


def _seconds(formats: ModelPrecision, chosen: Format, shape: Shape, num_rows: int, device: torch.device) -> float:
    weight = torch.randn(shape, device=device).requires_grad_()
    x = torch.randn(num_rows, shape[1], device=device, dtype=formats.config.result_of[chosen]).requires_grad_()
    product = formats.product("", chosen) if chosen != "fp32" else F.linear
    gradient = torch.randn(num_rows, shape[0], device=device, dtype=x.dtype)
    return seconds_of(lambda: product(x, weight).backward(gradient), device, clock=own_clock(device))


def onednn_speed_up(shapes: Sequence[Shape], *, num_rows: int) -> float:
    """Measures the speedup of FP32 products of these shapes on this CPU with oneDNN, forward and backward; 0 if PyTorch
    would not use it or it would round. num_rows: tokens per product. Both are timed in turn; the best of each counts.
    """
    try:
        with fp32_products(onednn=True):
            pass
    except ConfigError:
        return 0.0

    def seconds(onednn: bool, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> float:
        with fp32_products(onednn=onednn):
            return _product_seconds(x_NI, weight_OI)

    totals = {False: 0.0, True: 0.0}
    for shape in shapes:
        weight_OI, x_NI = torch.randn(shape), torch.randn(num_rows, shape[1])
        measures = {onednn: partial(seconds, onednn, x_NI, weight_OI) for onednn in totals}
        for onednn, times in in_turn(measures, num_rounds=REPEATS).items():
            totals[onednn] += min(times)
    return totals[False] / totals[True]


def _product_seconds(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> float:
    def products() -> None:
        y_NO = F.linear(x_NI, weight_OI)
        torch.mm(y_NO, weight_OI)
        torch.mm(y_NO.T, x_NI)

    return seconds_of(products, "cpu", clock=own_clock("cpu"))
