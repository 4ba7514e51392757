"""What integers cost in held-out text: rounding a finished model against training on the grid, at equal tokens.

Each seed trains a model, and then trains it on, once plainly and once on the grid. The plain end is rounded after
training; both ends have seen the same rows.
"""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model

from modelwright.compress.fold import smoothed
from modelwright.compress.gptq import gptq
from modelwright.compress.int8 import (
    Agreement,
    Int8WeightsConfig,
    TrainedGrid,
    measure_agreement,
    quantize_model,
    quantize_to_grid,
)
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, Linear
from modelwright.ops.int_grid import Codes, WeightGrid
from modelwright.parallel.mesh import single
from modelwright.train.techniques.fake_quantization import QuantizationAwareConfig, fake_quantization
from modelwright_claims import workbench
from modelwright_claims.claim import Setting
from modelwright_claims.training_run import Run, train_once

GRIDS = {"8 bits": WeightGrid(), "4 bits": WeightGrid(bits=4, granularity="group_32")}
"""Grids of quantization-aware training; activations are rounded per token."""
SERVED, NEAREST, GPTQ = "INT8 as served", "4 bits, nearest", "4 bits, GPTQ"
SMOOTH, TORCHAO = "INT8 after SmoothQuant", "4 bits, torchao"
TRAINED = {bits: f"{bits}, trained on the grid" for bits in GRIDS}
VARIANTS = (SERVED, SMOOTH, TRAINED["8 bits"], NEAREST, GPTQ, TORCHAO, TRAINED["4 bits"])
"""No target speaks of `SMOOTH` and `TORCHAO`; the latter is measured where the package is installed."""
HELDOUT_ROWS = 128
CALIBRATION_BATCHES, CALIBRATION_ROWS = 8, 8
MORE_RATE = 0.3
"""Rate of the steps that follow, with and without rounding, as a share of the first ones'. At the whole rate training
on a 4-bit grid ended further from FP32 than rounding afterwards (docs/log.md)."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The ends of one seed's training: the plain one, and those on the grids, by their bits."""

    plain: Decoder
    on_grid: Mapping[str, Decoder]


def measure_quality(setting: Setting, size: workbench.Size, num_seeds: int) -> list[dict[str, Agreement]]:
    """Each variant beside the plain end of its seed."""
    heldout = workbench.packed_rows(setting, seq_len=size.seq_len, mode="best_fit", split="test")
    tokens_BT = next(heldout.batches(16 if setting.quick else HELDOUT_ROWS)).input_ids_BT
    found = []
    for seed in range(num_seeds):
        trained = _train(setting, size, seed)
        variants = {name: make() for name, make in _variants(setting, size, trained).items()}
        found.append({name: measure_agreement(trained.plain, one, tokens_BT) for name, one in variants.items()})
    return found


def _train(setting: Setting, size: workbench.Size, seed: int) -> Trained:
    first = Run(size=size, seed=seed)
    rate = MORE_RATE * size.learning_rate
    more = Run(size=replace(size, num_steps=size.num_steps // 2, learning_rate=rate), seed=seed, start_from=first)
    with tempfile.TemporaryDirectory(dir=setting.folder) as place:
        begin = Path(place) / "begin.safetensors"
        train_once(setting, first, single(workbench.device()), keep=begin)

        def end(name: str, grid: WeightGrid | None) -> Decoder:
            keep = Path(place) / f"{name}.safetensors"
            techniques = [partial(fake_quantization, QuantizationAwareConfig(weights=grid))] if grid else []
            train_once(setting, more, single(workbench.device()), begin=begin, keep=keep, techniques=techniques)
            model = Decoder(size.model_config(workbench.prepare_text(setting).vocab_size))
            load_model(model, keep)
            return model.eval()

        return Trained(plain=end("plain", None), on_grid={name: end(name, grid) for name, grid in GRIDS.items()})


def _variants(setting: Setting, size: workbench.Size, trained: Trained) -> dict[str, Callable[[], Decoder]]:
    """How each model is made. All but the served one keep embedding and head as they are."""

    def calibration() -> list[TokenBatch]:
        rows = workbench.packed_rows(setting, seq_len=size.seq_len, mode="best_fit", split="train")
        return list(islice(rows.batches(CALIBRATION_ROWS), CALIBRATION_BATCHES))

    served, four_bits = Int8WeightsConfig(backend="int_mm"), GRIDS["4 bits"]
    makers: dict[str, Callable[[], Decoder]] = {
        SERVED: lambda: quantize_model(trained.plain, served),
        SMOOTH: lambda: quantize_model(smoothed(trained.plain, calibration()), served),
        NEAREST: lambda: _rounded(trained.plain, four_bits),
        GPTQ: lambda: _rounded(trained.plain, four_bits, gptq(trained.plain, calibration(), four_bits)),
    }
    if find_spec("torchao") is not None:
        makers[TORCHAO] = lambda: _by_torchao(trained.plain)
    makers |= {TRAINED[bits]: partial(_rounded, model, GRIDS[bits]) for bits, model in trained.on_grid.items()}
    return makers


def _by_torchao(model: Decoder) -> Decoder:
    """4-bit weights of the projections in groups of 32, activations in 8 bits per token, by PyTorch's own package."""
    torchao: Any = import_module("torchao.quantization")
    config = torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, "int4"),  # noqa: B009 - PyTorch's stubs do not have it
        weight_granularity=torchao.PerGroup(32),
    )
    result = copy.deepcopy(model)
    torchao.quantize_(result.blocks, config, filter_fn=lambda module, _: isinstance(module, Linear))
    return result


def _rounded(model: Decoder, grid: WeightGrid, codes: Mapping[str, Codes] | None = None) -> Decoder:
    trained = TrainedGrid(weights=grid, activations="token")
    return quantize_to_grid(model, trained, codes=codes, choose=lambda matrices: "int_mm")
