"""Trains the step noise to tell trusted text from junk, and tests its precision and recall.

Junk is made of trusted text by generators, which also spoil corpora for benchmarks. The classifier learns from some of
them and is tested on the others, with documents that it has not seen, so the report covers kinds of junk that it never
learned from. It decides the clear cases; where a second model is given (`noise.model`), that one reads only the
uncertain ones. Where the test cannot show that the promised share of what would be dropped is junk, nothing is dropped.
"""

import html
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError, DataError
from modelwright.core.seeds import derive_seed
from modelwright.data.clean.noise.classifier import KnownForms, LinearClassifier, logistic, threshold_for
from modelwright.data.document import Document

_MENU = (
    "Home About us Contact Sitemap Privacy policy Terms of use Log in Register Search Newsletter Subscribe Follow us "
    "on Facebook Twitter Instagram Share this article Read more Related posts Previous Next Back to top Add to cart "
    "Checkout My account Wish list Free shipping Accept all cookies Cookie settings Copyright All rights reserved "
    "Powered by WordPress Skip to content Comments (0) Leave a reply Tags Categories Archives Print this page"
)
_MENU_ITEMS = re.findall(r"[A-Z][^A-Z]*", _MENU)
_SPAM = [
    "buy",
    "cheap",
    "best",
    "price",
    "online",
    "discount",
    "sale",
    "free",
    "bonus",
    "casino",
    "poker",
    "slots",
    "loan",
    "credit",
    "insurance",
    "viagra",
    "pills",
    "weight",
    "loss",
    "win",
    "now",
    "click",
    "here",
    "guaranteed",
    "offer",
    "limited",
    "deal",
    "replica",
    "watches",
    "download",
    "crack",
    "torrent",
    "hd",
    "movie",
    "stream",
]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKUP = (
    '<div class="{0}">', "</div>", '<span style="color:#{1:06x};margin:{2}px">', "</span>", "<br/>", "&nbsp;&nbsp;",
    "var {0} = document.getElementById('{0}');", "if (!{0}) {{ return false; }}", ".{0} {{ padding: {2}px 0; }}",
    '<a href="/{0}?id={2}" onclick="track(\'{0}\')">', "</a>", "<!-- {0} -->", "window.{0}=window.{0}||[];",
)  # fmt: skip
FEWEST_SAMPLES = 200
"""Fewer trusted samples are too few to learn from."""
FEWEST_WORDS = 30
"""Shorter documents are not judged."""
SURELY_TRUSTED = 0.1
"""Documents with a lower probability of noise are never read by the second model."""
CLASSIFIER = "noise.safetensors"
_SETS = ("train", "test")
# A precision of 95% where a tenth is junk, of which 90% is found, means that at most 0.5% of good text is dropped. To
# show that takes 700 tested texts of which none is dropped, and 1,060 where one is.
_SHARES = (0.5, 0.5)
# Probability that the bound on the precision is above the precision.
_ERROR = 0.05
_LOW_RECALL = 0.1


def shuffled_words(text: str, rng: random.Random) -> str:
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def wrong_characters(text: str, rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) if char.isalpha() and rng.random() < 0.2 else char for char in text)


def gibberish(text: str, rng: random.Random) -> str:
    return re.sub(r"\w+", lambda match: "".join(rng.choices(_LETTERS, k=len(match[0]))), text)


def keyword_spam(text: str, rng: random.Random) -> str:
    own = [word for word in re.findall(r"\w+", text) if len(word) > 5][:20]
    words = rng.sample(_SPAM, 12) + own
    return " ".join(rng.choice(words) + ("," if rng.random() < 0.1 else "") for _ in text.split())


def menus(text: str, rng: random.Random) -> str:
    result: list[str] = []
    while sum(map(len, result)) < len(text):
        result.append(rng.choice(_MENU_ITEMS).strip())
    return rng.choice((" | ", "\n", " » ", "  ")).join(result)


