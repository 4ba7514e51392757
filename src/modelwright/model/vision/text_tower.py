"""The text tower of CLIP and SigLIP folders. Models that this project trains read text with the decoder.

Legend: N texts, T tokens, D width, E width of the common space.
"""

# PyTorch leaves the types of chunk, unflatten and of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import torch
from torch import Tensor, nn

from modelwright.model.vision.config import TextTowerConfig
from modelwright.model.vision.vit import EncoderBlock, init_encoder


class TextTower(nn.Module):
    """Token embedding, learned positions, pre-norm blocks; pooled at one token of each text."""

    def __init__(self, config: TextTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.positions = nn.Parameter(torch.empty(config.max_seq_len, config.model_dim))
        self.blocks = nn.ModuleList(
            EncoderBlock(config.model_dim, config.num_heads, config.ffn_dim, config.activation, config.norm_eps)
            for _ in range(config.num_layers)
        )
        self.norm_out = nn.LayerNorm(config.model_dim, eps=config.norm_eps)
        init_encoder(self, embedding_std=0.02, num_layers=config.num_layers)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Vectors of texts [N, D]. tokens_NT: int64 [N, T]. Raises `ValueError` for texts that are too long."""
        num_tokens = tokens_NT.shape[1]
        if num_tokens > self.config.max_seq_len:
            raise ValueError(f"texts of {num_tokens} tokens, where the tower reads {self.config.max_seq_len}")
        hidden_NTD = self.embedding(tokens_NT) + self.positions[:num_tokens]
        for block in self.blocks:
            hidden_NTD = block(hidden_NTD, is_causal=self.config.is_causal)
        if self.config.eos_id < 0:
            ends_N = torch.full_like(tokens_NT[:, 0], num_tokens - 1)
        elif self.config.eos_id == 2:
            # Folders from before transformers corrected CLIP's config say 2; their end token has the largest id
            ends_N = tokens_NT.argmax(dim=1)
        else:
            ends_N = (tokens_NT == self.config.eos_id).int().argmax(dim=1)
        return self.norm_out(hidden_NTD[torch.arange(len(tokens_NT), device=tokens_NT.device), ends_N])


class DualEncoder(nn.Module):
    """A CLIP or SigLIP model: images and texts in one space; projections that a folder lacks are `nn.Identity`."""

    def __init__(
        self, vision: nn.Module, text: TextTower, image_projection: nn.Module, text_projection: nn.Module
    ) -> None:
        super().__init__()
        self.vision, self.text = vision, text
        self.image_projection, self.text_projection = image_projection, text_projection
        # The logarithm of the factor of cosines, and the offset that is added
        self.logit_scale, self.logit_bias = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def encode_images(self, pixels_NCSS: Tensor) -> Tensor:
        """Vectors of images [N, E], not normalized."""
        return self.image_projection(self.vision(pixels_NCSS))

    def encode_texts(self, tokens_NT: Tensor) -> Tensor:
        """Vectors of texts [N, E], not normalized."""
        return self.text_projection(self.text(tokens_NT))
