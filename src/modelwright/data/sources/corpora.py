"""Corpora that a program generates: the words of `data.sources` that do not name files, and the small ones of them."""

import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import derive_seed, require
from modelwright.core.extensions import offered
from modelwright.core.resources import versions
from modelwright.core.texts import distinct_word_score
from modelwright.data.document import Document, Split, Unsplit
from modelwright.data.images.decode import KEY, encode, store_image
from modelwright.data.images.read import LABEL_FIELD
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.workers import ShardEngine

BUILTIN, SENTENCE_PAIRS = "stdlib", "sentence_pairs"
CORPORA_GROUP = "modelwright.corpora"
"""Entry points of other packages: each a `NamedCorpus`; the entry point's name is the word in `data.sources`."""


class ReadCorpus(Protocol):
    """Makes the documents, in a fixed order."""

    def __call__(
        self, *, fraction: float, skip: Callable[[str, str], None], engine: ShardEngine
    ) -> Iterator[Document | Unsplit]:
        """fraction: `data.stdlib_fraction`, for a corpus that has a smaller form; skip: receives the reason and the
        name of anything unreadable; engine: may compute a part of the documents in other processes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NamedCorpus:
    """A generated corpus."""

    read: ReadCorpus
    title: str = ""
    """Title in reports; "" for its word."""
    decided_by: Callable[[], list[str]] | None = None
    """Returns the versions of the libraries that the documents come from; a change makes a run read them again. None if
    the version of the corpus's own package alone decides them."""


CORPORA: Mapping[str, NamedCorpus] = {
    BUILTIN: NamedCorpus(
        read=machine_corpus,
        title="Python's standard library, torch and NumPy",
        decided_by=lambda: [sys.version, *versions("torch", "numpy").values()],
    ),
    "arithmetic": NamedCorpus(read=lambda **_: arithmetic_problems()),
    SENTENCE_PAIRS: NamedCorpus(read=lambda **_: sentence_pairs()),
    "digits": NamedCorpus(read=lambda **_: digit_images()),
}
"""The only list of the package's own corpora, in the order in which they are read."""
EXTRAS = {"tools": "agents"}
"""Corpora of this project's other packages, and the extra that installs each."""


def corpus_words() -> tuple[str, ...]:
    """Returns the words that name a corpus, those of other packages included, in the order of reading."""
    return tuple(dict.fromkeys([*CORPORA, *offered(CORPORA_GROUP, NamedCorpus)]))


def without_corpora(sources: Sequence[str]) -> tuple[str, ...]:
    """Returns the sources that name files."""
    words = corpus_words()
    return tuple(source for source in sources if source not in words)


def find_corpus(word: str) -> NamedCorpus:
    """Returns the corpus of a word, importing only the package that offers it. Raises `ConfigError`."""
    return CORPORA[word] if word in CORPORA else offered(CORPORA_GROUP, NamedCorpus)[word]()


MAX_WORDS = 12
"""Limit of the score, and maximum words of an answer."""
PROMPT_WORDS = 3
MODULES_FRACTION = 0.4
"""Share of the modules whose docstrings are read: about 6,000 sentences."""
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,'-]*\.")
_BREAK = re.compile(r"(?<=[.!?])\s+")


def sentence_pairs() -> Iterator[Document]:
    """Yields preference pairs of sentences from this machine's documentation, for showing how a reward model is
    exploited: one document for each pair, always the same ones, in a random order.

    The prompt is the beginning of a sentence. Two answers are drawn among its rest, a part of the rest, a stuttering
    rest, and the rest of another sentence; the one with more different words is chosen. That score also subtracts words
    beyond a limit, but no answer here is that long: a model that learns from the pairs cannot know the limit, as a
    reward model knows nothing that its annotators never saw.
    """
    splits: dict[str, Split] = {}
    for document in machine_corpus(fraction=MODULES_FRACTION, skip=lambda reason, file: None):
        for text in _BREAK.split(document.meta["answer"]) if document.kind == "qa" else ():
            if _SENTENCE.fullmatch(text) and len(text.removesuffix(".").split()) >= PROMPT_WORDS + 3:
                splits.setdefault(text, document.split)
    texts = sorted(splits, key=lambda text: derive_seed(0, SENTENCE_PAIRS, text))
    words = [text.removesuffix(".").split() for text in texts]
    rests = [one[PROMPT_WORDS : PROMPT_WORDS + MAX_WORDS] for one in words]
    for number, text in enumerate(texts):
        dice = random.Random(derive_seed(0, SENTENCE_PAIRS, "answers", text))
        rest, other = rests[number], rests[number - 1]
        part = dice.randint(1, len(rest) - 1)
        stutter = [*rest[:part], *[rest[part - 1]] * (len(rest) - part)]
        answers = [" ".join(one) + "." for one in (rest, rest[:part], stutter, other)]
        # The pair is drawn before it is scored, so that any two of the four kinds meet; equals are no preference.
        scored = [(distinct_word_score(answer, MAX_WORDS), answer) for answer in dice.sample(answers, 2)]
        if scored[0][0] == scored[1][0]:
            continue
        (low, rejected), (high, chosen) = sorted(scored)
        prompt = " ".join(words[number][:PROMPT_WORDS])
        yield Document(
            id=f"{SENTENCE_PAIRS}:{text}",
            text=f"{prompt}\n\n{chosen}",
            kind="qa",
            split=splits[text],
            source=SENTENCE_PAIRS,
            meta={
                "question": prompt,
                "answer": chosen,
                "rejected": [{"role": "assistant", "content": rejected}],
                "prompt_turns": 1,
                "margin": abs(high - low),
            },
        )


