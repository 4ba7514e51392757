"""Decodes with one operator per step, where the kernel of `ops/decode_step.py` is in use and computes all parts of a
model; of layers that select heads, only the open ones.

The model's own `forward` is the reference, and computes everything else. The model, the adapter of a sequence and the
position in its prompt alone decide which of the two computes a token, so neighbors change no bit of a request.

A model in training is decoded with the weights that its format multiplies, cast once: its own products would cast them
for every token. Nothing else is rounded, so that log-probabilities differ from those of a training step by the rounding
of its activations. Adapters are merged in FP32, because their first updates are smaller than a step of BF16.
"""

import math
from array import array
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.compress.int8 import WEIGHT_LEVELS, GridLinear, Int8Embedding, Int8Linear
from modelwright.core.config import ModelError
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.sequence import DecodeRow
from modelwright.model.adapter_bank import AdapterBank
from modelwright.model.decoder import Block, Decoder, Linear, ModelConfig, RMSNorm
from modelwright.model.low_rank import LowRank
from modelwright.ops import cpu_kernels, decode_step
from modelwright.ops.lowp_linear import plain_cast

FEWEST_ROPE_ROWS = 512
"""Positions of the first rotary table; a longer sequence needs at least twice as many."""
CASTS = (torch.float32, torch.bfloat16)
"""Training formats whose weights the kernel multiplies."""


PROMPT_LEN = 1024
"""Tokens of a prompt that the operator computes, each as a row that reads the cache by itself. The model's operators
cost milliseconds however short the prompt is, but share what they read of a long context (docs/log/speed.md)."""


class DecodeOperator:
    """Decodes with one model and one cache. Raises `ModelError` for a model that the kernel does not compute. Weights
    must not change in its lifetime: it points to the matrices, and holds copies of the cast weights of a model in
    training, and of norms and biases that are not plain FP32.
    """

    prompt_len = PROMPT_LEN
    """How many tokens at the beginning of a prompt it computes."""

    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        device = model.norm.weight.device.type
        refuse_unless(device == "cpu", f"it is on the device {device}")  # first, as kernels are compiled when asked for
        refuse_unless("decode_step" in cpu_kernels.used(), "the kernel decode_step is not used here")
        ends = model.ends
        norms = [module for module in (model.norm, *model.blocks.modules()) if isinstance(module, RMSNorm)]
        formats = {ends.stream_dtype, ends.head_dtype, *(norm.out_dtype for norm in norms)}
        refuse_unless(formats <= {None, *CASTS}, "the model computes in a training format")
        for block in model.blocks.values():
            refuse_unless(type(block) is Block, f"its blocks are {type(block).__name__}s (compiled or divided)")
        self._model = model
        self._tables = _RotaryRows(model)
        config, attention, table = model.config, model.config.attention, model.embedding
        layers = [_layer(block, config, cache) for block in model.blocks.values() if isinstance(block, Block)]
        if isinstance(table, Int8Embedding):
            embedding = decode_step.Weight(table.quantized, table.scale)
        else:
            refuse_unless(type(table) is nn.Embedding, f"its embedding is a {type(table).__name__}")
            assert isinstance(table, nn.Embedding)
            embedding = decode_step.Weight(_plain(table.weight))
        shape = decode_step.DecodeShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.num_rotated,
            activation=config.feed_forward.activation,
            eps=config.norm_eps,
            score_scale=attention.query_scale or config.head_dim**-0.5,
            soft_cap=attention.soft_cap,
            embedding_scale=config.embedding_scale,
        )
        self._step = decode_step.DecodeStep(shape, layers, embedding, _norm(model.norm))
        head = embedding if model.head is None else _weight(model.head)
        self._head = decode_step.RowProduct(head if ends.head_dtype is None else _cast(head, ends.head_dtype))

    def hidden(self, rows: Rows[DecodeRow]) -> Tensor:
        """Hidden states [N, D] of tokens of sequences; writes their keys and values into the cache."""
        inputs = decode_step.DecodeRows(positions=array("q", [row.position for row in rows]))
        inputs.tokens.extend([row.sequence.token_at(row.position) for row in rows])
        last = None  # the rows of a sequence are adjacent and share its block table
        for row in rows:
            if row.sequence is not last:
                last, start = row.sequence, len(inputs.blocks)
                inputs.blocks.extend(last.block_table)
            inputs.first_block.append(start)
        return self._step(inputs, self._tables.of(rows, inputs))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V]; those of a row do not depend on the number of rows."""
        return self._model.cap(self._head(hidden_ND))


class _RotaryRows:
    """Cosines and sines of the positions so far, computed once; where they depend on the length of the sequence,
    computed for every token.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._tables: tuple[Tensor, ...] = ()
        self._num_positions = 0

    def of(self, rows: Rows[DecodeRow], inputs: decode_step.DecodeRows) -> tuple[Tensor, ...]:
        """Returns the tables, and appends the tokens' row numbers in them to `inputs`."""
        if self._model.config.rope.depends_on_length:
            inputs.rope_rows.extend(range(len(rows)))
            lengths = [max(row.sequence.num_prefill, row.position + 1) for row in rows]
            return self._computed(list(inputs.positions), lengths)
        inputs.rope_rows.extend(inputs.positions)
        longest = max(inputs.positions) + 1
        if longest > self._num_positions:
            # Powers of two: the tables are computed again only when a sequence is twice as long.
            self._num_positions = max(FEWEST_ROPE_ROWS, 2 ** math.ceil(math.log2(longest)))
            positions = list(range(self._num_positions))
            self._tables = self._computed(positions, positions)
        return self._tables

    def _computed(self, positions: list[int], lengths: list[int]) -> tuple[Tensor, ...]:
        rotary = self._model.rotary_tables(torch.tensor([positions]), torch.tensor([lengths]))
        return tuple(table.contiguous() for table in rotary)


