"""The stage noise over a whole corpus: samples, training, test, and the documents that are dropped.

Junk is made of trusted text by generators (`corruptions.py`). The classifier learns from some of them and is tested on
the others, with documents that it has not seen, so that the report says what it does to junk that nobody showed it. It
decides the clear cases; where a second model is given (`noise.model`), that one reads the uncertain ones alone.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import DataError
from modelwright.core.seeds import derive_seed
from modelwright.data.corruptions import TEST_CORRUPTIONS, TRAINING_CORRUPTIONS
from modelwright.data.document import KINDS, Document
from modelwright.data.shard_files import ShardFiles, pack_arrays, unpack_arrays, unpack_documents, write_file
from modelwright.data.steps.noise import KnownForms, LinearClassifier, NoiseConfig, logistic, threshold_for
from modelwright.data.steps.quality import FEATURES
from modelwright.data.workers import ShardEngine

FEWEST_SAMPLES = 200
"""Fewer trusted samples are too few to learn from."""
_FEWEST_WORDS = 30
"""Shorter documents are not judged."""
_NUM_WORDS = FEATURES.index("num_words")
_SETS = ("train", "test")
_SHARES = (0.8, 0.2)
_SURELY_TRUSTED = 0.1
"""Documents with a lower probability of noise are never read by the second model."""
_LOW_RECALL = 0.1
_CLASSIFIER, _CASCADE = "noise.safetensors", "noise.json"

ReadTrusted = Callable[[tuple[str, ...], int], list[Document]]
"""At most so many documents of some sources."""


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """How both steps decide. threshold: from this probability on, the classifier drops; slope, offset: calibration of
    the second model's logits; model_threshold: from this calibrated probability on, it drops.
    """

    forms: KnownForms
    threshold: float
    slope: float = 1.0
    offset: float = 0.0
    model_threshold: float = 2.0

    def is_uncertain(self, p: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (p >= _SURELY_TRUSTED) & (p < self.threshold)

    def by_model(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Calibrated probabilities of noise of the second model's logits."""
        return logistic(self.slope * scores + self.offset)


@dataclass(frozen=True, kw_only=True)
class _Samples:
    texts: list[str]
    names: NDArray[np.str_]
    """The generator of each text, "" for trusted text."""
    sets: NDArray[np.int64]
    groups: NDArray[np.int64]
    """A text and the junk made of it are one group, in one set."""


def find_noise(
    features: NDArray[np.float32],
    kinds: NDArray[np.int8],
    alive: NDArray[np.bool_],
    starts: NDArray[np.int64],
    config: NoiseConfig,
    seed: int,
    work: Path,
    engine: ShardEngine,
    read_trusted: ReadTrusted,
) -> tuple[dict[int, tuple[str, str, str]], dict[str, Any]]:
    """The documents that are dropped as noise, and the report of the stage.

    features [N, F], kinds [N]; alive [N]: not dropped yet; starts: number of the first document of each shard. Raises
    `DataError` if there are too few trusted samples to learn from.
    """
    judged = np.flatnonzero(alive & (kinds != KINDS.index("qa")) & (features[:, _NUM_WORDS] >= _FEWEST_WORDS))
    path = work / _CASCADE
    if not path.exists():
        trained = train_cascade(read_trusted(config.trusted, config.num_samples), config, seed, work)
        write_atomic(path, json.dumps([asdict(trained[0]), trained[1]]))
    cascade, report = json.loads(path.read_text())
    cascade = Cascade(**cascade | {"forms": KnownForms(**cascade["forms"])})
    shards = np.searchsorted(starts, judged, side="right") - 1
    items = [
        (str(work), int(shard), (judged[shards == shard] - starts[shard]).tolist(), config, cascade)
        for shard in np.unique(shards)
    ]
    drops: dict[int, tuple[str, str, str]] = {}
    num_unknown = num_uncertain = 0
    for shard, arrays in engine.map(score_shard, items):
        p, by_model, has_form = arrays["p"], arrays["by_model"], arrays["has_form"]
        num_unknown += int((~has_form).sum())
        num_uncertain += int((has_form & cascade.is_uncertain(p)).sum())
        for row, first, second, known in zip(arrays["rows"], p, by_model, has_form, strict=True):
            if known and first >= cascade.threshold:
                detail = f"probability {first:.3f}, limit {cascade.threshold:.3f}"
            elif known and second >= cascade.model_threshold:
                detail = f"probability {second:.3f} by the model, limit {cascade.model_threshold:.3f}"
            else:
                continue
            drops[int(starts[shard] + row)] = ("noise", "noise", detail)
    counts = {"judged": len(judged), "abstained": num_unknown, "uncertain": num_uncertain, "dropped": len(drops)}
    return drops, {**report, **counts}


