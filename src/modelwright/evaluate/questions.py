"""Multiple-choice questions made from held-out question/answer documents.

Each question keeps its own answer and gets three distractors, the answers of other held-out documents: of the same
package but another module where there are enough, so that vocabulary is no cue, and of similar length, so that length
is none: the answer is the shortest, second, third or longest of the four equally often, as far as the documents allow.
Positions are shuffled. Everything depends on the documents and the seed alone.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from modelwright.data.document import Document
from modelwright.evaluate.config import MultipleChoiceConfig

NUM_CANDIDATES = 4
CHANCE = 1 / NUM_CANDIDATES
MAX_LENGTH_RATIO = 1.5
"""A distractor is at most this many times longer or shorter than the answer."""
MAX_SHARED_WORDS = 0.6
"""Answers whose word sets overlap by more than this (Jaccard) say the same thing."""
_DRAWN_FROM = 12
"""A distractor is drawn from this many nearest in length."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """`candidates[answer]` is right; `tier` says where the distractors come from: see `TIERS`."""

    id: str
    question: str
    candidates: tuple[str, ...]
    answer: int
    tier: str
    distractor_ids: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    id: str
    question: str
    answer: str
    num_bytes: int
    module: str
    package: str
    name: str
    words: tuple[str, ...]


def build_questions(documents: Iterable[Document], config: MultipleChoiceConfig) -> list[Question]:
    """Up to `config.num_questions` questions from the documents of kind "qa"; fewer if there are not enough documents.

    A document needs `meta["question"]` and `meta["answer"]`; `meta["module"]` and `meta["name"]` are used if present.
    The same question twice is asked once.
    """
    pool = _entries(documents, config)
    questions: list[Question] = []
    for entry in sorted(pool, key=lambda e: _draw(config.seed, "ask", e.id)):
        if len(questions) >= config.num_questions:
            break
        question = _question(entry, pool, config.seed)
        if question is not None:
            questions.append(question)
    return questions


def same_meaning(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two texts, given as words, say the same: one is a prefix of the other, or most words are shared."""
    short, long = sorted((first, second), key=len)
    if list(long[: len(short)]) == list(short):
        return True
    a, b = set(first), set(second)
    return len(a & b) > MAX_SHARED_WORDS * len(a | b)


def words_of(text: str) -> tuple[str, ...]:
    """Words in lower case; `copy_tree` and `CopyTree` give `copy`, `tree`."""
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return tuple(re.findall(r"[^\W_]+", split.lower()))


TIERS: dict[str, Callable[[_Entry, _Entry], bool]] = {
    "same package, other module": lambda a, b: a.package == b.package and a.module != b.module,
    "other module": lambda a, b: a.module != b.module,
    "any": lambda a, b: True,
}
"""Where distractors may come from, the first that has enough of them wins."""


def _entries(documents: Iterable[Document], config: MultipleChoiceConfig) -> list[_Entry]:
    """Eligible documents by increasing answer length; of equal questions the one with the first id."""
    result: dict[tuple[str, ...], _Entry] = {}
    for document in sorted((d for d in documents if d.kind == "qa"), key=lambda d: d.id):
        entry = _entry(document)
        if config.min_answer_bytes <= entry.num_bytes <= config.max_answer_bytes and entry.question:
            result.setdefault(tuple(entry.question.split()), entry)
    return sorted(result.values(), key=lambda e: (e.num_bytes, e.id))


def _entry(document: Document) -> _Entry:
    question, answer = str(document.meta.get("question", "")), str(document.meta.get("answer", ""))
    module = str(document.meta.get("module", document.source))
    quoted = re.search(r"`([^`]+)`", question)
    name = str(document.meta.get("name", quoted.group(1) if quoted else document.id))
    top = module.split(".")[0]
    return _Entry(
        id=document.id,
        question=question,
        answer=answer,
        num_bytes=len(answer.encode("utf-8")),
        module=module,
        package="python" if top in sys.stdlib_module_names else top,
        name=name.split(".")[-1].strip("()_").lower(),
        words=words_of(answer),
    )


def _question(entry: _Entry, pool: Sequence[_Entry], seed: int) -> Question | None:
    near = [
        other
        for other in pool
        if entry.num_bytes <= MAX_LENGTH_RATIO * other.num_bytes
        and other.num_bytes <= MAX_LENGTH_RATIO * entry.num_bytes
        and other.id != entry.id
        and other.name != entry.name
    ]
    drawn = sorted(range(NUM_CANDIDATES), key=lambda rank: _draw(seed, "rank", entry.id, str(rank)))
    for ranks in (drawn[:1], drawn[1:]):
        for tier, allowed in TIERS.items():
            allowed_near = [other for other in near if allowed(entry, other)]
            for rank in ranks:
                chosen = _distractors(entry, allowed_near, rank, seed)
                if chosen:
                    return _assemble(entry, chosen, tier, seed)
    return None


def _assemble(entry: _Entry, distractors: Sequence[_Entry], tier: str, seed: int) -> Question:
    order = sorted([entry, *distractors], key=lambda e: _draw(seed, "place", entry.id, e.id))
    return Question(
        id=entry.id,
        question=entry.question,
        candidates=tuple(e.answer for e in order),
        answer=order.index(entry),
        tier=tier,
        distractor_ids=tuple(e.id for e in order if e is not entry),
    )


def _distractors(entry: _Entry, near: Sequence[_Entry], num_shorter: int, seed: int) -> list[_Entry]:
    """Three entries, `num_shorter` of them shorter than the answer, none equivalent to another; or none."""
    shorter, longer = _by_side(entry, near, seed)
    chosen: list[_Entry] = []
    for side, requested in ((shorter, num_shorter), (longer, NUM_CANDIDATES - 1)):
        for other in side:
            if len(chosen) >= requested:
                break
            if not any(same_meaning(other.words, kept.words) for kept in (entry, *chosen)):
                chosen.append(other)
        if len(chosen) < requested:
            return []
    return chosen


def _by_side(entry: _Entry, near: Sequence[_Entry], seed: int) -> tuple[list[_Entry], list[_Entry]]:
    """Shorter and longer entries (ties are drawn), each in groups of similar length, shuffled within a group."""
    sides: tuple[list[_Entry], list[_Entry]] = ([], [])
    for other in near:
        coin = _draw(seed, "side", entry.id, other.id)[0] & 1
        longer = coin if other.num_bytes == entry.num_bytes else other.num_bytes > entry.num_bytes
        sides[int(longer)].append(other)
    return _shuffle_runs(entry, sides[0], seed), _shuffle_runs(entry, sides[1], seed)


def _shuffle_runs(entry: _Entry, side: Sequence[_Entry], seed: int) -> list[_Entry]:
    nearest = sorted(side, key=lambda e: (abs(e.num_bytes - entry.num_bytes), e.id))
    runs = [nearest[i : i + _DRAWN_FROM] for i in range(0, len(nearest), _DRAWN_FROM)]
    return [e for run in runs for e in sorted(run, key=lambda e: _draw(seed, "distract", entry.id, e.id))]


def _draw(seed: int, *names: str) -> bytes:
    return hashlib.sha256("/".join([str(seed), *names]).encode()).digest()