def decode_operator(model: Decoder, cache: PagedCache) -> tuple[DecodeOperator | None, str]:
    """Returns the operator, or None and the reason why PyTorch's operators decode this model."""
    try:
        return DecodeOperator(model, cache), ""
    except ModelError as error:
        return None, str(error)


def refuse_unless(condition: bool, reason: str) -> None:
    """Raise `ModelError` with the part of the model that the operator does not compute."""
    if not condition:
        raise ModelError(reason)


def _layer(block: Block, config: ModelConfig, cache: PagedCache) -> decode_step.DecodeLayer:
    attention, ffn = block.attention, block.ffn
    keys, values = cache.layer(attention.spec.layer)
    refuse_unless(keys.dtype in cpu_kernels.NAMES, f"its cache is in {keys.dtype}")
    window = attention.spec.window
    heads, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width, inner = config.model_dim, config.ffn_dim
    layer = decode_step.DecodeLayer(
        q=_weight(attention.q_proj, heads, width),
        k=_weight(attention.k_proj, pairs, width),
        v=_weight(attention.v_proj, pairs, width),
        o=_weight(attention.o_proj, width, heads),
        gate=_weight(ffn.gate_proj, inner, width),
        up=_weight(ffn.up_proj, inner, width),
        down=_weight(ffn.down_proj, width, inner),
        output_gate=decode_step.NO_WEIGHT
        if attention.output_gate is None
        else _weight(attention.output_gate, config.gate_dim, width),
        head_router=decode_step.NO_WEIGHT
        if attention.head_router is None
        else _weight(attention.head_router, config.router_dim, width),
        attention_norm=_norm(block.attention_norm),
        attention_post_norm=_norm(block.attention_post_norm),
        ffn_norm=_norm(block.ffn_norm),
        ffn_post_norm=_norm(block.ffn_post_norm),
        q_norm=_norm(attention.q_norm),
        k_norm=_norm(attention.k_norm),
        keys=keys,
        values=values,
        window=window,
        # Layers with a window may rotate by another base than global ones (`ModelConfig.window_rope_theta`).
        rotation="none" if not attention.uses_rope else "window" if window else "global",
    )
    of_attention = (layer.q, layer.k, layer.v, layer.output_gate, layer.head_router)
    for together in (of_attention, (layer.gate, layer.up)):
        formats = {one.format for one in together if one is not decode_step.NO_WEIGHT}
        refuse_unless(
            len(formats) == 1 or formats <= decode_step.UNENCODED,
            "projections of the same activations want them in several forms",
        )
    return layer


