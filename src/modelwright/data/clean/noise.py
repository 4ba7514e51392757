"""What tells trusted text from junk: a calibrated linear classifier on hashed n-grams of words and characters, any
sequence-classification model of Hugging Face, and generators of junk to train and test them.

The classifier judges only forms of text that it knows: a chat, a table or a language that is missing from the trusted
text is rare, which does not make it junk. `data/clean/steps/noise.py` trains and tests it.
"""

import html
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from modelwright.core.config import DataError
from modelwright.core.resources import num_usable_cores
from modelwright.data.clean.features import layout_of

_BUCKETS = 2**18
# Number of characters at the start of a text that are read.
_HEAD_CHARS = 4000
_FOLDS = 5
# Forms with a smaller share of the trusted documents are unknown.
_RARE = 0.01
# Lower bound of the threshold: where samples are easy to tell apart, a lower one would be right for them alone.
_LEAST_THRESHOLD = 0.5
_MENU = (
    "Home About us Contact Sitemap Privacy policy Terms of use Log in Register Search Newsletter Subscribe Follow us "
    "on Facebook Twitter Instagram Share this article Read more Related posts Previous Next Back to top Add to cart "
    "Checkout My account Wish list Free shipping Accept all cookies Cookie settings Copyright All rights reserved "
    "Powered by WordPress Skip to content Comments (0) Leave a reply Tags Categories Archives Print this page"
)
_MENU_ITEMS = re.findall(r"[A-Z][^A-Z]*", _MENU)
_SPAM = [
    "buy", "cheap", "best", "price", "online", "discount", "sale", "free", "bonus", "casino", "poker", "slots",
    "loan", "credit", "insurance", "viagra", "pills", "weight", "loss", "win", "now", "click", "here", "guaranteed",
    "offer", "limited", "deal", "replica", "watches", "download", "crack", "torrent", "hd", "movie", "stream",
]  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKUP = (
    '<div class="{0}">', "</div>", '<span style="color:#{1:06x};margin:{2}px">', "</span>", "<br/>", "&nbsp;&nbsp;",
    "var {0} = document.getElementById('{0}');", "if (!{0}) {{ return false; }}", ".{0} {{ padding: {2}px 0; }}",
    '<a href="/{0}?id={2}" onclick="track(\'{0}\')">', "</a>", "<!-- {0} -->", "window.{0}=window.{0}||[];",
)  # fmt: skip
_BATCH = 16
_MAX_TOKENS = 512


