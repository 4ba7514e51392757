"""The step noise: drops documents that a classifier of trusted text takes for junk, if a test shows its precision.

Junk is made of trusted text by generators (`data/clean/noise.py`, with the classifier), which also spoil corpora for
benchmarks. The classifier learns from some of them and is tested on the others, with documents that it has not seen, so
the report covers kinds of junk that it never learned from. It decides the clear cases; where a second model is given
(`noise.model`), that one reads only the uncertain ones. Where the test cannot show for a layout and language that the
promised share of what would be dropped is junk, nothing of that form is dropped.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError, DataError, constant, derive_seed
from modelwright.data.clean.features import FEATURES, layout_of, split_words
from modelwright.data.clean.noise import (
    TEST_CORRUPTIONS,
    TRAINING_CORRUPTIONS,
    KnownForms,
    LinearClassifier,
    NoiseModel,
    language_of,
    logistic,
    threshold_for,
)
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
