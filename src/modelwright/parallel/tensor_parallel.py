"""Tensor parallelism: the ranks of one axis share every layer's heads, FFN columns and the vocabulary.

A model pass. Every parameter becomes a DTensor on the axis, under its own name, and the modules' `forward`s compute
with the local pieces, so that the model's own operators stay in use. Query/key/value and gate/up projections are
sharded by output columns, output and down projections by input rows (Shoeybi et al. 2019, "Megatron-LM"); with sequence
parallelism the residual stream and its norms are sharded by tokens (Korthikanti et al. 2022). If there are fewer
key/value heads than ranks, every rank holds all of them and uses the head of its own queries.

The input of the embedding and the output of the final norm are whole and the same on all ranks of the axis, so
objectives are unaffected: each rank computes every loss term, and every gradient of it, alike. A pipeline stage without
an embedding takes, and one without a final norm returns, `stage_tokens` of each row's tokens.

Rank r holds rows `own_rows` of the vocabulary, as in a DTensor's `Shard(0)`: the last rank may have fewer. In training
no rank gathers the logits of the whole vocabulary; only three numbers per token are exchanged (Shoeybi et al. 2019,
section 3). Hidden states, labels and the loss are the same on all ranks, to the last bit.

Legend: B rows, T tokens of a row, S tokens of a row on this rank, D model width, V vocabulary, U the rows of it on this
rank, C tokens of one chunk, R ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.func import functional_call

from modelwright.core.config import ConfigError
from modelwright.model.decoder import Adapter, Block, Decoder, Linear, ModelConfig, RMSNorm, add_bias, decoders_in
from modelwright.model.low_rank import CODES, MAGNITUDE, SCALES, A, B, Factors, FrozenWeight, LowRank
from modelwright.ops.cross_entropy import LinearHead, linear_cross_entropy
from modelwright.ops.quantize import RUN_LEN
from modelwright.parallel.mesh import (
    World,
    axis_world,
    enter,
    gather,
    gather_replicated,
    gathered,
    leave,
    reduce_scatter,
    with_gradient,
)


def own_rows(vocab_size: int, num_ranks: int, rank: int) -> range:
    """Returns the range of tokens whose rows of embedding and head are on `rank`."""
    share = -(-vocab_size // num_ranks)
    return range(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


def embed(weight_UD: Tensor, tokens_BT: Tensor, vocab_size: int, axis: World) -> Tensor:
    """[B, T, D]: the embedding of tokens whose row is on this rank, zeros for others; one part of the axis's sum."""
    rows = own_rows(vocab_size, axis.size, axis.rank)
    here_BT = (tokens_BT >= rows.start) & (tokens_BT < rows.stop)
    found_BTD = F.embedding((tokens_BT - rows.start) * here_BT, weight_UD)
    return found_BTD.masked_fill(~here_BT.unsqueeze(-1), 0.0)


def cross_entropy(model: Decoder, axis: World, hidden_BTD: Tensor, labels_BT: Tensor, *, chunk_tokens: int) -> Tensor:
    """`Decoder.cross_entropy` over the sharded vocabulary: the complete sum and its complete gradient on each rank."""
    softmax = partial(_loss_and_gradient, own_rows(model.config.vocab_size, axis.size, axis.rank), axis)
    return linear_cross_entropy(
        enter(hidden_BTD, axis).flatten(0, 1),
        _local(model, name="head_weight"),
        labels_BT.flatten(),
        chunk_tokens=chunk_tokens,
        loss_of_logits=model.capped(softmax),
        compute=model.ends.head_dtype,
        in_fp32=model.ends.loss_in_fp32,
    )


def linear_head(model: Decoder, axis: World) -> LinearHead:
    """`Decoder.linear_head` of the rows on this rank; its results and their gradients are complete on each rank."""
    return LinearHead(
        weight_UD=_local(model, name="head_weight"),
        soft_cap=model.config.logit_soft_cap,
        compute=model.ends.head_dtype,
        first_row=own_rows(model.config.vocab_size, axis.size, axis.rank).start,
        enter=partial(enter, axis=axis),
        gather=axis.all_gather,
    )


def logits(model: Decoder, axis: World, hidden: Tensor) -> Tensor:
    """`Decoder.logits`, [..., V], of the sharded vocabulary, on each rank."""
    weight_UD = _local(model, name="head_weight")
    part = model.cap(F.linear(enter(hidden, axis), weight_UD.to(hidden.dtype)))
    vocab_size = model.config.vocab_size
    rows = own_rows(vocab_size, axis.size, axis.rank)
    missing = len(own_rows(vocab_size, axis.size, 0)) - len(rows)

    def all_parts(mine: Tensor) -> Tensor:
        whole = gathered(F.pad(mine, (0, missing)), axis, -1)
        return whole if whole.shape[-1] == vocab_size else whole[..., :vocab_size].contiguous()

    return with_gradient(part, all_parts, lambda gradient: gradient[..., rows.start : rows.stop])


