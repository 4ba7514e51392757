"""Writes a model folder as one GGUF file, tensor by tensor, so that only one of them is in memory at a time.

llama.cpp derives some of a model's shape from the architecture alone (which layers slide, which have no positions, the
scale of attention). A model that differs from that would run and answer wrongly, so it is refused by the name of the
setting. Names and rules are those of llama.cpp's `src/models` and of its converter.

Number formats: `f16`, `q8_0` (8 bits, one scale for 32 values) and `q4_0` (4 bits, likewise). Vectors stay in FP32, as
llama.cpp wants them, and a matrix whose rows do not divide into blocks of 32 stays in FP16. In `q4_0` the embedding and
the head have 8 bits, because errors there reach every token.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from modelwright.compress.gguf_vocabulary import Vocabulary, read_vocabulary
from modelwright.core.artifacts import writing
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.decoder import Activation, Decoder, ModelConfig
from modelwright.model.hf import FolderWeights, open_model, type_of
from modelwright.ops.rope_norm_swiglu import RopeKind, RopeScaling, scaled_frequencies

Value = int | float | str | Sequence[bool] | Sequence[float]
"""A setting of a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp, and the parts of a model that it computes."""

    name: str
    """Name in the file, which is also the prefix of the settings."""
    activation: Activation = "silu"
    scalings: Sequence[RopeKind] = ("default", "linear", "yarn")
    """Rotary scalings that it computes as `transformers` does."""
    interleaves: bool = False
    """True if it rotates neighboring dimensions instead of those of the two halves, so that rows of queries and keys
    are reordered."""
    slides_every: int = 0
    """All layers but every so-many-th have the window; 0 for an architecture that ignores windows."""
    no_rope_every: int = 0
    """Interval of the layers without rotary positions; 0 if all layers have them."""
    fuses: bool = False
    """True if queries, keys and values are one tensor, and gate and up projection one."""
    heads_fill_width: bool = False
    """True if all heads together must be as wide as the model."""
    biases: Sequence[str] = ("qkv_bias",)
    """Biases that it adds."""


ARCHITECTURES: Mapping[str, Architecture] = {
    # Only what llama.cpp computes for the type; everything else is refused by `architecture_of`.
    "llama": Architecture(
        name="llama",
        interleaves=True,
        scalings=("default", "linear", "yarn", "llama3"),
        biases=("qkv_bias", "output_bias", "ffn_bias"),
    ),
    "mistral": Architecture(name="llama", interleaves=True, biases=()),
    "qwen2": Architecture(name="qwen2", heads_fill_width=True),
    "qwen3": Architecture(name="qwen3"),
    "smollm3": Architecture(name="smollm3", interleaves=True, no_rope_every=4),
    "gemma2": Architecture(name="gemma2", activation="gelu_tanh", slides_every=2, scalings=("default",)),
    "gemma3_text": Architecture(name="gemma3", activation="gelu_tanh", slides_every=6, scalings=("default", "linear")),
    "phi3": Architecture(name="phi3", fuses=True, heads_fill_width=True, scalings=("default", "longrope"), biases=()),
}
"""Architectures by the `model_type` of Hugging Face."""


def architecture_of(config: ModelConfig, hf_type: str, source: str) -> Architecture:
    """Returns the architecture that computes the same model. source: the folder, for errors. Raises `ModelError` with
    the setting that llama.cpp does not compute.
    """
    chosen = ARCHITECTURES.get(hf_type)
    if chosen is None:
        raise ModelError(f"{source}: llama.cpp does not support model type {hf_type!r}; export to hf instead")
    attention, layers = config.attention, range(config.num_layers)
    no_rope = tuple(n for n in layers if chosen.no_rope_every and (n + 1) % chosen.no_rope_every == 0)
    biases = {
        "qkv_bias": attention.qkv_bias, "output_bias": attention.output_bias, "ffn_bias": config.feed_forward.bias
    }  # fmt: skip
    missing = [name for name, there in biases.items() if there and name not in chosen.biases]
    ignores_window = not chosen.slides_every and 0 < attention.window < config.max_seq_len
    wrong_width = chosen.heads_fill_width and config.num_heads * config.head_dim != config.model_dim
    # llama.cpp knows the 27B models of Gemma by their number of layers, and scales by the model's width for them.
    is_27b = (chosen.name, config.num_layers) in (("gemma2", 46), ("gemma3", 62))
    usual_scale = (config.model_dim // config.num_heads if is_27b else config.head_dim) ** -0.5
    other_scale = attention.query_scale and not math.isclose(attention.query_scale, usual_scale)
    own_factor = config.rope.kind == "yarn" and (bool(config.rope.attention_factor) or not config.rope.truncate)
    untied_gemma2 = chosen.name == "gemma2" and not config.tie_embeddings
    problems = [
        ("hidden_act", "has another activation" if config.feed_forward.activation != chosen.activation else ""),
        ("rope_scaling", f"has no scaling {config.rope.kind}" if config.rope.kind not in chosen.scalings else ""),
        ("rope_scaling", "takes no attention factor of its own" if own_factor else ""),
        ("sliding_window", "ignores the window" if ignores_window else ""),
        ("no_rope_layers", "gives positions to other layers" if attention.layers_without_rope != no_rope else ""),
        ("attention_bias", f"has no {missing[0]}" if missing else ""),
        ("head_dim", "wants heads that are together as wide as the model" if wrong_width else ""),
        ("query_pre_attn_scalar", "scales attention by another factor" if other_scale else ""),
        ("tie_word_embeddings", "always ties the embeddings" if untied_gemma2 else ""),
    ]
    for name, problem in problems:
        if problem:
            raise ModelError(f"{source}: {name}: llama.cpp's {chosen.name} {problem}; export to hf instead")
    return chosen


def settings_of(config: ModelConfig, chosen: Architecture) -> dict[str, Value]:
    """Returns the settings of the file, without the architecture's name before them."""
    attention, rope = config.attention, config.rope
    settings: dict[str, Value] = {
        "block_count": config.num_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.model_dim,
        "feed_forward_length": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.num_rotated,
        "rope.freq_base": config.rope_theta,
    }
    if rope.kind in ("linear", "yarn", "longrope"):
        settings["rope.scaling.type"] = rope.kind
    if rope.kind in ("linear", "yarn"):
        settings["rope.scaling.factor"] = rope.factor
    if rope.kind in ("yarn", "longrope"):
        settings["rope.scaling.original_context_length"] = rope.original_max_len
    if rope.kind == "yarn":
        settings |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    if rope.kind == "longrope":
        # As `transformers` does without a factor in the config: the formula of LongRoPE (Ding et al. 2024).
        growth = math.log(rope.factor) / math.log(rope.original_max_len) if rope.factor > 1 else 0.0
        settings["rope.scaling.attn_factor"] = rope.attention_factor or math.sqrt(1 + growth)
    if chosen.slides_every:
        settings["attention.sliding_window"] = attention.window
        # The layers with a window are stored only where they differ from the architecture's own pattern.
        slides = [bool(config.window_of(layer)) for layer in range(config.num_layers)]
        if slides != [(layer + 1) % chosen.slides_every != 0 for layer in range(config.num_layers)]:
            settings["attention.sliding_window_pattern"] = slides
        if config.window_rope_theta:
            settings["rope.freq_base_swa"] = config.window_rope_theta
    if chosen.name == "phi3":
        settings["attention.sliding_window"] = 0
    if attention.soft_cap:
        settings["attn_logit_softcapping"] = attention.soft_cap
    if config.logit_soft_cap:
        settings["final_logit_softcapping"] = config.logit_soft_cap
    return settings


