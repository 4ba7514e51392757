"""Generated arithmetic with unreliable demonstrations, for learning from rewards.

All sums with a carry and all differences with a borrow of two small numbers. Each has two demonstrations: the right
answer, and the one that forgets the carry. Imitation of both can only guess which to follow; a reward that compares
with the field `solution` tells them apart.
"""

from collections.abc import Iterator

from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split

NUM_TERMS = 50
"""Upper limit of the terms, exclusive."""
GENERATED_HELDOUT = 1 / 10
"""Share of held-out problems, with both demonstrations."""


def arithmetic_problems() -> Iterator[Document]:
    """Yields two documents for each problem, always the same ones, in a random order."""
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
