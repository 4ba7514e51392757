"""Preference pairs made of sentences of this machine's documentation, for showing how a reward model is exploited.

The prompt is how a sentence begins. Two answers are drawn among its rest, a part of the rest, a rest that stutters, and
the rest of another sentence; the one with more different words is chosen (`core.distinct_words`). That score also
counts words beyond a limit against an answer, but no answer here is that long: what learns from the pairs cannot know
the limit, as a reward model does not know what its annotators never saw.
"""

import random
import re
from collections.abc import Iterator, Sequence

from modelwright.core.distinct_words import distinct_word_score
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split
from modelwright.data.sources.stdlib_corpus import machine_corpus

NAME = "sentence_pairs"
MAX_WORDS = 12
"""The limit, and the most words of an answer."""
PROMPT_WORDS = 3
MODULES_FRACTION = 0.4
"""Share of the modules whose docstrings are read: about 6,000 sentences."""
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,'-]*\.")
_BREAK = re.compile(r"(?<=[.!?])\s+")


def sentence_pairs() -> Iterator[Document]:
    """One document for each pair, always the same ones, in a random order."""
    sentences = sorted(_sentences().items(), key=lambda one: derive_seed(0, NAME, one[0]))
    rests = [_words(text)[PROMPT_WORDS : PROMPT_WORDS + MAX_WORDS] for text, _ in sentences]
    for number, (text, split) in enumerate(sentences):
        dice = random.Random(derive_seed(0, NAME, "answers", text))
        two = dice.sample(_answers(rests[number], rests[number - 1], dice), 2)
        scores = [distinct_word_score(answer, MAX_WORDS) for answer in two]
        if scores[0] != scores[1]:
            chosen, rejected = (two[place] for place in sorted((0, 1), key=lambda place: -scores[place]))
            yield _document(text, split, chosen, rejected, margin=abs(scores[0] - scores[1]))


def _sentences() -> dict[str, Split]:
    """The plain sentences of docstrings that are long enough, with their splits."""
    found: dict[str, Split] = {}
    for document in machine_corpus(fraction=MODULES_FRACTION, skip=lambda reason, file: None):
        for text in _BREAK.split(document.meta["answer"]) if document.kind == "qa" else ():
            if _SENTENCE.fullmatch(text) and len(_words(text)) >= PROMPT_WORDS + 3:
                found.setdefault(text, document.split)
    return found


def _answers(rest: Sequence[str], other: Sequence[str], dice: random.Random) -> list[str]:
    """Answers to the beginning of a sentence."""
    part = dice.randint(1, len(rest) - 1)
    stutter = [*rest[:part], *[rest[part - 1]] * (len(rest) - part)]
    return [" ".join(words) + "." for words in (rest, rest[:part], stutter, other)]


def _document(text: str, split: Split, chosen: str, rejected: str, *, margin: float) -> Document:
    prompt = " ".join(_words(text)[:PROMPT_WORDS])
    return Document(
        id=f"{NAME}:{text}",
        text=f"{prompt}\n\n{chosen}",
        kind="qa",
        split=split,
        source=NAME,
        meta={
            "question": prompt,
            "answer": chosen,
            "rejected": [{"role": "assistant", "content": rejected}],
            "prompt_turns": 1,
            "margin": margin,
        },
    )


def _words(text: str) -> list[str]:
    return text.removesuffix(".").split()
