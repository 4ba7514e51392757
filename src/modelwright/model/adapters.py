"""Low-rank adapters on a decoder: attaching them, removing them, merging them into the weights.

A model pass on the whole model, before it is laid out: its own weights are frozen, so that gradients, optimizer states
and checkpoints are those of the adapters and of the objective's heads. One adapter is in `low_rank.py`; folders in
PEFT's layout are in `peft_folder.py`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelwright.core.config import ConfigError
from modelwright.model import low_rank
from modelwright.model.decoder import Decoder, Linear, ModelConfig, StoredParameters

ADAPTER = ".adapter."
"""Infix of the names of adapter parameters, after the name of the projection."""
HEADS = "heads."
FROZEN = ".frozen"


def attach_adapters(model: Decoder, config: low_rank.AdapterConfig, seed: int) -> None:
    """Add new adapters to the model, in place, and freeze its own weights; `config.r` 0 changes nothing. Existing
    adapters are kept.

    The seed decides the initial values, whatever the layout. Raises `ConfigError` if a pattern matches no projection,
    or if the model has adapters of another form.
    """
    if not config.r:
        return
    projections = own_projections(model)
    targets = config.targets(projections)
    if model.adapters.r:
        # The adapters of the model go on, with the dropout and the base format of the configuration
        present, before = adapters_of(model), model.adapters
        is_same = list(present) == list(targets) and config.use_dora == before.use_dora
        is_same = is_same and before.base_format in ("full", config.base_format)
        is_same = is_same and all(one.rank == config.rank_of(name) for name, one in present.items())
        if not (is_same and all(one.scale == config.scale_of(name) for name, one in present.items())):
            raise ConfigError(
                f"lora: the model has adapters of another form; set the section to theirs, {before}, or merge them "
                "first"
            )
        if config.base_format != "full" and before.base_format == "full":
            pack_projections(model, config.base_format)
        model.adapters = config
        for adapter in present.values():
            adapter.set_dropout(config.lora_dropout)
        freeze_base(model)
        return
    # The fingerprint identifies the base before its projections are packed and adapters add parameters
    model.base_fingerprint = model.base_fingerprint or base_fingerprint(model)
    model.adapters = config
    if config.base_format != "full":
        pack_projections(model, config.base_format)
    for name in targets:
        projection = projections[name]
        adapter = low_rank.LowRank(
            projection.in_features,
            projection.out_features,
            config.rank_of(name),
            scale=config.scale_of(name),
            dropout=config.lora_dropout,
            has_magnitude=config.use_dora,
        )
        like = projection.weight if projection.frozen is None else projection.frozen.scales
        projection.adapter = adapter.to(like.device, like.dtype)
    # Read after packing: DoRA's magnitudes start as the lengths of the weights that are used, which are rounded
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if ADAPTER in name}
    initial = StoredAdapters(stored=_source_of(model), config=config, seed=seed, shapes=shapes)
    if is_on_disk(model):
        model.stored = initial
    else:
        for name, shape in initial.shapes.items():
            _fill(model.get_parameter(name), initial.read(name, tuple(slice(0, length) for length in shape)))
    freeze_base(model)


def is_on_disk(model: Decoder) -> bool:
    """Returns whether the weights stay on disk until the model is laid out."""
    return model.stored is not None and model.head_weight.is_meta


def own_projections(model: Decoder) -> dict[str, Linear]:
    """Projections of the model's own layers, by name. Those of heads, such as a value model, are trained whole."""
    return {name: one for name, one in model.projections().items() if not name.startswith(HEADS)}


def pack_projections(model: Decoder, packed_format: low_rank.PackedFormat) -> None:
    """Quantize the weights of all own projections to four or eight bits, in place, or when they are read from disk."""
    for projection in own_projections(model).values():
        weight = projection.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        frozen = low_rank.FrozenWeight(projection.out_features, projection.in_features, packed_format, dtype=wide)
        projection.frozen = frozen.to(weight.device)
        if not is_on_disk(model):
            codes, scales = low_rank.pack(weight.detach(), packed_format)
            _fill(projection.frozen.codes, codes)
            _fill(projection.frozen.scales, scales)
        projection.register_parameter("weight", None)
    if is_on_disk(model):
        assert model.stored is not None
        inputs = {name: one.in_features for name, one in own_projections(model).items()}
        model.stored = StoredPacked(stored=model.stored, num_inputs=inputs, packed_format=packed_format)


