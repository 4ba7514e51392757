"""Overlap of a training text with held-out ones: their questions, their passages, short texts as a whole.

The cleaning step `decontamination` finds passages of 13 words, so it cannot find a question of fewer words, or one
whose answer was replaced.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from modelwright.data.clean.features import split_words
from modelwright.data.clean.steps.decontamination import passage_hashes
from modelwright.data.document import Document, join_turns

QUESTION, PASSAGE, SHORT_TEXT = "held-out question", "held-out passage", "held-out text"


@dataclass(frozen=True)
class HeldoutTexts:
    """Keys of held-out documents. passages: hashes of every 13 consecutive words."""

    questions: frozenset[str]
    texts: frozenset[str]
    passages: frozenset[int]

    @classmethod
    def of(cls, documents: Iterable[Document]) -> "HeldoutTexts":
        questions, texts, passages = set[str](), set[str](), set[int]()
        for document in documents:
            questions.add(question_key(document))
            texts.add(text_key(document))
            passages.update(map(int, passage_hashes(document.text)))
        return cls(frozenset(questions - {""}), frozenset(texts - {""}), frozenset(passages))

    def question_of(self, document: Document) -> str:
        """Returns `QUESTION` or `SHORT_TEXT` if the document has the question of a held-out one or equals
        one, else "".
        """
        if question_key(document) in self.questions:
            return QUESTION
        return SHORT_TEXT if text_key(document) in self.texts else ""

    def found_in(self, document: Document) -> str:
        """Returns the kind of overlap with held-out documents, as one of the three constants; "" for none."""
        if known := self.question_of(document):
            return known
        hashes = passage_hashes(document.text)
        return PASSAGE if len(hashes) and not self.passages.isdisjoint(np.unique(hashes).tolist()) else ""


def question_key(document: Document) -> str:
    """Returns the words before the last answer of a conversation, without case and punctuation; "" for
    other documents.
    """
    if document.kind != "qa":
        return ""
    turns = document.messages
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    # Many conversations share a system prompt, so it does not identify a question.
    asked = [turn for turn in turns[: answers[-1] if answers else len(turns)] if turn["role"] != "system"]
    return " ".join(split_words(join_turns(asked)))


def text_key(document: Document) -> str:
    """Returns all words of a document, without case and punctuation."""
    return " ".join(split_words(document.text))