def _loss_and_gradient(rows: range, axis: World, logits_CU: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss over the whole vocabulary, and its gradient in this rank's logits, which are overwritten."""
    here_C = (labels_C >= rows.start) & (labels_C < rows.stop)
    places_C1 = ((labels_C - rows.start) * here_C)[:, None]
    chosen_C = logits_CU.gather(1, places_C1)[:, 0] * here_C
    largest_C = logits_CU.amax(dim=-1)
    exponentials_CU = logits_CU.sub_(largest_C[:, None]).exp_()
    # One message per chunk: maximum, sum of exponentials and score of the label. Every rank merges them in the same
    # order, so the loss has the same bits everywhere.
    parts_R3C = axis.all_gather(torch.stack([largest_C, exponentials_CU.sum(dim=-1), chosen_C]))
    maxima_RC, sums_RC, chosen_RC = parts_R3C.unbind(1)
    normalizer_C = (maxima_RC + sums_RC.log()).logsumexp(dim=0)
    loss = (normalizer_C - chosen_RC.sum(dim=0)).sum()
    grad_CU = exponentials_CU.mul_((largest_C - normalizer_C).exp()[:, None])
    grad_CU.scatter_add_(1, places_C1, -here_C[:, None].to(grad_CU.dtype))
    return loss, grad_CU


TOKENS = 1
"""The dimension of tokens in [B, T, D]."""


def shard_layers(model: Decoder, tensor: DeviceMesh, *, sequence_parallel: bool) -> Decoder:
    """Shards this process's layers over the mesh axis `tensor`, in place. Every rank starts with the same weights.
    sequence_parallel: norms and the residual stream between blocks hold T / ranks tokens on each rank; otherwise every
    rank holds all of them. A decoder among the heads is sharded alike. Raises `ConfigError` if a shape does not divide.
    """
    config = model.config
    check_shape(config, tensor.size())
    axis = axis_world(tensor, torch.device(tensor.device_type))
    layers = _Layers(mesh=tensor, axis=axis, sequence_parallel=sequence_parallel)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        for norm in (block.attention_norm, block.attention_post_norm, block.ffn_norm, block.ffn_post_norm):
            if isinstance(norm, RMSNorm):
                _share_norm(layers, norm, partial_over_axis=sequence_parallel)
        _share_columns(layers, attention.q_proj)
        of_kv_heads = {attention.k_proj: config.head_dim, attention.v_proj: config.head_dim}
        if attention.head_router is not None and attention.head_selection is not None:
            of_kv_heads[attention.head_router] = 1
            _replace(attention.head_selection, num_open=partial(leave, axis=axis))
        for projection, dim in of_kv_heads.items():
            if config.num_kv_heads >= axis.size:
                _share_columns(layers, projection)
            else:
                # All key/value heads are here; this rank uses the one of its own queries.
                head = axis.rank * config.num_kv_heads // axis.size
                rows = slice(head * dim, (head + 1) * dim)
                _place_weight(layers, projection, Replicate(), rows)
                if projection.has_bias:
                    layers.place(projection, Replicate(), "bias")
                _replace(projection, forward=partial(_project, projection, gradient=Partial(), rows=rows))
                _share_adapter(layers, projection.adapter, a=Replicate(), b=Replicate(), rows=rows)
        if attention.output_gate is not None:
            _share_columns(layers, attention.output_gate)
        _share_rows(layers, attention.o_proj)
        for norm in (attention.q_norm, attention.k_norm):
            if isinstance(norm, RMSNorm):
                _share_norm(layers, norm, partial_over_axis=True)  # every rank norms its own heads
        _share_columns(layers, ffn.gate_proj)
        _share_columns(layers, ffn.up_proj)
        _share_rows(layers, ffn.down_proj)
        for part in (attention, ffn):
            _replace(part, forward=partial(layers.whole_before, part.forward))
    if model.norm is not None:
        _share_norm(layers, model.norm, partial_over_axis=sequence_parallel)
        _replace(model.norm, forward=partial(layers.whole_after, model.norm.forward))
    if model.embedding is not None:
        layers.place(model.embedding, Shard(0))
        _replace(model.embedding, forward=partial(_embed, layers, model.embedding))
    if model.head is not None:
        layers.place(model.head, Shard(0))
    decoders = decoders_in(model.heads)
    for decoder in decoders.values():
        shard_layers(decoder, tensor, sequence_parallel=sequence_parallel)
    for place, module in cast(Iterator[tuple[str, nn.Module]], model.heads.named_modules()):
        if not f"{place}.".startswith(tuple(decoders)):
            for name, _ in list(module.named_parameters(recurse=False)):
                layers.place(module, Replicate(), name)
    _replace(
        model,
        head_output=partial(_head_output, model),
        cross_entropy=partial(cross_entropy, model, layers.axis),
        logits=partial(logits, model, layers.axis),
        linear_head=partial(linear_head, model, layers.axis),
    )
    return model


def stage_tokens(row_len: int, num_ranks: int, *, sequence_parallel: bool) -> int:
    """Number of tokens of each row in the residual stream between blocks on one of `num_ranks` ranks of the tensor
    axis. Pipeline stages exchange [B, stage_tokens, D]. Raises `ConfigError` if the tokens do not divide.
    """
    if not sequence_parallel:
        return row_len
    if row_len % num_ranks:
        raise ConfigError(
            f"sequence_parallel: rows of {row_len} tokens do not divide among the {num_ranks} ranks of the tensor "
            "axis; choose another row length or disable it"
        )
    return row_len // num_ranks


def check_shape(config: ModelConfig, num_ranks: int) -> None:
    """Raises `ConfigError` if a model of this shape cannot be divided among `num_ranks` ranks."""
    for name in ("num_heads", "ffn_dim"):
        if getattr(config, name) % num_ranks:
            raise ConfigError(f"{name}: {getattr(config, name)} does not divide among {num_ranks} tensor ranks")
    if config.num_kv_heads % num_ranks and num_ranks % config.num_kv_heads:
        raise ConfigError(
            f"num_kv_heads: {config.num_kv_heads} heads can be divided neither among {num_ranks} tensor ranks nor "
            "among whole groups of them"
        )
    if len(own_rows(config.vocab_size, num_ranks, num_ranks - 1)) == 0:
        raise ConfigError(f"vocab_size: {config.vocab_size} leaves one of {num_ranks} tensor ranks without a row")


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Context of every replaced `forward`."""

    mesh: DeviceMesh
    axis: World
    sequence_parallel: bool

    def place(self, module: nn.Module, placement: Placement, name: str = "weight") -> None:
        """Makes the module's parameter a DTensor that shares no memory with the whole one."""
        whole = module.get_parameter(name)
        piece = distribute_tensor(whole.detach(), self.mesh, [placement], src_data_rank=None).clone()
        setattr(module, name, nn.Parameter(piece, requires_grad=whole.requires_grad))

    def whole_before(self, forward: Callable[..., Tensor], x_BSD: Tensor, *rest: Any) -> Tensor:
        """Calls `forward` with all tokens."""
        x_BTD = gather(x_BSD, self.axis, TOKENS) if self.sequence_parallel else enter(x_BSD, self.axis)
        return forward(x_BTD, *rest)

    def whole_after(self, forward: Callable[..., Tensor], x_BSD: Tensor) -> Tensor:
        out = forward(x_BSD)
        return gather_replicated(out, self.axis, TOKENS) if self.sequence_parallel else out

    def summed(self, part_BTD: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the layout of the residual stream: [B, S, D]."""
        if not self.sequence_parallel:
            return leave(part_BTD, self.axis)
        stage_tokens(part_BTD.shape[TOKENS], self.axis.size, sequence_parallel=True)
        return reduce_scatter(part_BTD, self.axis, TOKENS)


def _place_weight(layers: _Layers, linear: Linear, placement: Placement, rows: slice = slice(None)) -> None:
    """Places a projection's weight. rows: those of the placed weight that this rank multiplies with. Raises
    `ConfigError` if runs of a packed weight would be cut.
    """
    # `partial`s, not closures, replace methods throughout: `copy.deepcopy` points a `partial` to the copied module.
    if linear.frozen is None:
        layers.place(linear, placement)
        is_whole = rows == slice(None)
        own = partial(_local, linear) if is_whole else partial(_local, linear, Partial(), rows=rows)
        _replace(linear, own_weight=own)
        return
    if placement == Shard(1) and linear.in_features % (RUN_LEN * layers.axis.size):
        raise ConfigError(
            f"lora.base_format: the {linear.in_features} inputs of a projection do not divide into whole runs of "
            f"{RUN_LEN} among {layers.axis.size} tensor ranks; use base_format full, or parallel.tensor 1"
        )
    for name in (CODES, SCALES):
        layers.place(linear.frozen, placement, name)
    _replace(linear.frozen, tensors=partial(_local_codes, linear.frozen, rows))


def _local_codes(frozen: FrozenWeight, rows: slice) -> tuple[Tensor, Tensor]:
    return _local(frozen, name=CODES, rows=rows), _local(frozen, name=SCALES, rows=rows)


def _share_columns(layers: _Layers, linear: Linear) -> None:
    _place_weight(layers, linear, Shard(0))
    if linear.has_bias:
        layers.place(linear, Shard(0), "bias")
    _replace(linear, forward=partial(_project, linear))
    _share_adapter(layers, linear.adapter, a=Replicate(), b=Shard(0))


def _share_rows(layers: _Layers, linear: Linear) -> None:
    _place_weight(layers, linear, Shard(1))
    if linear.has_bias:
        layers.place(linear, Replicate(), "bias")
    _replace(linear, forward=partial(_project_and_sum, layers, linear))
    _share_adapter(layers, linear.adapter, a=Shard(1), b=Replicate())


def _share_adapter(
    layers: _Layers, adapter: Adapter | None, *, a: Placement, b: Placement, rows: slice = slice(None)
) -> None:
    """Places an adapter's factors. a, b: their placements; the magnitudes are placed like B, whose rows they scale.
    rows: those of B that this rank's weight has.
    """
    if adapter is None:
        return
    assert isinstance(adapter, LowRank), "several adapters at once are for inference"
    placements = {A: a, B: b, **({MAGNITUDE: b} if adapter.has_magnitude else {})}
    for name, placement in placements.items():
        layers.place(adapter, placement, name)
    _replace(adapter, factors=partial(_local_factors, adapter, rows))
    if a == Shard(1):
        _replace(adapter, sum_of_columns=layers.axis.all_reduce_sum)


def _local_factors(adapter: LowRank, rows: slice) -> Factors:
    pieces = []
    for name in (A, B, *((MAGNITUDE,) if adapter.has_magnitude else ())):
        parameter = adapter.get_parameter(name)
        assert isinstance(parameter, DTensor)
        # A replicated factor has a part of its gradient on every rank.
        gradient = Partial() if parameter.placements[0].is_replicate() else None
        pieces.append(_local(adapter, gradient, name=name))
    a_RI, b_OR, *magnitude = pieces
    return Factors(a_RI, b_OR[rows], magnitude[0][rows] if magnitude else b_OR.new_empty(0))


def _share_norm(layers: _Layers, norm: RMSNorm, *, partial_over_axis: bool) -> None:
    """Replicates a norm. partial_over_axis: each rank normalizes its own values, so the gradients must be summed."""
    layers.place(norm, Replicate())
    _replace(norm, forward=partial(_norm, norm, Partial() if partial_over_axis else Replicate()))


def _replace(module: nn.Module, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(module, name, method)


def _project(linear: Linear, x: Tensor, *, gradient: Placement | None = None, rows: slice | None = None) -> Tensor:
    out = linear.multiply(x)
    return add_bias(out, _local(linear, gradient, name="bias", rows=rows)) if linear.has_bias else out


def _project_and_sum(layers: _Layers, linear: Linear, x: Tensor) -> Tensor:
    out = layers.summed(linear.multiply(x))
    if not linear.has_bias:
        return out
    # The bias is added once, to the sum; with sequence parallelism each rank adds it to its own tokens.
    gradient = Partial() if layers.sequence_parallel else Replicate()
    return add_bias(out, _local(linear, gradient, name="bias"))


def _norm(norm: RMSNorm, gradient: Placement, x: Tensor) -> Tensor:
    return norm.norm(x, _local(norm, gradient))


def _embed(layers: _Layers, embedding: nn.Embedding, tokens_BT: Tensor) -> Tensor:
    return layers.summed(embed(_local(embedding), tokens_BT, embedding.num_embeddings, layers.axis))


def _head_output(model: Decoder, name: str, hidden_BTD: Tensor) -> Tensor:
    """`Decoder.head_output`, which every rank computes alike, except for the layers of decoders, which are shared."""
    shared = tuple(decoders_in(model.heads[name]))
    parameters = cast(Iterator[tuple[str, DTensor]], model.heads[name].named_parameters())
    whole = {key: parameter.to_local() for key, parameter in parameters if not key.startswith(shared)}
    return functional_call(model.heads[name], whole, (hidden_BTD,)).clone()


def _local(
    module: nn.Module, gradient: Placement | None = None, *, name: str = "weight", rows: slice | None = None
) -> Tensor:
    """This rank's shard of a parameter. gradient: placement of its gradient if it differs from the parameter's; rows:
    those of the shard that are used, all by default.
    """
    parameter = getattr(module, name)
    assert isinstance(parameter, DTensor)
    local = parameter.to_local(grad_placements=[gradient] if gradient is not None else None)
    return local if rows is None else local[rows]
