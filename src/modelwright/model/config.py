"""Shape of a decoder. Differences between model types are data here; `hf_types/` maps them to Hugging Face configs.

Fields that are not chosen for a model from scratch are constants: imported folders and Python code set them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.config import ConfigError, constant
from modelwright.ops.rope_norm_swiglu import RopeScaling

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
