"""Matrix products as this machine computes them: chooses the fastest method for logits, and the padding that keeps a
row's result independent of its neighbors. Both are measured.

The head is the largest product of a step. A BLAS that does not know that the weight is constant repacks a
vocabulary-sized matrix in every call; oneDNN can pack it once. An INT8 head brings its own product.

A BLAS chooses its kernel by the number of rows: one row goes through a matrix-vector kernel that sums in another
order than the blocked kernel that many rows get. The last bits of a sequence's logits would then depend on how many
other requests happen to run. Padding the rows to a multiple for which all products agree bit for bit removes that
(the idea of batch-invariant inference: He et al., Thinking Machines 2025; measured here instead of assumed).
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from modelwright.model.adapter_bank import AdapterPart, PreparedAdapter
from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import repeated, seconds_of

Product = Callable[[Tensor], Tensor]
"""Hidden states [rows, D] to logits [rows, V]."""

HeadKind = Literal["plain", "packed"]
"""`plain` is PyTorch's product, or that of an INT8 head; `packed` packs the weight once, for oneDNN."""

HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

_ROWS = (4, 32)
"""Numbers of rows that the methods are timed with: a few streams, and many."""


@torch.inference_mode()
def fastest_head_kind(model: Decoder) -> HeadKind:
    """Returns the kind of head that is measured as the fastest on this machine. All kinds agree up to rounding; engines
    that must agree bit for bit need the same one.
    """
    if not (model.head is None or isinstance(model.head, nn.Linear)):
        return "plain"  # a quantized head brings its own product
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    on_cpu = model.head_weight.device.type == "cpu" and model.head_weight.dtype == torch.float32
    if not (on_cpu and torch.backends.mkldnn.is_available() and has_operators):
        return "plain"
    seconds = dict.fromkeys(HEAD_KINDS, 0.0)
    for kind in HEAD_KINDS:
        product = head_of(model, kind)
        for rows in _ROWS:
            x = torch.randn(rows, model.head_weight.shape[1], generator=torch.Generator().manual_seed(0))
            timed = partial(seconds_of, partial(product, x), "cpu")
            seconds[kind] += statistics.median(repeated(timed, num_rounds=3, num_warmups=1))
    return min(HEAD_KINDS, key=lambda kind: seconds[kind])


@torch.inference_mode()
def head_of(model: Decoder, kind: HeadKind) -> Product:
    """Product by the head of the given kind."""
    if kind == "plain":
        return model.logits
    weight = torch.ops.mkldnn._reorder_linear_weight(model.head_weight.detach(), _ROWS[0])

    def packed(hidden_BD: Tensor) -> Tensor:
        return model.cap(torch.ops.mkldnn._linear_pointwise(hidden_BD, weight, None, "none", [], ""))

    return packed


MULTIPLES = (1, 2, 4, 8, 16)
PROBE_ROWS = 64
"""Rows of the product that smaller ones are compared with."""


@torch.inference_mode()
def stable_row_multiple(model: Decoder, head: Product) -> int:
    """Smallest multiple in `MULTIPLES` that makes every product of `model` independent of the number of rows; 0 if none
    does on this machine, so that results may differ in the last bits with the load. head: product that makes the
    logits.
    """
    # One module of each kind and shape stands for all.
    distinct: dict[tuple[type, int, int], tuple[Product, int]] = {}
    for module in model.blocks.modules():
        width, height = getattr(module, "in_features", 0), getattr(module, "out_features", 0)
        if isinstance(module, nn.Module) and width and height:
            distinct.setdefault((type(module), width, height), (module, width))
    return _smallest([*distinct.values(), (head, model.config.model_dim)], model.norm.weight)


@torch.inference_mode()
def adapter_row_multiple(adapter: PreparedAdapter, model: Decoder) -> int:
    """Smallest multiple, as in `stable_row_multiple`, for the products of an adapter."""
    shapes = {(part.a_RI.shape, part.b_OR.shape): part for part in adapter.parts.values()}

    def product(part: AdapterPart, x_NI: Tensor) -> Tensor:
        return part.apply(x_NI, x_NI.new_ones(x_NI.shape[0], part.b_OR.shape[0]))

    products = [(partial(product, part), part.a_RI.shape[1]) for part in shapes.values()]
    return _smallest(products, model.norm.weight)


def _smallest(products: Sequence[tuple[Product, int]], like: Tensor) -> int:
    """Smallest multiple for which leading and trailing rows give the same bits as all rows, in the format and on the
    device of `like`; 0 for none.
    """
    for multiple in MULTIPLES:
        # Kernels change between small numbers of rows, so all of these are tried, and few of the larger ones.
        counts = [multiple * n for n in itertools.chain(range(1, 9), (12, 16, 24, 32)) if multiple * n < PROBE_ROWS]
        for product, width in products:
            x = torch.randn(PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(like)
            full = product(x)
            heads = all(torch.equal(product(x[:count]), full[:count]) for count in counts)
            if not heads or not all(torch.equal(product(x[-count:]), full[-count:]) for count in counts):
                break
        else:
            return multiple
    return 0