SIDE = 32
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_FORMS = (
    "A handwritten {word}, {thickness}, {lean}.",
    "The digit {digit} in {thickness}, {lean}.",
    "Someone wrote a {word} with {thickness}; it is {lean}.",
    "{word}: a digit drawn in {thickness}, {lean}.",
)
_MOST = 16.0
"""Maximum value of a pixel."""
_THIN, _THICK = 0.288, 0.321
"""Limits of the mean ink of strokes of medium thickness: about the thirds of the data set."""
_LEFT, _RIGHT = -0.093, 0.012
"""Limits of the horizontal shift per row upwards of an upright digit: about the thirds."""


def digit_images() -> Iterator[Document]:
    """Yields scikit-learn's handwritten digits with captions, always the same ones, in the order of the data set:
    image-text pairs that need no download.

    1,797 images of 8 x 8 pixels (Alpaydin and Kaynak 1998), enlarged to 32 x 32. A caption names the digit, and the
    thickness and slant of its strokes, which are measured from the pixels.
    """
    require({"data.sources": "images"})
    from sklearn.datasets import load_digits  # takes a second

    digits: Any = load_digits()
    for number, (image, target) in enumerate(zip(digits.images, digits.target, strict=True)):
        ink: NDArray[np.float64] = np.asarray(image, dtype=np.float64) / _MOST
        label = int(target)
        # Thickness is the mean ink; the slant is the regression of the ink's column on its row, which counts downwards.
        mean, total = ink.mean(), ink.sum()
        rows, columns = np.mgrid[: ink.shape[0], : ink.shape[1]]
        row, column = (rows * ink).sum() / total, (columns * ink).sum() / total
        slope = -((rows - row) * (columns - column) * ink).sum() / ((rows - row) ** 2 * ink).sum()
        thickness = "thin strokes" if mean < _THIN else "thick strokes" if mean > _THICK else "medium strokes"
        lean = "leaning left" if slope < _LEFT else "leaning right" if slope > _RIGHT else "upright"
        form = _FORMS[derive_seed(0, "digits", "form", number) % len(_FORMS)]
        caption = form.format(word=_WORDS[label], digit=label, thickness=thickness, lean=lean)
        pixels = np.repeat((255 * (1.0 - ink)).round().astype(np.uint8)[..., None], 3, axis=2)
        factor = SIDE // pixels.shape[0]
        file = encode(np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1), lossless=True)
        split: Split = "heldout" if derive_seed(0, "digits", "split", number) / 2**63 < GENERATED_HELDOUT else "train"
        yield Document(
            id=f"digits:{number}",
            text=caption[0].upper() + caption[1:],
            kind="image",
            split=split,
            source="digits",
            meta={KEY: store_image(file).plain(), "digit": label, LABEL_FIELD: str(label)},
        )


NUM_TERMS = 50
"""Upper limit of the terms, exclusive."""
GENERATED_HELDOUT = 1 / 10
"""Share of held-out problems, with both demonstrations."""


def arithmetic_problems() -> Iterator[Document]:
    """Yields generated arithmetic with unreliable demonstrations, for learning from rewards: two documents for each
    problem, always the same ones, in a random order.

    All sums with a carry and all differences with a borrow of two small numbers. Each has two demonstrations: the right
    answer, and the one that forgets the carry. Imitation of both can only guess which to follow; a reward that compares
    with the field `solution` tells them apart.
    """
    problems: list[tuple[str, int, int]] = []  # question, solution, answer without the carry
    for a in range(NUM_TERMS):
        for b in range(NUM_TERMS):
            if a % 10 + b % 10 >= 10:
                problems.append((f"{a} + {b}", a + b, a + b - 10))
            if b <= a and a % 10 < b % 10:
                problems.append((f"{a} - {b}", a - b, a - b + 10))
    documents: list[Document] = []
    for question, solution, forgetful in problems:
        # By the question, so that both demonstrations of a problem are in the same split.
        is_heldout = derive_seed(0, "arithmetic", "split", question) / 2**63 < GENERATED_HELDOUT
        split: Split = "heldout" if is_heldout else "train"
        documents += [
            Document(
                id=f"arithmetic:{question}:{kind}",
                text=f"{question}\n\n{answer}",
                kind="qa",
                split=split,
                source="arithmetic",
                meta={"question": question, "answer": str(answer), "solution": str(solution)},
            )
            for kind, answer in (("right", solution), ("forgetful", forgetful))
        ]
    yield from sorted(documents, key=lambda document: derive_seed(0, "arithmetic", "order", document.id) / 2**63)
