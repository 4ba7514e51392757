"""The shape of a decoder, exactly expressible as a Hugging Face Llama or Qwen3 config."""

from dataclasses import dataclass

from modelwright.core.errors import ConfigError


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
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on queries and keys."""
    tie_embeddings: bool = True
    """Share the embedding matrix with the output head."""
    init_std: float = 0.02
    """Standard deviation of the projections' initial weights."""
    embedding_init_std: float = 0.02
    """Standard deviation of the embedding's initial weights, and so of the first logits when it is tied."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim: must be even for rotary positions, got {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads: {self.num_kv_heads} must divide num_heads ({self.num_heads}); "
                "each key/value head serves a whole group of query heads"
            )

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: four attention projections, three FFN projections, norms."""
        attention = self.model_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.model_dim + (2 * self.head_dim if self.qk_norm else 0)
        return attention + 3 * self.model_dim * self.ffn_dim + norms

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and, when it is not tied, of the head."""
        return self.vocab_size * self.model_dim * (1 if self.tie_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.embedding_parameters + self.model_dim

    def flops_per_token(self, mean_context: float) -> float:
        """FLOPs of one forward pass for one token: matrix products (2 per multiply-add) and attention.

        `mean_context`: how many positions a token attends to on average; about half the document length within a
        packed row. A training step costs three times as much (PaLM, appendix B).
        """
        projections = self.model_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        products = self.num_layers * (projections + 3 * self.model_dim * self.ffn_dim)
        attention = self.num_layers * 2 * self.num_heads * self.head_dim * mean_context
        return 2 * (products + attention + self.vocab_size * self.model_dim)
