"""A small bidirectional transformer that tells junk from text, trained from scratch in a minute on two CPU cores.

A word is the sum of three embeddings: its hash, its shape (capitals, digits, length) and the hash of its first and last
three letters, so that unseen words still mean something (as in fastText, Bojanowski et al. 2017). Documents are read in
windows of 64 words; the score is the mean of those of up to three windows spread over the document.
"""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WINDOW_WORDS = 64
_MAX_WINDOWS = 3
_BUCKETS, _SHAPES = 2**15, 2**9
_WIDTH, _LAYERS, _HEADS = 64, 2, 4
_BATCH = 64
_TOKEN = re.compile(r"\w+|[^\w\s]")


class NoiseEncoder(nn.Module):
    """Score of noise, in logits, of windows of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_BUCKETS, _WIDTH, padding_idx=0)
        self.parts = nn.Embedding(_BUCKETS, _WIDTH, padding_idx=0)
        self.shapes = nn.Embedding(_SHAPES, _WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.zeros(WINDOW_WORDS, _WIDTH))
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 2 * _WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.score = nn.Linear(_WIDTH, 1)
        for embedding in (self.words, self.parts, self.shapes):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens_BT3: Tensor) -> Tensor:
        """tokens [B, T, 3] int64, 0 for padding; returns scores [B]."""
        padding = tokens_BT3[..., 0] == 0
        hidden = self.words(tokens_BT3[..., 0]) + self.parts(tokens_BT3[..., 1]) + self.shapes(tokens_BT3[..., 2])
        hidden = self.layers(hidden + self.positions[: hidden.shape[1]], src_key_padding_mask=padding)
        weight = (~padding).float().unsqueeze(-1)
        return self.score((hidden * weight).sum(1) / weight.sum(1).clamp(min=1)).squeeze(-1)


def windows(text: str) -> list[NDArray[np.int64]]:
    """Up to three windows of tokens [T, 3], spread evenly over the text; one empty window for an empty text."""
    matches = _TOKEN.findall(text[:60_000])
    starts = range(0, max(1, len(matches) - WINDOW_WORDS // 2), WINDOW_WORDS)
    chosen = [starts[i * (len(starts) - 1) // (_MAX_WINDOWS - 1)] for i in range(_MAX_WINDOWS)]
    return [_tokens(matches[start : start + WINDOW_WORDS]) for start in dict.fromkeys(chosen)]


def score_texts(model: NoiseEncoder, texts: Sequence[str]) -> NDArray[np.float64]:
    """The mean score of each text's windows [N]."""
    pieces = [(number, window) for number, text in enumerate(texts) for window in windows(text)]
    pieces.sort(key=lambda piece: len(piece[1]))
    totals, counts = np.zeros(len(texts)), np.zeros(len(texts))
    model.eval()
    with torch.inference_mode():
        for at in range(0, len(pieces), _BATCH):
            batch = pieces[at : at + _BATCH]
            scores = model(_padded([window for _, window in batch])).double().numpy()
            for (number, _), score in zip(batch, scores, strict=True):
                totals[number] += score
                counts[number] += 1
    return totals / counts


def train_encoder(
    texts: Sequence[str], labels: Sequence[bool], *, num_epochs: int = 3, min_steps: int = 300, seed: int = 0
) -> NoiseEncoder:
    """Train on texts and whether each is noise, for `num_epochs` and at least `min_steps`; deterministic on one machine
    with one number of threads.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NoiseEncoder()
        pieces = [(window, float(label)) for text, label in zip(texts, labels, strict=True) for window in windows(text)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        steps_per_epoch = -(-len(pieces) // _BATCH)
        num_epochs = max(num_epochs, -(-min_steps // steps_per_epoch))
        num_steps = num_epochs * steps_per_epoch
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=num_steps)
        model.train()
        for _ in range(num_epochs):
            order = torch.randperm(len(pieces)).tolist()
            for at in range(0, len(order), _BATCH):
                batch = [pieces[i] for i in order[at : at + _BATCH]]
                scores = model(_padded([window for window, _ in batch]))
                target = torch.tensor([label for _, label in batch])
                loss = nn.functional.binary_cross_entropy_with_logits(scores, target)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    return model


def save_encoder(model: NoiseEncoder, path: Path) -> None:
    save_file(model.state_dict(), path)


def load_encoder(path: Path) -> NoiseEncoder:
    model = NoiseEncoder()
    model.load_state_dict(load_file(path))
    return model


def _tokens(words: Sequence[str]) -> NDArray[np.int64]:
    return np.array([_token(word) for word in words], np.int64).reshape(-1, 3)


def _token(word: str) -> tuple[int, int, int]:
    lower = word.lower()
    length = min(len(word), 15)
    has_digit, is_alpha = any(map(str.isdigit, word)), word.isalpha()
    vowels = min(3, 4 * sum(char in "aeiouy" for char in lower) // max(1, len(word)))
    shape = 1 + length + 16 * (word[:1].isupper() + 2 * has_digit + 4 * is_alpha) + 128 * vowels
    return 1 + _hash(lower), 1 + _hash(lower[:3] + "\0" + lower[-3:]), min(shape, _SHAPES - 1)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "replace")) % (_BUCKETS - 1)


def _padded(batch: Sequence[NDArray[np.int64]]) -> Tensor:
    longest = max(1, *map(len, batch)) if batch else 1
    tokens = torch.zeros(len(batch), longest, 3, dtype=torch.int64)
    for row, window in enumerate(batch):
        tokens[row, : len(window)] = torch.from_numpy(window)
    return tokens
