"""Multiple choice by likelihood: questions made from held-out question/answer documents, and the candidates that the
model finds most likely after them.

The question is put as a user's turn in the chat format of fine-tuning; each candidate is scored as the assistant's
answer. Longer answers are less likely, so the log-likelihood is divided by a length (Brown et al. 2020, section 2.4):

- `byte` (default): by UTF-8 bytes. The length of a text is its own; it is the unit of the bits-per-byte table, and
  models with different tokenizers can be compared.
- `token`: by tokens. An artifact of the tokenizer: a rare word cut into many pieces gains, as its last pieces are
  nearly free.
- `pmi`: the question's help, per byte: the log-likelihood less that of the same candidate after a question
  that names nothing (Holtzman et al. 2021). Cancels the candidate's unconditional likelihood.

The config fixes before the run which one ranks. The model's choice without the question is reported as well: the
candidate that it finds most likely per byte after a question that names nothing.

Each question keeps its own answer and gets three distractors, the answers of other held-out documents: of the same
package where there are enough, so that the vocabulary does not give the answer away, and those whose words are most
like the question's, as hard negatives are retrieved for a search engine. By similarity to the question and by length
the answer is the first, second, third or last of the four equally often, so that neither tells which one is right.
Positions are shuffled. Everything depends on the documents and the seed alone.
"""

import dataclasses
import hashlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.progress import Progress
from modelwright.data.document import Document
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import (
    EvaluateConfig,
    MultipleChoiceConfig,
    Scored,
    log10_binomial_tail,
    sequence_nats,
    wilson_interval,
)
from modelwright.model.decoder import Decoder

