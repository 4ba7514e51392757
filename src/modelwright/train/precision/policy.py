"""Settings of number formats: FP32 master weights and optimizer states always, and the format of all that is computed.

A policy names a format for each kind of layer; `overrides` changes single kinds, `fp32_ops` names the operators that
stay in FP32 inside narrower layers. `auto` is resolved once, before a run, from measured rates (`resolve`) and written
into the resolved config, so that a rerun on a busier machine cannot change it. `AdaptiveConfig`: formats that change
while a model trains; `controllers.py` implements them.

Loss scaling: the loss is multiplied by a factor so that gradients do not underflow in a narrow format (Micikevicius et
al. 2018). The scale is a power of two in most settings, so that scaling and unscaling change no bit unless something
overflows or would have underflowed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from modelwright.core import compatibility as traits
from modelwright.core.compatibility import Feature, feature
from modelwright.core.config import ConfigError, constant, only_for
from modelwright.ops.lowp_linear import FLOATS, Format, Recipe

MAX_HISTORY = 1000
"""Number of changes of the scale that are kept."""
SCALE_OF_LARGE = 2.0**12
"""First scale of the largest models, where `init_scale` is 0."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling, with the names of `torch.amp.GradScaler`."""

    enabled: Literal["auto", "always", "never"] = "auto"
    """`auto`: when anything is computed in FP16."""
    dynamic: bool = field(default=True, metadata=only_for("enabled", "auto", "always"))
    """Grow and back off the scale; otherwise it stays at `init_scale`."""
    init_scale: float = field(default=2.0**15, metadata=only_for("enabled", "auto", "always"))
    """First scale; 0 chooses it by the number of parameters."""
    growth_interval: int = field(default=2000, metadata=only_for("enabled", "auto", "always"))
    """Updates in a row without overflow after which the scale grows."""
    growth_factor: float = constant(2.0)
    """Factor by which the scale grows."""
    backoff_factor: float = constant(0.5)
    """Factor on the scale after an overflow; that update is skipped."""
    min_scale: float = constant(2.0**-14)
    """Lower bound of the scale."""
    max_scale: float = constant(2.0**24)
    """Upper bound of the scale."""

    def __post_init__(self) -> None:
        if self.init_scale < 0:
            text = f"init_scale: must not be negative, got {self.init_scale}"
            raise ConfigError(f"{text}; 0 chooses by the number of parameters")
        if self.growth_factor <= 1:
            raise ConfigError(f"growth_factor: must be above 1, got {self.growth_factor}; 2 is usual, 8 grows faster")
        if not 0 < self.backoff_factor < 1:
            raise ConfigError(f"backoff_factor: must be between 0 and 1, got {self.backoff_factor}; 0.5 is usual")
        if self.growth_interval < 1:
            text = f"growth_interval: must be at least 1 update, got {self.growth_interval}"
            raise ConfigError(f"{text}; 1000 or 2000 is usual")
        if not 0 < self.min_scale <= self.max_scale:
            raise ConfigError(
                f"min_scale: must be above 0 and at most max_scale ({self.max_scale:g}), got {self.min_scale}"
            )
        if self.init_scale and not self.min_scale <= self.init_scale <= self.max_scale:
            raise ConfigError(
                f"init_scale: must be between min_scale ({self.min_scale:g}) and max_scale ({self.max_scale:g}), got "
                f"{self.init_scale}"
            )

    def scales(self, *, uses_fp16: bool) -> bool:
        """True if losses are scaled in a run that computes anything in FP16, or not."""
        return self.enabled == "always" or (self.enabled == "auto" and uses_fp16)