def markup(text: str, rng: random.Random) -> str:
    result: list[str] = []
    words = text.split()
    while sum(map(len, result)) < len(text):
        name = rng.choice(words or ["x"]).strip(".,;:()'\"").lower() or "x"
        result.append(rng.choice(_MARKUP).format(name, rng.randrange(2**24), rng.randrange(100)))
        if rng.random() < 0.3:
            result.append(html.escape(" ".join(rng.choices(words or ["x"], k=3))))
    return rng.choice((" ", "\n")).join(result)


def wrong_encoding(text: str, rng: random.Random) -> str:
    """Turns text into one of a script that was read in the encoding of another."""
    table = {char: chr(ord(char) + rng.randrange(0x90, 0x160)) for char in set(text) if char.isalpha()}
    return "".join(table.get(char, char) if rng.random() < 0.6 else char for char in text)


def log_lines(text: str, rng: random.Random) -> str:
    words = re.findall(r"\w+", text) or ["x"]
    lines: list[str] = []
    while sum(map(len, lines)) < len(text):
        stamp = (
            f"20{rng.randrange(10, 26)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02} {rng.randrange(24):02}:00"
        )
        number = rng.randrange(16**8)
        lines.append(
            f"{stamp} [{rng.choice(('INFO', 'WARN', 'DEBUG'))}] {rng.choice(words)}={number:08x} {number % 977}ms"
        )
    return "\n".join(lines)