NUM_CANDIDATES = 4
CHANCE = 1 / NUM_CANDIDATES
MAX_LENGTH_RATIO = 2.0
"""A distractor is at most this many times longer or shorter than the answer."""
MAX_SHARED_WORDS = 0.6
"""Answers whose word sets overlap by more than this (Jaccard) say the same thing."""
_NGRAM = 4
"""Letters of a part of a word, by which `copytree` is like `copy` and `tree`."""
_WORD_WEIGHT = 4.0
"""Weight of a whole word; a part of one weighs 1. On the built-in corpus the answer shared most words with the question
in 32% of the questions; 40% at 1, and 77% with distractors chosen by length alone."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """`candidates[answer]` is right. `lead`: the words with which each candidate begins as an answer, which names what
    the question is about; it is given to the model and not scored. `tier`: where the distractors come from, a key of
    `TIERS`.
    """

    id: str
    question: str
    candidates: tuple[str, ...]
    answer: int
    tier: str
    distractor_ids: tuple[str, ...]
    lead: str = ""


@dataclass(frozen=True)
class _Entry:
    id: str
    question: str
    lead: str
    answer: str
    num_bytes: int
    package: str
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class _Ranks:
    """Rank of an answer among the four: numbers of distractors that are more similar to the question, and longer."""

    more_similar: int
    longer: int


_Sides = dict[tuple[bool, bool], list[int]]
"""Entries by whether they are more similar to the question, and longer, than the answer."""


def build_questions(documents: Iterable[Document], config: MultipleChoiceConfig) -> list[Question]:
    """Up to `config.num_questions` questions from the documents of kind "qa"; fewer if there are not enough documents.
    A document needs `meta["question"]` and `meta["answer"]`; `meta["module"]`, `meta["name"]` and `meta["title"]`, with
    which the answer begins, are used if present. The same question twice is asked once.
    """
    # Eligible documents by their ids; of equal questions the one with the first id.
    unique: dict[tuple[str, ...], _Entry] = {}
    for document in sorted((d for d in documents if d.kind == "qa"), key=lambda d: d.id):
        question, whole = str(document.meta.get("question", "")), str(document.meta.get("answer", ""))
        title = str(document.meta.get("title", ""))
        lead = title if whole.startswith(title) else ""  # a record's own field of that name may be anything
        answer = whole.removeprefix(lead).strip()
        quoted = re.search(r"`([^`]+)`", question)
        name = str(document.meta.get("name", quoted.group(1) if quoted else document.id))
        top = str(document.meta.get("module", document.source)).split(".")[0]
        entry = _Entry(
            id=document.id,
            question=question,
            lead=lead,
            answer=answer,
            num_bytes=len(answer.encode("utf-8")),
            package="python" if top in sys.stdlib_module_names else top,
            name=name.split(".")[-1].strip("()_").lower(),
            words=words_of(answer),
        )
        if config.min_answer_bytes <= entry.num_bytes <= config.max_answer_bytes and entry.question:
            unique.setdefault(tuple(entry.question.split()), entry)
    pool = list(unique.values())
    similarity = Similarity([entry.words for entry in pool])
    # Each rank is used by a quarter of the questions, by similarity and by length.
    quota = math.ceil(config.num_questions / NUM_CANDIDATES)
    places = [_Ranks(similar, long) for similar in range(NUM_CANDIDATES) for long in range(NUM_CANDIDATES)]
    taken: Counter[tuple[str, int]] = Counter()
    questions: list[Question] = []
    for number in sorted(range(len(pool)), key=lambda n: _draw(config.seed, "ask", pool[n].id)):
        if len(questions) >= config.num_questions:
            break
        scores = similarity.to(words_of(pool[number].question))
        # Ranks that are not taken often enough yet, those taken least first.
        counts = {one: (taken["similar", one.more_similar], taken["long", one.longer]) for one in places}
        open_ranks = sorted(
            (one for one in places if max(counts[one]) < quota),
            key=lambda one: (sum(counts[one]), _draw(config.seed, "rank", pool[number].id, repr(one))),
        )
        if found := _question(number, pool, scores, open_ranks, config.seed):
            question, place = found
            taken.update({("similar", place.more_similar): 1, ("long", place.longer): 1})
            questions.append(question)
    return questions


def same_meaning(first: Sequence[str], second: Sequence[str]) -> bool:
    """True if two texts, given as words, say the same: one is a prefix of the other, or most words are shared."""
    short, long = sorted((first, second), key=len)
    if list(long[: len(short)]) == list(short):
        return True
    a, b = set(first), set(second)
    return len(a & b) > MAX_SHARED_WORDS * len(a | b)


def words_of(text: str) -> tuple[str, ...]:
    """Words in lower case; `copy_tree` and `CopyTree` give `copy`, `tree`."""
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return tuple(re.findall(r"[^\W_]+", split.lower()))


class Similarity:
    """Similarity of texts to a question: the words and parts of words that they share, each weighted by its inverse
    document frequency, over the root of the text's number of them.
    """

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        """texts [N]: as words."""
        features = [_features(words) for words in texts]
        holders: dict[str, list[int]] = {}
        for number, of_one in enumerate(features):
            for feature in of_one:
                holders.setdefault(feature, []).append(number)
        self._holders = {feature: np.array(numbers) for feature, numbers in holders.items()}
        self._roots_N = np.sqrt([max(1, len(of_one)) for of_one in features])

    def to(self, question: Sequence[str]) -> NDArray[np.float64]:
        """Computes the similarity of each text to a question, given as words; [N]."""
        scores_N = np.zeros(len(self._roots_N))
        for feature in sorted(_features(question)):  # sorted, so that sums are rounded the same in every process
            if feature in self._holders:
                holders, weight = self._holders[feature], _WORD_WEIGHT if feature.startswith("=") else 1.0
                scores_N[holders] += weight * math.log((1 + len(scores_N)) / len(holders))
        return scores_N / self._roots_N


def word_parts(words: Sequence[str]) -> set[str]:
    """Parts of `_NGRAM` letters of some words."""
    return {word[i : i + _NGRAM] for word in words for i in range(len(word) - _NGRAM + 1)}


def _features(words: Sequence[str]) -> set[str]:
    """Words, marked as such, and their parts."""
    return word_parts(words) | {f"={word}" for word in words}


TIERS: dict[str, Callable[[_Entry, _Entry], bool]] = {
    "same package": lambda a, b: a.package == b.package,
    "any": lambda a, b: True,
}
"""Sources of distractors; the first that has enough of them wins."""


def _question(
    number: int, pool: Sequence[_Entry], scores_N: NDArray[np.float64], open_ranks: Sequence[_Ranks], seed: int
) -> tuple[Question, _Ranks] | None:
    """Builds the question of an entry, with the answer at the first ranks for which there are enough distractors."""
    entry = pool[number]
    near = [
        other
        for other in range(len(pool))
        if entry.num_bytes <= MAX_LENGTH_RATIO * pool[other].num_bytes
        and pool[other].num_bytes <= MAX_LENGTH_RATIO * entry.num_bytes
        and other != number
        and pool[other].name != entry.name
    ]
    # Each side begins with the entries that are about as similar to the question as the answer.
    near.sort(key=lambda other: (abs(scores_N[other] - scores_N[number]), pool[other].id))
    for tier, allowed in TIERS.items():
        sides = _Sides()
        for other in near:
            if allowed(entry, pool[other]):
                is_similar = _is_above(scores_N[other], scores_N[number], seed, "similar", entry.id, pool[other].id)
                is_longer = _is_above(pool[other].num_bytes, entry.num_bytes, seed, "longer", entry.id, pool[other].id)
                sides.setdefault((is_similar, is_longer), []).append(other)
        for ranks in open_ranks:
            if chosen := _distractors(number, sides, pool, ranks):
                distractors = [pool[other] for other in chosen]
                order = sorted([entry, *distractors], key=lambda e: _draw(seed, "place", entry.id, e.id))
                question = Question(
                    id=entry.id,
                    question=entry.question,
                    candidates=tuple(e.answer for e in order),
                    answer=order.index(entry),
                    tier=tier,
                    distractor_ids=tuple(e.id for e in order if e is not entry),
                    lead=entry.lead,
                )
                return question, ranks
    return None


def _distractors(number: int, sides: _Sides, pool: Sequence[_Entry], ranks: _Ranks) -> list[int]:
    """Chooses three entries that put the answer at these ranks, each with another meaning; none if there are not."""
    similar, longer, others = ranks.more_similar, ranks.longer, NUM_CANDIDATES - 1
    # The two ranks fix how many distractors each of the four sides gives, up to the number that are both.
    for both in range(max(0, similar + longer - others), min(similar, longer) + 1):
        needed = {
            (True, True): both,
            (True, False): similar - both,
            (False, True): longer - both,
            (False, False): others - similar - longer + both,
        }
        chosen: list[int] = []
        for side, count in needed.items():
            most = len(chosen) + count
            for other in sides.get(side, ()):
                if len(chosen) == most:
                    break
                if not any(same_meaning(pool[other].words, pool[one].words) for one in (number, *chosen)):
                    chosen.append(other)
        if len(chosen) == others:
            return chosen
    return []


def _is_above(value: float, other: float, seed: int, *names: str) -> bool:
    """True if a value is above another one; a tie is drawn."""
    return value > other or (value == other and bool(_draw(seed, *names)[0] & 1))


def _draw(seed: int, *names: str) -> bytes:
    return hashlib.sha256("/".join([str(seed), *names]).encode()).digest()


NEUTRAL_QUESTION, NEUTRAL_LEAD = "What does it do?", "`it`:"
"""Replacements for the question, and for the words that candidates begin with, to score the likelihood without a
question."""

WITHOUT_QUESTION = "without_question"
"""Key, among the choices of a record, of the model's choice without the question."""


