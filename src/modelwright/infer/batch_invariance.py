"""Measure how this machine's matrix products must be padded so that a row's result does not depend on its neighbors.

A BLAS chooses its kernel by the number of rows: one row goes through a matrix-vector kernel that sums in another
order than the blocked kernel that many rows get. The last bits of a sequence's logits would then depend on how many
other requests happen to run. Padding the rows to a multiple for which all products agree bit for bit removes that
(the idea of batch-invariant inference: He et al., Thinking Machines 2025; measured here instead of assumed).
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from modelwright.infer.lm_head import Product
from modelwright.model.adapter_bank import AdapterPart, PreparedAdapter
from modelwright.model.decoder import Decoder

MULTIPLES = (1, 2, 4, 8, 16)
PROBE_ROWS = 64


@torch.inference_mode()
def stable_row_multiple(model: Decoder, head: Product) -> int:
    """The smallest multiple in `MULTIPLES` that makes every product of `model` independent of the number of rows.

    `head` is how its logits are made. 0 when none does on this machine: results may then differ in the last bits with
    the load.
    """
    return _smallest(_distinct_products(model, head), model.norm.weight)


@torch.inference_mode()
def adapter_row_multiple(adapter: PreparedAdapter, model: Decoder) -> int:
    """The same for the products of an adapter with the rows that it computes."""
    shapes = {(part.a_RI.shape, part.b_OR.shape): part for part in adapter.parts.values()}
    products = [(_product_of(part), part.a_RI.shape[1]) for part in shapes.values()]
    return _smallest(products, model.norm.weight)


def _product_of(part: AdapterPart) -> Product:
    def product(x_NI: Tensor) -> Tensor:
        return part.apply(x_NI, x_NI.new_ones(x_NI.shape[0], part.b_OR.shape[0]))

    return product


def _smallest(products: Iterable[tuple[Product, int]], like: Tensor) -> int:
    products = list(products)
    for multiple in MULTIPLES:
        if all(_is_stable(product, width, multiple, like) for product, width in products):
            return multiple
    return 0


def _distinct_products(model: Decoder, head: Product) -> list[tuple[Product, int]]:
    """One module of each kind and shape, and the head."""
    result: dict[tuple[type, int, int], tuple[Product, int]] = {}
    for module in model.blocks.modules():
        width, height = getattr(module, "in_features", 0), getattr(module, "out_features", 0)
        if isinstance(module, nn.Module) and width and height:
            result.setdefault((type(module), width, height), (module, width))
    return [*result.values(), (head, model.config.model_dim)]


def _is_stable(product: Product, width: int, multiple: int, like: Tensor) -> bool:
    """like: its format and device are those of the rows."""
    x = torch.randn(PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(like)
    full = product(x)
    counts = [multiple * n for n in itertools.chain(range(1, 9), (12, 16, 24, 32)) if multiple * n < PROBE_ROWS]
    heads = all(torch.equal(product(x[:count]), full[:count]) for count in counts)
    tails = all(torch.equal(product(x[-count:]), full[-count:]) for count in counts)
    return heads and tails
