"""align: texts, code and images in one space, by contrastive learning of pairs.

Rows are groups of two: texts, and what belongs to them. Code is tokens; an image is two end tokens whose value is its
number plus 1 in the image store. Artifact: the language model with its tokenizer, and the towers next to it
(`objectives/contrastive.py`). Facts: `retrieval`, recall on held-out pairs with chance and bags of words, and
examples.

Legend: Q queries, C candidates.
"""

import base64
import io
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import DataError
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document, Split
from modelwright.data.images.decode import KEY, StoredImage, decode, pillow
from modelwright.data.images.store import FORMAT, ImageStore, images_folder, open_images, write_images
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import TokenSequence, row_source
from modelwright.data.sources.stdlib_corpus import described_functions
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.objectives.contrastive import AlignConfig, AlignedModel, Contrastive, save_alignment
from modelwright.pipeline.report.blocks import Block, Fact, Samples, Table, TextSample, count, percent
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import PackJob, RowUse, Sequences, TrainingData
from modelwright.pipeline.stages.training import FurtherModels, TrainedModel, metric_charts, training_spec

SIDE = 64
"""Maximum pixels per side of a thumbnail."""


def thumbnail(data: bytes) -> str:
    """Returns an image file as a small PNG in a `data:` URL."""
    image, file = pillow().fromarray(decode(data)), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


MOST_IMAGES = 2**24 - 2
"""Largest number of an image: numbers are stored as FP32, which is exact for integers up to 2^24."""
ROWS_READ_AT_ONCE = 64
"""Rows, or groups of them, that are read together where all are read in order."""


def _pack_aligned(job: PackJob, split: Split) -> None:
    with write_images(images_folder(job.context.output.path / ALIGNED_ROWS.name, split)) as images:
        # Documents are encoded some blocks ahead; their pairs wait in order, with the number of the image or -1.
        waiting: deque[tuple[Document, int]] = deque()

        def texts() -> Iterator[str]:
            for document in read_kept(job.clean, split=split, kinds=("image", "code")):
                if document.kind == "image":
                    number = images.add(StoredImage.from_plain(document.meta[KEY]).data)
                    if number > MOST_IMAGES:
                        raise DataError(f"pack: there are more than {MOST_IMAGES:,} images; pack them in several runs")
                    waiting.append((document, number))
                    yield document.text
                elif document.kind == "code":
                    for pair in described_functions(document.text):
                        waiting.append((document, -1))
                        yield pair.text
                        yield pair.code

        def sequences() -> Sequences:
            encoded = job.tokenizer.encode_documents(texts(), num_threads=job.config.hardware.num_threads)
            for text_ids in encoded:
                document, number = waiting.popleft()
                other_ids = next(encoded) if number < 0 else np.full(2, job.tokenizer.end_id)
                source, value = row_source(document, job.settings.group_by), float(number + 1)
                for ids in (text_ids, other_ids):
                    # Cut, with room for the end token: both sides of a pair must stay one sequence each.
                    yield TokenSequence(ids[: job.settings.seq_len - 1], source=source, value=value)

        job.pack(f"{ALIGNED_ROWS.name}/{split}", sequences(), group_size=2)


@dataclass(frozen=True)
class AlignedPair:
    """A packed pair, cut to the length of a row. image: number of its image; -1 for code."""

    text: str
    text_ids: np.ndarray
    code_ids: np.ndarray
    image: int


def read_pairs(rows: PackedRows, tokenizer: Tokenizer) -> Iterator[AlignedPair]:
    """Reads the pairs of packed rows, in order."""
    for batch in rows.batches(ROWS_READ_AT_ONCE):
        whole = (batch.input_ids_BT, batch.segments_BT, batch.extras["values_BT"])
        groups = (one.unflatten(0, (-1, 2)).numpy() for one in whole)
        for tokens, segments, values in zip(*groups, strict=True):
            for piece in range(int(segments[0].max()) + 1):
                text_ids, other_ids = (tokens[side][segments[side] == piece] for side in range(2))
                number = round(float(values[1][segments[1] == piece][0])) - 1
                yield AlignedPair(tokenizer.decode(text_ids).strip(), text_ids, other_ids, number)


