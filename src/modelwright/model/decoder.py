"""The decoder: RMSNorm, rotary grouped-query attention with optional QK-norm, gated feed-forward layers, optionally
tied embeddings; `ModelConfig` has the additions of other model types.

Single-device code. Attention is a parameter: every layer passes its queries, keys and values to an `Attend` function,
which training builds from a mask and inference from a KV cache. `forward` returns hidden states; `logits` and
`cross_entropy` apply the head. Blocks are named by layer, so a pipeline stage keeps their names.

`ModelConfig` is the shape. Differences between model types are data in it; `hf_types/` maps them to Hugging Face
configs. Fields that are not chosen for a model from scratch are constants: imported folders and Python code set them.

Legend: B rows, T tokens, D model width, H query heads, K key/value heads, d head width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.config import ConfigError, constant
from modelwright.model.head_selection import HeadSelection
from modelwright.model.low_rank import AdapterConfig, FrozenWeight
from modelwright.ops.cross_entropy import (
    CHUNK_TOKENS,
    LinearHead,
    LossOfLogits,
    linear_cross_entropy,
    soft_cap_logits,
    soft_capped,
    softmax_loss,
    token_log_probs,
    token_log_probs_and_entropies,
)
from modelwright.ops.distillation_loss import Teacher, distillation_loss
from modelwright.ops.rope_norm_swiglu import (
    RopeScaling,
    apply_rope,
    document_lengths,
    gated_gelu,
    rms_norm,
    rope_tables,
    scaled_rope_tables,
    swiglu,
)

AttentionGate = Literal["none", "head", "element"]
"""Gate on attention's output (Qiu et al. 2025, arXiv 2505.06708): none, or sigmoids of a projection of the layer's
input, one for each head or for each element."""
Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Activation of a feed-forward layer's gate; `gelu_tanh` is the tanh approximation of GELU."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Features of attention beyond grouped queries and rotary positions."""

    qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    output_bias: bool = False
    """Bias of the output projection."""
    query_scale: float = 0.0
    """Factor of the scores; 0 is 1 / sqrt(head_dim)."""
    soft_cap: float = 0.0
    """Scores s become soft_cap * tanh(s / soft_cap) (Gemma 2); 0 leaves them."""
    window: int = 0
    """Tokens that the `window_layers` see, the present one included; 0 is all earlier ones."""
    window_layers: tuple[int, ...] = ()
    """Layers with a sliding window."""
    layers_without_rope: tuple[int, ...] = ()
    """Layers whose queries and keys carry no positions (NoPE)."""

    def __post_init__(self) -> None:
        if self.window < 0 or self.soft_cap < 0 or self.query_scale < 0:
            raise ConfigError("window, soft_cap, query_scale: must not be negative; 0 disables them")
        if bool(self.window) != bool(self.window_layers):
            num_layers = len(self.window_layers)
            raise ConfigError(f"window: is {self.window} with {num_layers} window_layers; set both or neither")


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Placement and scale of norms; their epsilon is `ModelConfig.norm_eps`."""

    post_norms: bool = False
    """Norms after attention and feed-forward, too, before the residual is added (Gemma 2)."""
    one_plus_weight: bool = False
    """The learned scale is 1 + weight (Gemma)."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """The gated feed-forward layer."""

    activation: Activation = "silu"
    """Activation of the gate: SwiGLU or GeGLU (Shazeer 2020)."""
    bias: bool = False
    """Biases of all three projections."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer: Llama without `qk_norm`, Qwen3 with it."""

    vocab_size: int
    """Vocabulary of the tokenizer."""
    num_layers: int
    """Transformer blocks."""
    model_dim: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; a divisor of `num_heads`."""
    ffn_dim: int
    """Width of the feed-forward layer (SwiGLU)."""
    head_dim: int
    """Width of one head."""
    max_seq_len: int
    """Longest context in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = constant(1e-6)
    """Epsilon of RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on queries and keys."""
    attention_gate: AttentionGate = "none"
    """Sigmoid gate on the output of attention: one factor for each `head` or each `element` (Qiu et al. 2025), from a
    projection of the layer's input. `transformers` lacks a model type for it."""
    head_budget: float = 1.0
    """Mean share of the heads that attention computes for a token. Below 1 each layer learns which heads a token needs
    and skips the others (`model/head_selection.py`); those that share a key/value head are chosen together.
    `transformers` lacks a model type for it."""
    tie_embeddings: bool = True
    """Share the embedding matrix with the output head."""
    init_std: float = 0.02
    """Standard deviation of the projections' initial weights."""
    embedding_init_std: float = 0.02
    """Standard deviation of the embedding's initial weights, and so of the first logits when it is tied."""
    rope: RopeScaling = constant(RopeScaling())
    """Scaling of the rotary frequencies."""
    rotary_dim: int = constant(0)
    """First dimensions of each head that carry positions; 0 is all of them."""
    window_rope_theta: float = constant(0.0)
    """Base of the unscaled rotary frequencies of layers with a window; 0 gives them those of the other layers."""
    attention: AttentionConfig = constant(AttentionConfig())
    """Biases, soft cap, windows, layers without positions."""
    norms: NormConfig = constant(NormConfig())
    """Placement of norms."""
    feed_forward: FeedForwardConfig = constant(FeedForwardConfig())
    """Activation and biases."""
    embedding_scale: float = constant(1.0)
    """Factor of the embedding where it enters the residual stream."""
    logit_soft_cap: float = constant(0.0)
    """Logits x become cap * tanh(x / cap); 0 leaves them."""
    hf_type: str = constant("")
    """`model_type` of the Hugging Face folder that the model comes from and is written as; "" is the type that fits:
    llama, or qwen3 with `qk_norm`."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim: must be even for rotary positions, got {self.head_dim}")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim: must be even and at most head_dim ({self.head_dim}), got {self.rotary_dim}; 0 is all"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads: {self.num_kv_heads} must divide num_heads ({self.num_heads}); "
                "each key/value head serves a whole group of query heads"
            )
        if not 0.0 < self.head_budget <= 1.0:
            raise ConfigError(
                f"head_budget: must be above 0 and at most 1, got {self.head_budget}; 1 computes all heads"
            )
        self.rope.check_dim(self.num_rotated)

    @property
    def num_rotated(self) -> int:
        """Dimensions of a head that carry positions."""
        return self.rotary_dim or self.head_dim

    @property
    def gate_dim(self) -> int:
        """Outputs of the projection that gates attention's output; 0 without a gate."""
        return {"none": 0, "head": self.num_heads, "element": self.num_heads * self.head_dim}[self.attention_gate]

    @property
    def router_dim(self) -> int:
        """Outputs of the projection that selects heads, one for each key/value head; 0 where all are computed."""
        return self.num_kv_heads if self.head_budget < 1.0 else 0

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct attention spans of the layers, as `window_of` gives them."""
        return tuple(sorted({self.window_of(layer) for layer in range(self.num_layers)}))

    def window_of(self, layer: int) -> int:
        """Tokens that a layer's queries see, the present one included; 0 is all earlier ones."""
        return self.attention.window if layer in self.attention.window_layers else 0

    @property
    def replicated_block_parameters(self) -> int:
        """Parameters of one block that tensor parallelism does not divide: norms, and biases of what ranks sum up."""
        norms = (4 if self.norms.post_norms else 2) * self.model_dim + (2 * self.head_dim if self.qk_norm else 0)
        return norms + self.model_dim * (self.attention.output_bias + self.feed_forward.bias)

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: attention and FFN projections, a gate, a router of heads, biases, norms."""
        heads, pairs = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        of_attention = 2 * (heads + pairs) + self.gate_dim + self.router_dim
        matrices = self.model_dim * (of_attention + 3 * self.ffn_dim)
        biases = (heads + 2 * pairs) * self.attention.qkv_bias + 2 * self.ffn_dim * self.feed_forward.bias
        return matrices + biases + self.replicated_block_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and, when it is not tied, of the head."""
        return self.vocab_size * self.model_dim * (1 if self.tie_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.embedding_parameters + self.model_dim

    def flops_per_token(self, mean_context: float) -> float:
        """FLOPs of one forward pass for one token: matrix products (2 per multiply-add) and attention.

        `mean_context`: positions that a token attends to on average; about half the document length within a packed
        row. A layer with a window attends to at most the window, and only the share `head_budget` of the heads counts.
        A training step costs three times as much (PaLM, appendix B).
        """
        heads = self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        projections = self.model_dim * (heads + self.gate_dim + self.router_dim)
        products = self.num_layers * (projections + 3 * self.model_dim * self.ffn_dim)
        contexts = sum(min(mean_context, self.window_of(layer) or mean_context) for layer in range(self.num_layers))
        attention = 2 * self.num_heads * self.head_dim * contexts * self.head_budget
        return 2 * (products + attention + self.vocab_size * self.model_dim)


def layers_where(flags: Sequence[bool]) -> tuple[int, ...]:
    """Numbers of the layers whose flag is set."""
    return tuple(layer for layer, flag in enumerate(flags) if flag)


class AttentionSpec(NamedTuple):
    """Settings of a layer for an `Attend` function. window: tokens that a query sees, the present one included; 0 is
    all earlier ones; soft_cap: scores s become soft_cap * tanh(s / soft_cap); 0 leaves them; open_BTH: the heads whose
    output counts for each token, boolean, None for all: others need not be computed, but have to be finite.
    """

    layer: int
    window: int = 0
    soft_cap: float = 0.0
    open_BTH: Tensor | None = None


class RotaryTables(NamedTuple):
    """Cosines and sines [B, T, 1, r] for layers that see all earlier tokens, and for layers with a window."""

    cos: Tensor
    sin: Tensor
    window_cos: Tensor
    window_sin: Tensor

    def of(self, block: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns the tables of one block."""
        assert isinstance(block, Block)
        return (self.window_cos, self.window_sin) if block.attention.spec.window else (self.cos, self.sin)


Attend = Callable[[AttentionSpec, Tensor, Tensor, Tensor], Tensor]
"""`(spec, q_BTHd, k_BTKd, v_BTKd) -> out_BTHd`; q and k have rotary positions; scores are divided by sqrt(d)."""
Product = Callable[[Tensor, Tensor], Tensor]
"""`(x [..., I], weight [O, I]) -> [..., O]`."""
EmbeddingHook = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(residual stream before all blocks, tokens, positions) -> residual stream`; the last two are whole rows [B, T], the
first [B, T, D] or, with sequence parallelism, this rank's tokens of it.
"""
Insert = Callable[[Tensor], Tensor]
"""`embeddings [B, T, D] -> embeddings`: replaces some in one forward pass (`vision/llava.py`)."""


class Adapter(Protocol):
    """Addition to a projection: one adapter (`low_rank.py`) or several to choose from (`adapter_bank.py`)."""

    def __call__(self, x: Tensor, out: Tensor, row_blocks: Callable[[], Iterable[Tensor]]) -> Tensor:
        """Returns the output [..., O] for x [..., I] from the projection's product `out`, without bias. row_blocks: the
        weight, some rows at a time.
        """
        ...


HEAD_METHODS = (
    "cross_entropy",
    "logits",
    "token_log_probs",
    "token_log_probs_and_entropies",
    "distillation_loss",
    "head_output",
)
"""Methods of `Decoder` that read parameters at the end of the model outside `forward`."""


class Linear(nn.Linear):
    """Linear layer with hooks. `product` multiplies: the hook for other number formats and for products that skip a
    part. adapter: an addition to the output, None without (`adapters.py`). frozen: the weight in four or eight bits, in
    place of `weight`, which is None then.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = False) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)  # pyright: ignore[reportUnknownMemberType]
        self.has_bias = bias
        self.product: Product = F.linear
        self.adapter: Adapter | None = None
        self.frozen: FrozenWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        out = self.multiply(input)
        return add_bias(out, self.bias) if self.has_bias else out

    def multiply(self, x: Tensor) -> Tensor:
        """Returns the product of x [..., I] with this process's part of the weight, with the adapter, without bias."""
        out = self.product(x, self.own_weight()) if self.frozen is None else self.frozen(x, self.product)
        return out if self.adapter is None else self.adapter(x, out, self.row_blocks)

    def own_weight(self) -> Tensor:
        """This process's part of the weight, unless it is packed; layouts replace this method."""
        return self.weight

    def row_blocks(self) -> Iterable[Tensor]:
        """This process's part of the weight, some rows at a time, dequantized if it is packed."""
        return [self.own_weight()] if self.frozen is None else self.frozen.row_blocks(*self.frozen.tensors())


def add_bias(out: Tensor, bias: Tensor) -> Tensor:
    """Returns the sum in the format of `out`."""
    return out + bias.to(out.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale, `weight` or 1 + `weight`."""

    def __init__(self, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.one_plus_weight = config.norms.one_plus_weight
        self.neutral_weight = 0.0 if self.one_plus_weight else 1.0
        """The weight whose scale is 1."""
        self.weight = nn.Parameter(torch.full((dim,), self.neutral_weight))
        # None is the input's format; `in_fp32` computes in FP32 whatever the input's format
        self.out_dtype: torch.dtype | None = None
        self.in_fp32 = True

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight)

    def norm(self, x: Tensor, weight_D: Tensor) -> Tensor:
        # 1 + weight is summed in FP32: in BF16 the sum would drop the last bits of small weights
        if self.one_plus_weight:
            weight_D = 1.0 + weight_D.to(torch.promote_types(weight_D.dtype, torch.float32))
        return rms_norm(x, weight_D, self.eps, out_dtype=self.out_dtype, in_fp32=self.in_fp32)


class Attention(nn.Module):
    """Grouped-query self-attention around an `Attend` function."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        attention, self.head_dim = config.attention, config.head_dim
        self.spec = AttentionSpec(layer, config.window_of(layer), attention.soft_cap)
        self.uses_rope = layer not in attention.layers_without_rope
        # `Attend` divides scores by sqrt(head_dim), so a model's own scale is relative to that
        self.query_factor = attention.query_scale * math.sqrt(config.head_dim) if attention.query_scale else 1.0
        query_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.model_dim, query_dim, bias=attention.qkv_bias)
        self.k_proj = Linear(config.model_dim, kv_dim, bias=attention.qkv_bias)
        self.v_proj = Linear(config.model_dim, kv_dim, bias=attention.qkv_bias)
        self.o_proj = Linear(query_dim, config.model_dim, bias=attention.output_bias)
        self.output_gate = Linear(config.model_dim, config.gate_dim) if config.gate_dim else None
        self.head_router = Linear(config.model_dim, config.router_dim) if config.router_dim else None
        self.head_selection = HeadSelection(config.num_heads, config.head_budget) if config.router_dim else None
        self.q_norm = RMSNorm(config.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q_BTHd, k_BTKd = self.queries_and_keys(x_BTD, cos, sin)
        v_BTKd = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        out_BTHd = self.attended(x_BTD, q_BTHd, k_BTKd, v_BTKd, attend)
        if self.output_gate is not None:  # position G1 of arXiv 2505.06708
            gates_BTHg = self.output_gate(x_BTD).unflatten(-1, (out_BTHd.shape[-2], -1))
            out_BTHd = out_BTHd * gates_BTHg.sigmoid().to(out_BTHd.dtype)
        return self.o_proj(out_BTHd.flatten(-2))

    def attended(self, x_BTD: Tensor, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, attend: Attend) -> Tensor:
        """Attention's output [B, T, H, d], only of the selected heads if the layer has a router."""
        if self.head_router is None or self.head_selection is None:
            return attend(self.spec, q_BTHd, k_BTKd, v_BTKd)
        # The query heads that share a key/value head are consecutive, and get its decision
        logits_BTK = self.head_router(x_BTD)
        logits_BTH = logits_BTK.repeat_interleave(q_BTHd.shape[-2] // logits_BTK.shape[-1], dim=-1)
        open_BTH = self.head_selection(logits_BTH)
        out_BTHd = attend(self.spec._replace(open_BTH=open_BTH), q_BTHd, k_BTKd, v_BTKd)
        return self.head_selection.gated(out_BTHd, logits_BTH, open_BTH)

    def queries_and_keys(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, d] and keys [B, T, K, d], with rotary positions."""
        q_BTHd = self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTKd = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        if self.query_factor != 1.0:
            q_BTHd = q_BTHd * self.query_factor
        if not self.uses_rope:
            return q_BTHd, k_BTKd
        return apply_rope(q_BTHd, cos, sin), apply_rope(k_BTKd, cos, sin)


class FeedForward(nn.Module):
    """SwiGLU, or GeGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.feed_forward.bias
        self.gate_proj = Linear(config.model_dim, config.ffn_dim, bias=bias)
        self.up_proj = Linear(config.model_dim, config.ffn_dim, bias=bias)
        self.down_proj = Linear(config.ffn_dim, config.model_dim, bias=bias)
        self.activation: Activation = config.feed_forward.activation
        self.activation_in_fp32 = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_proj(x_BTD), self.up_proj(x_BTD)
        if self.activation == "silu":
            return self.down_proj(swiglu(gate_BTF, up_BTF, in_fp32=self.activation_in_fp32))
        by_tanh = self.activation == "gelu_tanh"
        return self.down_proj(gated_gelu(gate_BTF, up_BTF, by_tanh=by_tanh, in_fp32=self.activation_in_fp32))


class Block(nn.Module):
    """Attention and feed-forward behind a norm each, or between two each, added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.is_recomputed = False  # whether backward computes its activations again
        post_norms = config.norms.post_norms
        self.attention_norm = RMSNorm(config.model_dim, config)
        self.attention = Attention(config, layer)
        self.attention_post_norm = RMSNorm(config.model_dim, config) if post_norms else nn.Identity()
        self.ffn_norm = RMSNorm(config.model_dim, config)
        self.ffn = FeedForward(config)
        self.ffn_post_norm = RMSNorm(config.model_dim, config) if post_norms else nn.Identity()

    def forward(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        attended_BTD = self.attention(self.attention_norm(hidden_BTD), cos, sin, attend)
        hidden_BTD = hidden_BTD + self.attention_post_norm(attended_BTD)
        return hidden_BTD + self.ffn_post_norm(self.ffn(self.ffn_norm(hidden_BTD)))


@dataclass
class EndFormats:
    """Number formats at the ends of a model, shared by its pipeline stages; None is that of the weights."""

    # Of the residual stream, and of the products of head and loss
    stream_dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    loss_in_fp32: bool = True

    def reset(self) -> None:
        self.stream_dtype, self.head_dtype, self.loss_in_fp32 = None, None, True


class StoredParameters(Protocol):
    """Parameters on disk."""

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read the part of a parameter that bounded slices of its dimensions select, in the format of the file."""
        ...


class Decoder(nn.Module):
    """A decoder-only transformer; passes (checkpointing, compile, sharding) work on `blocks`. stored: source of the
    weights while parameters are on the meta device; a layout then reads this rank's part
    (`parallel/sharded_weights.py`). adapters: their settings, `r` 0 without; base_fingerprint: identifies the weights
    that they were attached to (`adapters.py`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.ends = EndFormats()
        self.stored: StoredParameters | None = None
        self.embedding_hooks: list[EmbeddingHook] = []
        """Changes of the embeddings in training, where gradients are recorded; shared by pipeline stages."""
        self.adapters = AdapterConfig()
        self.base_fingerprint = ""
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.num_layers)})
        self.norm = RMSNorm(config.model_dim, config)
        self.head = None if config.tie_embeddings else Linear(config.model_dim, config.vocab_size)
        self.heads = nn.ModuleDict()
        """Further modules that read hidden states: those of the objective in training (`Objective.own_modules`)."""

    @property
    def head_weight(self) -> Tensor:
        """The output projection [V, D]: the embedding itself if tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        attend: Attend,
        lengths_BT: Tensor | None = None,
        insert: Insert | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm.

        tokens_BT, positions_BT: int64 [B, T]; positions restart at 0 in each packed document. lengths_BT: see
        `rotary_tables`. insert: replaces the embeddings of some tokens.
        """
        embedded_BTD = self.embed(tokens_BT, positions_BT, insert)
        return self.norm(self.run_blocks(embedded_BTD, positions_BT, attend, lengths_BT))

    def embed(self, tokens_BT: Tensor, positions_BT: Tensor, insert: Insert | None = None) -> Tensor:
        """The residual stream [B, T, D] before all blocks."""
        hidden_BTD = self.embedding(tokens_BT)
        if self.config.embedding_scale != 1.0:
            hidden_BTD = hidden_BTD * self.config.embedding_scale
        # Inserted embeddings are not scaled: a projector already writes to the residual stream
        if insert is not None:
            hidden_BTD = insert(hidden_BTD)
        for hook in self.embedding_hooks if torch.is_grad_enabled() else ():
            hidden_BTD = hook(hidden_BTD, tokens_BT, positions_BT)
        return hidden_BTD.to(self.ends.stream_dtype) if self.ends.stream_dtype else hidden_BTD

    def run_blocks(
        self, hidden_BTD: Tensor, positions_BT: Tensor, attend: Attend, lengths_BT: Tensor | None = None
    ) -> Tensor:
        """The residual stream [B, T, D] after all blocks in this process."""
        rotary = self.rotary_tables(positions_BT, lengths_BT)
        for block in self.blocks.values():
            hidden_BTD = block(hidden_BTD, *rotary.of(block), attend)
        return hidden_BTD

    def rotary_tables(self, positions_BT: Tensor, lengths_BT: Tensor | None = None) -> RotaryTables:
        """Rotary tables of all layers. lengths_BT: tokens of the sequence that each token belongs to, which decide the
        frequencies of some scalings; None for rows of whole documents, whose lengths follow from their positions.
        """
        config = self.config
        if lengths_BT is None:
            lengths_BT = document_lengths(positions_BT) if config.rope.depends_on_length else positions_BT
        cos, sin = scaled_rope_tables(positions_BT, lengths_BT, config.num_rotated, config.rope_theta, config.rope)
        # The same tensors for layers with a window, unless the model has other frequencies there
        if not config.window_rope_theta:
            return RotaryTables(cos, sin, cos, sin)
        return RotaryTables(cos, sin, *rope_tables(positions_BT, config.num_rotated, config.window_rope_theta))

    def projections(self) -> dict[str, Linear]:
        """Projections of the blocks in this process and of `heads`, by name."""
        found: dict[str, Linear] = {}
        for part, modules in (("blocks", self.blocks), ("heads", self.heads)):
            named = cast(Iterator[tuple[str, nn.Module]], modules.named_modules())
            found |= {f"{part}.{name}": module for name, module in named if isinstance(module, Linear)}
        return found

    def cross_entropy(self, hidden_BTD: Tensor, labels_BT: Tensor, *, chunk_tokens: int) -> Tensor:
        """Sum of the labels' negative log-likelihoods (nats), FP32, in chunks of tokens; labels of -100 are ignored."""
        return linear_cross_entropy(
            hidden_BTD.flatten(0, 1),
            self.head_weight,
            labels_BT.flatten(),
            chunk_tokens=chunk_tokens,
            loss_of_logits=self.capped(softmax_loss),
            compute=self.ends.head_dtype,
            in_fp32=self.ends.loss_in_fp32,
        )

    def token_log_probs(self, hidden_BTD: Tensor, labels_BT: Tensor, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
        """log p(label) of every token in nats [B, T], FP32 at least, with gradients; 0 where the label is -100."""
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), labels_BT.flatten()
        log_probs_N = token_log_probs(hidden_ND, self.linear_head(), labels_N, chunk_tokens=chunk_tokens)
        # A clone, also below: FSDP hooks into what `HEAD_METHODS` return, which must not be a view
        return log_probs_N.view_as(labels_BT).clone()

    def token_log_probs_and_entropies(
        self, hidden_BTD: Tensor, labels_BT: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
    ) -> tuple[Tensor, Tensor]:
        """`token_log_probs` and the entropies of the distributions in nats, [B, T] each."""
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), labels_BT.flatten()
        log_probs_N, entropies_N = token_log_probs_and_entropies(
            hidden_ND, self.linear_head(), labels_N, chunk_tokens=chunk_tokens
        )
        return log_probs_N.view_as(labels_BT).clone(), entropies_N.view_as(labels_BT).clone()

    def distillation_loss(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor,
        teacher: Teacher,
        *,
        temperature: float,
        label_share: float,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over labeled tokens: the loss with gradients, divergence from the teacher and label loss without."""
        terms = distillation_loss(
            hidden_BTD.flatten(0, 1),
            self.linear_head(),
            teacher,
            labels_BT.flatten(),
            temperature=temperature,
            label_share=label_share,
            chunk_tokens=chunk_tokens,
        )
        return terms.loss.clone(), terms.divergence, terms.label_loss

    def linear_head(self) -> LinearHead:
        """Output projection; valid within the methods of `HEAD_METHODS`, for which FSDP gathers it."""
        return LinearHead(weight_UD=self.head_weight, soft_cap=self.config.logit_soft_cap, compute=self.ends.head_dtype)

    def head_output(self, name: str, hidden_BTD: Tensor) -> Tensor:
        """Output of one of `heads` for hidden states."""
        return self.heads[name](hidden_BTD).clone()

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [..., V], multiplied in `ends.head_dtype`. Training calls `cross_entropy` instead."""
        if self.ends.head_dtype:
            return self.cap(F.linear(hidden_BTD.to(self.ends.head_dtype), self.head_weight.to(self.ends.head_dtype)))
        if self.head is None:  # tied: an embedding has no `product` that training could replace
            return self.cap(F.linear(hidden_BTD, self.embedding.weight.to(hidden_BTD.dtype)))
        return self.cap(self.head(hidden_BTD))

    def cap(self, products: Tensor) -> Tensor:
        """Applies the soft cap to products with the head's weight, for all of the vocabulary or a part of it."""
        return soft_cap_logits(products, self.config.logit_soft_cap) if self.config.logit_soft_cap else products

    def capped(self, loss_of_logits: LossOfLogits) -> LossOfLogits:
        """Returns the same loss as a function of products with the head's weight."""
        cap = self.config.logit_soft_cap
        return soft_capped(loss_of_logits, cap) if cap else loss_of_logits

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal initialization, residual projections scaled by 1/sqrt(2 * layers) (GPT-2); norms scale by one, biases
        are zero.

        Drawn on the CPU from `seed` in parameter order, so that every device and every layout starts equal.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") or self.config.norms.one_plus_weight else 1.0)
                continue
            std = self.config.init_std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = residual_std
            elif name == "embedding.weight":
                std = self.config.embedding_init_std
            # FP32 on the CPU: drawing in the parameter's format or on its device would give other numbers
            draw = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            parameter.copy_(draw)


def decoders_in(model: nn.Module) -> dict[str, Decoder]:
    """Decoders in a model by prefix of their parameters' names: "" for the model, and heads such as a value model."""
    named = cast(Iterator[tuple[str, nn.Module]], model.named_modules())
    return {f"{name}." if name else "": module for name, module in named if isinstance(module, Decoder)}