_TOP = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
_PARTS = {
    "attention_norm": "attn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "ffn.gate_proj": "ffn_gate",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
_FUSED = {
    "attention.q_proj": "attn_qkv",
    "attention.k_proj": "attn_qkv",
    "attention.v_proj": "attn_qkv",
    "ffn.gate_proj": "ffn_up",
    "ffn.up_proj": "ffn_up",
}


GgufFormat = Literal["f16", "q8_0", "q4_0"]
_FILE_TYPES: Mapping[GgufFormat, int] = {"f16": 1, "q8_0": 7, "q4_0": 2}
"""llama.cpp's numbers for the formats of whole files."""
BLOCK = 32
"""Values that share a scale."""
_ENDS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of the file. `read` returns it in FP32."""

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], np.ndarray]


def export_gguf(folder: Path, target: Path, *, number_format: GgufFormat, name: str) -> Path:
    """Write the model folder as `target`, atomically; returns it. name: of the model, for display. Raises `ModelError`
    with the setting or the part of the tokenizer for which llama.cpp lacks a counterpart, and `ConfigError` if the
    package `gguf` is not installed.
    """
    try:
        gguf: Any = import_module("gguf")
    except ImportError:
        raise ConfigError("--to gguf: needs the package gguf: pip install 'modelwright[gguf]'") from None
    model, weights = open_model(folder)
    config = model.config
    chosen = architecture_of(config, type_of(config).name, str(folder))
    vocabulary = read_vocabulary(folder, config.vocab_size)
    # Listed before the file is opened: what llama.cpp cannot compute is refused without a trace on disk.
    tensors = list(gguf_tensors(model, weights, chosen, number_format))
    temporary = target.with_name(target.name + ".tmp")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = gguf.GGUFWriter(temporary, chosen.name)
            # llama.cpp infers facts about the vocabulary from the name: `phi-3` or `phi3` makes it strip white space
            # after special tokens, and fail without the token `</s>`; `modern-bert` changes the token `[MASK]`.
            shown = re.sub(r"(phi|modern)-?(?=3|bert)", r"\1 ", name, flags=re.IGNORECASE)
            writer.add_name(f"Phi-3 {shown}" if vocabulary.strips_like_phi3 else shown)
            writer.add_file_type(_FILE_TYPES[number_format])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in settings_of(config, chosen).items():
                own_name = f"{chosen.name}.{key}"
                match value:
                    case bool():
                        writer.add_bool(own_name, value)
                    case int():
                        writer.add_uint32(own_name, value)
                    case float():
                        writer.add_float32(own_name, value)
                    case str():
                        writer.add_string(own_name, value)
                    case _:
                        writer.add_array(own_name, list(cast(Sequence[Any], value)))
            _add_vocabulary(writer, vocabulary)
            # The descriptions of all tensors come first, then the data, one tensor after another.
            kinds = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
            for tensor in tensors:
                kind = gguf.GGMLQuantizationType[kinds[tensor.format]]
                is_plain = tensor.format in ("f32", "f16")
                shape = tensor.shape if is_plain else gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)
                dtype = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}.get(
                    tensor.format, np.dtype(np.uint8)
                )
                num_bytes = math.prod(shape) * dtype.itemsize
                writer.add_tensor_info(tensor.name, shape, dtype, num_bytes, raw_dtype=None if is_plain else kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                kind = gguf.GGMLQuantizationType[kinds[tensor.format]]
                writer.write_tensor_data(gguf.quants.quantize(tensor.read(), kind))
            writer.close()
            # On disk before the rename: a crash must not leave a whole name with half a file.
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


def gguf_tensors(
    model: Decoder, weights: FolderWeights, chosen: Architecture, number_format: GgufFormat
) -> Iterator[GgufTensor]:
    """Yields the tensors of the file in the order of the model's parameters. model: may be on the meta device."""
    config, rope = model.config, model.config.rope
    # Factors of the rotary frequencies, [rotated dimensions / 2] each
    factors_of: dict[str, Sequence[float]] = {}
    if rope.kind == "longrope":
        factors_of = {"rope_factors_long": rope.long_factor, "rope_factors_short": rope.short_factor}
    if rope.kind == "llama3":
        # llama.cpp divides by the factor: unscaled frequency over scaled frequency.
        lengths = torch.ones(1, 1, dtype=torch.int64)
        plain, _ = scaled_frequencies(lengths, config.num_rotated, config.rope_theta, RopeScaling())
        scaled, _ = scaled_frequencies(lengths, config.num_rotated, config.rope_theta, rope)
        factors_of = {"rope_freqs": (plain.double() / scaled.double()).flatten().tolist()}
    for name, factors in factors_of.items():
        values = np.array(factors, dtype=np.float32)
        yield GgufTensor(name=f"{name}.weight", shape=values.shape, format="f32", read=lambda values=values: values)
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if name.startswith("heads."):
            continue
        # `blocks.0.ffn.up_proj.weight` -> `blk.0.ffn_up.weight`. Parameters with one name are the tensor's rows.
        place, _, own = name.rpartition(".")
        if name.startswith("blocks."):
            _, layer, module = place.split(".", 2)
            stem = f"blk.{layer}.{({**_PARTS, **_FUSED} if chosen.fuses else _PARTS)[module]}"
        else:
            stem = _TOP[place]
        parts.setdefault(f"{stem}.{own}", []).append(name)
    for target, names in parts.items():
        shapes = [tuple(model.get_parameter(name).shape) for name in names]
        shape = (sum(own[0] for own in shapes), *shapes[0][1:])

        def read(names: Sequence[str] = tuple(names), shapes: Sequence[tuple[int, ...]] = tuple(shapes)) -> np.ndarray:
            rows = [
                stored(weights.read(name, tuple(slice(0, length) for length in own)), name, model.config, chosen)
                for name, own in zip(names, shapes, strict=True)
            ]
            return torch.cat(rows).numpy()

        # Vectors stay in FP32 and rows that do not divide into blocks in FP16; q4_0's ends have 8 bits.
        kind: str = "q8_0" if number_format == "q4_0" and target in _ENDS else number_format
        if number_format != "f16" and shape[-1] % BLOCK:
            kind = "f16"
        yield GgufTensor(name=target, shape=shape, format=kind if len(shape) > 1 else "f32", read=read)


def stored(weight: Tensor, name: str, config: ModelConfig, chosen: Architecture) -> Tensor:
    """Returns a parameter as llama.cpp stores it, FP32: norms with their whole scale, and rows of queries and keys so
    that the dimensions that are rotated together are neighbors.
    """
    weight = weight.float()
    if config.norms.one_plus_weight and "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        weight = weight + 1.0
    if chosen.interleaves and ".q_proj." in name:
        weight = interleaved(weight, config.num_heads)
    if chosen.interleaves and ".k_proj." in name:
        weight = interleaved(weight, config.num_kv_heads)
    return weight.contiguous()


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head, of which (i, i + half) belong together, to 0, half, 1, half + 1, ..."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([int(kind) for kind in vocabulary.kinds])
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    add = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
        "unknown": writer.add_unk_token_id,
        "padding": writer.add_pad_token_id,
    }
    for name, token_id in vocabulary.special.items():
        add[name](token_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