ALIGNED_ROWS = RowSet(
    name="aligned_pairs",
    title="texts with images and code",
    pack=_pack_aligned,
    documents="image with a caption and no described function",
    trained_rows=2,
    learned="images",
    decides=lambda config: {"images": FORMAT},
    stdlib_bytes=6e6,
)


RANKS = (1, 5)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
"""Words, and the words inside identifiers."""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Shares of the queries with a relevant candidate among the best 1 and 5."""

    at_1: float
    at_5: float


def recall(scores_QC: NDArray[np.floating], is_relevant_QC: NDArray[np.bool_]) -> Recall:
    """Recall of candidates by descending score. Of equal scores the worst order counts, so that equal scores for all
    candidates find nothing; NaN scores are the lowest.
    """
    scores_QC = np.where(np.isnan(scores_QC), -np.inf, scores_QC)
    best_Q = np.where(is_relevant_QC, scores_QC, -np.inf).max(axis=1)
    # `>=`: ties count as ranked before, which is the worst order.
    num_before_Q = ((scores_QC >= best_Q[:, None]) & ~is_relevant_QC).sum(axis=1)
    at_1, at_5 = (float((num_before_Q < most).mean()) for most in RANKS)
    return Recall(at_1=at_1, at_5=at_5)


def chance(is_relevant_QC: NDArray[np.bool_]) -> Recall:
    """Expected recall of candidates in random order."""
    num_candidates = is_relevant_QC.shape[1]
    at: list[float] = []
    for rank in RANKS:
        most = min(rank, num_candidates)
        # Probability that none of the relevant candidates is among the first: hypergeometric.
        missed = [
            math.comb(num_candidates - relevant, most) / math.comb(num_candidates, most)
            for relevant in is_relevant_QC.sum(axis=1).tolist()
        ]
        at.append(float(np.mean([1 - probability for probability in missed])))
    return Recall(at_1=at[0], at_5=at[1])


def bag_of_words(queries: Sequence[str], candidates: Sequence[str]) -> NDArray[np.float64]:
    """Cosines of TF-IDF vectors [Q, C]; identifiers are split into their words."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second

    options: dict[str, Any] = {"token_pattern": None}  # or scikit-learn warns that the tokenizer replaces it
    vectorizer = TfidfVectorizer(tokenizer=words, lowercase=False, sublinear_tf=True, **options)
    vectors = vectorizer.fit_transform([*queries, *candidates])
    return np.asarray((vectors[: len(queries)] @ vectors[len(queries) :].T).todense())


def words(text: str) -> list[str]:
    """Splits a text or code into words in lower case; a placeholder for a text without any."""
    return [word.lower() for word in _WORDS.findall(text)] or [""]


MOST_PAIRS = 1000
"""Number of held-out pairs of each kind in the search for the right partner."""
MOST_NEIGHBORS = 10_000
"""Training pairs among which the baseline of images searches for the nearest pixels."""
NUM_EXAMPLES, NUM_SHOWN, SHOWN_CHARS = 3, 3, 160
NEIGHBOR_SIDE = 16
"""Pixels per side in the baseline's comparison."""


