"""Precision policy: FP32 master weights always, and the format in which the matrix products are computed.

`fastest` is a wish that is settled once, before a run, from measured rates (`resolve`) and written into the resolved
config, so that a rerun on a busier machine cannot flip it. Knows nothing about how rates are measured.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from modelwright.core.errors import ConfigError
from modelwright.precision.loss_scale import LossScaleConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHOICE = ("fp32", "bf16")
"""What `fastest` chooses among: FP16 needs a loss scale, and is slow on most processors."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`compute`: format of the matrix products; weights, gradients and optimizer states are FP32 in every case.

    loss_scale: of FP16, whose gradients would underflow.
    """

    compute: Literal["fp32", "bf16", "fp16", "fastest"] = "fastest"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)


def resolve(config: PrecisionConfig, rates: Mapping[str, float]) -> PrecisionConfig:
    """The config with `fastest` replaced by the format of the highest rate.

    `rates`: FLOP/s of the model's own matrix shapes by format name ("fp32", "bf16"). A concrete config is returned
    as it is. On a tie FP32 wins: it needs no casts.
    """
    if config.compute != "fastest":
        return config
    known = {name: rates[name] for name in _CHOICE if name in rates}
    if not known:
        raise ConfigError("compute: 'fastest' needs measured rates of fp32 and bf16; set fp32 or bf16 instead")
    return replace(config, compute=max(known, key=lambda name: known[name]))  # type: ignore[arg-type]


def compute_dtype(config: PrecisionConfig) -> torch.dtype:
    """The torch dtype of a concrete config. Raises `ConfigError` for `fastest`, which must be resolved before."""
    if config.compute not in _DTYPES:
        raise ConfigError("compute: 'fastest' is not settled yet; resolve it from measured rates or set fp32 or bf16")
    return _DTYPES[config.compute]


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context in which forward passes and losses run: matrix products in `compute`, the rest as PyTorch casts."""
    dtype = compute_dtype(config)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
