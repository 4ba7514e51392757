"""The matrix products of a model, forward and backward, and their combined rate.

Pure arithmetic over shapes. Attention's own products are excluded: they are a few percent of the FLOPs at the context
lengths of small models and run in a fused kernel that has no shape of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from modelwright.model.config import ModelConfig

Pass = Literal["forward", "grad_input", "grad_weight"]
Rate = Callable[[int, int, int], float]
"""`(m, k, n) -> FLOP/s` of a product [m, k] x [k, n]."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`count` products [m, k] x [k, n]; `name` of the layer, `during` which part of the step."""

    name: str
    during: Pass
    m: int
    k: int
    n: int
    count: float

    @property
    def flops(self) -> float:
        """FLOPs; a multiply-add counts as two."""
        return 2.0 * self.m * self.k * self.n * self.count

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n


def forward_products(model: ModelConfig, *, num_tokens: int, head_chunk_tokens: int) -> list[Product]:
    """The linears of one forward pass over `num_tokens` tokens; the head works on chunks (`ops.cross_entropy`)."""
    query_dim, kv_dim = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layers = {
        "q_proj": (model.model_dim, query_dim),
        "k_proj": (model.model_dim, kv_dim),
        "v_proj": (model.model_dim, kv_dim),
        **({"output_gate": (model.model_dim, model.gate_dim)} if model.gate_dim else {}),
        **({"head_router": (model.model_dim, model.router_dim)} if model.router_dim else {}),
        "o_proj": (query_dim, model.model_dim),
        "gate_proj": (model.model_dim, model.ffn_dim),
        "up_proj": (model.model_dim, model.ffn_dim),
        "down_proj": (model.ffn_dim, model.model_dim),
    }
    products = [
        Product(name=name, during="forward", m=num_tokens, k=k, n=n, count=model.num_layers)
        for name, (k, n) in layers.items()
    ]
    chunk = min(num_tokens, head_chunk_tokens)
    head = Product(
        name="head", during="forward", m=chunk, k=model.model_dim, n=model.vocab_size, count=num_tokens / chunk
    )
    return [*products, head]


def training_products(model: ModelConfig, *, num_tokens: int, head_chunk_tokens: int) -> list[Product]:
    """Forward products and, for each, its two backward products: gradients of input and of weight."""
    products = []
    for p in forward_products(model, num_tokens=num_tokens, head_chunk_tokens=head_chunk_tokens):
        products.append(p)
        products.append(Product(name=p.name, during="grad_input", m=p.m, k=p.n, n=p.k, count=p.count))
        products.append(Product(name=p.name, during="grad_weight", m=p.n, k=p.m, n=p.k, count=p.count))
    return products


def effective_rate(products: Iterable[Product], rate: Rate) -> float:
    """FLOP/s of all products done one after the other: total FLOPs over total time; each shape is looked up once."""
    known: dict[tuple[int, int, int], float] = {}
    flops = seconds = 0.0
    for product in products:
        if product.shape not in known:
            known[product.shape] = rate(*product.shape)
        flops += product.flops
        seconds += product.flops / known[product.shape]
    return flops / seconds