class LossScale:
    """The scale of the present update, and its changes; it multiplies losses before backward."""

    def __init__(self, config: LossScaleConfig, num_parameters: int) -> None:
        self.config = config
        self.value = config.init_scale
        if not self.value:
            # By size, because larger models sum more contributions into each gradient and overflow earlier: 2^15 up to
            # 100 million parameters, half of that with each tenfold increase, 2^12 from 10 billion on.
            tenfolds = math.floor(math.log10(max(num_parameters, 1)) - 8 + 1e-9) + 1 if num_parameters > 1e8 else 0
            chosen = max(2.0 ** (15 - tenfolds), SCALE_OF_LARGE)
            self.value = min(max(chosen, config.min_scale), config.max_scale)
        self.num_overflows = 0
        self.history: list[tuple[int, float]] = [(0, self.value)]
        self._num_good = 0

    def unscale(self, gradients: list[Tensor]) -> None:
        """Removes the scale in place."""
        if gradients and self.value != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.value)  # pyright: ignore

    def update(self, step: int, overflowed: bool) -> None:
        """Call after update `step` (from 0), which was skipped if it overflowed."""
        self.num_overflows += overflowed
        if not self.config.dynamic:
            return
        before = self.value
        self._num_good = 0 if overflowed else self._num_good + 1
        if overflowed:
            self.value = max(self.value * self.config.backoff_factor, self.config.min_scale)
        elif self._num_good >= self.config.growth_interval:
            self.value, self._num_good = min(self.value * self.config.growth_factor, self.config.max_scale), 0
        if self.value != before:
            self.history = [*self.history, (step + 1, self.value)][-MAX_HISTORY:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "num_good": self._num_good,
            "num_overflows": self.num_overflows,
            "history": [list(change) for change in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._num_good = float(state["value"]), int(state["num_good"])
        self.num_overflows = int(state["num_overflows"])
        self.history = [(int(step), float(value)) for step, value in state["history"]]


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """Number formats that change while the model trains."""

    kind: Literal["none", "rules", "bandit", "schedule"] = "none"
    """`rules`: decide by measured speed and damage; `bandit`: a contextual bandit decides (LinUCB, Li et al. 2010);
    `schedule`: follow `schedule`; `none`."""
    decide_every_steps: int = constant(100)
    """Steps between decisions."""
    candidates: tuple[Format, ...] = constant(("bf16", "int8"))
    """Formats to choose among; FP32 and the policy's own are always candidates."""
    tolerance: float = constant(0.05)
    """Largest accepted damage to a submodule's gradients, as a relative error."""
    schedule: tuple[tuple[int, float], ...] = ()
    """(step, fraction) pairs: from that step on, this fraction of the submodules computes in `low_precision`,
    feed-forward first."""
    low_precision: Format = constant("bf16")
    """Format that `schedule` switches to."""
    measure_steps: int = constant(4)
    """Steps before each decision that are measured."""
    min_speedup: float = constant(1.1)
    """Least speedup for which a format is changed."""
    cooldown_decisions: int = constant(2)
    """Decisions for which a changed submodule is left alone."""
    revert_on_loss_rise: float = constant(0.2)
    """Relative rise of the loss over its running mean that restores the last good formats."""
    exploration: float = constant(0.3)
    """Width of the bandit's confidence bounds: a larger value favors formats that were tried less."""
    damage_penalty: float = constant(5.0)
    """Weight of damage against saved time in the bandit's reward."""

    def __post_init__(self) -> None:
        assert self.measure_steps >= 1
        if self.decide_every_steps <= self.measure_steps:
            raise ConfigError(
                f"decide_every_steps: must be at least {self.measure_steps + 1}, because the last {self.measure_steps} "
                f"steps before each decision are measured; got {self.decide_every_steps}"
            )
        if self.min_speedup < 1:
            raise ConfigError(f"min_speedup: must be at least 1, got {self.min_speedup}; 1.1 requires a tenth")
        for name in ("tolerance", "revert_on_loss_rise"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if (self.kind == "schedule") != bool(self.schedule):
            raise ConfigError("schedule: (step, share) pairs require kind schedule and vice versa; set both or neither")
        steps, shares = [step for step, _ in self.schedule], [share for _, share in self.schedule]
        if steps != sorted(set(steps)) or any(not 0 <= share <= 1 for share in shares):
            raise ConfigError(f"schedule: steps must increase and shares must be in [0, 1], got {self.schedule}")

    @property
    def looks(self) -> bool:
        """True if decisions use indicators."""
        return self.kind in ("rules", "bandit")


Policy = Literal["fp32", "bf16_mixed", "fp16_mixed", "pure_fp16", "hybrid", "fp8", "int8", "auto"]
Kind = Literal["embedding", "attention", "ffn", "head"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Fp32Matmul = Literal["auto", "default", "onednn", "tf32"]

POLICIES: dict[str, tuple[Format, Format, Format, Format]] = {
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16_mixed": ("fp32", "bf16", "bf16", "bf16"),
    "fp16_mixed": ("fp32", "fp16", "fp16", "fp16"),
    "pure_fp16": ("fp16", "fp16", "fp16", "fp16"),
    "hybrid": ("fp32", "fp32", "bf16", "fp32"),
    "fp8": ("fp32", "fp8", "fp8", "bf16"),
    "int8": ("bf16", "int8", "int8", "fp32"),
}
"""Formats by kind: embedding (and with it the residual stream), attention, feed-forward, head.

INT8 saves its codes in addition to the tensors that forward saves, so that in an FP32 stream it takes more memory than
FP32 does.
"""

ALWAYS_FP32 = {
    "softmax": "attention kernels keep it in FP32 themselves",
    "reduction": "gradients, and activations of a divided model, are added up in FP32; gradient_sync.kind bf16 sends "
    "gradients in two bytes",
    "rope": "angles need more than eight bits of mantissa",
}
CAN_BE_NARROW = ("norm", "loss", "activation")
FP32_OPS = (*ALWAYS_FP32, "norm", "loss")


@dataclass(frozen=True, kw_only=True)
class PrecisionOverrides:
    """Number formats of single kinds of layers; "" keeps the policy's."""

    embedding: Literal["", "fp32", "bf16", "fp16"] = ""
    """Embedding, and with it the residual stream between blocks."""
    attention: Literal["", "fp32", "bf16", "fp16", "fp8", "int8"] = ""
    """Attention projections."""
    ffn: Literal["", "fp32", "bf16", "fp16", "fp8", "int8"] = ""
    """Feed-forward projections."""
    head: Literal["", "fp32", "bf16", "fp16"] = ""
    """Output head."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 training."""

    recipe: Recipe = "tensorwise"
    """Granularity of scales: a whole tensor, a row, or blocks as in DeepSeek-V3 (1 x 128 activations, 128 x 128
    weights, E4M3 everywhere)."""
    scaling: Literal["current", "delayed"] = "current"
    """Scale by the current maxima, or by those of recent steps (`delayed`, tensorwise only). Delayed scaling saves no
    pass here: the current maximum is taken anyway, to detect overflow."""
    grad_dtype: Literal["", "e4m3", "e5m2"] = constant("")
    """FP8 type of gradients; "" is the recipe's own (E5M2; E4M3 for blockwise)."""
    wgrad_high_precision: bool = constant(False)
    """Compute weight gradients from unquantized factors (torchao's `gw_hp`)."""
    save_quantized_input: bool = constant(False)
    """Save inputs for backward as quantized in forward: one byte an element, shared by the projections that read them
    (one copy each under delayed scaling)."""
    amax_history_len: int = constant(16)
    """Steps in the amax history of delayed scaling, as in TransformerEngine."""

    def __post_init__(self) -> None:
        if self.scaling == "delayed" and self.recipe != "tensorwise":
            raise ConfigError(f"scaling: delayed requires recipe tensorwise, not {self.recipe}; choose current")
        if self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len: must be at least 1 step, got {self.amax_history_len}; 16 is usual")

    @property
    def gradient_dtype(self) -> torch.dtype:
        chosen = self.grad_dtype or ("e4m3" if self.recipe == "blockwise" else "e5m2")
        return torch.float8_e4m3fn if chosen == "e4m3" else torch.float8_e5m2


@dataclass(frozen=True, kw_only=True)
class Int8MatmulConfig:
    """INT8 training."""

    stochastic_rounding: bool = constant(True)
    """Round gradients stochastically."""
    wgrad_high_precision: bool = constant(False)
    """Compute weight gradients from unquantized factors."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of one training run. Weights, their gradients and optimizer states are FP32 in every case."""

    policy: Policy = "auto"
    """Formats of all kinds of layers; `auto` chooses fp32 or bf16_mixed once, before the run, from rates measured at
    the model's own shapes."""
    overrides: PrecisionOverrides = field(default_factory=PrecisionOverrides)
    """Formats of single kinds of layers."""
    fp32_ops: tuple[str, ...] = FP32_OPS
    """Operators that stay in FP32 inside layers of lower precision. `softmax`, `reduction` and `rope` always do;
    `norm` and `loss` unless left out; `activation` only if named."""
    output_dtype: Literal["", "fp32", "bf16", "fp16"] = constant("")
    """Output of 8-bit GEMMs; "" is BF16 for FP8, and for INT8 the format of the residual stream."""
    eval_dtype: Literal["policy", "fp32"] = constant("policy")
    """Evaluate validation losses in the policy's formats or in FP32."""
    fp32_matmul: Fp32Matmul = "auto"
    """Kernels of FP32 matrix products. `default`: PyTorch's own; `onednn`: oneDNN's on a CPU, which use AVX-512 on AMD
    processors, equally exact with other last bits (refused where they would round); `tf32`: 10-bit mantissas on CUDA;
    `auto` takes onednn where it is exact and clearly faster at the model's shapes, settled once before the run."""
    fp8: Fp8Config = field(default_factory=Fp8Config)
    int8: Int8MatmulConfig = field(default_factory=Int8MatmulConfig)
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)

    def __post_init__(self) -> None:
        for name in self.fp32_ops:
            if name not in (*ALWAYS_FP32, *CAN_BE_NARROW):
                known = ", ".join((*ALWAYS_FP32, *CAN_BE_NARROW))
                raise ConfigError(f"fp32_ops: {name!r} is not one of {known}")
        for name, reason in ALWAYS_FP32.items():
            if name not in self.fp32_ops:
                raise ConfigError(f"fp32_ops: {name} always stays in FP32: {reason}")

    def format_of(self, kind: Kind) -> Format:
        """The format of a kind of layer. Raises `ConfigError` while the policy is `auto`."""
        if self.policy == "auto":
            text = "policy: 'auto' is not resolved yet"
            raise ConfigError(f"{text}; resolve it from measured rates or set fp32 or bf16_mixed")
        return getattr(self.overrides, kind) or POLICIES[self.policy][KINDS.index(kind)]

    @property
    def formats(self) -> dict[Kind, Format]:
        return {kind: self.format_of(kind) for kind in KINDS}

    @property
    def compute(self) -> Format:
        """The format of most products: the feed-forward layers'."""
        return self.format_of("ffn")

    @property
    def result_of(self) -> dict[str, torch.dtype]:
        """The output format of products, by their compute format."""
        stream_is_bf16 = self.format_of("embedding") == "bf16"
        eight = {"fp8": torch.bfloat16, "int8": torch.bfloat16 if stream_is_bf16 else torch.float32}
        return FLOATS | (dict.fromkeys(eight, FLOATS[self.output_dtype]) if self.output_dtype else eight)

    def relative_bytes(self, chosen: Format) -> float:
        """Bytes of a format's outputs, which are saved for backward, relative to FP32."""
        return self.result_of[chosen].itemsize / torch.float32.itemsize

    def gathered_as(self, kind: Kind) -> torch.dtype:
        """The format in which every reader takes a weight of this kind, so that no more needs to be communicated: a
        16-bit floating-point format, unless formats change or evaluation has its own.
        """
        stays = self.adaptive.kind == "none" and self.eval_dtype == "policy"
        return FLOATS.get(self.format_of(kind), torch.float32) if stays else torch.float32

    @property
    def planned_as(self) -> Literal["fp32", "bf16"]:
        """The format of the same size as the feed-forward layers' outputs; FP16 is as large as BF16."""
        return "fp32" if self.result_of[self.compute] == torch.float32 else "bf16"

    @property
    def delays(self) -> bool:
        """True if any layer uses delayed FP8 scaling, now or after a change of formats."""
        return self.fp8.scaling == "delayed" and "fp8" in self.possible

    def features(self) -> list[Feature]:
        """Features of the precision settings, with their requirements on a run and what they break."""
        result: list[Feature] = []
        if self.loss_scale.scales(uses_fp16=self.policy != "auto" and self.uses_fp16):
            result.append(feature("loss_scale", needs=[traits.WHOLE_GRADIENTS]))
        if self.policy != "auto" and self.possible & {"fp8", "int8"}:
            result.append(feature("policy", self.policy, breaks=[traits.FLOAT_PRODUCTS]))
        if self.fp32_matmul == "tf32":
            result.append(feature("fp32_matmul", "tf32", only_with=[traits.ACCELERATOR]))
        if self.adaptive.kind != "none":
            needs = {traits.EAGER_BLOCKS, traits.SYNCHRONOUS_UPDATES, traits.SAME_UNITS, traits.WHOLE_GRADIENTS}
            needs |= {traits.TRAINED_WEIGHTS}
            result.append(feature("adaptive.kind", self.adaptive.kind, needs=needs, breaks=[traits.SAME_MATMULS]))
        return result

    @property
    def uses_fp16(self) -> bool:
        """True if gradients pass through FP16 anywhere, now or after a change."""
        return torch.float16 in {self.result_of[name] for name in self.possible}

    @property
    def possible(self) -> set[Format]:
        """The formats of all layers, and those that some may change to."""
        adaptive = self.adaptive
        changes = {"schedule": (adaptive.low_precision,), "none": ()}.get(adaptive.kind, adaptive.candidates)
        return {*self.formats.values(), *changes}


def resolve(config: PrecisionConfig, rates: Mapping[str, float]) -> PrecisionConfig:
    """Replaces `auto` by the policy of the highest rate: `fp32` or `bf16_mixed`.

    `rates`: FLOP/s of the model's own matrix shapes by format name ("fp32", "bf16"). A concrete config is returned
    unchanged. On a tie FP32 wins, because it needs no casts. FP16 needs a loss scale and is slow on most processors,
    and eight-bit formats change results, so `auto` chooses neither.
    """
    if config.policy != "auto":
        return config
    choice: dict[str, Policy] = {"fp32": "fp32", "bf16": "bf16_mixed"}
    known = {name: rates[name] for name in choice if name in rates}
    if not known:
        raise ConfigError("policy: 'auto' needs measured rates of fp32 and bf16; set fp32 or bf16_mixed instead")
    return replace(config, policy=choice[max(known, key=lambda name: known[name])])