def language_of(text: str) -> str:
    """The ISO 639-1 code of a text's language, "" if its halves disagree, as those of junk often do."""
    import py3langid  # takes half a second

    head = text[:_HEAD_CHARS]
    first, second = (py3langid.classify(half)[0] for half in (head[: len(head) // 2], head[len(head) // 2 :]))
    return first if first == second != "zxx" else ""


@dataclass(frozen=True, kw_only=True)
class KnownForms:
    """Layouts with languages of the trusted text, "" where the language cannot be told: all texts of the layout."""

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "KnownForms":
        counts = Counter((layout_of(text), language_of(text)) for text in texts)
        pairs = {pair for pair, n in counts.items() if n >= _RARE * len(texts)}
        return cls(pairs=tuple(sorted(pairs | {(layout, "") for layout, _ in pairs})))

    def includes(self, text: str) -> bool:
        """True if a text has one of the layouts in one of its languages, or in one that cannot be told."""
        return (layout_of(text), language_of(text)) in self.pairs


@dataclass(frozen=True)
class LinearClassifier:
    """P(noise) = sigmoid(slope * (weights . n-grams + bias) + offset)."""

    weights: NDArray[np.float32]
    bias: float
    slope: float
    offset: float

    @classmethod
    def fit(
        cls, texts: Sequence[str], labels: NDArray[np.bool_], groups: NDArray[np.int64]
    ) -> tuple["LinearClassifier", NDArray[np.float64]]:
        """Fits and calibrates by cross-validation; also returns P(noise) of each text by a classifier that has not seen
        it [N]. labels [N]: True for noise; groups [N]: texts of one group are in one fold. Deterministic.
        """
        from sklearn.calibration import CalibratedClassifierCV
        from sklearn.frozen import FrozenEstimator
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import GroupKFold

        inputs, num_texts = _ngrams(texts), len(texts)
        folds = [(known, unknown) for known, unknown in GroupKFold(_FOLDS).split(inputs, labels, groups)]

        def fit(rows: NDArray[np.int64]) -> Any:
            return LogisticRegression(C=10.0, solver="liblinear", random_state=0).fit(inputs[rows], labels[rows])

        with ThreadPoolExecutor(num_usable_cores()) as threads:  # liblinear releases the interpreter's lock
            whole, *parts = threads.map(fit, [np.arange(num_texts), *(known for known, _ in folds)])
        unseen = np.empty(num_texts)
        for part, (_, unknown) in zip(parts, folds, strict=True):
            unseen[unknown] = part.decision_function(inputs[unknown])
        # Platt's sigmoid (1999) of the scores. A classifier whose decision function is its input makes scikit-learn fit
        # it to the scores themselves; they are of unseen texts, because those of seen ones are too certain.
        same: Any = LogisticRegression()
        same.classes_, same.coef_, same.intercept_ = np.array([False, True]), np.ones((1, 1)), np.zeros(1)
        calibrated: Any = CalibratedClassifierCV(FrozenEstimator(same), method="sigmoid")
        (calibrated,) = calibrated.fit(unseen[:, None], labels).calibrated_classifiers_
        (sigmoid,) = calibrated.calibrators
        slope, offset = -float(sigmoid.a_), -float(sigmoid.b_)
        result = cls(whole.coef_[0].astype(np.float32), float(whole.intercept_[0]), slope, offset)
        return result, logistic(slope * unseen + offset)

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """P(noise) of each text [N]."""
        if not len(texts):
            return np.empty(0)
        scores: NDArray[np.float64] = _ngrams(texts) @ self.weights + self.bias
        return logistic(self.slope * scores + self.offset)

    def save(self, path: Path) -> None:
        scalars = np.array([self.bias, self.slope, self.offset])
        save_file({"weights": self.weights, "scalars": scalars}, path)

    @classmethod
    def load(cls, path: Path) -> "LinearClassifier":
        arrays = load_file(path)
        return cls(arrays["weights"], *map(float, arrays["scalars"]))


def logistic(scores: Any) -> Any:
    """The logistic function, without overflow."""
    return 1 / (1 + np.exp(-np.clip(scores, -50, 50)))


def threshold_for(p: NDArray[np.float64], labels: NDArray[np.bool_], min_precision: float, share: float) -> float:
    """The lowest threshold, at least a half, from which the precision is at least `min_precision` if a share of `share`
    of all documents is noise, whatever its share among the samples; above 1 if none reaches it.
    """
    from sklearn.metrics import precision_recall_curve

    if not labels.any():
        return 2.0
    # Laplace's rule: one more trusted sample, which the classifier gets wrong, so that few samples promise little.
    p, labels = np.append(p, 1.0), np.append(labels, False)
    weights = np.where(labels, share / labels.sum(), (1 - share) / (~labels).sum())
    precision, _, thresholds = precision_recall_curve(labels, p, sample_weight=weights)
    good = np.flatnonzero(precision[:-1] >= min_precision)
    return max(_LEAST_THRESHOLD, float(thresholds[good[0]])) if len(good) else 2.0


def _ngrams(texts: Sequence[str]) -> Any:
    """Hashed n-grams of the beginnings of texts, a sparse matrix [N, 2 * _BUCKETS]."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import HashingVectorizer

    single: Any = np.float32
    words = HashingVectorizer(n_features=_BUCKETS, ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", dtype=single)
    chars = HashingVectorizer(n_features=_BUCKETS, analyzer="char_wb", ngram_range=(1, 4), dtype=single)
    heads = [text[:_HEAD_CHARS] for text in texts]
    return hstack([words.transform(heads), chars.transform(heads)], format="csr")


class NoiseModel:
    """Scores noise, in logits, by a model in `folder`; `noise_label` is the name or number of its class of noise.

    Raises `DataError` if the model cannot be loaded or does not have this class.
    """

    def __init__(self, folder: str, noise_label: str) -> None:
        try:
            import transformers
        except ImportError:
            raise DataError("noise.model: needs the package transformers; install modelwright[hf]") from None
        transformers.logging.set_verbosity_error()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            ).eval()
        except (OSError, ValueError) as error:
            text = f"noise.model: {folder}: cannot be loaded ({str(error).splitlines()[0]})"
            raise DataError(f"{text}; give a folder of a sequence-classification model with safetensors") from None
        config = self._model.config
        by_name = {name.lower(): int(number) for number, name in config.id2label.items()}
        self._noise = by_name.get(noise_label.lower(), int(noise_label) if noise_label.isdigit() else -1)
        if not 0 <= self._noise < config.num_labels:
            known = ", ".join(config.id2label.values())
            raise DataError(f"noise.model_noise_label: {noise_label!r} is not one of {known}")
        self._longest = min(_MAX_TOKENS, getattr(self._model.config, "max_position_embeddings", _MAX_TOKENS))

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Computes the logit of noise against all other classes of each text [N]."""
        import torch  # would cost every process that cleans hundreds of megabytes

        result: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                batch = self._tokenizer(
                    list(texts[start : start + _BATCH]), truncation=True, max_length=self._longest, padding=True,
                    return_tensors="pt",
                )  # fmt: skip
                logits = self._model(**batch).logits.double()
                others = [number for number in range(logits.shape[1]) if number != self._noise]
                result += (logits[:, self._noise] - logits[:, others].logsumexp(dim=1)).tolist()
        return np.array(result)


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
