"""Selective activation checkpointing: outputs of chosen operators are saved, everything else is recomputed.

PyTorch's selective checkpointing decides operator by operator; here an operator is named by its place in the block
(`config.OPERATORS`), so that each matrix product can be chosen separately. Relies on the order in which a block runs
its products and on the known attention operators.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from modelwright.memory.config import OPERATORS, Operator

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_PRODUCTS = tuple(name for name in OPERATORS if name != "attend")
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


def contexts_keeping(keep: Sequence[Operator], num_gates: int = 0) -> Callable[[], Contexts]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint` of one block that saves the outputs of `keep`. num_gates:
    products between those of values and output, of a router of heads and a gate on attention's output.
    """
    before = _PRODUCTS.index("o_proj")
    products = (*_PRODUCTS[:before], *[""] * num_gates, *_PRODUCTS[before:])

    def make() -> Contexts:
        num_products = 0

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal num_products
            name = "attend" if operator.name() in _ATTENTION else ""
            if operator.name() in _LINEAR:
                name = products[num_products] if num_products < len(products) else ""
                num_products += 1
            return CheckpointPolicy.MUST_SAVE if name in keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return make
