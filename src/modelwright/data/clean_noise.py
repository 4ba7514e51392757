"""The stage noise over a whole corpus: samples, training, and the scores of documents in the uncertain band."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import DataError
from modelwright.core.seeds import derive_seed
from modelwright.data.corruptions import CORRUPTIONS
from modelwright.data.document import KINDS, Document
from modelwright.data.shard_files import ShardFiles, pack_arrays, unpack_arrays, unpack_documents, write_file
from modelwright.data.steps.noise import (
    LogisticModel,
    NoiseConfig,
    calibrate,
    fit_logistic,
    ordinariness,
    precision_recall,
    threshold_for,
    uncertain_band,
)
from modelwright.data.steps.quality import FEATURES, QualityConfig, measure
from modelwright.data.workers import ShardEngine

FEWEST_SAMPLES = 200
"""Fewer trusted samples are too few to learn from."""
_FEWEST_WORDS = 30
"""Shorter documents are not judged."""
_USED = [number for number, name in enumerate(FEATURES) if name not in ("num_chars", "num_words")]
_NUM_WORDS = FEATURES.index("num_words")
_SETS = ("train", "calibration", "test")
_SHARES = (0.7, 0.15, 0.15)

ReadTexts = Callable[[Sequence[int]], list[Document]]
"""The documents with these numbers."""
ReadTrusted = Callable[[tuple[str, ...], int], list[Document]]
"""At most so many documents of some sources."""


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """The cascade. band: probabilities of the logistic regression between which the encoder decides, whose calibrated
    probability is sigmoid(slope * score + offset); threshold: documents from this probability on are noise.
    """

    logistic: LogisticModel
    band: tuple[float, float]
    slope: float
    offset: float
    threshold: float
    report: dict[str, Any]


def find_noise(
    features: NDArray[np.float32],
    kinds: NDArray[np.int8],
    alive: NDArray[np.bool_],
    starts: NDArray[np.int64],
    config: NoiseConfig,
    work: Path,
    engine: ShardEngine,
    read_texts: ReadTexts,
    read_trusted: ReadTrusted,
) -> tuple[dict[int, tuple[str, str, str]], dict[str, Any]]:
    """The documents that are dropped as noise, and the report of the classifier.

    features [N, F], kinds [N]; alive [N]: not dropped yet; starts: number of the first document of each shard. Raises
    `DataError` if there are too few trusted samples to learn from.
    """
    judged = np.flatnonzero(alive & (kinds != KINDS.index("qa")) & (features[:, _NUM_WORDS] >= _FEWEST_WORDS))
    path = work / "noise.json"
    if not path.exists():
        if config.trusted:
            trusted = read_trusted(config.trusted, config.num_samples)
        else:
            trusted = read_texts(_ordinary(features, kinds, judged, config.num_samples))
        classifier = train_classifier(trusted, config, work)
        write_atomic(path, json.dumps(vars(classifier) | {"logistic": classifier.logistic.plain()}))
    plain = json.loads(path.read_text())
    classifier = Classifier(**plain | {"logistic": LogisticModel(**plain["logistic"])})
    p = classifier.logistic.probabilities(features[judged][:, _USED])
    low, high = classifier.band
    uncertain = judged[(p >= low) & (p <= high)]
    by_encoder = _encoder_scores(uncertain, starts, config, work, engine)
    drops: dict[int, tuple[str, str, str]] = {}
    for number, value in zip(map(int, judged), p, strict=True):
        by = "features"
        if number in by_encoder:
            value, by = _sigmoid(classifier.slope * by_encoder[number] + classifier.offset), "encoder"
        elif value <= high:
            continue
        if value >= classifier.threshold or by == "features":
            detail = f"probability {value:.3f} by {by}, limit {classifier.threshold:.3f}"
            drops[number] = ("noise", "noise", detail)
    counts = {"judged": len(judged), "read_by_encoder": len(uncertain), "dropped": len(drops)}
    return drops, {**classifier.report, **counts}


def train_classifier(trusted: Sequence[Document], config: NoiseConfig, work: Path) -> Classifier:
    """Learn from trusted documents and from junk made of them; writes the encoder to `work/noise.safetensors`."""
    trusted = [document for document in trusted if len(document.text.split()) >= _FEWEST_WORDS]
    if len(trusted) < FEWEST_SAMPLES:
        text = f"noise.trusted: {len(trusted)} documents of {_FEWEST_WORDS} words or more are too few to learn from"
        raise DataError(f"{text}; give at least {FEWEST_SAMPLES}, or set clean.noise.enabled to false")
    texts, labels, sets, names = _samples(trusted)
    quality = QualityConfig()
    rows = [measure(_plain(text), quality) for text in texts]
    features = np.array(rows, np.float32)[:, _USED]
    part = {name: np.flatnonzero(sets == number) for number, name in enumerate(_SETS)}
    logistic = fit_logistic(features[part["train"]], labels[part["train"]])
    p = logistic.probabilities(features)
    calibration = part["calibration"]
    band = uncertain_band(p[calibration], labels[calibration], config.max_missed, config.max_false)
    score = _scorer(config, work, lambda: _fit_encoder(texts, labels, part["train"], config, work))
    scores = np.full(len(texts), np.nan)
    both = np.concatenate([calibration, part["test"]])
    scores[both] = score([texts[i] for i in both])
    slope, offset = calibrate(scores[calibration], labels[calibration])
    is_uncertain = (p >= band[0]) & (p <= band[1])
    combined = np.where(is_uncertain, _sigmoid(slope * scores + offset), p)
    chosen = calibration[is_uncertain[calibration]]
    threshold = (
        threshold_for(combined[chosen], labels[chosen], config.min_precision, config.assumed_share)
        if len(chosen)
        else band[1]
    )
    test = part["test"]
    dropped = np.where(is_uncertain, combined >= threshold, p > band[1])
    precision, recall = precision_recall(dropped[test], labels[test])
    alone = precision_recall(p[test] >= 0.5, labels[test])
    by_kind: dict[str, float] = {}
    for name in sorted(CORRUPTIONS):
        members = [i for i in test if names[i] == name]
        if members:
            by_kind[name] = round(float(dropped[members].mean()), 4)
    report = {
        "num_trusted": len(trusted), "band": [round(value, 4) for value in band], "threshold": round(threshold, 4),
        "share_uncertain": round(float(is_uncertain[test].mean()), 4), "precision": round(precision, 4),
        "recall": round(recall, 4), "features_alone": [round(value, 4) for value in alone], "recall_by_kind": by_kind,
        "samples": {name: len(members) for name, members in part.items()},
    }  # fmt: skip
    return Classifier(
        logistic=logistic, band=band, slope=slope, offset=offset, threshold=threshold, report=report
    )  # fmt: skip


def _samples(
    trusted: Sequence[Document],
) -> tuple[list[str], NDArray[np.bool_], NDArray[np.int64], list[str]]:
    """Texts with their labels, sets and kinds of junk. A text and the junk made of it are in one set."""
    texts: list[str] = []
    names: list[str] = []
    sets: list[int] = []
    kinds = list(CORRUPTIONS)
    for number, document in enumerate(trusted):
        rng = random.Random(derive_seed(0, "noise", document.text))
        which = int(np.searchsorted(np.cumsum(_SHARES[:-1]), rng.random(), side="right"))
        kind = kinds[number % len(kinds)]
        texts += [document.text, CORRUPTIONS[kind](document.text, rng)]
        names += ["", kind]
        sets += [which, which]
    return texts, np.array([bool(name) for name in names]), np.array(sets), names


def _ordinary(
    features: NDArray[np.float32], kinds: NDArray[np.int8], judged: NDArray[np.int64], most: int
) -> list[int]:
    """A sample of the documents of each kind, without the fifth whose features are the least ordinary."""
    result: list[int] = []
    for kind in np.unique(kinds[judged]):
        members = judged[kinds[judged] == kind]
        best = members[
            np.argsort(ordinariness(features[members][:, _USED]), kind="stable")[: -(-4 * len(members) // 5)]
        ]
        share = max(1, round(most * len(members) / len(judged)))
        rng = np.random.Generator(np.random.Philox(derive_seed(0, "trusted", str(kind)) % 2**63))
        result += sorted(best[np.argsort(rng.random(len(best)))[:share]].tolist())
    return result


def _plain(text: str) -> Document:
    return Document(id="", text=text, kind="prose", split="train", source="")


def _fit_encoder(
    texts: list[str], labels: NDArray[np.bool_], train: NDArray[np.int64], config: NoiseConfig, work: Path
) -> None:
    from modelwright.data.noise_encoder import save_encoder, train_encoder

    model = train_encoder([texts[i] for i in train], [bool(labels[i]) for i in train], min_steps=config.min_train_steps)
    save_encoder(model, work / "noise.safetensors")


Scorer = Callable[[Sequence[str]], NDArray[np.float64]]


def _scorer(config: NoiseConfig, work: Path, fit: Callable[[], None] = lambda: None) -> Scorer:
    """Scores of texts by the encoder in `work`, after `fit` has made it, or by the model that was configured."""
    if config.model:
        return _hugging_face_scorer(config)
    from modelwright.data.noise_encoder import load_encoder, score_texts

    fit()
    model = load_encoder(work / "noise.safetensors")
    return lambda texts: score_texts(model, texts)


def _hugging_face_scorer(config: NoiseConfig) -> Scorer:
    try:
        import transformers
    except ImportError:
        raise DataError("noise.model: needs the package transformers; install modelwright[hf]") from None
    import torch

    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            config.model, local_files_only=True, use_safetensors=True
        ).eval()
    except (OSError, ValueError) as error:
        text = f"noise.model: {config.model}: cannot be loaded ({str(error).splitlines()[0]})"
        raise DataError(f"{text}; give a folder of a sequence-classification model with safetensors") from None
    label = {name.lower(): int(number) for number, name in model.config.id2label.items()}
    noise = label.get(config.model_noise_label.lower())
    if noise is None and config.model_noise_label.isdigit():
        noise = int(config.model_noise_label)
    if noise is None or not 0 <= noise < model.config.num_labels:
        known = ", ".join(model.config.id2label.values())
        raise DataError(f"noise.model_noise_label: {config.model_noise_label!r} is not one of {known}")
    longest = min(512, getattr(model.config, "max_position_embeddings", 512))

    def score(texts: Sequence[str]) -> NDArray[np.float64]:
        result: list[float] = []
        with torch.inference_mode():
            for at in range(0, len(texts), 16):
                batch = tokenizer(
                    list(texts[at : at + 16]), truncation=True, max_length=longest, padding=True, return_tensors="pt"
                )
                logits = model(**batch).logits.double()
                others = [number for number in range(logits.shape[1]) if number != noise]
                result += (logits[:, noise] - logits[:, others].logsumexp(dim=1)).tolist()
        return np.array(result)

    return score


def _encoder_scores(
    numbers: NDArray[np.int64], starts: NDArray[np.int64], config: NoiseConfig, work: Path, engine: ShardEngine
) -> dict[int, float]:
    """Scores of the documents with these numbers, shard by shard."""
    shards = np.searchsorted(starts, numbers, side="right") - 1
    items = [
        (str(work), int(shard), (numbers[shards == shard] - starts[shard]).tolist(), config)
        for shard in np.unique(shards)
    ]
    result: dict[int, float] = {}
    for shard, rows, scores in engine.map(score_shard, items):
        result |= {int(starts[shard]) + row: score for row, score in zip(rows, scores, strict=True)}
    return result


def score_shard(item: tuple[str, int, list[int], NoiseConfig]) -> tuple[int, list[int], list[float]]:
    """Scores of some documents of a shard; runs in worker processes."""
    folder, number, rows, config = item
    files = ShardFiles(Path(folder), number)
    if files.facts("noise") is None:
        documents = unpack_documents(files.read("measured", "docs.zst"))
        scores = _scorer(config, Path(folder))([documents[row].text for row in rows])
        write_file(files.path("noise.npz"), pack_arrays({"rows": np.array(rows), "scores": scores}))
        files.finish("noise", ["noise.npz"], {})
    arrays = unpack_arrays(files.read("noise", "noise.npz"))
    return number, arrays["rows"].tolist(), arrays["scores"].tolist()


def _sigmoid(value: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(value, -50, 50)))
