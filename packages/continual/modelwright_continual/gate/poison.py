"""Checks of the texts that an update learned from: held-out ones, garbage, templates, labels that contradict the
benchmark. Word salads are found by `order.py`.

A benchmark alone would not do: a model may learn from a few bad texts what no question of the benchmark asks for.
Each check says how many texts of a kind without fault it would refuse.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import betabinom, fisher_exact, mannwhitneyu
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from modelwright.data.clean.features import FEATURES, measure
from modelwright.data.clean.steps.quality import QualityConfig, has_language, judge, judged_kinds, limits_by_kind
from modelwright.data.clean.words import split_words
from modelwright.data.document import KINDS, Document
from modelwright_continual.heldout import HeldoutTexts, question_key
from modelwright_continual.update_files import NEW

ERROR = 0.01
"""Probability with which texts like those of the benchmark are refused by any check."""
NUM_CHECKS = 7
"""Checks with a random result: cost, quality and templates of new texts, order and labels of new and of old ones."""
LEVEL = ERROR / NUM_CHECKS
"""Of each check (Bonferroni)."""
LEAST_GAP = 0.1
"""Difference between shares that matters, however sure it is: the honest documentation of another library has up to 8
points more texts of a line or two, whose order does not show."""
_LEAST_OF_LABEL = 3
"""Documents that an answer must have to be a label, and parts of the cross-validation."""
_LEAST_LABELED = 0.8
"""Share of the conversations that have such an answer, from which on answers are taken for labels."""
_LEAST_LABEL_GAP = 0.05
"""`LEAST_GAP` of contradicted labels, which no subject explains."""


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


def check_garbage(costs: Sequence[float], trusted: Sequence[float]) -> PoisonCheck:
    """Few new texts may be less or more predictable to the model before the update than all trusted ones are.

    costs, trusted: bits per byte of the new texts and of the benchmark's. If both are drawn alike, the share of texts
    outside of the range of n trusted ones is Beta(2, n - 1) distributed (Wilks 1941), and their number is
    beta-binomial; the limit is its quantile at 1 - `LEVEL`.
    """
    low, high = min(trusted), max(trusted)
    outside = len([cost for cost in costs if not low <= cost <= high])
    most = int(betabinom.ppf(1.0 - LEVEL, len(costs), 2, len(trusted) - 1))
    limit = most / max(1, len(costs))
    share = outside / max(1, len(costs))
    text = (
        f"{outside:,} of {len(costs):,} new texts ({share:.1%}) cost the model before the update less or more than "
        f"each of the {len(trusted):,} of the benchmark ({low:.2f} to {high:.2f} bits per byte); up to "
        f"{limit:.1%} are usual"
    )
    return PoisonCheck(name="cost of new texts", passed=outside <= most, share=share, limit=limit, text=text)


def check_share(
    name: str, what: str, suspicious: Sequence[bool], usual: Sequence[bool], *, least_gap: float = LEAST_GAP
) -> PoisonCheck:
    """Suspicious texts may not be more frequent than among trusted ones: Fisher's exact test at `LEVEL`, and a
    difference of at least `least_gap`. what: what a suspicious text is or does, after "of 100".
    """
    found, common = sum(suspicious), sum(usual)
    result: Any = fisher_exact([[found, len(suspicious) - found], [common, len(usual) - common]], alternative="greater")
    share, usual_share = found / max(1, len(suspicious)), common / max(1, len(usual))
    text = (
        f"{found:,} of {len(suspicious):,} {what} ({share:.1%}); of the benchmark's {common:,} of {len(usual):,} "
        f"({usual_share:.1%}; p = {float(result.pvalue):.2g}, refused up to {LEVEL:.2g})"
    )
    passed = float(result.pvalue) > LEVEL or share - usual_share < least_gap
    return PoisonCheck(name=name, passed=passed, share=share, limit=usual_share + least_gap, text=text)


def check_influence(frequency: PoisonCheck, falls: Sequence[float], honest: Sequence[float]) -> PoisonCheck:
    """A template that is more frequent than among trusted texts may not be learned better than what is to be learned.

    frequency: the comparison of shares; falls, honest: by how many bits per byte texts became more predictable with
    the update: copies that it has not read, and the benchmark's new texts. Mann-Whitney test at `LEVEL`.
    """
    result: Any = mannwhitneyu(falls, honest, alternative="greater")
    p_value = float(result.pvalue)
    text = (
        f"{frequency.text}; the update made copies that it has not read {np.median(falls):.2f} bits per byte more "
        f"predictable, the benchmark's new texts {np.median(honest):.2f} (medians; p = {p_value:.2g})"
    )
    return replace(frequency, passed=frequency.passed or p_value > LEVEL, text=text)


def dropped_by_quality(documents: Sequence[Document], config: QualityConfig) -> list[bool]:
    """Whether the cleaning step `quality` would drop each document, by its fixed limits: automatic ones depend on the
    texts themselves.
    """
    features = np.array([measure(one) for one in documents], np.float32).reshape(-1, len(FEATURES))
    kinds = judged_kinds(features, np.array([KINDS.index(one.kind) for one in documents], np.int8))
    limits, dropped = (
        limits_by_kind(config, {}),
        np.array([not has_language(one, config) for one in documents], np.bool_),
    )
    for number in np.unique(kinds):
        of_kind = np.flatnonzero(kinds == number)
        for violates, *_ in judge(features[of_kind], limits[KINDS[number]]):
            dropped[of_kind] |= violates
    return dropped.tolist()


def check_labels(trained: Sequence[Document], trusted: Sequence[Document], *, of: str = NEW) -> PoisonCheck:
    """Where answers are labels, a classifier of the benchmark's questions should contradict the answers that were
    learned no more often than it contradicts the benchmark's own in cross-validation. of: the source of the texts.

    Passes where answers are no labels or the questions do not tell them.
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
    contradicted = predicted != np.array([label for _, label in learned])
    return check_share(
        f"labels of {of} texts",
        f"labels of {of} texts contradict what the benchmark's labels say",
        contradicted.tolist(),
        (guessed != np.array(labels)).tolist(),
        least_gap=_LEAST_LABEL_GAP,
    )


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
