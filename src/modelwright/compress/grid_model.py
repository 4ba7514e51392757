"""Decoders whose projections are integers on a trained or chosen grid; norms keep their format, embedding and head may
be INT8 rows.

Folder format: as `int8.py` writes it, version 2; for each projection `NAME.weight` (codes; two to a byte for 4 bits),
`NAME.scale` and `NAME.zero` (float32, one of each group); for INT8 embedding and head as in version 1.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from modelwright.compress.grid_linear import ActivationGrid, GridLinear, InputGrid, unpack_nibbles
from modelwright.compress.int8_linear import EMBEDDING, Backend, Int8Embedding, Int8Linear, place_int8, quantize_rows
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump, parse
from modelwright.core.errors import ConfigError, ModelError, writing
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.ops.int_grid import Codes, WeightGrid

GRID_VERSION = 2
GRID, STEPS = "quantization.json", "quantization.safetensors"
"""The files in a model folder that hold its trained grid."""
ChooseBackend = Callable[[Mapping[str, tuple[Tensor, Tensor]]], Backend]
"""Chooses kernels from the codes and scales of all matrices."""


@dataclass(frozen=True, kw_only=True)
class TrainedGrid:
    """The grid that a model was trained for. steps: learned steps of projections, [G] each; without them, steps span
    the weights. ranges: of projections' inputs, for activations of kind `tensor`. int8_ends: true if embedding and head
    become INT8 rows, as `int8.py` makes them.
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
    return _assemble_grid(model.config, grid.weights, found, inputs, ends, rest, choose)


def _ends(shape: ModelConfig, grid: TrainedGrid) -> list[str]:
    """Names of the matrices, other than projections, that are INT8."""
    return [EMBEDDING, *([] if shape.tie_embeddings else ["head"])] if grid.int8_ends else []


def _assemble_grid(
    shape: ModelConfig,
    grid: WeightGrid,
    codes: Mapping[str, Codes],
    inputs: Mapping[str, InputGrid],
    ends: Mapping[str, tuple[Tensor, Tensor]],
    rest: Mapping[str, Tensor],
    choose: ChooseBackend,
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape)
    # Where the kernels of `int8_linear.py` compute exactly the same, they do; they need a scale for each output.
    is_int8 = grid.bits == 8 and grid.symmetric and not grid.group_size
    fast = {name for name in codes if is_int8 and inputs[name].kind == "token"}
    scales = {name: codes[name].step_G.float().expand(codes[name].codes_OI.shape[0]).contiguous() for name in fast}
    matrices = {name: (codes[name].codes_OI, scales[name]) for name in fast} | dict(ends)
    backend = choose(matrices) if matrices else "int_mm"
    for name, own in codes.items():
        if name in fast:
            module: nn.Module = Int8Linear(own.codes_OI, scales[name], backend)
        else:
            module = GridLinear(own, grid, inputs[name])
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    for name, (rows, scale) in ends.items():
        place_int8(model, name, rows, scale, backend)
    for name, tensor in rest.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def save_grid_model(model: Decoder, grid: TrainedGrid, folder: Path) -> None:
    """Write a decoder of `quantize_to_grid` into `folder`."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ends = _ends(model.config, grid)
    # Ends have no zero points; a tied INT8 head is skipped, as it shares the rows of the embedding.
    for name, module in model.named_modules():
        if name in ends and isinstance(module, (Int8Linear, Int8Embedding)):
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale}
        elif name != "head" and isinstance(module, (Int8Linear, GridLinear)):
            zero = module.zero if isinstance(module, GridLinear) else torch.zeros_like(module.scale)
            tensors |= {f"{name}.weight": module.quantized, f"{name}.scale": module.scale, f"{name}.zero": zero}
    description = {
        "format": "modelwright-int8",
        "version": GRID_VERSION,
        "model": dump(model.config, constants=True),
        "quantization_config": {
            "quant_method": "modelwright-int8",
            "weights": asdict(grid.weights),
            "activations": grid.activations,
            "ranges": dict(grid.ranges),
            "int8_ends": grid.int8_ends,
        },
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def load_grid_model(folder: Path, description: Mapping[str, Any], choose: ChooseBackend) -> Decoder:
    """Read a folder of `save_grid_model`; description: its config.json. Raises `ModelError` if it is damaged."""
    try:
        shape = parse(ModelConfig, description["model"], constants=True)
        settings = description["quantization_config"]
        ranges = {name: (float(low), float(high)) for name, (low, high) in settings["ranges"].items()}
        grid = TrainedGrid(
            weights=WeightGrid(**settings["weights"]),
            activations=settings["activations"],
            ranges=ranges,
            int8_ends=settings.get("int8_ends", False),
        )
        tensors = load_file(folder / "model.safetensors")
    except (ConfigError, KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: is damaged ({error}); write it again") from None
    with torch.device("meta"):
        plain = Decoder(shape)
    projections = plain.projections()
    expected = {name for name, _ in plain.named_parameters()}
    expected |= {f"{name}.{part}" for name in projections for part in ("scale", "zero")}
    expected |= {f"{name}.scale" for name in _ends(shape, grid)}
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
    ends = {name: (tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.scale")) for name in _ends(shape, grid)}
    inputs = {name: grid.inputs(name) for name in codes}
    return _assemble_grid(shape, grid.weights, codes, inputs, ends, tensors, choose)