def train_cascade(
    trusted: Sequence[Document], config: NoiseConfig, seed: int, work: Path
) -> tuple[Cascade, dict[str, Any]]:
    """Learn from trusted documents and from junk made of them; writes the classifier into `work`. Returns how it
    decides, and what it did on held-out documents and generators.
    """
    texts = [document.text for document in trusted if len(document.text.split()) >= _FEWEST_WORDS]
    if len(texts) < FEWEST_SAMPLES:
        text = f"noise.trusted: {len(texts)} documents of {_FEWEST_WORDS} words or more are too few to learn from"
        raise DataError(f"{text}; give at least {FEWEST_SAMPLES}, or empty clean.noise.trusted")
    samples = _samples(texts, seed)
    is_noise = samples.names != ""
    train, test = (np.flatnonzero(samples.sets == number) for number in range(len(_SETS)))
    classifier, unseen = LinearClassifier.fit([samples.texts[i] for i in train], is_noise[train], samples.groups[train])
    classifier.save(work / _CLASSIFIER)
    forms = KnownForms.of([samples.texts[i] for i in train if not is_noise[i]])
    threshold = threshold_for(unseen, is_noise[train], config.min_precision, config.assumed_share)
    p = np.empty(len(samples.texts))
    p[train], p[test] = unseen, classifier.probabilities([samples.texts[i] for i in test])
    cascade = Cascade(forms=forms, threshold=threshold)
    by_model = np.zeros(len(p))
    if config.model:
        cascade, by_model = _with_model(cascade, samples, p, train, test, config)
    dropped = np.array([forms.includes(samples.texts[i]) for i in test])
    dropped &= (p[test] >= cascade.threshold) | (
        cascade.is_uncertain(p[test]) & (by_model[test] >= cascade.model_threshold)
    )
    report = _test_report(samples.names[test], dropped, config)
    report |= {"num_trusted": len(texts), "threshold": round(cascade.threshold, 4), "layouts": list(forms.layouts)}
    report["languages"] = list(forms.languages)
    report["share_uncertain"] = round(float(cascade.is_uncertain(p[test]).mean()), 4)
    return cascade, report


def low_recall(noise: Mapping[str, Any]) -> list[str]:
    """The generators whose junk the classifier hardly finds, from the report of the stage."""
    return [name for name, recall in noise.get("recall_by_kind", {}).items() if recall < _LOW_RECALL]


def _test_report(names: NDArray[np.str_], dropped: NDArray[np.bool_], config: NoiseConfig) -> dict[str, Any]:
    """Precision for the assumed share of noise, recall on generators that were not trained on and on those that were,
    and the fraction of trusted text that is dropped.
    """
    by_kind = {name: float(dropped[names == name].mean()) for name in np.unique(names[names != ""])}
    recall = float(np.mean([by_kind[name] for name in by_kind if name in TEST_CORRUPTIONS] or [0.0]))
    trained = float(np.mean([by_kind[name] for name in by_kind if name in TRAINING_CORRUPTIONS] or [0.0]))
    lost = float(dropped[names == ""].mean()) if (names == "").any() else 0.0
    hits, false = config.assumed_share * recall, (1 - config.assumed_share) * lost
    return {
        "precision": round(hits / (hits + false), 4) if hits + false else 1.0,
        "recall": round(recall, 4), "recall_trained": round(trained, 4), "trusted_dropped": round(lost, 4),
        "recall_by_kind": {name: round(value, 4) for name, value in by_kind.items() if name in TEST_CORRUPTIONS},
    }  # fmt: skip


