"""What retrieval of held-out pairs finds, for the facts of the stage align."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.data.images.store import ImageStore, open_images
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.retrieval import bag_of_words, chance, recall
from modelwright.objectives.aligned_model import AlignedModel
from modelwright.pipeline.stages.aligned_rows import AlignedPair, read_pairs
from modelwright.pipeline.stages.cached_rows import TrainingData
from modelwright.pipeline.stages.thumbnails import thumbnail

MOST_PAIRS = 1000
"""Held-out pairs of each kind that are searched among."""
MOST_NEIGHBORS = 10_000
"""Training pairs among which the baseline of images looks for the nearest pixels."""
NUM_EXAMPLES, NUM_SHOWN, SHOWN_CHARS = 3, 3, 160
NEIGHBOR_SIDE = 16
"""Pixels of a side in the baseline's comparison."""


def measure_retrieval(model: AlignedModel, training: TrainingData, rows: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Recall by task, `recall`, and some queries with what was found, `examples`. training: what the model learned
    from; rows: folder of the set of rows.
    """
    pairs = list(read_pairs(PackedRows(rows / "heldout"), tokenizer))
    with_code = [pair for pair in pairs if pair.image < 0][:MOST_PAIRS]
    with_image = [pair for pair in pairs if pair.image >= 0][:MOST_PAIRS]
    result: dict[str, Any] = {"recall": {}, "examples": {}}
    if with_code:
        _code_tasks(model, with_code, tokenizer, result)
    if with_image:
        store = open_images(rows, "heldout")
        assert store is not None
        neighbors = _nearest_captions(with_image, store, training, tokenizer)
        _image_tasks(model, with_image, store, neighbors, result)
    return result


def _code_tasks(
    model: AlignedModel, pairs: Sequence[AlignedPair], tokenizer: Tokenizer, result: dict[str, Any]
) -> None:
    texts, code = [pair.text for pair in pairs], [tokenizer.decode(pair.code_ids).strip() for pair in pairs]
    text_vectors = model.embed_texts([pair.text_ids for pair in pairs])
    scores = text_vectors @ model.embed_code([pair.code_ids for pair in pairs]).T
    is_right = _same(texts, texts)
    words = bag_of_words(texts, code)
    _add(result, "code: text to code", scores, words, is_right, texts, code)
    _add(result, "code: code to text", scores.T, words.T, is_right.T, code, texts)


def _image_tasks(
    model: AlignedModel, pairs: Sequence[AlignedPair], store: ImageStore, neighbors: Sequence[str],
    result: dict[str, Any],
) -> None:  # fmt: skip
    """Captions that several images share are one query, or one candidate."""
    captions = [pair.text for pair in pairs]
    first_with = {caption: place for place, caption in reversed(list(enumerate(captions)))}
    texts = list(first_with)
    text_vectors = model.embed_texts([pairs[first_with[text]].text_ids for text in texts])
    scores = text_vectors @ model.embed_images(store.read([pair.image for pair in pairs])).T
    is_right = _same(texts, captions)
    words = bag_of_words(texts, neighbors)
    names = [f"image {pair.image}: {pair.text}" for pair in pairs]
    images = _Pictures(store, [pair.image for pair in pairs])
    _add(result, "image: text to image", scores, words, is_right, texts, names, found=images)
    _add(result, "image: image to text", scores.T, words.T, is_right.T, names, texts, asked=images)


@dataclass(frozen=True)
class _Pictures:
    """Images of a store, by their places in a list of numbers."""

    store: ImageStore
    numbers: Sequence[int]

    def at(self, place: int) -> str:
        return thumbnail(self.store.data(self.numbers[place]))


def _same(texts: Sequence[str], others: Sequence[str]) -> NDArray[np.bool_]:
    return np.array([[text == other for other in others] for text in texts])


def _add(
    result: dict[str, Any], name: str, scores: NDArray[Any], words: NDArray[Any], is_right: NDArray[np.bool_],
    queries: Sequence[str], candidates: Sequence[str], *, asked: _Pictures | None = None,
    found: _Pictures | None = None,
) -> None:  # fmt: skip
    """asked, found: the pictures of queries and of candidates that are images."""
    result["recall"][name] = {
        "num_queries": len(queries),
        "num_candidates": len(candidates),
        "model": asdict(recall(scores, is_right)),
        "chance": asdict(chance(is_right)),
        "bag_of_words": asdict(recall(words, is_right)),
    }
    examples: list[dict[str, Any]] = []
    shown: list[int] = np.linspace(0, len(queries) - 1, NUM_EXAMPLES).astype(int).tolist()
    for query in shown:
        order: list[int] = np.argsort(-scores[query], kind="stable").tolist()
        place = int(np.flatnonzero(is_right[query][order])[0]) + 1
        lines = [f"{rank}. {_short(candidates[one])}" for rank, one in enumerate(order[:NUM_SHOWN], start=1)]
        example: dict[str, Any] = {"query": _short(queries[query]), "found": lines, "place": place}
        if asked:
            example["query_image"] = asked.at(query)
        if found:
            example["found_images"] = [found.at(one) for one in order[:NUM_SHOWN]]
        examples.append(example)
    result["examples"][name] = examples


def _nearest_captions(
    pairs: Sequence[AlignedPair], store: ImageStore, training: TrainingData, tokenizer: Tokenizer
) -> list[str]:
    """For each held-out image the caption of the training image with the nearest pixels; "" without any."""
    if training.images is None:
        return [""] * len(pairs)
    with_image = (one for one in read_pairs(training.rows, tokenizer) if one.image >= 0)
    known = list(islice(with_image, MOST_NEIGHBORS))
    of_training, of_heldout = _small(training.images, known), _small(store, pairs)
    squares = (of_training**2).sum(axis=1)
    nearest = (squares - 2 * of_heldout @ of_training.T).argmin(axis=1)
    return [known[place].text for place in nearest]


def _small(store: ImageStore, pairs: Sequence[AlignedPair]) -> NDArray[np.float32]:
    """The pixels of the images of pairs, [pairs, values]."""
    images = list(store.squares([one.image for one in pairs], size=NEIGHBOR_SIDE, fit="stretch"))
    return np.stack(images).reshape(len(images), -1).astype(np.float32) / np.float32(255)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 3]}..."
