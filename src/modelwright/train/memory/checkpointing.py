"""Activation checkpointing: activations that are not saved are recomputed in the backward pass.

A model pass, `model -> model`, that changes the model in place and leaves parameter names alone. Gradients are the
same to the last bit on one device (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

A segment of one block is wrapped in the block's own `forward`, inside FSDP's hooks and inside what compile sees. A
segment of several blocks calls the blocks, hooks and compiled code included, from one checkpointed function.

In selective checkpointing outputs of chosen operators are saved and everything else is recomputed. PyTorch decides
operator by operator; here an operator is named by its place in the block (`OPERATORS`), so that each matrix
product can be chosen separately. That relies on the order in which a block runs its products and on the known attention
operators.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from modelwright.model.decoder import Attend, Block, Decoder, Linear, RotaryTables
from modelwright.model.low_rank import LowRank
from modelwright.train.memory.activations import (
    ActivationCheckpointingConfig,
    BlockShape,
    Budget,
    Operator,
    Segment,
    block_choices,
    solve,
)
from modelwright.train.memory.offload import Store, offloading

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_LINEAR = {"aten::mm", "aten::addmm", "aten::_int_mm", "aten::_scaled_mm"}
_ATTENTION = {
    "modelwright::packed_attention",
    "modelwright::selected_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}
"""Attention operators, by name, because an operator of ours exists only once its module is imported."""


def contexts_keeping(keep: Sequence[Operator], block: Block) -> Callable[[], Contexts]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint` of `block` that saves the outputs of `keep`."""

    def make() -> Contexts:
        # The matrix products of the block in the order in which they run; "" for those that are never saved: of the
        # router of heads, of the gate on attention's output, of adapters, which are narrow, and the last one.
        attention, ffn = block.attention, block.ffn
        projections: list[tuple[str, Linear | None]] = [
            ("q_proj", attention.q_proj),
            ("k_proj", attention.k_proj),
            ("v_proj", attention.v_proj),
            ("", attention.head_router),
            ("", attention.output_gate),
            ("o_proj", attention.o_proj),
            ("gate_proj", ffn.gate_proj),
            ("up_proj", ffn.up_proj),
            ("", ffn.down_proj),
        ]
        names: list[str] = []
        for name, projection in projections:
            if projection is not None:
                num_row_blocks = 1 if projection.frozen is None else projection.frozen.num_row_blocks
                names += [name] * num_row_blocks
                if isinstance(projection.adapter, LowRank):
                    names += [""] * projection.adapter.num_products(num_row_blocks)
        passes = {False: iter(names), True: iter(names)}  # PyTorch 2.11 asks again when it recomputes

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = "attend" if operator.name() in _ATTENTION else ""
            if operator.name() in _LINEAR:
                name = next(passes[context.is_recompute], "")
            return CheckpointPolicy.MUST_SAVE if name in keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return make


def segments_for(
    config: ActivationCheckpointingConfig,
    num_layers: int,
    *,
    shape: BlockShape,
    num_tokens: int,
    in_flight: int = 1,
    end_bytes: int = 0,
) -> list[Segment]:
    """Divides `num_layers` consecutive blocks into segments; the last one may be shorter than the others. shape,
    num_tokens (of one microbatch), in_flight and end_bytes (see `Budget`) are used by mode budget only, which raises
    `ConfigError` if the budget is too small.
    """
    away = config.offload != "none"
    if config.mode == "none":
        return [Segment(num_layers=1, recompute=False, offload=away)] * num_layers
    if config.mode == "selective":
        return [Segment(num_layers=1, recompute=True, keep=config.save_outputs_of, offload=away)] * num_layers
    if config.mode == "full":
        lengths = [
            min(config.layers_per_segment, num_layers - s) for s in range(0, num_layers, config.layers_per_segment)
        ]
        return [Segment(num_layers=length, recompute=True, offload=away) for length in lengths]
    budget = Budget(num_bytes=config.budget_bytes, in_flight=in_flight, end_bytes=end_bytes)
    choices = block_choices(shape, num_tokens, num_layers, flops_per_byte=config.flops_per_byte)
    return [choice.segment for choice in solve(choices, num_layers, budget)] if num_layers else []


def checkpoint_segments(model: Decoder, segments: Sequence[Segment], *, store: Store | None = None) -> Decoder:
    """Wrap the model's blocks, in order, as the segments specify; returns the model. store: of offloaded tensors."""
    assert store is not None or not any(segment.offload for segment in segments)
    assert sum(segment.num_layers for segment in segments) == len(model.blocks)
    blocks = iter(model.blocks.values())
    groups = [(segment, [next(blocks) for _ in range(segment.num_layers)]) for segment in segments]
    for segment, group in groups:
        for block in group:
            assert isinstance(block, Block)
            block.is_recomputed = segment.recompute
        if segment.num_layers > 1 or not (segment.recompute or segment.offload):
            continue
        block, forward = group[0], group[0].forward
        if segment.recompute:
            assert isinstance(block, Block)
            contexts = contexts_keeping(segment.keep, block) if segment.keep else noop_context_fn
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        if segment.offload:  # outside the checkpoint, so that its input, which it saves, is offloaded
            forward = partial(_offloaded, [block], forward, store)
        block.forward = forward
    if any(segment.num_layers > 1 for segment in segments):
        model.run_blocks = partial(_run_units, model, groups, store)
    return model


def remove_checkpoints(model: Decoder) -> None:
    """Remove everything that wraps the model's blocks."""
    model.__dict__.pop("run_blocks", None)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.is_recomputed = False
        block.__dict__.pop("forward", None)


def _run_units(
    model: Decoder,
    units: Sequence[tuple[Segment, Sequence[nn.Module]]],
    store: Store | None,
    hidden_BTD: Tensor,
    positions_BT: Tensor,
    attend: Attend,
    lengths_BT: Tensor | None = None,
) -> Tensor:
    """`Decoder.run_blocks` with every segment of several blocks as one checkpointed function."""
    rotary = model.rotary_tables(positions_BT, lengths_BT)
    for segment, unit in units:
        run = partial(_run_in_turn, unit)
        if len(unit) > 1:
            run = partial(checkpoint, run, use_reentrant=False)
            run = partial(_offloaded, unit, run, store) if segment.offload else run
        hidden_BTD = run(hidden_BTD, *rotary, attend)
    return hidden_BTD


def _run_in_turn(blocks: Sequence[nn.Module], hidden_BTD: Tensor, *tables_and_attend: Any) -> Tensor:
    # Tables come one by one, because checkpoints look for tensors among their arguments only.
    *tables, attend = tables_and_attend
    rotary = RotaryTables(*tables)
    for block in blocks:
        hidden_BTD = block(hidden_BTD, *rotary.of(block), attend)
    return hidden_BTD


def _offloaded(
    blocks: Sequence[nn.Module],
    run: Callable[..., Tensor],
    store: Store | None,
    hidden_BTD: Tensor,
    *tables_and_attend: Any,
) -> Tensor:
    assert store is not None
    with offloading(blocks, tables_and_attend[:-1], store):
        return run(hidden_BTD, *tables_and_attend)
