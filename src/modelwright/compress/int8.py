"""Integer models: quantize a finished decoder, choose the fastest backend by measuring, save, load and compare.

All matrices are INT8, or the projections are integers on a trained or chosen grid; then norms keep their format, and
embedding and head may be INT8 rows.

Folder format: `config.json` with `format: "modelwright-int8"`, the model's shape and the quantization's parameters;
`model.safetensors` with the codes `NAME.weight` and the steps `NAME.scale` (float32) of each quantized matrix `NAME`,
and every other tensor in its format under its own name. A head that is tied to the embedding is not stored again.
Version 1: all matrices are INT8 [out, in] with scales [out]. Version 2: projections are on a grid, with one step and
one `NAME.zero` for each group; codes of 4 bits are two to a byte.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelwright.compress.integer_linear import (
    EMBEDDING,
    WEIGHT_LEVELS,
    ActivationGrid,
    Backend,
    GridLinear,
    InputGrid,
    Int8Embedding,
    Int8Linear,
    place_int8,
    quantize_rows,
    require_backend,
    unpack_nibbles,
    usable_backends,
)
from modelwright.core.artifacts import write_atomic, writing
from modelwright.core.config import ConfigError, ModelError, dump, only_for, parse
from modelwright.model.attention import causal_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.ops.int_grid import ACTIVATION_LEVELS, Codes, Granularity, WeightGrid
from modelwright.ops.microbenchmark import repeated, seconds_of

FORMAT, GRID_VERSION = "modelwright-int8", 2
GRID, STEPS = "quantization.json", "quantization.safetensors"
"""The files in a model folder that hold its trained grid."""
FOUR_BITS = ("int4_nearest", "int4_folded", "int4_gptq")
"""Values of `weights` with four bits."""
MEASURED_ROWS = (8, 256)
"""Tokens that backends are measured with: decoding streams and a chunk of a prompt."""
HOPELESS = 3.0
"""Factor above the fastest kernels' time that no noise of a measurement explains."""
ChooseBackend = Callable[[Mapping[str, tuple[Tensor, Tensor]]], Backend]
"""Chooses kernels from the codes and scales of all matrices."""


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


