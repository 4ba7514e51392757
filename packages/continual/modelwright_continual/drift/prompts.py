"""Embeddings of prompts in the reference's units, and their scores by the served model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from modelwright.core.progress import Progress
from modelwright_continual.drift.embedding import Embedding, NgramEmbedder
from modelwright_continual.drift.features import TextScores

# Lower bound of the deviation that components are divided by: one that hardly varies in the reference would otherwise
# dominate.
_LEAST_DEVIATION = 0.01
_MOST_DEVIATIONS = 10.0
"""Limit to which components are clipped: a rare word that occurs in no session of the reference would otherwise
outweigh all else."""


class PromptModel(Protocol):
    """The served model: `embedding.ModelEmbedder`."""

    def embed(self, texts: Sequence[str], progress: Progress) -> Embedding: ...

    def nats_per_token(self, texts: Sequence[str], progress: Progress) -> NDArray[np.float64]: ...


@dataclass(frozen=True, eq=False)
class PromptReader:
    """Embeds and scores prompts: shares of rare words always come from the n-grams, the rest from the model if there is
    one.
    """

    ngrams: NgramEmbedder
    model: PromptModel | None

    def embed(self, texts: Sequence[str], progress: Progress, *, is_reference: bool) -> Embedding:
        """Returns mean hidden states or projected n-grams, followed by shares of rare words [N, D]."""
        projected, rarity = self.ngrams.embed(texts, progress, is_reference=is_reference)
        if self.model is not None:
            projected = self.model.embed(texts, progress)
        return np.concatenate([projected, rarity], axis=1)

    def scores(self, texts: Sequence[str], progress: Progress) -> TextScores:
        if self.model is None:
            return TextScores()
        return TextScores(self.model.nats_per_token(texts, progress).tolist())


@dataclass(frozen=True, eq=False)
class Standard:
    """Scales embeddings to zero mean and unit variance in the reference. center, scale [D]."""

    center: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def fit(cls, embeddings: Embedding) -> "Standard":
        return cls(embeddings.mean(axis=0), np.maximum(embeddings.std(axis=0), _LEAST_DEVIATION))

    def apply(self, embeddings: Embedding) -> Embedding:
        return np.clip((embeddings - self.center) / self.scale, -_MOST_DEVIATIONS, _MOST_DEVIATIONS)
