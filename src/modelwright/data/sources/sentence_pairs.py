"""Preference pairs of sentences from this machine's documentation, for showing how a reward model is exploited.

The prompt is the beginning of a sentence. Two answers are drawn among its rest, a part of the rest, a stuttering rest,
and the rest of another sentence; the one with more different words is chosen (`core.distinct_words`). That score also
subtracts words beyond a limit, but no answer here is that long: a model that learns from the pairs cannot know the
limit, as a reward model knows nothing that its annotators never saw.
"""

import random
import re
from collections.abc import Iterator

from modelwright.core.seeds import derive_seed
from modelwright.core.texts import distinct_word_score
from modelwright.data.document import Document, Split
from modelwright.data.sources.stdlib_corpus import machine_corpus

SENTENCE_PAIRS = "sentence_pairs"
MAX_WORDS = 12
"""Limit of the score, and maximum words of an answer."""
PROMPT_WORDS = 3
MODULES_FRACTION = 0.4
"""Share of the modules whose docstrings are read: about 6,000 sentences."""
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,'-]*\.")
_BREAK = re.compile(r"(?<=[.!?])\s+")


def sentence_pairs() -> Iterator[Document]:
    """Yields one document for each pair, always the same ones, in a random order."""
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
