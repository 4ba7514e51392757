"""INT8 models: quantize a finished decoder, choose the fastest backend by measuring, save and load.

Folder format: `config.json` with `format: "modelwright-int8"`, the model's shape and the quantization's parameters;
`model.safetensors` with, for each quantized matrix `NAME`, `NAME.weight` (int8, [out, in]) and `NAME.scale` (float32,
[out]), and every other tensor in float32 under its own name. The embedding is one of them; a head that is tied to it
is not stored again. Version 2, for other grids, is that of `grid_model.py`.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelwright.compress.grid_model import GRID_VERSION, load_grid_model
from modelwright.compress.int8_linear import (
    WEIGHT_LEVELS,
    Backend,
    Int8Embedding,
    Int8Linear,
    place_int8,
    quantize_rows,
    require_backend,
    usable_backends,
)
from modelwright.core.config import dump, only_for, parse
from modelwright.core.errors import ConfigError, ModelError, writing
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.ops.int_grid import ACTIVATION_LEVELS, Granularity
from modelwright.ops.microbenchmark import repeated, seconds_of

FORMAT = "modelwright-int8"
FOUR_BITS = ("int4_nearest", "int4_folded", "int4_gptq")
"""Values of `weights` with four bits."""
MEASURED_ROWS = (8, 256)
"""Tokens that backends are measured with: decoding streams and a chunk of a prompt."""
HOPELESS = 3.0
"""Factor above the fastest kernels' time that no noise of a measurement explains."""


@dataclass(frozen=True, kw_only=True)
class Int8WeightsConfig:
    """Integer inference."""

    weights: Literal["int8", "int8_folded", "int8_smooth", "int4_nearest", "int4_folded", "int4_gptq"] = "int8"
    """Result of the stage quantize for a model that was not trained on a grid: INT8 weights and activations, unchanged
    or with outliers of activations moved into the weights (SmoothQuant, Xiao et al. 2023); or 4-bit weights of the
    decoder's linear layers, rounded to the nearest code or by GPTQ (Frantar et al. 2023), with embedding and head in
    INT8. The `folded` ones first multiply the weights of the norms before projections into these."""
    granularity: Granularity = field(default="group_32", metadata=only_for("weights", *FOUR_BITS))
    """Weights that share a step of 4-bit weights."""

    backend: Literal["auto", "fbgemm", "int_mm", "kernel"] = "auto"
    """INT8 GEMM kernels of whatever the decode operator does not compute, such as prompts: PyTorch's two, and this
    package's own `kernel`; `auto` measures them at the model's own shapes when it is loaded. All give the same numbers
    up to rounding of the last bit."""


def quantize_model(model: Decoder, config: Int8WeightsConfig) -> Decoder:
    """Returns a new decoder with all linears, the head and the embedding table in INT8; norms keep their format.
    `model` is not changed. The result is for inference: it lacks gradients.
    """
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, weight in list(_matrices(model)):
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = quantize_rows(weight)
    return _assemble(model.config, tensors, config)


