"""Checks of the texts that an update was trained on: held-out ones, garbage, templates, labels that contradict the
benchmark. `order.py` detects word salads.

A benchmark alone would not suffice: a few bad texts can teach a model something that no question of the benchmark asks
for. Each check has a bounded probability of refusing harmless texts.
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

from modelwright.data.clean.features import FEATURES, measure, split_words
from modelwright.data.clean.steps.quality import QualityConfig, has_language, judge, judged_kinds, limits_by_kind
from modelwright.data.document import KINDS, Document
from modelwright_continual.heldout import HeldoutTexts, question_key
from modelwright_continual.update_files import NEW

ERROR = 0.01
"""Probability that texts like those of the benchmark are refused by any of the checks."""
NUM_CHECKS = 7
"""Number of checks with a random result: cost, quality and templates of new texts, order and labels of new and of old
ones."""
LEVEL = ERROR / NUM_CHECKS
"""Level of each check (Bonferroni)."""
LEAST_GAP = 0.1
"""Smallest difference between shares that matters, however significant it is: the harmless documentation of another
library has up to 8 points more texts of a line or two, in which no order is visible."""
_LEAST_OF_LABEL = 3
"""Minimum number of documents with an answer that counts as a label; also the number of folds of the
cross-validation."""
_LEAST_LABELED = 0.8
"""Minimum share of the conversations with such an answer for answers to be treated as labels."""
_LEAST_LABEL_GAP = 0.05
"""`LEAST_GAP` for contradicted labels; it is smaller, because no difference in subject explains them."""


@dataclass(frozen=True, kw_only=True)
class PoisonCheck:
    """Result of a check. limit: the largest share that passes; text: one sentence."""

    name: str
    passed: bool
    share: float
    limit: float
    text: str


def check_heldout(trained: Sequence[Document], heldout: HeldoutTexts) -> PoisonCheck:
    """Checks that no training text has a question or a passage of a held-out one."""
    found = [(document, what) for document in trained if (what := heldout.found_in(document))]
    text = "no training text has a question or a passage of a held-out one"
    if found:
        document, what = found[0]
        text = f"{len(found):,} of {len(trained):,} training texts have a {what}, such as {document.id}"
    share = len(found) / max(1, len(trained))
    return PoisonCheck(name="held-out texts", passed=not found, share=share, limit=0.0, text=text)


def check_garbage(costs: Sequence[float], trusted: Sequence[float]) -> PoisonCheck:
    """Checks that few new texts are less or more predictable than all trusted ones, to the model before the update.

    costs, trusted: bits per byte of the new texts and of the benchmark's. If both come from the same distribution, the
    share of texts outside the range of n trusted ones is Beta(2, n - 1) distributed (Wilks 1941), and their number is
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
    """Checks that suspicious texts are not more frequent than among trusted ones. Refuses a share that is larger by
    Fisher's exact test at `LEVEL` and by at least `least_gap`. what: phrase for suspicious texts, after "of 100".
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
    """Checks that a template that is more frequent than among trusted texts was not learned better than the new task.

    frequency: the comparison of shares; falls, honest: decrease in bits per byte through the update, of copies that
    were left out of it, and of the benchmark's new texts. Mann-Whitney test at `LEVEL`.
    """
    result: Any = mannwhitneyu(falls, honest, alternative="greater")
    p_value = float(result.pvalue)
    text = (
        f"{frequency.text}; the update made copies that it has not read {np.median(falls):.2f} bits per byte more "
        f"predictable, the benchmark's new texts {np.median(honest):.2f} (medians; p = {p_value:.2g})"
    )
    return replace(frequency, passed=frequency.passed or p_value > LEVEL, text=text)


def dropped_by_quality(documents: Sequence[Document], config: QualityConfig) -> list[bool]:
    """Returns, for each document, whether the cleaning step `quality` would drop it by its fixed limits; automatic
    limits are not applied, because they depend on the texts themselves.
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
    """Checks labels, if answers are labels: a classifier of the benchmark's questions should contradict the answers
    that were learned no more often than the benchmark's own in cross-validation. of: the source of the texts.

    Passes if answers are not labels or cannot be predicted from the questions.
    """
    known = _labeled(trusted)
    texts, labels = [text for text, _ in known], [label for _, label in known]
    if len(set(labels)) < 2:
        return _no_labels(of, "answers are no labels")
    model = make_pipeline(
        # Question keys are words separated by spaces already.
        TfidfVectorizer(analyzer="word", token_pattern=r"\S+"),
        LogisticRegression(C=100.0, max_iter=1000),
    )
    folds = StratifiedKFold(_LEAST_OF_LABEL, shuffle=True, random_state=0)
    guessed = np.array(cross_val_predict(model, texts, labels, cv=folds))
    wrong = int(np.count_nonzero(guessed != np.array(labels)))
    most_frequent = Counter(labels).most_common(1)[0][1]
    # The classifier is no better than always guessing the most frequent label.
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
    """Returns question and answer of the conversations with a frequent answer; [] if these are few."""
    pairs = [(question_key(one), _answer(one)) for one in documents if one.kind == "qa"]
    counts = Counter(answer for _, answer in pairs)
    frequent = [(question, answer) for question, answer in pairs if counts[answer] >= _LEAST_OF_LABEL]
    return frequent if frequent and len(frequent) >= _LEAST_LABELED * len(pairs) else []


def _answer(document: Document) -> str:
    """Returns the words of the last answer."""
    said = [turn["content"] for turn in document.messages if turn["role"] == "assistant"]
    return " ".join(split_words(said[-1])) if said else ""
