"""Generated arithmetic: questions whose answers a program can check, for learning from rewards.

All sums and differences of two small numbers, each once, so that none is both learned and held out.
"""

from collections.abc import Iterator

from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split

NUM_TERMS = 50
"""Terms are smaller than this."""
HELDOUT_FRACTION = 1 / 20


def arithmetic_problems() -> Iterator[Document]:
    """The problems as questions with answers, always the same ones, in a random order."""
    terms = range(NUM_TERMS)
    sums = ((f"{a} + {b}", a + b) for a in terms for b in terms)
    differences = ((f"{a} - {b}", a - b) for a in terms for b in range(a + 1))
    problems = sorted([*sums, *differences], key=lambda problem: _hash("order", problem[0]))
    return (_document(question, str(answer)) for question, answer in problems)


def _document(question: str, answer: str) -> Document:
    split: Split = "heldout" if _hash("split", question) < HELDOUT_FRACTION else "train"
    return Document(
        id=f"arithmetic:{question}",
        text=f"{question}\n\n{answer}",
        kind="qa",
        split=split,
        source="arithmetic",
        meta={"question": question, "answer": answer},
    )


def _hash(stream: str, text: str) -> float:
    """A number in [0, 1)."""
    return derive_seed(0, "arithmetic", stream, text) / 2**63
