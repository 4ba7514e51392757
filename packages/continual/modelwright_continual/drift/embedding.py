"""Embeddings of prompts: hashed n-grams, or the mean hidden states of the served model, which also gives perplexities.

Legend: B rows, T tokens, N prompts, D width of the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.progress import Progress

Embedding = NDArray[np.float32]

WIDTH = 128
"""Maximum number of components of an embedding; wider ones are projected."""
RARITY_EDGES = (1, 3, 9, 27)
"""Exclusive upper edges, in sessions of the reference, of the bins in which rare words are counted; words of no session
come first. A rare topic changes few components of an embedding, but many of these words."""
_BUCKETS = 2**18
_SPREAD = 4
"""Components to which one n-gram contributes, so that no two n-grams share all of them."""
_MOST_CHARS = 4000
"""Number of characters at the beginning of a prompt that are embedded."""
_MOST_TOKENS = 1024
_BATCH_TOKENS = 8192
_CHUNK = 2000
_PROJECTION_SEED = 20
"""Fixed seed, because a reference's embeddings and later ones must have the same projection."""


@dataclass(frozen=True)
class NgramEmbedder:
    """Hashed words and groups of three characters, weighted by their rarity (TF-IDF) and randomly projected (Achlioptas
    2003), and the shares of rare words in a prompt.

    frequencies [2 * 2^18]: number of sessions of the reference with an n-gram of each bucket, out of `num_sessions`.
    """

    frequencies: NDArray[np.int32]
    num_sessions: int

    @classmethod
    def fit(cls, texts: Sequence[str], sessions: NDArray[np.int64]) -> "NgramEmbedder":
        """Counts n-grams in the reference. sessions [N]: session number of each prompt."""
        from scipy.sparse import csr_array

        num_sessions = int(sessions.max()) + 1 if len(sessions) else 0
        owners: Any = csr_array((np.ones(len(texts), np.float32), (sessions, np.arange(len(texts)))))
        frequencies = np.asarray(((owners @ _ngrams(texts)) > 0).sum(axis=0)).ravel()
        return cls(frequencies.astype(np.int32), num_sessions)

    def embed(self, texts: Sequence[str], progress: Progress, *, is_reference: bool) -> tuple[Embedding, Embedding]:
        """Returns projected n-grams [N, WIDTH] and shares of rare words [N, len(RARITY_EDGES)].

        is_reference: the texts are those that the frequencies count; then a text's own session is not counted, since
        otherwise no word of the reference would be as rare as new words of later requests.
        """
        parts: list[tuple[Embedding, Embedding]] = []
        progress.begin("embed prompts", len(texts), "prompts")
        for start in range(0, len(texts), _CHUNK):
            parts.append(self._embed(texts[start : start + _CHUNK], int(is_reference)))
            progress.advance(min(len(texts), start + _CHUNK))
        progress.end()
        return np.concatenate([one for one, _ in parts]), np.concatenate([one for _, one in parts])

    def _embed(self, texts: Sequence[str], own: int) -> tuple[Embedding, Embedding]:
        from sklearn.preprocessing import normalize

        counts = _ngrams(texts)
        frequencies = self.frequencies[counts.indices] - own
        rows = np.repeat(np.arange(len(texts)), np.diff(counts.indptr))
        is_word = counts.indices < _BUCKETS
        step = np.searchsorted(RARITY_EDGES, frequencies[is_word], side="right")
        places = rows[is_word] * (len(RARITY_EDGES) + 1) + step
        table = np.bincount(places, counts.data[is_word], minlength=len(texts) * (len(RARITY_EDGES) + 1))
        table = table.reshape(len(texts), -1)
        rarity = table[:, :-1] / np.maximum(table.sum(axis=1, keepdims=True), 1)
        counts.data = (np.log1p(counts.data) * np.log((1 + self.num_sessions) / (1 + frequencies))).astype(np.float32)
        projected: Any = normalize(counts) @ _projection(2 * _BUCKETS)
        return projected.toarray().astype(np.float32), rarity.astype(np.float32)