def answer_questions(
    model: Decoder, tokenizer: Tokenizer, questions: Sequence[Question], config: EvaluateConfig, *, progress: Progress
) -> list[dict[str, Any]]:
    """Scores questions; returns one plain record for each: the question itself, each candidate's nats, tokens, bytes
    and scores, `correct`. `scores` holds the candidates' values by score name (higher is better), `choices` the index
    chosen by each, `choice` and `correct` those of the configured score. `WITHOUT_QUESTION` is among the scores.
    """
    rule = config.multiple_choice.score
    encoded = [
        tokenizer.encode(f" {text}" if question.lead else text)  # a candidate follows the lead after a blank
        for question in questions
        for text in question.candidates
    ]
    shape = (len(questions), NUM_CANDIDATES)
    num_tokens = np.array([len(ids) for ids in encoded]).reshape(shape)
    num_bytes = np.array([len(t.encode("utf-8")) for q in questions for t in q.candidates]).reshape(shape)
    prompts = [(question.question, question.lead) for question in questions]
    neutral_prompts = [(NEUTRAL_QUESTION, NEUTRAL_LEAD if question.lead else "") for question in questions]
    nats = _candidate_nats(model, tokenizer, encoded, prompts, config, progress)
    # The same candidates after a question that names nothing: their likelihood without the question.
    neutral = _candidate_nats(model, tokenizer, encoded, neutral_prompts, config, progress)
    scores = {
        "byte": -nats / num_bytes,
        "token": -nats / np.maximum(1, num_tokens),
        "pmi": (neutral - nats) / num_bytes,
        WITHOUT_QUESTION: -neutral / num_bytes,
    }
    records: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        choices = {name: int(values[i].argmax()) for name, values in scores.items()}
        records.append(
            {
                **dataclasses.asdict(question),
                "candidates": list(question.candidates),
                "distractor_ids": list(question.distractor_ids),
                "nats": nats[i].tolist(),
                "tokens": num_tokens[i].tolist(),
                "bytes": num_bytes[i].tolist(),
                "scores": {name: values[i].tolist() for name, values in scores.items()},
                "choices": choices,
                "choice": choices[rule],
                "correct": choices[rule] == question.answer,
            }
        )
    return records