def freeze_base(model: Decoder) -> None:
    """Freeze all parameters but adapters and heads; parameters of heads that an objective has frozen stay frozen."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name) and (parameter.requires_grad or ADAPTER in name))


def is_trained(name: str) -> bool:
    """Returns whether a parameter of a model with adapters is trained."""
    return ADAPTER in name or name.startswith(HEADS)


def adapters_of(model: Decoder) -> dict[str, low_rank.LowRank]:
    """Adapters of this process's projections, by the projection's name."""
    found = {name: one.adapter for name, one in model.projections().items()}
    return {name: adapter for name, adapter in found.items() if isinstance(adapter, low_rank.LowRank)}


def merge_adapters(model: Decoder) -> None:
    """Merge the adapters into the weights, in place: a plain, trainable model with the same outputs up to rounding."""
    # Unpacked first: codes of four or eight bits would round the merged weights again
    _unpack_projections(model)
    projections = model.projections()
    for name, adapter in adapters_of(model).items():
        _fill(projections[name].weight, adapter.merged(projections[name].weight))
    remove_adapters(model)


def remove_adapters(model: Decoder) -> None:
    """Remove the adapters, in place; weights that were packed stay rounded."""
    _unpack_projections(model)
    for projection in model.projections().values():
        projection.adapter = None
    model.adapters, model.base_fingerprint = low_rank.AdapterConfig(), ""
    model.requires_grad_(True)


def base_fingerprint(model: Decoder) -> str:
    """SHA-256 that identifies a model's weights: names, shapes and the first row of every tensor, without adapters."""
    digest = hashlib.sha256()
    source = _source_of(model)
    for name, parameter in model.named_parameters():
        if not is_trained(name):
            *rows, width = parameter.shape
            sample = source.read(name, (*(slice(0, 1) for _ in rows), slice(0, width))).detach()
            # Rounded to BF16, so that a copy of the model in a narrower format has the same fingerprint
            sample = sample.to("cpu", torch.bfloat16).contiguous()
            digest.update(f"{name} {list(parameter.shape)}".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def adapter_flops(shape: ModelConfig, config: low_rank.AdapterConfig) -> float:
    """FLOPs per token of a forward pass through all adapters, 2 per multiply-add."""
    sizes = projection_sizes(shape)
    return sum(2.0 * config.rank_of(name) * sum(sizes[name]) for name in config.targets(sizes)) if config.r else 0.0


def adapter_parameters(shape: ModelConfig, config: low_rank.AdapterConfig) -> int:
    """Parameters of all adapters of a model of this shape."""
    sizes = projection_sizes(shape)
    targets = config.targets(sizes) if config.r else []
    return sum(config.rank_of(name) * sum(sizes[name]) + config.use_dora * sizes[name][0] for name in targets)


def projection_sizes(shape: ModelConfig) -> dict[str, tuple[int, int]]:
    """Number of outputs and inputs of every projection of a model of this shape, by name."""
    queries, pairs = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    width, inner = shape.model_dim, shape.ffn_dim
    block = {
        "attention.q_proj": (queries, width),
        "attention.k_proj": (pairs, width),
        "attention.v_proj": (pairs, width),
        "attention.o_proj": (width, queries),
        "ffn.gate_proj": (inner, width),
        "ffn.up_proj": (inner, width),
        "ffn.down_proj": (width, inner),
    }
    for name, outputs in (("output_gate", shape.gate_dim), ("head_router", shape.router_dim)):
        if outputs:
            block[f"attention.{name}"] = (outputs, width)
    return {f"blocks.{layer}.{name}": size for layer in range(shape.num_layers) for name, size in block.items()}


@dataclass(frozen=True, kw_only=True)
class StoredAdapters(StoredParameters):
    """Initial values of adapters together with the stored weights of their base model."""

    stored: StoredParameters
    config: low_rank.AdapterConfig
    seed: int
    shapes: Mapping[str, torch.Size]

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        if name not in self.shapes:
            return self.stored.read(name, part)
        projection, _, own = name.partition(ADAPTER)
        if own == low_rank.A:
            return low_rank.initial_a(self.seed, projection, *self.shapes[name])[part]
        if own == low_rank.B:
            return torch.zeros(self.shapes[name])[part]
        # DoRA's magnitudes start as the lengths of whole rows, even where this rank holds only a part of the columns
        num_inputs = self.shapes[f"{projection}{ADAPTER}{low_rank.A}"][1]
        return low_rank.row_norms(self.stored.read(f"{projection}.weight", (part[0], slice(0, num_inputs))))


@dataclass(frozen=True, kw_only=True)
class StoredPacked(StoredParameters):
    """Stored weights, those of the projections packed when they are read. num_inputs: by projection."""

    stored: StoredParameters
    num_inputs: Mapping[str, int]
    packed_format: low_rank.PackedFormat

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        projection, _, own = name.rpartition(".")
        projection = projection.removesuffix(FROZEN)
        if projection not in self.num_inputs or own == "bias":
            return self.stored.read(name, part)
        # Whole rows are packed and then cut, so that runs and codes are those of one process
        num_inputs = self.num_inputs[projection]
        rows_OI = self.stored.read(f"{projection}.weight", (part[0], slice(0, num_inputs)))
        codes, scales = low_rank.pack(rows_OI, self.packed_format)
        if own == low_rank.CODES:
            return codes[:, part[1]]
        if own == low_rank.SCALES:
            return scales[:, part[1]]
        return low_rank.unpack(codes, scales, num_inputs, self.packed_format)[:, part[1]]


@dataclass(frozen=True)
class _Weights(StoredParameters):
    """Weights of a model in memory, those of packed projections dequantized."""

    model: Decoder

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        projection = self.model.projections().get(name.removesuffix(".weight"))
        if projection is not None and projection.frozen is not None:
            return projection.frozen.dense()[part]
        return self.model.get_parameter(name).detach()[part]


def _source_of(model: Decoder) -> StoredParameters:
    if model.stored is not None and is_on_disk(model):
        return model.stored
    return _Weights(model)


def _unpack_projections(model: Decoder) -> None:
    for projection in model.projections().values():
        if projection.frozen is not None:
            projection.weight = nn.Parameter(projection.frozen.dense(), requires_grad=False)
            projection.frozen = None


def _fill(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
