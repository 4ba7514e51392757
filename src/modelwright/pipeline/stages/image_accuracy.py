"""Accuracy on held-out images, compared with simple rules: facts of a stage, and a table of the report."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.data.images.store import LabeledImages
from modelwright.evaluate.statistics import log10_sign_test, wilson_interval
from modelwright.objectives.image_classifier import TrainedClassifier
from modelwright.pipeline.report.blocks import Fact, Table, count, number, percent

MOST_TRAINING_IMAGES = 10_000
"""Images from which logistic regression learns; with more it takes minutes."""
BASELINE_SIDE = 16
"""Pixels per side of its images."""
MOST_CLASSES_SHOWN = 20
MOST_ITERATIONS = 1000


def measure_accuracy(classifier: TrainedClassifier, training: LabeledImages, heldout: LabeledImages) -> dict[str, Any]:
    """Returns the accuracy with a 95% interval (Wilson), that of the rules, the p-value of a paired sign test against
    logistic regression, and the confusion matrix.
    """
    labels, predicted = heldout.labels.astype(np.int64), _predicted(classifier, heldout)
    started = time.perf_counter()
    by_pixels = logistic_regression(training, heldout)
    most_frequent = int(np.bincount(training.labels).argmax())
    is_right, others = predicted == labels, by_pixels == labels
    better, worse = int((is_right & ~others).sum()), int((others & ~is_right).sum())
    return {
        "num_images": len(labels),
        "num_training_images": len(training),
        "accuracy": float(is_right.mean()),
        "interval": list(wilson_interval(int(is_right.sum()), len(labels))),
        "logistic_regression": float(others.mean()),
        "logistic_regression_s": time.perf_counter() - started,
        "most_frequent_class": float((labels == most_frequent).mean()),
        "num_better": better,
        "num_worse": worse,
        "p_value": min(1.0, 10 ** log10_sign_test(better, worse)),
        "classes": list(heldout.classes),
        "confusion": confusion(labels, predicted, len(heldout.classes)),
    }


def share_right(classifier: TrainedClassifier, heldout: LabeledImages) -> float:
    """Returns the held-out accuracy, without baselines or intervals."""
    return float((_predicted(classifier, heldout) == heldout.labels).mean())


def _predicted(classifier: TrainedClassifier, images: LabeledImages) -> NDArray[np.int64]:
    size = classifier.model.shape.image_size
    squares = list(images.store.squares(range(len(images)), size=size, fit=classifier.fit))
    return classifier.probabilities(squares).argmax(axis=1)


def accuracy_facts(title: str, facts: Mapping[str, Any] | None) -> Sequence[Fact]:
    """Returns an accuracy with that of the rules, for the top of the report; nothing without facts."""
    if not facts:
        return []
    hint = (
        f"of {count(facts['num_images'])} held-out images; logistic regression on pixels "
        f"{percent(facts['logistic_regression'], 1)}, the most frequent class "
        f"{percent(facts['most_frequent_class'], 1)}"
    )
    return [Fact(title, percent(facts["accuracy"], 1), hint)]


def accuracy_table(facts: Mapping[str, Any], *, method: str, title: str, remark: str = "") -> Table:
    """Returns a table of an accuracy and that of the rules. method: name of the first line; remark: further sentences
    of the caption.
    """
    low, high = facts["interval"]
    rows = [
        [method, percent(facts["accuracy"], 1)],
        ["logistic regression on pixels", percent(facts["logistic_regression"], 1)],
        ["the most frequent class", percent(facts["most_frequent_class"], 1)],
    ]
    sentences = (
        f"{count(facts['num_images'])} held-out images, none of which was trained on.",
        remark,
        f"95% interval of {method} {percent(low, 1)} to {percent(high, 1)} (Wilson).",
        f"On {count(facts['num_better'])} images logistic regression alone is wrong, on {count(facts['num_worse'])} it "
        f"alone is right: p = {number(facts['p_value'], 2)} in a sign test. It is scikit-learn's, and learned from the "
        f"labels of {count(min(facts['num_training_images'], MOST_TRAINING_IMAGES))} of "
        f"{count(facts['num_training_images'])} training images.",
    )
    caption = " ".join(sentence for sentence in sentences if sentence)
    return Table(["method", "accuracy"], rows, title, caption, numeric=(1,), strong=(0,))


def confusion(labels: NDArray[np.int64], predicted: NDArray[np.int64], num_classes: int) -> Sequence[Sequence[int]]:
    """Counts the images of each class (row) that were taken for each class (column); [] with many classes."""
    # A larger table is unreadable on the page.
    if num_classes > MOST_CLASSES_SHOWN:
        return []
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts.tolist()


def logistic_regression(training: LabeledImages, heldout: LabeledImages) -> NDArray[np.int64]:
    """Predicts the classes of held-out images by scikit-learn's multinomial logistic regression on standardized pixels,
    learned from at most `MOST_TRAINING_IMAGES` training images. These are drawn at random, because images may be sorted
    by class.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # Sorted again after drawing, so that the store is read in its order.
    drawn = np.sort(np.random.default_rng(0).permutation(len(training))[:MOST_TRAINING_IMAGES])
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=MOST_ITERATIONS))
    model.fit(_pixels(training, drawn), training.labels[drawn])
    return np.asarray(model.predict(_pixels(heldout, np.arange(len(heldout)))), dtype=np.int64)


def _pixels(images: LabeledImages, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Colors in [0, 1], one row for each image."""
    squares = images.store.squares(numbers.tolist(), size=BASELINE_SIDE, fit="crop")
    return np.stack(list(squares)).reshape(len(numbers), -1) / 255.0