def save_int8(model: Decoder, folder: Path) -> None:
    """Write an INT8 decoder into `folder` in the format of this module."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        # A tied head shares the rows of the embedding, which are stored once.
        is_tied_head = name == "head" and model.config.tie_embeddings
        if isinstance(module, Int8Embedding) or (isinstance(module, Int8Linear) and not is_tied_head):
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = module.quantized, module.scale
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
    description = {
        "format": FORMAT,
        "version": 1,
        "model": dump(model.config, constants=True),
        "quantization_config": {
            "quant_method": FORMAT,
            "weights": f"symmetric per output channel, {WEIGHT_LEVELS} levels each way",
            "activations": f"symmetric per token at run time, {ACTIVATION_LEVELS} levels each way",
        },
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def is_int8_folder(folder: Path) -> bool:
    """True if `folder` was written by `save_int8`."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def load_int8(folder: Path, config: Int8WeightsConfig) -> Decoder:
    """Read an INT8 decoder. Raises `ModelError` when the folder is of another kind, incomplete or damaged."""
    if not is_int8_folder(folder):
        raise ModelError(f"{folder}: is not an INT8 model folder (the format in its config.json is not {FORMAT!r})")
    description: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if description.get("version") == GRID_VERSION:
        return load_grid_model(folder, description, partial(choose_backend, config))
    try:
        shape = parse(ModelConfig, description["model"], constants=True)
        tensors = load_file(folder / "model.safetensors")
    except (ConfigError, KeyError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: is damaged ({error}); write it again") from None
    return _assemble(shape, tensors, config)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all distinct tensors of a model as stored."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())


def _matrices(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields the matrices to quantize, by module name; a tied head is listed under the name of the embedding."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            yield name, module.weight


def _assemble(shape: ModelConfig, tensors: dict[str, Tensor], config: Int8WeightsConfig) -> Decoder:
    """Builds a decoder from stored tensors. Raises `ModelError` on a missing, surplus or ill-shaped tensor."""
    with torch.device("meta"):
        model = Decoder(shape)
    matrices = {name: weight.shape for name, weight in _matrices(model)}
    expected = {f"{name}.{part}" for name in matrices for part in ("weight", "scale")}
    expected |= {name for name, _ in model.named_parameters() if name.removesuffix(".weight") not in matrices}
    if expected != set(tensors):
        wrong = ", ".join(sorted(expected ^ set(tensors))[:4])
        raise ModelError(f"INT8 weights: missing or unknown tensors ({wrong}); quantize the model again")
    backend = choose_backend(config, {name: (tensors[f"{name}.weight"], tensors[f"{name}.scale"]) for name in matrices})
    for name, tensor_shape in matrices.items():
        quantized, scale = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scale")
        if quantized.shape != tensor_shape or scale.shape != tensor_shape[:1] or quantized.dtype != torch.int8:
            raise ModelError(f"INT8 weights: {name} has shape {tuple(quantized.shape)}, not {tuple(tensor_shape)}")
        place_int8(model, name, quantized, scale, backend)
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def choose_backend(config: Int8WeightsConfig, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> Backend:
    """Returns the kernels of the configuration, or the fastest for matrices, given as codes and scales."""
    if config.backend != "auto":
        require_backend(config.backend)
        return config.backend
    # Products of one shape take the same time, so that each shape is measured once.
    distinct = list({tuple(weight.shape): (weight, scale) for weight, scale in matrices.values()}.values())
    times = backend_times(distinct, num_rounds=1)
    return min(times, key=lambda backend: times[backend])


def backend_times(matrices: Sequence[tuple[Tensor, Tensor]], *, num_rounds: int) -> dict[Backend, float]:
    """Measures the seconds that all matrices, given as codes and scales, take for a token with each kind of kernels,
    decoded and of a prompt: the least of the rounds. Kernels that are `HOPELESS` times as slow as others are not
    measured to the end, and not in the next round: without instructions for integers, `int_mm` would take most of the
    time.
    """
    best: dict[Backend, float] = {}
    for _ in range(num_rounds):
        for backend in usable_backends():
            limit_s = HOPELESS * min(best.values(), default=math.inf)
            if best.get(backend, 0.0) <= limit_s:
                best[backend] = min(best.get(backend, math.inf), _backend_seconds(backend, matrices, limit_s))
    return best


@torch.inference_mode()
def _backend_seconds(backend: Backend, matrices: Sequence[tuple[Tensor, Tensor]], limit_s: float) -> float:
    """Sums the medians of three measurements; returns the sum so far once it is above `limit_s`."""
    total = 0.0
    for weight, scale in matrices:
        if total > limit_s:
            break
        linear = Int8Linear(weight, scale, backend)
        for rows in MEASURED_ROWS:
            x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
            product = partial(linear, x)
            times = repeated(lambda product=product: seconds_of(product, "cpu"), num_rounds=3, num_warmups=1)
            total += statistics.median(times) / rows
    return total