def measure_retrieval(model: AlignedModel, training: TrainingData, rows: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns recall by task, `recall`, and some queries with the best candidates, `examples`. training: training data
    of the model; rows: folder of the set of rows.
    """
    pairs = list(read_pairs(PackedRows(rows / "heldout"), tokenizer))
    with_code = [pair for pair in pairs if pair.image < 0][:MOST_PAIRS]
    with_image = [pair for pair in pairs if pair.image >= 0][:MOST_PAIRS]
    result: dict[str, Any] = {"recall": {}, "examples": {}}
    if with_code:
        texts, code = [one.text for one in with_code], [tokenizer.decode(one.code_ids).strip() for one in with_code]
        text_vectors = model.embed_tokens("text", [pair.text_ids for pair in with_code])
        scores = text_vectors @ model.embed_tokens("code", [pair.code_ids for pair in with_code]).T
        is_right = _same(texts, texts)
        words = bag_of_words(texts, code)
        _add(result, "code: text to code", scores, words, is_right, texts, code)
        _add(result, "code: code to text", scores.T, words.T, is_right.T, code, texts)
    if with_image:
        store = open_images(rows, "heldout")
        assert store is not None
        captions = [pair.text for pair in with_image]
        # The baseline knows an image by the caption of the training image with the nearest pixels; "" without any.
        neighbors = [""] * len(captions)
        if training.images is not None:
            known = list(
                islice((one for one in read_pairs(training.rows, tokenizer) if one.image >= 0), MOST_NEIGHBORS)
            )
            of_training, of_heldout = _small(training.images, known), _small(store, with_image)
            squares = (of_training**2).sum(axis=1)  # |a - b|^2 without |b|^2, the same for all training images
            nearest = (squares - 2 * of_heldout @ of_training.T).argmin(axis=1)
            neighbors = [known[place].text for place in nearest]
            del of_training, of_heldout
        # A caption that several images share is one query, or one candidate: each of its images is a right answer.
        first_with = {caption: place for place, caption in reversed(list(enumerate(captions)))}
        texts = list(first_with)
        text_vectors = model.embed_tokens("text", [with_image[first_with[text]].text_ids for text in texts])
        scores = text_vectors @ model.embed_images(store.read([pair.image for pair in with_image])).T
        is_right, words = _same(texts, captions), bag_of_words(texts, neighbors)
        names = [f"image {pair.image}: {pair.text}" for pair in with_image]

        def image_at(place: int) -> str:
            return thumbnail(store.data(with_image[place].image))

        _add(result, "image: text to image", scores, words, is_right, texts, names, candidate_image=image_at)
        _add(result, "image: image to text", scores.T, words.T, is_right.T, names, texts, query_image=image_at)
    return result


def _same(texts: Sequence[str], others: Sequence[str]) -> NDArray[np.bool_]:
    return np.array([[text == other for other in others] for text in texts])


def _add(
    result: dict[str, Any], name: str, scores: NDArray[Any], words: NDArray[Any], is_right: NDArray[np.bool_],
    queries: Sequence[str], candidates: Sequence[str], *, query_image: Callable[[int], str] | None = None,
    candidate_image: Callable[[int], str] | None = None,
) -> None:  # fmt: skip
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
        # Stable, so that equal scores keep the order of the candidates on every machine.
        order: list[int] = np.argsort(-scores[query], kind="stable").tolist()
        place = int(np.flatnonzero(is_right[query][order])[0]) + 1
        lines = [f"{rank}. {_short(candidates[one])}" for rank, one in enumerate(order[:NUM_SHOWN], start=1)]
        example: dict[str, Any] = {"query": _short(queries[query]), "found": lines, "place": place}
        if query_image:
            example["query_image"] = query_image(query)
        if candidate_image:
            example["found_images"] = [candidate_image(one) for one in order[:NUM_SHOWN]]
        examples.append(example)
    result["examples"][name] = examples


def _small(store: ImageStore, pairs: Sequence[AlignedPair]) -> NDArray[np.float32]:
    """Returns the pixels of the images of pairs, [pairs, values]."""
    images = list(store.squares([one.image for one in pairs], size=NEIGHBOR_SIDE, fit="stretch"))
    return np.stack(images).reshape(len(images), -1).astype(np.float32) / np.float32(255)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 3]}..."


_TITLES = {
    "image: text to image": "captions to images",
    "image: image to text": "images to captions",
    "code: text to code": "docstrings to code",
    "code: code to text": "code to docstrings",
}


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    config = trained.config.section(ALIGN)
    save_model_folder(trained.model, trained.tokenizer, trained.folder)
    settings = {"embed_dim": config.embed_dim, "pooling": config.pooling, "loss": config.loss}
    save_alignment(trained.model, trained.folder, settings)
    if not trained.heldout.is_dir():
        return {}
    assert trained.data is not None
    trained.context.progress.note("align: measuring retrieval on held-out pairs")
    aligned = AlignedModel(trained.model.eval(), config.pooling)
    return {"retrieval": measure_retrieval(aligned, trained.data, trained.heldout.parent, trained.tokenizer)}


def _headline(data: RunData, stage: StageData) -> Sequence[Fact]:
    facts: list[Fact] = []
    for name in ("image: image to text", "code: text to code"):
        found = stage.facts.get("retrieval", {}).get("recall", {}).get(name)
        if found:
            hint = (
                f"recall@1 among {count(found['num_candidates'])}; chance {percent(found['chance']['at_1'], 1)}, "
                f"bag of words {percent(found['bag_of_words']['at_1'], 1)}"
            )
            facts.append(Fact(f"Retrieval, {_TITLES[name]}", percent(found["model"]["at_1"], 1), hint))
    return facts


def _blocks(stage: StageData) -> Sequence[Block]:
    charts = metric_charts(
        stage,
        {
            "Share of texts whose own partner is nearest": {"accuracy/image": "images", "accuracy/code": "code"},
            "Scale of cosines": {"scale": "scale"},
        },
    )
    if not (retrieval := stage.facts.get("retrieval")):
        return charts
    header = ["held-out pairs", "queries", "candidates", "recall@1", "chance", "bag of words", "recall@5", "chance",
              "bag of words"]  # fmt: skip
    rows = [
        [_TITLES[name], count(one["num_queries"]), count(one["num_candidates"])]
        + [percent(one[method][rank], 1) for rank in ("at_1", "at_5") for method in ("model", "chance", "bag_of_words")]
        for name, one in retrieval["recall"].items()
    ]
    caption = (
        "How often the right candidate is the first, or among the first five. Bag of words: TF-IDF of the words; an "
        "image is described by the caption of the training image with the nearest pixels."
    )
    blocks: list[Block] = [Table(header, rows, "Retrieval", caption, numeric=tuple(range(1, 9)))]
    for name, examples in retrieval["examples"].items():
        items = [
            TextSample(
                one["query"], "\n".join(one["found"]), f"right one at place {one['place']}",
                image=one.get("query_image", ""), answer_images=one.get("found_images", ())
            )
            for one in examples
        ]  # fmt: skip
        blocks.append(Samples(items, f"Examples, {_TITLES[name]}"))
    return [*blocks, *charts]


ALIGN = training_spec(
    name="align",
    title="Aligning texts, code and images",
    report_title="Texts, code and images in one space",
    model_title="",  # not a model that later stages continue
    objective=lambda inputs: Contrastive(
        inputs.plan,
        inputs.training,
        images=inputs.images,
        heldout_images=open_images(inputs.parents[PACK.name] / ALIGNED_ROWS.name, "heldout"),
    ),
    rows=ALIGNED_ROWS,
    run_needs=Contrastive.needs,
    needs=lambda config: (PACK.name,),
    extras=lambda config: {"align": "images"},  # scikit-learn's TF-IDF is the baseline
    config=AlignConfig,
    headline=_headline,
    only_if_named=True,
    loss_unit="",
    blocks=_blocks,
    further=lambda run, config: FurtherModels(
        folders={"vision_tower.init_from": config.vision_tower.init_from} if config.vision_tower.init_from else {}
    ),
    row_use=RowUse(compares_rows=True, learns_by_heart=False),
    save=_save,
)
