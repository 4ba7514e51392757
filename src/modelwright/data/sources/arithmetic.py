"""Generated arithmetic whose demonstrations are not to be trusted, for learning from rewards.

All sums with a carry and all differences with a borrow of two small numbers. Each has two demonstrations: the right
answer, and the one that forgets the carry. What learns from both can do no better than guess which to follow; a reward
that compares with the field `solution` tells.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split

NUM_TERMS = 50
"""Terms are smaller than this."""
HELDOUT_FRACTION = 1 / 10
"""Share of the problems that is held out, with both demonstrations."""


@dataclass(frozen=True)
class _Problem:
    question: str
    solution: int
    forgetful: int
    """The answer without the carry."""


def arithmetic_problems() -> Iterator[Document]:
    """Two documents for each problem, always the same ones, in a random order."""
    documents = [
        _document(problem, kind, answer)
        for problem in _problems()
        for kind, answer in (("right", problem.solution), ("forgetful", problem.forgetful))
    ]
    yield from sorted(documents, key=lambda document: _hash("order", document.id))


def _problems() -> Iterator[_Problem]:
    for a in range(NUM_TERMS):
        for b in range(NUM_TERMS):
            if a % 10 + b % 10 >= 10:
                yield _Problem(f"{a} + {b}", a + b, a + b - 10)
            if b <= a and a % 10 < b % 10:
                yield _Problem(f"{a} - {b}", a - b, a - b + 10)


def _document(problem: _Problem, kind: str, answer: int) -> Document:
    split: Split = "heldout" if _hash("split", problem.question) < HELDOUT_FRACTION else "train"
    return Document(
        id=f"arithmetic:{problem.question}:{kind}",
        text=f"{problem.question}\n\n{answer}",
        kind="qa",
        split=split,
        source="arithmetic",
        meta={"question": problem.question, "answer": str(answer), "solution": str(problem.solution)},
    )


def _hash(stream: str, text: str) -> float:
    """A number in [0, 1)."""
    return derive_seed(0, "arithmetic", stream, text) / 2**63
