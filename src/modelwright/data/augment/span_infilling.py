"""Span infilling: a language model rewrites short runs of words, like the gaps of BART's and T5's objectives
(Lewis et al. 2020, https://arxiv.org/abs/1910.13461).

A causal model sees only the text before a gap, so it writes several candidates and then scores how well each of them
continues with the text after the gap. `pipeline/augmenting.py` loads the model into our engine and passes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from modelwright.core.config import ConfigError
from modelwright.data.augment import augmentation as aug
from modelwright.data.document import Document

_SPAN_WORDS = 3
"""Words in a gap: the mean length in BART and T5."""
_CONTEXT_CHARS = 1000
_FOLLOWING_CHARS = 60
"""Text before a gap that the model continues, and text after it by which candidates are compared."""
_TOKENS_PER_WORD = 4
"""Limit of the tokens that a candidate may take per word."""


class LanguageModel(Protocol):
    """A causal language model."""

    def complete(self, prompts: Sequence[str], *, max_tokens: int, seeds: Sequence[int]) -> list[str]:
        """Returns a sampled continuation of each prompt, with its first white space."""
        ...

    def log_probs(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """Returns the log-probability of each continuation after its context, in nats."""
        ...


LoadLanguageModel = Callable[[Path], LanguageModel]


@dataclass(frozen=True, kw_only=True)
class SpanInfillingConfig:
    """Short spans written anew by a language model."""

    model: Path = Path()
    """Model folder, as `modelwright serve` takes it."""
    fraction: float = 0.1
    """Fraction of the words in rewritten spans, which have three words each."""
    num_candidates: int = 4
    """Candidates that the model writes for each span; the one after which the following text is likeliest is used."""

    def __post_init__(self) -> None:
        aug.check_fraction(self)
        if self.num_candidates < 1:
            raise ConfigError(f"num_candidates: {self.num_candidates} is not positive; for example 4")


@dataclass(frozen=True)
class Gap:
    """A span of a text. number: the index of the document in its batch and of the text in the document."""

    number: tuple[int, int]
    text: str
    span: aug.Span

    @property
    def context(self) -> str:
        """Text before the gap, without the space, which tokenizers attach to the next word."""
        return self.text[: self.span.start][-_CONTEXT_CHARS:].rstrip(" ")


def span_infilling(config: SpanInfillingConfig, load: LoadLanguageModel) -> aug.Augmentation:
    if config.model == Path():
        raise ConfigError("span_infilling.model: is not set; give a model folder, as modelwright export writes it")
    model = load(config.model)

    def change(documents: Sequence[Document], rngs: Sequence[Random]) -> list[Document | None]:
        pairs = list(zip(documents, rngs, strict=True))
        gaps = [
            Gap((number, place), text, span)
            for number, (document, rng) in enumerate(pairs)
            for place, text in enumerate(aug.texts_of(document))
            for span in choose_spans(text, config.fraction, rng)
        ]
        seeds = [rngs[gap.number[0]].getrandbits(62) for gap in gaps for _ in range(config.num_candidates)]
        prompts = [gap.context for gap in gaps for _ in range(config.num_candidates)]
        completions = model.complete(prompts, max_tokens=_TOKENS_PER_WORD * (_SPAN_WORDS + 1), seeds=seeds)
        tries: list[tuple[Gap, str]] = []
        for place, gap in enumerate(gaps):
            written = completions[place * config.num_candidates : (place + 1) * config.num_candidates]
            fills = dict.fromkeys(fill for text in written if (fill := first_words(text)) and fill != gap.span.text)
            tries += [(gap, fill) for fill in fills]
        contexts = [f"{gap.context} {fill}" for gap, fill in tries]
        scores = model.log_probs(contexts, [gap.text[gap.span.end :][:_FOLLOWING_CHARS] for gap, _ in tries])
        # The words settle a tie, so that the result is deterministic. A gap without plain words stays as it was.
        best: dict[Gap, tuple[float, str]] = {}
        for (gap, fill), score in zip(tries, scores, strict=True):
            best[gap] = max(best.get(gap, (score, fill)), (score, fill))
        edits: dict[tuple[int, int], list[aug.Span]] = {}
        for gap, (_, fill) in best.items():
            edits.setdefault(gap.number, []).append(aug.Span(gap.span.start, gap.span.end, fill))
        changed: list[Document | None] = []
        for number, document in enumerate(documents):
            texts = aug.texts_of(document)
            new = [aug.replace_spans(text, edits.get((number, place), [])) for place, text in enumerate(texts)]
            changed.append(
                aug.with_texts(document, [aug.repair_articles(*pair) for pair in zip(new, texts, strict=True)])
            )
        return changed

    return aug.Augmentation(
        name="span_infilling", kinds=frozenset({"prose", "qa"}), keeps=frozenset({"lines"}), change=change
    )


def choose_spans(text: str, fraction: float, rng: Random) -> list[aug.Span]:
    """Draws runs of words with single spaces between them, inside a sentence and without names."""
    runs = []
    for sentence in aug.spans_of_sentences(text):
        words = aug.find_words(sentence.text)
        for first in range(1, len(words) - _SPAN_WORDS + 1, _SPAN_WORDS):
            start, end = words[first].start, words[first + _SPAN_WORDS - 1].end
            inside = sentence.text[start:end]
            is_plain = inside == " ".join(word.text for word in words[first : first + _SPAN_WORDS])
            if is_plain and inside.islower() and sentence.text[start - 1] == " ":
                runs.append(aug.Span(sentence.start + start, sentence.start + end, inside))
    num_spans = min(len(runs), max(1, round(fraction * len(aug.find_words(text)) / _SPAN_WORDS)))
    return [runs[place] for place in sorted(rng.sample(range(len(runs)), num_spans))]


def first_words(completion: str) -> str:
    """Returns the first words of a continuation that begins with a space; "" if they are not plain words. The last word
    of a continuation may be cut off and does not count.
    """
    words = completion.split(" ")[1:-1][:_SPAN_WORDS] if completion.startswith(" ") else []
    return " ".join(words) if words and all(word.isalpha() and word.islower() for word in words) else ""
