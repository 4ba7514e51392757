"""The step noise: drops documents that a classifier of trusted text takes for junk, if a test shows its precision.

Junk is made of trusted text by generators, which also spoil corpora for benchmarks. The classifier learns from some of
them and is tested on the others, with documents that it has not seen, so the report covers kinds of junk that it never
learned from. It decides the clear cases; where a second model is given (`noise.model`), that one reads only the
uncertain ones. Where the test cannot show for a layout and language that the promised share of what would be dropped is
junk, nothing of that form is dropped.

What tells trusted text from junk: a calibrated linear classifier on hashed n-grams of words and characters, any
sequence-classification model of Hugging Face, and generators of junk to train and test them.

The classifier judges only forms of text that it knows: a chat, a table or a language that is missing from the trusted
text is rare, which does not make it junk.
"""

import html
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError, DataError, constant, derive_seed
from modelwright.core.resources import num_usable_cores
from modelwright.data.clean.features import FEATURES, layout_of, split_words
from modelwright.data.clean.steps.step import (
    DOCUMENTS,
    Columns,
    Decisions,
    Drop,
    Drops,
    MeasuredCorpus,
    ShardFiles,
    StepSpec,
    unpack_lines,
)
from modelwright.data.document import KINDS, Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

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
_NUM_WORDS = FEATURES.index("num_words")
_STDLIB_FRACTION = 0.1
_CASCADE = "noise.json"
_STAGE = "noise"


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The noise classifier."""

    trusted: tuple[str, ...] = ()
    """Files or directories with trusted text, from which the classifier learns the opposite of noise; `stdlib`: English
    documentation and Python code on this machine; empty switches the step off."""
    model: str = ""
    """Folder of a Hugging Face sequence-classification model that decides where the classifier is uncertain."""
    model_noise_label: str = constant("1")
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


@dataclass(frozen=True)
class Noise:
    config: NoiseConfig
    seed: int
    name: str = "noise"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures `judged` [N]: True if a document is long enough, not a pair and not a caption."""
        if "features" in columns:
            num_words = columns["features"][:, _NUM_WORDS]
        else:
            num_words = np.array([len(split_words(document.text)) for document in documents], np.int64)
        is_text = ~np.isin(columns["kind"], [KINDS.index("qa"), KINDS.index("image")])
        return {"judged": is_text & (num_words >= FEWEST_WORDS)}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Trains the classifier, and scores the documents in worker processes. Nothing is scored or dropped if its
        test does not show the promised precision. Raises `DataError` if there are too few trusted samples to learn
        from.
        """
        path = corpus.folder / _CASCADE
        if not path.exists():
            trusted = read_trusted(self.config.trusted, self.config.num_samples)
            trained = train_cascade(trusted, self.config, self.seed, corpus.folder)
            write_atomic(path, json.dumps([asdict(trained[0]), trained[1]]))
        # Read back even if just written: a resumed run must decide by the same values.
        fields, report = json.loads(path.read_text())
        cascade = Cascade(**fields | {"forms": KnownForms(pairs=tuple(map(tuple, fields["forms"]["pairs"])))})
        if not report["acts"]:
            nothing = dict.fromkeys(("judged", "abstained", "uncertain", "dropped"), 0)
            return Decisions(drops={}, report={"noise": {**report, **nothing}})
        numbers, values, by_model = [np.empty(0, np.int64)], [np.empty(0)], [np.empty(0, np.bool_)]
        num_judged = num_unknown = num_uncertain = 0
        columns = zip(corpus.shards, corpus.starts[:-1], corpus.parts("judged"), strict=True)
        jobs = (
            _ScoreJob(corpus.folder, files, corpus.stage, rows.tolist(), self.config, cascade)
            for files, start, judged in columns
            if len(rows := np.flatnonzero(judged & corpus.alive[start : start + len(judged)]))
        )
        for shard, arrays in corpus.engine.map(score_shard, jobs):
            has_form, is_uncertain = arrays["has_form"], cascade.is_uncertain(arrays["p"])
            num_judged += len(has_form)
            num_unknown += int((~has_form).sum())
            num_uncertain += int((has_form & is_uncertain).sum())
            is_noise = arrays["p"] >= cascade.threshold
            rows = np.flatnonzero(has_form & (is_noise | (arrays["by_model"] >= cascade.model_threshold)))
            numbers.append(corpus.starts[shard] + arrays["rows"][rows])
            values.append(np.where(is_noise, arrays["p"], arrays["by_model"])[rows])
            by_model.append(~is_noise[rows])
        all_numbers, all_values = np.concatenate(numbers), np.concatenate(values)
        all_by_model = np.concatenate(by_model)
        order = np.argsort(all_numbers)

        def drop(place: int) -> Drop:
            index = order[place]
            limit, who = (cascade.model_threshold, " by the model") if all_by_model[index] else (cascade.threshold, "")
            return Drop("noise", f"probability {all_values[index]:.3f}{who}, limit {limit:.3f}")

        counts = {
            "judged": num_judged, "abstained": num_unknown, "uncertain": num_uncertain, "dropped": len(all_numbers)
        }  # fmt: skip
        return Decisions(drops=Drops(all_numbers[order], drop), report={"noise": {**report, **counts}})


NOISE = StepSpec(
    name="noise",
    build=lambda config, seed: Noise(config, seed) if config.trusted else None,
    remedies={"noise": "--clean.noise.trusted []"},
    sources=("trusted",),
    files=("model",),
    needs_clean=lambda config: ["trusted"] if config.trusted else [],
)


def read_trusted(sources: tuple[str, ...], most: int) -> list[Document]:
    """Reads the first documents of the sources of `clean.noise.trusted`, without pairs, which the step does not judge.
    A tenth of the modules of `stdlib`, the documentation and code on this machine, is enough.
    """
    config = SourceConfig(
        sources=sources, validation_fraction=0.0, on_bad_record="skip", learns=False, stdlib_fraction=_STDLIB_FRACTION
    )
    documents = read_documents(config, report=SourceReport())
    return list(islice((document for document in documents if document.kind in ("prose", "code")), most))


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


@dataclass(frozen=True)
class _ScoreJob:
    """Documents of a shard to score. folder: with the classifier; stage: the one that wrote the shard's documents."""

    folder: Path
    files: ShardFiles
    stage: str
    rows: list[int]
    config: NoiseConfig
    cascade: Cascade


