"""Noise: a classifier of trusted text against junk, as a cascade.

A logistic regression on the features of the stage quality decides the clear cases. Only documents in its uncertain
band are read by an encoder (`data/noise_encoder.py`), which is trained once for the corpus, or by any Hugging Face
sequence-classification model on disk.

Trusted samples are given (`trusted`), or are the documents of the corpus itself with the most ordinary features; junk
is made from them (`corruptions.py`). A part of the samples is held out: on it the probabilities are calibrated, the
band and the threshold chosen, and precision and recall measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError

_RIDGE = 1e-3
_MAX_NEWTON_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The noise classifier."""

    enabled: bool = False
    """Drop prose and code that a classifier takes for junk."""
    trusted: tuple[str, ...] = ()
    """Files or directories with trusted text; empty takes the most ordinary documents of the corpus."""
    model: str = ""
    """Folder of a Hugging Face sequence-classification model that decides instead of our own encoder."""
    model_noise_label: str = "1"
    """Label of the class of `model` that stands for noise, by name or number."""
    min_precision: float = 0.95
    """Precision that the threshold must reach on held-out samples: the share of dropped documents that are junk."""
    assumed_share: float = constant(0.1)
    """Share of noise in the corpus for which `min_precision` is kept; with more noise the precision is higher."""
    min_train_steps: int = constant(300)
    """Steps of training the encoder, or three epochs if these are more."""
    num_samples: int = constant(3000)
    """Most trusted samples; as many junk samples are made from them."""
    max_missed: float = constant(0.005)
    """Share of held-out samples that may be noise below the uncertain band."""
    max_false: float = constant(0.0005)
    """Share of held-out samples that may be trusted text above the uncertain band; an outlier is not noise yet."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.min_precision < 1:
            raise ConfigError(f"min_precision: must be from 0.5 to below 1, got {self.min_precision}; 0.95 is usual")


@dataclass(frozen=True, kw_only=True)
class LogisticModel:
    """P(noise) = sigmoid(weights . (x - mean) / scale + bias), for features x and their squares."""

    mean: list[float]
    scale: list[float]
    weights: list[float]
    bias: float

    def probabilities(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """P(noise) [N] of documents with these features [N, F]."""
        scores = _standardized(features, np.array(self.mean), np.array(self.scale)) @ np.array(self.weights) + self.bias
        return 1 / (1 + np.exp(-np.clip(scores, -50, 50)))

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def fit_logistic(features: NDArray[np.float32], labels: NDArray[np.bool_]) -> LogisticModel:
    """Fit by Newton's method with a small ridge penalty. features [N, F]; labels [N]: whether noise."""
    mean = features.mean(axis=0, dtype=np.float64)
    scale = features.std(axis=0, dtype=np.float64) + 1e-6
    inputs = _standardized(features, mean, scale)
    design = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    weights = np.zeros(design.shape[1])
    penalty = _RIDGE * len(design) * np.eye(design.shape[1])
    penalty[-1, -1] = 0
    for _ in range(_MAX_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -50, 50)))
        gradient = design.T @ (p - labels) + penalty @ weights
        hessian = (design * (p * (1 - p) + 1e-9)[:, None]).T @ design + penalty
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if np.abs(step).max() < 1e-6:
            break
    return LogisticModel(
        mean=mean.tolist(), scale=scale.tolist(), weights=weights[:-1].tolist(), bias=float(weights[-1])
    )


def uncertain_band(
    p: NDArray[np.float64], labels: NDArray[np.bool_], max_missed: float, max_false: float
) -> tuple[float, float]:
    """`(low, high)`: below low a document is trusted, above high it is noise; of all samples at most a share of
    `max_missed` is noise below low, and of `max_false` trusted above high.
    """
    order = np.argsort(p)
    errors_below = np.cumsum(labels[order]) / len(p)
    errors_above = np.cumsum(~labels[order][::-1])[::-1] / len(p)
    num_low = int(np.searchsorted(errors_below, max_missed, side="right"))
    low = float(p[order][num_low]) if num_low < len(p) else 1.0
    fits = np.flatnonzero(errors_above <= max_false)
    high = float(p[order][fits[0]]) if len(fits) else 1.0
    return (low, high) if low < high else ((low + high) / 2, (low + high) / 2)


def calibrate(scores: NDArray[np.float64], labels: NDArray[np.bool_]) -> tuple[float, float]:
    """Platt scaling (1999): slope and offset such that sigmoid(slope * score + offset) is the probability of noise."""
    model = fit_logistic(scores[:, None].astype(np.float32), labels)
    linear = model.weights[0] / model.scale[0]
    return linear, model.bias - linear * model.mean[0]


def threshold_for(p: NDArray[np.float64], labels: NDArray[np.bool_], min_precision: float, share: float) -> float:
    """The lowest threshold from which the precision is at least `min_precision` if a share of `share` of all documents
    is noise, whatever its share among the samples; 1 if there is none. One more false drop than there were is counted
    (Laplace's rule), so that few samples promise little.
    """
    order = np.argsort(-p, kind="stable")
    hits = np.cumsum(labels[order]) * share / max(1, int(labels.sum()))
    false = (np.cumsum(~labels[order]) + 1) * (1 - share) / (int((~labels).sum()) + 1)
    precision = hits / np.maximum(hits + false, 1e-12)
    good = np.flatnonzero(precision >= min_precision)
    return float(p[order][good[-1]]) if len(good) else 1.0


def precision_recall(dropped: NDArray[np.bool_], labels: NDArray[np.bool_]) -> tuple[float, float]:
    """Precision and recall of dropping noise; 1 and 0 if nothing is dropped."""
    hits = int((dropped & labels).sum())
    return hits / max(1, int(dropped.sum())) if dropped.any() else 1.0, hits / max(1, int(labels.sum()))


def ordinariness(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """How far each document is from the median of any feature, in units of the median absolute deviation [N]."""
    middle = np.median(features, axis=0)
    spread = np.median(np.abs(features - middle), axis=0) + 1e-6
    return (np.abs(features - middle) / spread).max(axis=1)


def _standardized(features: NDArray[np.float32], mean: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float64]:
    return np.clip((features - mean) / scale, -10, 10)