@dataclass(frozen=True, kw_only=True)
class TrainedGrid:
    """The grid that a model was trained for. steps: learned steps of projections, [G] each; without them, steps span
    the weights. ranges: of projections' inputs, for activations of kind `tensor`. int8_ends: true if embedding and head
    become INT8 rows, too.
    """

    weights: WeightGrid
    activations: ActivationGrid = "none"
    steps: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    int8_ends: bool = False

    def codes(self, name: str, weight_OI: Tensor) -> Codes:
        """Quantizes a projection's weight to integers."""
        step_G, zero_G = self.weights.ranges(weight_OI)
        if name in self.steps:
            step_G, zero_G = self.steps[name].to(step_G.dtype), torch.zeros_like(zero_G)
        return self.weights.codes(weight_OI, step_G, zero_G)

    def inputs(self, name: str) -> InputGrid:
        """Returns the quantization of a projection's input."""
        if self.activations != "tensor":
            return InputGrid(kind=self.activations)
        if name not in self.ranges:
            return InputGrid()  # a layer whose input was never observed stays as it is in training, too
        least, most = self.ranges[name]
        return InputGrid(kind="tensor", least=least, most=most)

    def describe(self) -> str:
        """Describes the grid in a sentence for people."""
        kind = "symmetric" if self.weights.symmetric else "asymmetric"
        where = {"tensor": "per matrix", "channel": "per output channel"}.get(
            self.weights.granularity, f"per group of {self.weights.group_size} inputs"
        )
        activations = {
            "none": "activations stay as they are",
            "token": "activations are quantized per token at run time",
            "tensor": "activations are quantized by observed ranges",
        }
        learned = " with learned steps" if self.steps else ""
        ends = "embedding and head are INT8, norms" if self.int8_ends else "embedding, head and norms"
        return (
            f"Projections have {self.weights.bits}-bit weights, {kind} {where}{learned}; "
            f"{activations[self.activations]}; {ends} keep their format."
        )

    def save(self, folder: Path) -> None:
        """Write the grid into the folder of a model's weights."""
        settings = {"weights": asdict(self.weights), "activations": self.activations, "ranges": dict(self.ranges)}
        with writing(folder):
            save_file({name: step.detach().contiguous() for name, step in self.steps.items()}, folder / STEPS)
        write_atomic(folder / GRID, json.dumps(settings, indent=1))

    @classmethod
    def load(cls, folder: Path) -> "TrainedGrid | None":
        """Reads the grid in the folder of a model's weights; None without one. Raises `ModelError` if it is damaged."""
        if not (folder / GRID).is_file():
            return None
        try:
            settings = json.loads((folder / GRID).read_text(encoding="utf-8"))
            return cls(
                weights=WeightGrid(**settings["weights"]),
                activations=settings["activations"],
                steps=load_file(folder / STEPS),
                ranges={name: (float(low), float(high)) for name, (low, high) in settings["ranges"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"{folder / GRID}: is damaged ({error}); run its stage again") from None


def quantize_model(model: Decoder, config: Int8WeightsConfig) -> Decoder:
    """Returns a new decoder with all linears, the head and the embedding table in INT8; norms keep their format.
    `model` is not changed. The result is for inference: it lacks gradients.
    """
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = quantize_rows(module.weight)
    return _from_int8(model.config, tensors, config)


def quantize_to_grid(
    model: Decoder, grid: TrainedGrid, *, codes: Mapping[str, Codes] | None = None, choose: ChooseBackend
) -> Decoder:
    """Returns a new decoder whose projections are integers on the grid. codes: of projections, in place of those to
    which the grid rounds, such as GPTQ's. `model` is not changed. The result is for inference. Raises `ConfigError` if
    the inputs of a projection do not divide into the grid's groups.
    """
    for name, one in model.projections().items():
        grid.weights.check(name, one.in_features)
    found = {name: (codes or {}).get(name) or grid.codes(name, one.weight) for name, one in model.projections().items()}
    inputs = {name: grid.inputs(name) for name in found}
    rest = {name: one.detach().clone() for name, one in model.named_parameters() if not name.startswith("heads.")}
    for name in found:
        del rest[f"{name}.weight"]
    ends = {name: quantize_rows(rest.pop(f"{name}.weight")) for name in _ends(model.config, grid)}
    return _assemble(model.config, found, inputs, ends, rest, choose, grid=grid.weights)


def _ends(shape: ModelConfig, grid: TrainedGrid) -> list[str]:
    """Names of the matrices, other than projections, that are INT8."""
    return [EMBEDDING, *([] if shape.tie_embeddings else ["head"])] if grid.int8_ends else []


def _from_int8(shape: ModelConfig, tensors: dict[str, Tensor], config: Int8WeightsConfig) -> Decoder:
    """Builds a decoder whose matrices are all INT8. Raises `ModelError` on a missing, surplus or ill-shaped tensor."""
    with torch.device("meta"):
        plain = Decoder(shape)
    # A tied head is listed under the name of the embedding.
    matrices = {
        name: module.weight.shape
        for name, module in plain.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    }
    expected = {f"{name}.{part}" for name in matrices for part in ("weight", "scale")}
    expected |= {name for name, _ in plain.named_parameters() if name.removesuffix(".weight") not in matrices}
    if expected != set(tensors):
        wrong = ", ".join(sorted(expected ^ set(tensors))[:4])
        raise ModelError(f"INT8 weights: missing or unknown tensors ({wrong}); quantize the model again")
    rows = {name: (tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scale")) for name in matrices}
    for name, (codes, scale) in rows.items():
        if codes.shape != matrices[name] or scale.shape != matrices[name][:1] or codes.dtype != torch.int8:
            raise ModelError(f"INT8 weights: {name} has shape {tuple(codes.shape)}, not {tuple(matrices[name])}")
    return _assemble(shape, {}, {}, rows, tensors, partial(choose_backend, config))


def _assemble(
    shape: ModelConfig,
    codes: Mapping[str, Codes],
    inputs: Mapping[str, InputGrid],
    rows: Mapping[str, tuple[Tensor, Tensor]],
    rest: Mapping[str, Tensor],
    choose: ChooseBackend,
    *,
    grid: WeightGrid | None = None,
) -> Decoder:
    """codes, inputs: of projections on a grid; rows: codes and scales of the matrices that are INT8 rows."""
    with torch.device("meta"):
        model = Decoder(shape)
    # Where the kernels of `integer_linear.py` compute exactly the same, they do; they need a scale for each output.
    is_int8 = grid is not None and grid.bits == 8 and grid.symmetric and not grid.group_size
    fast = {name for name in codes if is_int8 and inputs[name].kind == "token"}
    scales = {name: codes[name].step_G.float().expand(codes[name].codes_OI.shape[0]).contiguous() for name in fast}
    matrices = {name: (codes[name].codes_OI, scales[name]) for name in fast} | dict(rows)
    backend = choose(matrices) if matrices else "int_mm"
    for name, own in codes.items():
        if name in fast:
            module: nn.Module = Int8Linear(own.codes_OI, scales[name], backend)
        else:
            assert grid is not None
            module = GridLinear(own, grid, inputs[name])
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    for name, (own_codes, scale) in rows.items():
        place_int8(model, name, own_codes, scale, backend)
    for name, tensor in rest.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def save_int8(model: Decoder, folder: Path) -> None:
    """Write an INT8 decoder into `folder` in the format of this module."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        # A tied head shares the rows of the embedding, which are stored once.
        is_tied_head = name == "head" and model.config.tie_embeddings
        if isinstance(module, Int8Embedding) or (isinstance(module, Int8Linear) and not is_tied_head):
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale}
    quantization = {
        "weights": f"symmetric per output channel, {WEIGHT_LEVELS} levels each way",
        "activations": f"symmetric per token at run time, {ACTIVATION_LEVELS} levels each way",
    }
    _save(model, folder, tensors, quantization, version=1)


def save_grid_model(model: Decoder, grid: TrainedGrid, folder: Path) -> None:
    """Write a decoder of `quantize_to_grid` into `folder`."""
    tensors: dict[str, Tensor] = {}
    ends = _ends(model.config, grid)
    # Ends have no zero points; a tied INT8 head is skipped, as it shares the rows of the embedding.
    for name, module in model.named_modules():
        if name in ends and isinstance(module, (Int8Linear, Int8Embedding)):
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale}
        elif name != "head" and isinstance(module, (Int8Linear, GridLinear)):
            zero = module.zero if isinstance(module, GridLinear) else torch.zeros_like(module.scale)
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale, f"{name}.zero": zero}
    quantization = {
        "weights": asdict(grid.weights),
        "activations": grid.activations,
        "ranges": dict(grid.ranges),
        "int8_ends": grid.int8_ends,
    }
    _save(model, folder, tensors, quantization, version=GRID_VERSION)


def _save(
    model: Decoder, folder: Path, tensors: dict[str, Tensor], quantization: Mapping[str, Any], *, version: int
) -> None:
    tensors |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    description = {
        "format": FORMAT,
        "version": version,
        "model": dump(model.config, constants=True),
        "quantization_config": {"quant_method": FORMAT, **quantization},
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
    grid: TrainedGrid | None = None
    try:
        shape = parse(ModelConfig, description["model"], constants=True)
        if description.get("version") == GRID_VERSION:
            settings = description["quantization_config"]
            grid = TrainedGrid(
                weights=WeightGrid(**settings["weights"]),
                activations=settings["activations"],
                ranges={name: (float(low), float(high)) for name, (low, high) in settings["ranges"].items()},
                int8_ends=settings.get("int8_ends", False),
            )
        tensors = load_file(folder / "model.safetensors")
    except (ConfigError, KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: is damaged ({error}); write it again") from None
    if grid is None:
        return _from_int8(shape, tensors, config)
    with torch.device("meta"):
        plain = Decoder(shape)
    projections, ends = plain.projections(), _ends(shape, grid)
    expected = {name for name, _ in plain.named_parameters()}
    expected |= {f"{name}.{part}" for name in projections for part in ("scale", "zero")}
    expected |= {f"{name}.scale" for name in ends}
    if expected != set(tensors):
        wrong = ", ".join(sorted(expected ^ set(tensors))[:4])
        raise ModelError(f"{folder}: missing or unknown tensors ({wrong}); quantize the model again")
    codes: dict[str, Codes] = {}
    for name, one in projections.items():
        stored = tensors.pop(f"{name}.weight")
        stored = unpack_nibbles(stored, one.in_features) if stored.dtype == torch.uint8 else stored
        codes[name] = Codes(stored, tensors.pop(f"{name}.scale"), tensors.pop(f"{name}.zero"))
        if stored.shape != one.weight.shape:
            raise ModelError(f"{folder}: {name} has shape {tuple(stored.shape)}, not {tuple(one.weight.shape)}")
    rows = {name: (tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scale")) for name in ends}
    inputs = {name: grid.inputs(name) for name in codes}
    return _assemble(shape, codes, inputs, rows, tensors, partial(choose_backend, config), grid=grid.weights)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all distinct tensors of a model as stored."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())


def choose_backend(config: Int8WeightsConfig, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> Backend:
    """Returns the kernels of the configuration, or the fastest for matrices, given as codes and scales."""
    if config.backend != "auto":
        require_backend(config.backend)
        return config.backend
    # Products of one shape take the same time, so that each shape is measured once.
    distinct = list({tuple(weight.shape): (weight, scale) for weight, scale in matrices.values()}.values())
    times = backend_times(distinct, num_rounds=1)
    return min(times, key=lambda backend: times[backend])


@torch.inference_mode()
def backend_times(matrices: Sequence[tuple[Tensor, Tensor]], *, num_rounds: int) -> dict[Backend, float]:
    """Measures the seconds that all matrices, given as codes and scales, take for a token with each kind of kernels,
    decoded and of a prompt: the sum of medians of three, the least of the rounds. Kernels that are `HOPELESS` times as
    slow as others are not measured to the end, and not in the next round: without instructions for integers, `int_mm`
    would take most of the time.
    """
    best: dict[Backend, float] = {}
    for _ in range(num_rounds):
        for backend in usable_backends():
            limit_s, total_s = HOPELESS * min(best.values(), default=math.inf), 0.0
            if best.get(backend, 0.0) > limit_s:
                continue
            for weight, scale in matrices:
                if total_s > limit_s:
                    break
                linear = Int8Linear(weight, scale, backend)
                for rows in MEASURED_ROWS:
                    x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
                    product = partial(linear, x)
                    times = repeated(lambda product=product: seconds_of(product, "cpu"), num_rounds=3, num_warmups=1)
                    total_s += statistics.median(times) / rows
            best[backend] = min(best.get(backend, math.inf), total_s)
    return best


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences of the two models' next-token predictions on the same text. Losses in nats per token; accuracies are
    the shares of tokens that were the likeliest one; `divergence` is the mean KL divergence from the reference in nats;
    `same_first` the share of positions with the same likeliest token; `max_logit_gap` the largest difference of any
    logit.
    """

    num_tokens: int
    reference_loss: float
    int8_loss: float
    reference_accuracy: float
    int8_accuracy: float
    divergence: float
    same_first: float
    max_logit_gap: float


@torch.inference_mode()
def measure_agreement(reference: Decoder, int8: Decoder, tokens_BT: Tensor) -> Agreement:
    """Compare next-token distributions row by row."""
    sums = torch.zeros(6, dtype=torch.float64)
    count, gap = 0, 0.0
    for tokens_T in tokens_BT:
        left, right = (
            model.logits(model(tokens_T[None], torch.arange(len(tokens_T))[None], causal_attend()))[0, :-1].float()
            for model in (reference, int8)
        )
        log_left, log_right = left.log_softmax(-1), right.log_softmax(-1)
        # The last position predicts a token that is not known, so its logits are left out.
        labels = tokens_T[1:]
        sums[0] += F.nll_loss(log_left, labels, reduction="sum")
        sums[1] += F.nll_loss(log_right, labels, reduction="sum")
        sums[2] += (log_left.exp() * (log_left - log_right)).sum()
        sums[3] += (left.argmax(-1) == right.argmax(-1)).sum()
        sums[4] += (left.argmax(-1) == labels).sum()
        sums[5] += (right.argmax(-1) == labels).sum()
        gap = max(gap, float((left - right).abs().max()))
        count += len(labels)
    loss, int8_loss, divergence, same, accuracy, int8_accuracy = (sums / count).tolist()
    return Agreement(
        num_tokens=count,
        reference_loss=loss,
        int8_loss=int8_loss,
        reference_accuracy=accuracy,
        int8_accuracy=int8_accuracy,
        divergence=divergence,
        same_first=same,
        max_logit_gap=gap,
    )