def _ngrams(texts: Sequence[str]) -> Any:
    """Counts hashed n-grams [N, 2 * _BUCKETS], sparse: words, then groups of three characters."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import HashingVectorizer

    # Without alternating signs, because TF-IDF takes the logarithm of the counts.
    options: Any = {"n_features": _BUCKETS, "norm": None, "alternate_sign": False, "dtype": np.float32}
    words = HashingVectorizer(token_pattern=r"\w+", **options)
    chars = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 3), **options)
    heads = [text[:_MOST_CHARS] for text in texts]
    return hstack([words.transform(heads), chars.transform(heads)], format="csr")


def _projection(num_inputs: int) -> Any:
    """Returns a sparse random projection [num_inputs, WIDTH], the same in every process."""
    from scipy.sparse import csr_array

    rng = np.random.default_rng(_PROJECTION_SEED)
    columns = rng.integers(0, WIDTH, num_inputs * _SPREAD)
    signs = rng.choice(np.array([-1, 1], np.float32), num_inputs * _SPREAD)
    return csr_array((signs, columns, np.arange(0, len(columns) + 1, _SPREAD)), shape=(num_inputs, WIDTH))


class ModelEmbedder:
    """Mean hidden states of a model's last layer over a prompt's first tokens."""

    def __init__(self, folder: Path) -> None:
        """Loads the model. Raises `ModelError` if the folder does not contain one that can be loaded."""
        from modelwright.data.tokenizer.tokenizer import Tokenizer
        from modelwright.model.hf import load_model
        from modelwright.pipeline.resolve import resolved_device

        self._device = resolved_device("auto")
        self._model = load_model(folder).to(self._device).eval()
        self._tokenizer = Tokenizer.load(folder)

    def embed(self, texts: Sequence[str], progress: Progress) -> Embedding:
        import torch

        longest = min(_MOST_TOKENS, self._model.config.max_seq_len)
        ids = [sequence[:longest] for sequence in self._encode(texts)]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        result = np.empty((len(ids), self._model.config.model_dim), np.float32)
        progress.begin("embed prompts", len(ids), "prompts")
        done = 0
        while done < len(order):
            # the longest row of a batch is its last one, because they are in order of length
            count = 1
            while done + count < len(order) and (count + 1) * len(ids[order[done + count]]) <= _BATCH_TOKENS:
                count += 1
            rows = order[done : done + count]
            with torch.no_grad():
                result[rows] = self._means([ids[row] for row in rows])
            done += count
            progress.advance(done)
        progress.end()
        return result if result.shape[1] <= WIDTH else result @ _dense_projection(result.shape[1])

    def nats_per_token(self, texts: Sequence[str], progress: Progress) -> NDArray[np.float64]:
        """Returns the mean negative log-likelihood of each prompt's tokens [N], the logarithm of its perplexity; NaN
        for an empty prompt.
        """
        from modelwright.evaluate.scoring import EvaluateConfig, Scored, sequence_nats

        config = EvaluateConfig()
        # The start token is context and is not scored.
        sequences = [Scored(sequence, 1) for sequence in self._encode(texts)]
        nats = sequence_nats(
            self._model,
            sequences,
            context_overlap=config.context_overlap,
            max_context=config.max_context,
            batch_tokens=config.batch_tokens,
            progress=progress,
            name="perplexity of prompts",
        )
        counts = np.array([len(sequence.ids) - 1 for sequence in sequences], dtype=np.float64)
        return np.where(counts > 0, nats / np.maximum(counts, 1), np.nan)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        from modelwright.evaluate.scoring import start_id

        return [[start_id(self._tokenizer), *self._tokenizer.encode(text)] for text in texts]

    def _means(self, rows: Sequence[Sequence[int]]) -> Embedding:
        import torch

        from modelwright.model.attention import packed_attend

        length = max(map(len, rows))
        ids_BT = torch.zeros((len(rows), length), dtype=torch.int64)
        # Segment -1 marks padding.
        segments_BT = torch.full((len(rows), length), -1, dtype=torch.int32)
        for number, row in enumerate(rows):
            ids_BT[number, : len(row)] = torch.tensor(row)
            segments_BT[number, : len(row)] = 0
        ids_BT, segments_BT = ids_BT.to(self._device), segments_BT.to(self._device)
        positions_BT = torch.arange(length, device=self._device).expand(len(rows), -1)
        hidden_BTD = self._model(ids_BT, positions_BT, packed_attend(segments_BT, self._model.config.windows))
        counted = (segments_BT >= 0)[..., None]
        means_BD = torch.where(counted, hidden_BTD.float(), 0.0).sum(dim=1) / counted.sum(dim=1)
        return means_BD.cpu().numpy()


def _dense_projection(num_inputs: int) -> Embedding:
    signs = np.random.default_rng(_PROJECTION_SEED).choice(np.array([-1, 1], np.float32), (num_inputs, WIDTH))
    return (signs / np.sqrt(num_inputs)).astype(np.float32)
