"""The matrix product that computes logits, the largest one of a step, by the method that is fastest here.

A BLAS that does not know that the weight is constant repacks a vocabulary-sized matrix in every call; oneDNN can pack
it once. The faster one is found by measuring; an INT8 head brings its own product.
"""

import statistics
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import repeated, seconds_of

Product = Callable[[Tensor], Tensor]
"""Hidden states [rows, D] to logits [rows, V]."""

HeadKind = Literal["plain", "packed"]
"""`plain` is PyTorch's product, or that of an INT8 head; `packed` packs the weight once, for oneDNN."""

HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

_ROWS = (4, 32)


@torch.inference_mode()
def fastest_head(model: Decoder) -> Product:
    """The fastest way to multiply by the head on this machine; all ways agree up to rounding."""
    return head_of(model, fastest_head_kind(model))


@torch.inference_mode()
def fastest_head_kind(model: Decoder) -> HeadKind:
    """What `fastest_head` takes, by measuring: engines that are to agree bit for bit need the same."""
    if not _is_plain(model) or not _can_pack(model.head_weight):
        return "plain"
    width = model.head_weight.shape[1]
    return min(HEAD_KINDS, key=lambda kind: _seconds(head_of(model, kind), width))


@torch.inference_mode()
def head_of(model: Decoder, kind: HeadKind) -> Product:
    """One way to multiply by the head."""
    if kind == "plain":
        return model.logits
    products = _packed(model.head_weight)

    def packed(hidden_BD: Tensor) -> Tensor:
        return model.cap(products(hidden_BD))

    return packed


def _is_plain(model: Decoder) -> bool:
    """Whether the head is not quantized, which brings a product of its own."""
    return model.head is None or isinstance(model.head, torch.nn.Linear)


def _can_pack(weight_VD: Tensor) -> bool:
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    on_cpu = weight_VD.device.type == "cpu" and weight_VD.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and has_operators


def _packed(weight_VD: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_VD.detach(), _ROWS[0])

    def product(hidden_BD: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden_BD, packed, None, "none", [], "")

    return product


def _seconds(product: Product, width: int) -> float:
    """Sum over `_ROWS` of the median time of three products, after a warm-up."""
    total = 0.0
    for rows in _ROWS:
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        times = repeated(lambda x=x: seconds_of(lambda: product(x), "cpu"), num_rounds=3, num_warmups=1)
        total += statistics.median(times)
    return total
