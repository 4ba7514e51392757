"""Selective activation checkpointing: outputs of chosen operators are saved, everything else is recomputed.

PyTorch's selective checkpointing decides operator by operator; here an operator is named by its place in the block
(`config.OPERATORS`), so that each matrix product can be chosen separately. Relies on the order in which a block runs
its products and on the known attention operators.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from modelwright.memory.config import Operator
from modelwright.model.decoder import Block, Linear
from modelwright.model.low_rank import LowRank

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
"""By name, because an operator of ours exists only once its module is imported."""


def contexts_keeping(keep: Sequence[Operator], block: Block) -> Callable[[], Contexts]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint` of `block` that saves the outputs of `keep`."""

    def make() -> Contexts:
        names = _products_of(block)
        passes = {False: iter(names), True: iter(names)}  # PyTorch 2.11 asks again when it recomputes

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = "attend" if operator.name() in _ATTENTION else ""
            if operator.name() in _LINEAR:
                name = next(passes[context.is_recompute], "")
            return CheckpointPolicy.MUST_SAVE if name in keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return make


def _products_of(block: Block) -> list[str]:
    """The operator of each matrix product of a block, in the order in which they run; "" for those that are never
    saved: of the router of heads, of the gate on attention's output, of adapters, which are narrow, and the last one.
    """
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
    products: list[str] = []
    for name, projection in projections:
        if projection is not None:
            num_row_blocks = 1 if projection.frozen is None else projection.frozen.num_row_blocks
            products += [name] * num_row_blocks
            if isinstance(projection.adapter, LowRank):
                products += [""] * projection.adapter.num_products(num_row_blocks)
    return products