def score_shard(job: _ScoreJob) -> tuple[int, dict[str, NDArray[Any]]]:
    """Computes both models' probabilities of noise for some documents, and whether their form is known; in workers."""
    if job.files.facts(_STAGE) is None:
        lines = unpack_lines(job.files.array(job.stage, DOCUMENTS).tobytes())
        texts = [Document.from_json(lines[row]).text for row in job.rows]
        p = LinearClassifier.load(job.folder / CLASSIFIER).probabilities(texts)
        has_form = np.ones(len(texts), np.bool_)
        # The others are kept whatever their form, and recognizing a language takes time.
        for index in np.flatnonzero(p >= SURELY_TRUSTED):
            has_form[index] = job.cascade.forms.includes(texts[index])
        by_model = np.zeros(len(texts))
        uncertain = np.flatnonzero(has_form & job.cascade.is_uncertain(p))
        if job.config.model and len(uncertain):
            model = NoiseModel(job.config.model, job.config.model_noise_label)
            by_model[uncertain] = job.cascade.by_model(model.scores([texts[index] for index in uncertain]))
        rows = np.array(job.rows, np.int64)
        job.files.write_arrays(_STAGE, {"rows": rows, "p": p, "by_model": by_model, "has_form": has_form}, {})
    return job.files.number, dict(job.files.read_arrays(_STAGE))


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
    dropped = (p[test] >= cascade.threshold) | (
        cascade.is_uncertain(p[test]) & (by_model[test] >= cascade.model_threshold)
    )
    # Junk counts for the form of the text that it was made of: its own language often cannot be told.
    numbers = np.array(groups)[test]
    own = {number: (layout_of(trusted_texts[number]), language_of(trusted_texts[number])) for number in set(numbers)}
    by_form = dict[tuple[str, str], dict[str, Any]]()
    for layout, language in forms.pairs:
        inside = np.array([own[n][0] == layout and language in ("", own[n][1]) for n in numbers])
        found = heldout_report(generators[test][inside], dropped[inside], config)
        by_form[layout, language] = {name: found[name] for name in ("precision_low", "acts")}
    acting = tuple(form for form, found in by_form.items() if found["acts"])
    if acting:
        cascade = replace(cascade, forms=KnownForms(pairs=acting))
        dropped &= np.array([cascade.forms.includes(texts[i]) for i in test])
    report = heldout_report(generators[test], dropped, config) | {"acts": bool(acting)}
    report |= {"num_trusted": len(trusted_texts), "threshold": round(cascade.threshold, 4)}
    report["forms"] = {f"{layout}, {language or 'any language'}": one for (layout, language), one in by_form.items()}
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
        f"{noise['min_precision']:.0%} must be, for a layout and language (give more trusted text that is like yours "
        "with --clean.noise.trusted, or leave the step out with --clean.noise.trusted [])"
    )


def low_recall(noise: Mapping[str, Any]) -> list[str]:
    """Names the generators whose junk the classifier hardly finds, from the report of the step."""
    return [name for name, recall in noise.get("recall_by_kind", {}).items() if recall < _LOW_RECALL]
