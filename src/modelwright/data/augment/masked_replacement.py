"""Contextual replacement: a masked language model replaces words by likely ones
(Kobayashi 2018, https://arxiv.org/abs/1805.06201; Wu et al. 2019, https://arxiv.org/abs/1812.06705)."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from modelwright.core.config import ConfigError, ModelError, constant
from modelwright.data.augment import augmentation as aug

_CONTEXT_CHARS = 400
"""Text on each side of a masked word that the model sees."""
_MIN_WORD_LEN = 3
_WORD_STARTS = ("Ġ", "▁")
"""Marks of a token that begins a word in byte-level BPE and SentencePiece; WordPiece marks the others, by `##`."""
_MAX_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class MaskedReplacementConfig:
    """Replacement of words by a masked language model."""

    model: Path = Path()
    """Folder of a masked language model of Hugging Face, such as BERT, with its tokenizer."""
    fraction: float = 0.1
    """Fraction of the words that are replaced."""
    top_k: int = 10
    """Number of likeliest words from which the new one is drawn by its probability."""
    min_probability: float = constant(0.01)
    """Minimum probability of a new word."""

    def __post_init__(self) -> None:
        aug.check_fraction(self)
        if self.top_k < 1:
            raise ConfigError(f"top_k: {self.top_k} is not positive; for example 10")


def masked_replacement(config: MaskedReplacementConfig) -> aug.Augmentation:
    model = MaskedModel(config.model)
    return aug.text_augmentation(
        "masked_replacement", lambda text, rng: replace_masked(text, model, config, rng), keeps=("word_count", "lines")
    )


@dataclass(frozen=True)
class Fill:
    """A word for a masked place, with its probability."""

    word: str
    probability: float


def replace_masked(text: str, model: "MaskedModel", config: MaskedReplacementConfig, rng: Random) -> str | None:
    """Replaces words, except those with a capital, which may be names. All places of a text go through the model
    together, and each is predicted from the unchanged text.
    """
    words = [
        word
        for word in aug.find_words(text)
        if word.text.isalpha()
        and word.text.islower()
        and len(word.text) >= _MIN_WORD_LEN
        and aug.stands_free(text, word)
    ]
    chosen = aug.draw(words, config.fraction, rng)
    edits = []
    # One more than `top_k`, because the original word is likely to be among them.
    for word, fills in zip(chosen, model.fill(text, chosen, config.top_k + 1), strict=True):
        fitting = [
            fill for fill in fills if fill.word.lower() != word.text and fill.probability >= config.min_probability
        ][: config.top_k]
        if fitting:
            fill = rng.choices(fitting, weights=[fill.probability for fill in fitting])[0]
            edits.append(aug.Span(word.start, word.end, aug.match_case(fill.word, word.text)))
    return aug.repair_articles(aug.replace_spans(text, edits), text) if edits else None


class MaskedModel:
    """A masked language model and its tokenizer. Raises `ConfigError` or `ModelError` if they cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer, self._model = load_transformers(folder, "AutoModelForMaskedLM", "masked_replacement.model")
        if self._tokenizer.mask_token is None:
            raise ModelError(f"{folder}: its tokenizer lacks a mask token; give a masked language model such as BERT")
        from torch import tensor  # late, because the command line lists methods without it

        # Whole words of the vocabulary by token id, and their ids [N] in ascending order.
        vocabulary = self._tokenizer.get_vocab()
        marks = tuple(mark for mark in _WORD_STARTS if any(token.startswith(mark) for token in vocabulary))
        starts = {token: token[1:] for token in vocabulary if token.startswith(marks)} if marks else {}
        # A vocabulary without such marks is WordPiece's.
        words = starts or {token: token for token in vocabulary if not token.startswith("##")}
        # A tokenizer may have added tokens that the model has no row for.
        size = self._model.get_output_embeddings().weight.shape[0]
        self._whole_words = {
            vocabulary[token]: word
            for token, word in words.items()
            if word.isalpha() and len(word) > 1 and vocabulary[token] < size
        }
        self._word_ids = tensor(sorted(self._whole_words))

    def fill(self, text: str, words: Sequence[aug.Span], top_k: int) -> list[list[Fill]]:
        """Returns the likeliest whole words in the place of each word, best first."""
        from torch import no_grad

        mask = self._tokenizer.mask_token
        prompts: list[str] = []
        for word in words:
            left, right = text[: word.start][-_CONTEXT_CHARS:], text[word.end :][:_CONTEXT_CHARS]
            # A mask token in the text itself would be a second place to predict.
            prompts.append(f"{left.replace(mask, '')}{mask}{right.replace(mask, '')}")
        fills: list[list[Fill]] = []
        with no_grad():
            for start in range(0, len(prompts), _MAX_BATCH):
                batch = self._tokenizer(prompts[start : start + _MAX_BATCH], return_tensors="pt", padding=True)
                rows, columns = (batch["input_ids"] == self._tokenizer.mask_token_id).nonzero(as_tuple=True)
                logits_NV = self._model(**batch).logits[rows, columns].float()
                # The softmax is over the whole vocabulary, so that pieces of words keep their share of probability.
                best = logits_NV.softmax(dim=-1)[:, self._word_ids].topk(min(top_k, len(self._word_ids)))
                for probabilities, places in zip(best.values.tolist(), best.indices, strict=True):
                    ids = self._word_ids[places].tolist()
                    fills.append([Fill(self._whole_words[one], p) for one, p in zip(ids, probabilities, strict=True)])
        return fills


def load_transformers(folder: Path, auto_class: str, setting: str) -> tuple[Any, Any]:
    """Loads tokenizer and model of a Hugging Face folder, from safetensors only and without code from the folder.

    auto_class: name of a class of `transformers`; setting: name of the folder's setting in errors.
    """
    if not (folder / "config.json").is_file():
        problem = f"{folder} holds no config.json" if folder != Path() else "is not set"
        raise ConfigError(f"{setting}: {problem}; give the folder of a model of Hugging Face")
    transformers = aug.import_extra("transformers")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")  # MarianTokenizer never calls it
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        # Pickled weights could run code.
        model = getattr(transformers, auto_class).from_pretrained(folder, use_safetensors=True, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{setting}: {folder} cannot be loaded as {auto_class} ({first_line})") from None
    return tokenizer, model.eval()