def _weight(module: nn.Module, *shape: int) -> decode_step.AnyWeight:
    weight: decode_step.AnyWeight
    # Exact types: a subclass may compute something else in its forward.
    if type(module) is Int8Linear:
        codes = module.quantized
        least, most = (int(one) for one in codes.aminmax())
        refuse_unless(-WEIGHT_LEVELS <= least <= most <= WEIGHT_LEVELS, "its INT8 weights exceed the levels")
        weight = decode_step.Weight(
            codes, module.scale, decode_step.NO_NORM if module.bias is None else _factors(module.bias)
        )
    elif type(module) is GridLinear:
        refuse_unless(module.inputs.kind != "tensor", "its activations have one static range for all tokens")
        refuse_unless(module.grid.bits == 4, "its 8-bit weights have groups, zero points or FP32 activations")
        packed = module.packed_weight()
        refuse_unless(packed.step_OP.dtype == torch.float32, f"the steps of its weights are in {packed.step_OP.dtype}")
        weight = packed if module.bias is None else replace(packed, bias_O=_factors(module.bias))
    else:
        refuse_unless(type(module) is Linear, f"it has {type(module).__name__}s")
        assert isinstance(module, Linear)
        refuse_unless(module.frozen is None, "its weights are packed")
        chosen = plain_cast(module.product)
        refuse_unless(module.product is F.linear or chosen in CASTS, "a training format multiplies its weights")
        refuse_unless("own_weight" not in vars(module), "its layout divides weights")
        adapter = module.adapter
        known = adapter is None or isinstance(adapter, AdapterBank | LowRank)
        refuse_unless(known, "an adapter is attached that is not of low rank")
        weight = decode_step.Weight(
            _plain(module.weight), bias_O=_factors(module.bias) if module.has_bias else decode_step.NO_NORM
        )
        if isinstance(adapter, LowRank):
            weight = replace(weight, weight_OI=adapter.merged(weight.weight_OI.float()))
        elif chosen:
            weight = _cast(weight, chosen)
    refuse_unless(not shape or weight.shape == shape, "the shape of a weight differs from the config's")
    return weight


def _cast(weight: decode_step.AnyWeight, chosen: torch.dtype) -> decode_step.Weight:
    """Weight in the format that a product reads."""
    assert isinstance(weight, decode_step.Weight)
    return replace(weight, weight_OI=weight.weight_OI.to(chosen))


def _plain(weight: Tensor) -> Tensor:
    refuse_unless(type(weight) in (Tensor, nn.Parameter), f"its weights are {type(weight).__name__}s")
    refuse_unless(weight.dtype in cpu_kernels.NAMES, f"its weights are in {weight.dtype}")
    refuse_unless(weight.is_contiguous(), "its weights are not contiguous")
    return weight.detach()


def _norm(module: nn.Module) -> Tensor:
    """FP32 factors of a norm; none for the identity that replaces it."""
    if isinstance(module, nn.Identity):
        return decode_step.NO_NORM
    refuse_unless(type(module) is RMSNorm, f"it has {type(module).__name__}s")
    assert isinstance(module, RMSNorm)
    factors = _factors(module.weight)
    return 1.0 + factors if module.one_plus_weight else factors


def _factors(values: Tensor) -> Tensor:
    return values.detach().float().contiguous()