def _samples(trusted: Sequence[str], seed: int) -> _Samples:
    """Trusted texts with junk made of each: by the generators to learn from, in the test set by all of them."""
    texts: list[str] = []
    names: list[str] = []
    sets: list[int] = []
    groups: list[int] = []
    for number, text in enumerate(trusted):
        rng = random.Random(derive_seed(seed, "noise", text))
        which = int(np.searchsorted(np.cumsum(_SHARES[:-1]), rng.random(), side="right"))
        makers = TRAINING_CORRUPTIONS
        chosen = [list(makers)[number % len(makers)]]
        if _SETS[which] == "test":
            makers = TRAINING_CORRUPTIONS | TEST_CORRUPTIONS
            chosen.append(list(TEST_CORRUPTIONS)[number % len(TEST_CORRUPTIONS)])
        texts += [text, *(makers[name](text, rng) for name in chosen)]
        names += ["", *chosen]
        sets += [which] * (1 + len(chosen))
        groups += [number] * (1 + len(chosen))
    return _Samples(texts=texts, names=np.array(names), sets=np.array(sets), groups=np.array(groups))


def _with_model(
    cascade: Cascade, samples: _Samples, p: NDArray[np.float64], train: NDArray[np.int64],
    test: NDArray[np.int64], config: NoiseConfig,
) -> tuple[Cascade, NDArray[np.float64]]:  # fmt: skip
    """The cascade with the second model, calibrated (Platt scaling) on uncertain samples or on all if these are few,
    and its probabilities for the samples of the test.
    """
    from sklearn.linear_model import LogisticRegression

    from modelwright.data.noise_model import NoiseModel

    model = NoiseModel(config.model, config.model_noise_label)
    is_noise = samples.names != ""
    chosen = train[cascade.is_uncertain(p[train])]
    if min(is_noise[chosen].sum(), (~is_noise[chosen]).sum()) < FEWEST_SAMPLES // 10:
        chosen = train[: 10 * FEWEST_SAMPLES]
    scores = model.scores([samples.texts[i] for i in chosen])
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
    by_model[uncertain] = cascade.by_model(model.scores([samples.texts[i] for i in uncertain]))
    return cascade, by_model


def score_shard(item: tuple[str, int, list[int], NoiseConfig, Cascade]) -> tuple[int, dict[str, NDArray[Any]]]:
    """Probabilities of noise of some documents of a shard by both steps, and whether their form is known; runs in
    worker processes.
    """
    folder, number, rows, config, cascade = item
    files = ShardFiles(Path(folder), number)
    if files.facts("noise") is None:
        documents = unpack_documents(files.read("measured", "docs.zst"))
        texts = [documents[row].text for row in rows]
        p = LinearClassifier.load(Path(folder) / _CLASSIFIER).probabilities(texts)
        has_form = np.ones(len(texts), np.bool_)
        for index in np.flatnonzero(p >= _SURELY_TRUSTED):
            has_form[index] = cascade.forms.includes(texts[index])
        by_model = np.zeros(len(texts))
        uncertain = np.flatnonzero(has_form & cascade.is_uncertain(p))
        if config.model and len(uncertain):
            from modelwright.data.noise_model import NoiseModel

            scores = NoiseModel(config.model, config.model_noise_label).scores([texts[index] for index in uncertain])
            by_model[uncertain] = cascade.by_model(scores)
        arrays = {"rows": np.array(rows, np.int64), "p": p, "by_model": by_model, "has_form": has_form}
        write_file(files.path("noise.npz"), pack_arrays(arrays))
        files.finish("noise", ["noise.npz"], {})
    return number, unpack_arrays(files.read("noise", "noise.npz"))