def repetition(text: str, rng: random.Random) -> str:
    words = text.split()
    length = rng.randrange(3, 12)
    at = rng.randrange(max(1, len(words) - length))
    part = " ".join(words[at : at + length])
    return " ".join([part] * max(2, len(text) // max(1, len(part))))


def mixed_lines(text: str, rng: random.Random) -> str:
    """Mixes fragments of sentences, as of columns that were read across."""
    parts = re.findall(r"\S+(?:\s+\S+){0,4}", text)
    rng.shuffle(parts)
    return "\n".join(parts)


Corruption = Callable[[str, random.Random], str]


TRAINING_CORRUPTIONS: dict[str, Corruption] = {
    corruption.__name__: corruption
    for corruption in (shuffled_words, gibberish, keyword_spam, menus, markup, log_lines, wrong_encoding)
}
"""Corruptions that the noise classifier learns from."""
TEST_CORRUPTIONS: dict[str, Corruption] = {
    corruption.__name__: corruption for corruption in (wrong_characters, repetition, mixed_lines)
}
"""Corruptions that it is tested on, and never learns from."""


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """Decision rules. threshold: probability from which the classifier drops; slope, offset: calibration of the second
    model's logits; model_threshold: calibrated probability from which it drops.
    """

    forms: KnownForms
    threshold: float
    slope: float = 1.0
    offset: float = 0.0
    model_threshold: float = 2.0

    def is_uncertain(self, p: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (p >= SURELY_TRUSTED) & (p < self.threshold)

    def by_model(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Calibrates the second model's logits to probabilities of noise."""
        return logistic(self.slope * scores + self.offset)


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The noise classifier."""

    trusted: tuple[str, ...] = ()
    """Files or directories with trusted text, from which the classifier learns the opposite of noise; `stdlib`: English
    documentation and Python code on this machine; empty switches the step off."""
    model: str = ""
    """Folder of a Hugging Face sequence-classification model that decides where the classifier is uncertain."""
    model_noise_label: str = "1"
    """Name or number of the class of `model` that means noise."""
    min_precision: float = constant(0.95)
    """Precision that the threshold must reach on held-out samples: the fraction of dropped documents that are junk. If
    its lower bound on the samples of the test is below, the step keeps everything: a filter of which more than one in
    20 victims is good text costs more than the junk that it leaves, at most a tenth of the corpus."""
    assumed_share: float = constant(0.1)
    """Share of noise in the corpus for which `min_precision` is kept; with more noise the precision is higher."""
    num_samples: int = constant(3000)
    """Maximum number of trusted samples; as many junk samples are made from them."""

    def __post_init__(self) -> None:
        if self.model and not self.trusted:
            raise ConfigError("model: needs trusted text to be calibrated; name some with noise.trusted")

    @property
    def enabled(self) -> bool:
        return bool(self.trusted)


def train_cascade(
    trusted: Sequence[Document], config: NoiseConfig, seed: int, work: Path
) -> tuple[Cascade, dict[str, Any]]:
    """Learns from trusted documents and from junk made of them; writes the classifier into `work`. Returns its decision
    rules, and its report on held-out documents and generators.
    """
    trusted_texts = [document.text for document in trusted if len(document.text.split()) >= FEWEST_WORDS]
    if len(trusted_texts) < FEWEST_SAMPLES:
        text = (
            f"noise.trusted: {len(trusted_texts)} documents of {FEWEST_WORDS} words or more are too few to learn from"
        )
        raise DataError(f"{text}; give at least {FEWEST_SAMPLES}, or empty clean.noise.trusted")
    texts: list[str] = []
    names: list[str] = []  # the generator of each text, "" for trusted text
    sets: list[int] = []
    # A text and the junk made of it are one group, in one set: junk of a text seen in training would be an easy test.
    groups: list[int] = []
    for number, text in enumerate(trusted_texts):
        rng = random.Random(derive_seed(seed, "noise", text))
        which = int(np.searchsorted(np.cumsum(_SHARES[:-1]), rng.random(), side="right"))
        makers = TRAINING_CORRUPTIONS
        chosen = [list(makers)[number % len(makers)]]
        if _SETS[which] == "test":  # which has junk of all generators
            makers = TRAINING_CORRUPTIONS | TEST_CORRUPTIONS
            chosen.append(list(TEST_CORRUPTIONS)[number % len(TEST_CORRUPTIONS)])
        texts += [text, *(makers[name](text, rng) for name in chosen)]
        names += ["", *chosen]
        sets += [which] * (1 + len(chosen))
        groups += [number] * (1 + len(chosen))
    generators = np.array(names)
    is_noise = generators != ""
    train, test = (np.flatnonzero(np.array(sets) == number) for number in range(len(_SETS)))
    classifier, unseen = LinearClassifier.fit([texts[i] for i in train], is_noise[train], np.array(groups)[train])
    classifier.save(work / CLASSIFIER)
    forms = KnownForms.of([texts[i] for i in train if not is_noise[i]])
    threshold = threshold_for(unseen, is_noise[train], config.min_precision, config.assumed_share)
    p = np.empty(len(texts))
    p[train], p[test] = unseen, classifier.probabilities([texts[i] for i in test])
    cascade = Cascade(forms=forms, threshold=threshold)
    by_model = np.zeros(len(p))
    if config.model:
        cascade, by_model = _with_model(cascade, texts, is_noise, p, train, test, config)
    dropped = np.array([forms.includes(texts[i]) for i in test])
    dropped &= (p[test] >= cascade.threshold) | (
        cascade.is_uncertain(p[test]) & (by_model[test] >= cascade.model_threshold)
    )
    report = heldout_report(generators[test], dropped, config)
    report |= {"num_trusted": len(trusted_texts), "threshold": round(cascade.threshold, 4)}
    report |= {"layouts": list(forms.layouts), "languages": list(forms.languages)}
    report["share_uncertain"] = round(float(cascade.is_uncertain(p[test]).mean()), 4)
    return cascade, report


def heldout_report(names: NDArray[np.str_], dropped: NDArray[np.bool_], config: NoiseConfig) -> dict[str, Any]:
    """Computes the precision for the assumed share of noise, with its lower bound, the recall on generators that were
    not trained on and on those that were, the fraction of trusted text that is dropped, and whether the step acts.

    names: the generator of each text of the test, "" for trusted text. The bound uses the lower bound of the recall and
    the upper bound of that fraction (Clopper and Pearson 1934), each at half the error.
    """
    by_kind = {name: float(dropped[names == name].mean()) for name in np.unique(names[names != ""])}
    recall = float(np.mean([by_kind[name] for name in by_kind if name in TEST_CORRUPTIONS] or [0.0]))
    trained = float(np.mean([by_kind[name] for name in by_kind if name in TRAINING_CORRUPTIONS] or [0.0]))
    lost = float(dropped[names == ""].mean()) if (names == "").any() else 0.0
    is_unseen = np.isin(names, list(TEST_CORRUPTIONS))
    low = _precision(_bounds(dropped[is_unseen])[0], _bounds(dropped[names == ""])[1], config.assumed_share)
    return {
        "precision": round(_precision(recall, lost, config.assumed_share), 4),
        "precision_low": round(low, 4), "min_precision": config.min_precision, "acts": low >= config.min_precision,
        "recall": round(recall, 4), "recall_trained": round(trained, 4), "trusted_dropped": round(lost, 4),
        "recall_by_kind": {name: round(value, 4) for name, value in by_kind.items() if name in TEST_CORRUPTIONS},
    }  # fmt: skip


def _precision(recall: float, lost: float, share: float) -> float:
    """Fraction of junk among dropped documents. lost: fraction of good text dropped; share: of junk in a corpus."""
    hits, false = share * recall, (1 - share) * lost
    return hits / (hits + false) if hits + false else 1.0


def _bounds(dropped: NDArray[np.bool_]) -> tuple[float, float]:
    """Exact bounds of the fraction that is dropped; each is violated with half of the error's probability."""
    from scipy.stats import binomtest

    if not len(dropped):
        return 0.0, 1.0
    interval = binomtest(int(dropped.sum()), len(dropped)).proportion_ci(1 - _ERROR, method="exact")
    return float(interval.low), float(interval.high)


def _with_model(
    cascade: Cascade, texts: list[str], is_noise: NDArray[np.bool_], p: NDArray[np.float64],
    train: NDArray[np.int64], test: NDArray[np.int64], config: NoiseConfig,
) -> tuple[Cascade, NDArray[np.float64]]:  # fmt: skip
    """Adds the second model to the cascade, calibrated (Platt scaling) on uncertain samples or on all if these are few;
    also returns its probabilities for the samples of the test.
    """
    from sklearn.linear_model import LogisticRegression

    from modelwright.data.clean.noise.model import NoiseModel

    model = NoiseModel(config.model, config.model_noise_label)
    chosen = train[cascade.is_uncertain(p[train])]
    if min(is_noise[chosen].sum(), (~is_noise[chosen]).sum()) < FEWEST_SAMPLES // 10:
        chosen = train[: 10 * FEWEST_SAMPLES]
    scores = model.scores([texts[i] for i in chosen])
    # A large C switches the regularization off, as Platt scaling has none.
    platt: Any = LogisticRegression(C=1e6).fit(scores[:, None], is_noise[chosen])
    slope, offset = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    threshold = threshold_for(
        logistic(slope * scores + offset), is_noise[chosen], config.min_precision, config.assumed_share
    )
    cascade = Cascade(
        forms=cascade.forms, threshold=cascade.threshold, slope=slope, offset=offset, model_threshold=threshold
    )
    by_model = np.zeros(len(p))
    uncertain = test[cascade.is_uncertain(p[test])]
    by_model[uncertain] = cascade.by_model(model.scores([texts[i] for i in uncertain]))
    return cascade, by_model


def refusal(noise: Mapping[str, Any]) -> str:
    """Explains why the step kept everything, from its report; "" if it acted."""
    if noise.get("acts", True):
        return ""
    return (
        f"the step noise kept everything: on text that its classifier has not seen, {noise['precision']:.0%} of what "
        f"it would drop is junk where a tenth of a corpus is, and only {noise['precision_low']:.0%} is certain; "
        f"{noise['min_precision']:.0%} must be (give more trusted text that is like yours with --clean.noise.trusted, "
        "or leave the step out with --clean.noise.trusted [])"
    )


def low_recall(noise: Mapping[str, Any]) -> list[str]:
    """Names the generators whose junk the classifier hardly finds, from the report of the step."""
    return [name for name, recall in noise.get("recall_by_kind", {}).items() if recall < _LOW_RECALL]
