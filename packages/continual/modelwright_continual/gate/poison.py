"""Checks of the texts that an update learned from: held-out ones, garbage, labels that contradict the benchmark.

A benchmark alone would not do: a model may learn from a few bad texts what no question of the benchmark asks for.
Each check says how many texts of a kind without fault it would refuse.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import beta, fisher_exact
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from modelwright.data.document import Document
from modelwright.data.words import split_words
from modelwright_continual.heldout import HeldoutTexts, question_key
from modelwright_continual.update_files import NEW, OLD

ERROR = 0.01
"""Probability with which a check refuses texts like those of the benchmark."""
_LEAST_OF_LABEL = 3
"""Documents that an answer must have to be a label, and parts of the cross-validation."""
_LEAST_LABELED = 0.8
"""Share of the conversations that have such an answer, from which on answers are taken for labels."""
_LEAST_GAP = 0.05
"""Difference between the shares of contradictions that matters, however sure it is."""


@dataclass(frozen=True, kw_only=True)
class PoisonCheck:
    """The result of one check. limit: the largest share that passes; text: one sentence."""

    name: str
    passed: bool
    share: float
    limit: float
    text: str


def check_heldout(trained: Sequence[Document], heldout: HeldoutTexts) -> PoisonCheck:
    """No text that was learned from may have a question or a passage of a held-out one."""
    found = [(document, what) for document in trained if (what := heldout.found_in(document))]
    text = "no training text has a question or a passage of a held-out one"
    if found:
        document, what = found[0]
        text = f"{len(found):,} of {len(trained):,} training texts have a {what}, such as {document.id}"
    share = len(found) / max(1, len(trained))
    return PoisonCheck(name="held-out texts", passed=not found, share=share, limit=0.0, text=text)


def check_garbage(
    costs: Sequence[float], trusted: Sequence[float], *, of: str = NEW, when: Literal["before", "after"]
) -> PoisonCheck:
    """Few texts may be less or more predictable than all trusted ones are.

    costs, trusted: bits per byte of the texts and of the benchmark's, by the model before or after the update. of: the
    source of the texts. To a model that has learned from texts they may well be more predictable than others, so only
    new ones before the update are judged on both sides. If both are drawn alike, the share of texts beyond the largest
    of n trusted ones is Beta(1, n) distributed, and that outside of their range Beta(2, n - 1) (Wilks 1941); the limit
    is the quantile at 1 - `ERROR`. A count that a share within the limit explains passes, too.
    """
    was_learned = of == OLD or when == "after"
    low, high = min(trusted), max(trusted)
    outside = len([cost for cost in costs if cost > high or (cost < low and not was_learned)])
    num_sides = 1 if was_learned else 2
    limit = float(beta.ppf(1.0 - ERROR, num_sides, len(trusted) + 1 - num_sides))
    lowest = float(beta.ppf(ERROR, outside, len(costs) - outside + 1)) if outside else 0.0  # Clopper and Pearson 1934
    share = outside / max(1, len(costs))
    what = "more" if was_learned else "less or more"
    text = (
        f"{outside:,} of {len(costs):,} {of} texts ({share:.1%}) cost the model {when} the update {what} than each of "
        f"the {len(trusted):,} of the benchmark ({low:.2f} to {high:.2f} bits per byte); up to {limit:.1%} are usual"
    )
    return PoisonCheck(
        name=f"garbage in {of} texts, {when}", passed=lowest <= limit, share=share, limit=limit, text=text
    )


def check_labels(trained: Sequence[Document], trusted: Sequence[Document], *, of: str = NEW) -> PoisonCheck:
    """Where answers are labels, a classifier of the benchmark's questions should contradict the answers that were
    learned no more often than it contradicts the benchmark's own in cross-validation. of: the source of the texts.

    Fisher's exact test at level `ERROR`; passes where answers are no labels or the questions do not tell them.
    """
    known = _labeled(trusted)
    texts, labels = [text for text, _ in known], [label for _, label in known]
    if len(set(labels)) < 2:
        return _no_labels(of, "answers are no labels")
    model = make_pipeline(
        TfidfVectorizer(analyzer="word", token_pattern=r"\S+"), LogisticRegression(C=100.0, max_iter=1000)
    )
    folds = StratifiedKFold(_LEAST_OF_LABEL, shuffle=True, random_state=0)
    guessed = np.array(cross_val_predict(model, texts, labels, cv=folds))
    wrong = int(np.count_nonzero(guessed != np.array(labels)))
    most_frequent = Counter(labels).most_common(1)[0][1]
    if wrong >= len(labels) - most_frequent:
        return _no_labels(of, "questions do not tell the labels")
    answered = [(question_key(one), _answer(one)) for one in trained if one.kind == "qa"]
    learned = [(text, label) for text, label in answered if label in set(labels)]
    if not learned:
        return _no_labels(of, "no answer is a label of the benchmark")
    predicted = np.array(model.fit(texts, labels).predict([text for text, _ in learned]))
    contradicted = int(np.count_nonzero(predicted != np.array([label for _, label in learned])))
    table = [[contradicted, len(learned) - contradicted], [wrong, len(labels) - wrong]]
    result: Any = fisher_exact(table, alternative="greater")
    p_value = float(result.pvalue)
    share, usual = contradicted / len(learned), wrong / len(labels)
    text = (
        f"{contradicted:,} of {len(learned):,} labels of {of} texts ({share:.1%}) contradict what the benchmark's "
        f"labels say; {usual:.1%} of its own do (p = {p_value:.2g})"
    )
    passed = p_value > ERROR or share - usual < _LEAST_GAP
    return PoisonCheck(name=f"labels of {of} texts", passed=passed, share=share, limit=usual + _LEAST_GAP, text=text)


def _no_labels(of: str, why: str) -> PoisonCheck:
    return PoisonCheck(name=f"labels of {of} texts", passed=True, share=0.0, limit=1.0, text=f"not checked: {why}")


def _labeled(documents: Sequence[Document]) -> list[tuple[str, str]]:
    """Question and answer of the conversations with a frequent answer; [] if these are few."""
    pairs = [(question_key(one), _answer(one)) for one in documents if one.kind == "qa"]
    counts = Counter(answer for _, answer in pairs)
    frequent = [(question, answer) for question, answer in pairs if counts[answer] >= _LEAST_OF_LABEL]
    return frequent if frequent and len(frequent) >= _LEAST_LABELED * len(pairs) else []


def _answer(document: Document) -> str:
    """The words of the last answer."""
    said = [turn["content"] for turn in document.messages if turn["role"] == "assistant"]
    return " ".join(split_words(said[-1])) if said else ""