def summarize_answers(records: Sequence[Mapping[str, Any]], *, score: str) -> dict[str, Any]:
    """Accuracy with its 95% Wilson interval, the exact one-sided p-value against chance, and the accuracy of cues
    alone. `by_score`: accuracy under each score, `without_question` among them. `cues`: accuracy of choosing the
    longest, the shortest, or the candidate that shares most words, or parts of words, with the question; ties share the
    credit.
    """
    total = len(records)
    correct = sum(bool(record["correct"]) for record in records)
    low, high = wilson_interval(correct, total)
    log10_p = log10_binomial_tail(correct, total, CHANCE)
    names = records[0]["choices"] if records else []
    credits = {"longest": 0.0, "shortest": 0.0, "shared_words": 0.0, "shared_parts_of_words": 0.0}
    for record in records:
        asked = words_of(record["question"])
        texts = [words_of(text) for text in record["candidates"]]
        shared = [len(set(asked) & set(words)) for words in texts]
        shared_parts = [len(word_parts(asked) & word_parts(words)) for words in texts]
        credits["longest"] += _credit(record["bytes"], record["answer"])
        credits["shortest"] += _credit([-size for size in record["bytes"]], record["answer"])
        credits["shared_words"] += _credit(shared, record["answer"])
        credits["shared_parts_of_words"] += _credit(shared_parts, record["answer"])
    return {
        "questions": total,
        "correct": correct,
        "accuracy": correct / max(1, total),
        "accuracy_low": low,
        "accuracy_high": high,
        "chance": CHANCE,
        "p_value": 10.0**log10_p,
        "log10_p_value": log10_p,
        "score": score,
        "by_score": {name: sum(r["choices"][name] == r["answer"] for r in records) / total for name in names},
        "cues": {name: credit / max(1, total) for name, credit in credits.items()},
        "tiers": dict(Counter(record["tier"] for record in records)),
    }


def best_rival(summary: Mapping[str, Any]) -> tuple[str, float]:
    """Name and accuracy of the strongest rival in a result of `summarize_answers`: chance, a cue, or the model without
    the question.
    """
    rivals = {"chance": summary["chance"]}
    rivals |= {name.replace("_", " "): accuracy for name, accuracy in summary["cues"].items()}
    if WITHOUT_QUESTION in summary["by_score"]:
        rivals["the model without the question"] = summary["by_score"][WITHOUT_QUESTION]
    return max(rivals.items(), key=lambda rival: rival[1])


def _candidate_nats(
    model: Decoder,
    tokenizer: Tokenizer,
    encoded: Sequence[Sequence[int]],
    prompts: Sequence[tuple[str, str]],
    config: EvaluateConfig,
    progress: Progress,
) -> np.ndarray:
    """Scores all candidates after their prompts, each a question and the lead of its answer; nats [questions,
    candidates].
    """
    sequences = []
    for i, (question, lead) in enumerate(prompts):
        prompt = [*tokenizer.chat.encode_prompt([{"role": "user", "content": question}]), *tokenizer.encode(lead)]
        for ids in encoded[i * NUM_CANDIDATES : (i + 1) * NUM_CANDIDATES]:
            sequences.append(Scored([*prompt, *ids], len(prompt)))
    nats = sequence_nats(
        model,
        sequences,
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="multiple choice",
    )
    return nats.reshape(len(prompts), NUM_CANDIDATES)


def _credit(values: Sequence[float], answer: int) -> float:
    # Ties share the credit, as a rule that draws among them would on average
    best = max(values)
    return (values[answer] == best) / sum(value == best for value in values)
