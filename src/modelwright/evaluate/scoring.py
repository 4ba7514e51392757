"""Likelihoods that a model gives to texts of any length: in nats for token sequences, as bits per byte for documents,
and as perplexity for the answers of conversations.

Long sequences are split into overlapping windows, and windows are packed into rows. A sequence of n + 1 tokens has n
predictions; prediction i is of token i + 1 from the tokens up to i. Bytes are those of the record's own text, so that
models with different tokenizers can be compared by them.

`score_records` and its neighbors score single records for one model: reference answers, choices by likelihood,
generated numbers, and costs in nats of answers and texts.

Intervals and exact tests for proportions. Pure Python, in log space for small numbers.

Two models on the same records: differences with a paired bootstrap.

Records are drawn with replacement, each with the results of both models, so that the difficulty of a record for both
cancels out (Efron & Tibshirani 1993, chapters 13 and 15; for language models Koehn 2004). The p-value is that of the
percentile interval which just includes no difference: twice the share of the resamples on the smaller side of 0.

`EvaluateConfig` has the settings of the evaluation: its measures and the amount of text for them.

Legend: B rows, T tokens, D model width, N predictions.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.config import ConfigError, DataError, constant, derive_seed
from modelwright.core.progress import Progress
from modelwright.data.document import Document, join_turns
from modelwright.data.rows.examples import template_variables
from modelwright.data.rows.pack import best_fit
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.tensor_heap import use_tensor_heap
from modelwright.reward.numeric_match import MARKER, equal, final_number

Score = Literal["byte", "token", "pmi"]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceConfig:
    """The multiple-choice benchmark made from validation question/answer pairs."""

    num_questions: int = 600
    """Most questions; 0 leaves the benchmark out."""
    score: Score = "byte"
    """Score that ranks answers for the headline accuracy: log-likelihood per UTF-8 `byte` or per `token`, or `pmi`, its
    gain per byte over the same answer without the question (Holtzman et al. 2021)."""
    min_answer_bytes: int = constant(20)
    """Shortest answer that is asked for."""
    max_answer_bytes: int = constant(400)
    """Longest answer that is asked for."""
    seed: int = constant(0)
    """Seed of questions, distractors and positions."""

    def __post_init__(self) -> None:
        if self.num_questions < 0:
            raise ConfigError(f"num_questions: must be 0 (none) or more, got {self.num_questions}")
        if not 0 < self.min_answer_bytes <= self.max_answer_bytes:
            raise ConfigError(
                f"min_answer_bytes: {self.min_answer_bytes} must be at least 1 and at most max_answer_bytes "
                f"({self.max_answer_bytes})"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Settings of the scores of a model and of its baselines."""

    domains: tuple[str, ...] = ("prose", "code")
    """Kinds of validation documents that get bits per byte; where none of them exists, the question/answer pairs get
    them. Empty measures none. Answers get a perplexity in any case."""
    max_bytes_per_domain: int = 400_000
    """Size of a deterministic sample of whole documents; 0 takes all."""
    context_overlap: float = 0.5
    """Fraction of the context that a window shares with the one before: a token far into a document sees at least this
    fraction of the context, at 1 / (1 - overlap) times the compute."""
    max_context: int = constant(2048)
    """Most tokens of context, for models whose own would not fit in memory."""
    batch_tokens: int = constant(4096)
    """Tokens per forward pass."""
    bootstrap_resamples: int = constant(1000)
    """Resamples of documents behind the 95% intervals."""
    multiple_choice: MultipleChoiceConfig = MultipleChoiceConfig()
    bigram_tokens: int = constant(50_000_000)
    """Most training tokens for the bigram baseline; 0 takes all."""
    seed: int = constant(0)
    """Seed of the samples."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.context_overlap < 1.0:
            raise ConfigError(f"context_overlap: must be at least 0 and below 1, got {self.context_overlap}")
        for name, least in (
            ("max_bytes_per_domain", 0),
            ("max_context", 1),
            ("batch_tokens", 1),
            ("bootstrap_resamples", 1),
            ("bigram_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Window:
    """Predictions [start, end) of sequence `sequence` run through the model; those from `scored_from` on count."""

    sequence: int
    start: int
    end: int
    scored_from: int

    @property
    def length(self) -> int:
        return self.end - self.start


def cut_windows(sequence: int, num_predictions: int, first: int, *, context: int, stride: int) -> Iterator[Window]:
    """Yields windows of at most `context` tokens in which each prediction from `first` on counts exactly once. A
    prediction sees all tokens before it within `context` in the first window, and at least `context - stride` of them
    in every later one. `1 <= stride <= context`.
    """
    assert 1 <= stride <= context, (stride, context)
    done = first
    while done < num_predictions:
        end = min(num_predictions, max(context, done + stride))
        # The tokens before `done` are context alone: an earlier window has counted their predictions.
        yield Window(sequence, max(0, end - context), end, done)
        done = end


def pack_windows(windows: Sequence[Window], row_len: int) -> list[list[Window]]:
    """Packs windows into rows of at most `row_len` tokens: best fit, longest first. Deterministic; fuller rows come
    first, so that rows of like fill share a batch.
    """
    ordered = sorted(windows, key=lambda w: (-w.length, w.sequence, w.start))
    row_of = best_fit(np.array([window.length for window in ordered], dtype=np.int64), row_len).tolist()
    rows: list[list[Window]] = [[] for _ in range(max(row_of, default=-1) + 1)]
    for window, row in zip(ordered, row_of, strict=True):
        rows[row].append(window)
    return sorted(rows, key=lambda row: -sum(window.length for window in row))


@dataclass(frozen=True)
class Scored:
    """A sequence to score: `ids`, of which `ids[first:]` are predicted and the rest is given (`first >= 1`)."""

    ids: Sequence[int]
    first: int
    mask: np.ndarray | None = None
    """1 for the tokens that count [len(ids)]; None if all from `first` on do."""


@torch.no_grad()
def sequence_nats(
    model: Decoder,
    sequences: Sequence[Scored],
    *,
    context_overlap: float,
    max_context: int,
    batch_tokens: int,
    progress: Progress,
    name: str = "score",
) -> np.ndarray:
    """Scores sequences: returns the negative log-likelihood in nats (float64) of the predicted tokens of each.
    Sequences longer than the model's context, or than `max_context`, go through overlapping windows; short ones share
    rows without seeing each other. Each predicted token counts exactly once. The model is put into evaluation mode.
    """
    use_tensor_heap()
    context = min(model.config.max_seq_len, max_context)
    # Windows overlap by the rest of the context, whose predictions were scored by the window before.
    stride = max(1, round(context * (1.0 - context_overlap)))
    windows = [
        window
        for number, scored in enumerate(sequences)
        for window in cut_windows(number, len(scored.ids) - 1, scored.first - 1, context=context, stride=stride)
    ]
    rows = pack_windows(windows, context)
    rows_per_batch = max(1, batch_tokens // context)
    model.eval()
    nats, done = np.zeros(len(sequences)), 0
    progress.begin(name, sum(window.length for window in windows), "tokens")
    for start in range(0, len(rows), rows_per_batch):
        batch = rows[start : start + rows_per_batch]
        _score_rows(model, sequences, batch, nats)
        done += sum(window.length for row in batch for window in row)
        progress.advance(done)
    progress.end()
    return nats


def _score_rows(model: Decoder, sequences: Sequence[Scored], rows: list[list[Window]], nats: np.ndarray) -> None:
    """Run one batch of rows and add each window's counted predictions to its sequence in `nats`."""
    length = max(sum(window.length for window in row) for row in rows)
    inputs, labels, positions = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(3))
    # Padding has segment -1 and no owner: nothing attends to it, and it is not scored.
    segments = np.full((len(rows), length), -1, dtype=np.int32)
    owner = np.full((len(rows), length), -1, dtype=np.int64)
    for r, row in enumerate(rows):
        at = 0
        for number, window in enumerate(row):
            here = slice(at, at + window.length)
            ids = np.asarray(sequences[window.sequence].ids[window.start : window.end + 1], dtype=np.int64)
            inputs[r, here], labels[r, here] = ids[:-1], ids[1:]
            positions[r, here], segments[r, here] = np.arange(window.length), number
            owner[r, at + window.scored_from - window.start : at + window.length] = window.sequence
            mask = sequences[window.sequence].mask
            if mask is not None:
                owner[r, here][mask[window.start + 1 : window.end + 1] == 0] = -1
            at += window.length
    counted = owner >= 0
    device = next(iter(model.parameters())).device
    attend = packed_attend(_to(segments, device), model.config.windows)
    hidden_BTD = model(_to(inputs, device), _to(positions, device), attend)
    hidden_ND = hidden_BTD[_to(counted, device)]
    # In FP32, by the model's own head (an INT8 head too), a chunk at a time: logits of all tokens would not fit.
    chunks = zip(hidden_ND.split(CHUNK_TOKENS), _to(labels[counted], device).split(CHUNK_TOKENS), strict=True)
    nats_N = torch.cat([F.cross_entropy(model.logits(h).float(), own, reduction="none") for h, own in chunks])
    np.add.at(nats, owner[counted], nats_N.double().cpu().numpy())  # `+=` would count repeated owners once


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


@dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """Cost of one document: `nats` for `num_tokens` tokens, `num_bytes` UTF-8 bytes of text."""

    id: str
    kind: str
    num_tokens: int
    num_bytes: int
    nats: float


def start_id(tokenizer: Tokenizer) -> int:
    """Id of the token before a text: the begin token, or, without one, the end token of the previous text."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def select_documents(
    documents: Iterable[Document], *, kinds: Sequence[str], max_bytes_per_kind: int, seed: int
) -> list[Document]:
    """Selects non-empty documents of `kinds`, of each kind a sample of at most `max_bytes_per_kind` bytes (0: all).
    Documents are drawn at random and skipped once they no longer fit, so a tight cap favors short ones; at least one of
    a kind is taken. The sample depends on `seed` and the documents' ids and texts alone, not on their order. The result
    is in the order of kinds, then of ids.
    """
    by_kind: dict[str, list[Document]] = {kind: [] for kind in kinds}
    for document in documents:
        if document.kind in by_kind and document.text:
            by_kind[document.kind].append(document)
    chosen: list[Document] = []
    for group in by_kind.values():
        taken, size = [], 0
        # In the order of a hash, not of a random generator: adding a document leaves the draw of the others unchanged.
        names = [f"{seed}/{one.id}/{hashlib.sha256(one.text.encode('utf-8')).hexdigest()}" for one in group]
        drawn = sorted(zip(names, group, strict=True), key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
        for _, document in drawn:
            num_bytes = len(document.text.encode("utf-8"))
            if not taken or not max_bytes_per_kind or size + num_bytes <= max_bytes_per_kind:
                taken.append(document)
                size += num_bytes
        chosen += sorted(taken, key=lambda d: (d.id, d.text))
    return chosen


def score_documents(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> list[DocumentScore]:
    """Scores the model's cost of each document, each token given as much context as the model takes."""
    encoded = [tokenizer.encode(document.text) for document in documents]
    nats = sequence_nats(
        model,
        [Scored([start_id(tokenizer), *ids], 1) for ids in encoded],
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="bits per byte",
    )
    return document_scores(documents, encoded, nats)


def document_scores(
    documents: Sequence[Document], encoded: Sequence[Sequence[int]], nats: Iterable[float]
) -> list[DocumentScore]:
    """Combines documents with their token ids and costs in nats."""
    return [
        DocumentScore(
            id=document.id,
            kind=document.kind,
            num_tokens=len(ids),
            num_bytes=len(document.text.encode("utf-8")),
            nats=float(cost),
        )
        for document, ids, cost in zip(documents, encoded, nats, strict=True)
    ]


def summarize_scores(scores: Sequence[DocumentScore], *, resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Per kind: documents, tokens, bytes, nats, nats per token, bits per byte and its 95% bootstrap interval."""
    summary: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(score.kind for score in scores):
        own = [score for score in scores if score.kind == kind]
        nats = np.array([score.nats for score in own])
        sizes = np.array([score.num_bytes for score in own], dtype=np.float64)
        num_tokens = sum(score.num_tokens for score in own)
        # A seed for each kind: its interval does not depend on the kinds that are scored with it.
        kind_seed = derive_seed(seed, "bootstrap", kind)
        low, high = bootstrap_ratio(nats / math.log(2), sizes, resamples=resamples, seed=kind_seed)
        summary[kind] = {
            "documents": len(own),
            "tokens": num_tokens,
            "bytes": int(sizes.sum()),
            "nats": float(nats.sum()),
            "nats_per_token": float(nats.sum()) / max(1, num_tokens),
            "bits_per_byte": float(nats.sum() / math.log(2) / sizes.sum()),
            "bits_per_byte_low": low,
            "bits_per_byte_high": high,
        }
    return summary


def bootstrap_ratio(
    numerators: np.ndarray, denominators: np.ndarray, *, resamples: int, seed: int
) -> tuple[float, float]:
    """Returns the 95% percentile interval of sum(numerators) / sum(denominators) over documents drawn with replacement.
    Efron & Tibshirani 1993, chapter 13. The ratio is of sums, so long documents weigh as they do in the figure.
    """
    low, high = np.quantile(resampled_ratios(numerators, denominators, resamples=resamples, seed=seed), [0.025, 0.975])
    return float(low), float(high)


def resampled_ratios(numerators: np.ndarray, denominators: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """Returns sum(numerators) / sum(denominators) over documents drawn with replacement, once for each resample."""
    rng = np.random.default_rng(seed)
    count = len(numerators)
    ratios = np.empty(resamples)
    for i in range(resamples):
        # Numerators and denominators of a document are drawn together, as the ratio needs both.
        drawn = rng.integers(0, count, count)
        ratios[i] = numerators[drawn].sum() / denominators[drawn].sum()
    return ratios


def score_answers(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> list[dict[str, Any]]:
    """Scores conversations; returns one plain record for each: `id`, `num_tokens` and `nats` of its answers,
    `num_bytes` of their text. Raises `DataError` with the conversation's id if the chat template refuses it.
    """
    texts: list[list[Scored]] = []
    for document in documents:
        try:
            chats = tokenizer.chat.encode_training_chats(
                document.messages, tools=document.tools, variables=template_variables(document)
            )
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        # A chat ends with its last learned token: what follows would only cost time.
        texts.append(
            [
                Scored(ids[:end].tolist(), max(1, int(learned[0])), mask[:end])
                for ids, mask in chats
                if len(learned := np.flatnonzero(mask)) and (end := int(learned[-1]) + 1) > 1
            ]
        )
    owners = [number for number, scored in enumerate(texts) for _ in scored]
    nats = sequence_nats(
        model,
        [scored for of_one in texts for scored in of_one],
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="answers",
    )
    totals = np.bincount(owners, weights=nats, minlength=len(documents))
    return [
        {
            "id": document.id,
            "num_tokens": sum(int(scored.mask.sum()) for scored in of_one if scored.mask is not None),
            "num_bytes": len(answer_text(document).encode("utf-8")),
            "nats": float(total),
        }
        for document, of_one, total in zip(documents, texts, totals, strict=True)
    ]


def answer_text(document: Document) -> str:
    """Text of the assistant's turns in a conversation; of a preference pair, the chosen answer alone."""
    return join_turns([turn for turn in document.messages if turn["role"] == "assistant"])


def summarize_answer_scores(records: Sequence[Mapping[str, Any]], *, resamples: int, seed: int) -> dict[str, Any]:
    """Conversations, tokens, nats per token, perplexity and bits per byte with their 95% bootstrap intervals; {}
    without conversations.
    """
    if not records:
        return {}
    nats, tokens, sizes = (np.array([float(r[name]) for r in records]) for name in ("nats", "num_tokens", "num_bytes"))
    seed = derive_seed(seed, "bootstrap", "answers")
    low, high = bootstrap_ratio(nats, tokens, resamples=resamples, seed=seed)
    bits_low, bits_high = bootstrap_ratio(nats / math.log(2), sizes, resamples=resamples, seed=seed)
    per_token = float(nats.sum() / tokens.sum())
    return {
        "conversations": len(records),
        "tokens": int(tokens.sum()),
        "bytes": int(sizes.sum()),
        "nats_per_token": per_token,
        "perplexity": perplexity(per_token),
        "perplexity_low": perplexity(low),
        "perplexity_high": perplexity(high),
        "bits_per_byte": float(nats.sum() / math.log(2) / sizes.sum()),
        "bits_per_byte_low": bits_low,
        "bits_per_byte_high": bits_high,
    }


def perplexity(nats_per_token: float) -> float:
    """exp of the loss in nats; the largest float for a loss beyond it."""
    return math.exp(min(nats_per_token, 700.0))


Rows = list[dict[str, Any]]
"""Plain results, one for each record, with its `id`."""


@dataclass(frozen=True, kw_only=True)
class RecordScores:
    """Scores of some records for one model; the lists of two models on the same records have the same ids."""

    answers: Rows
    """`num_tokens`, `num_bytes` and `nats` of the reference answers."""
    choices: Rows
    """`choice`, `right` and `correct` of records with choices."""
    numbers: Rows
    """`answer`, as generated, and `correct` of records whose reference answer ends with a number, as in GSM8K."""


def score_records(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    config: EvaluateConfig,
    *,
    max_new_tokens: int,
    progress: Progress,
) -> RecordScores:
    """Score question/answer documents. Raises `DataError` with the id of a record that the chat template refuses."""
    return RecordScores(
        answers=score_answers(model, tokenizer, documents, config, progress=progress),
        choices=score_choices(model, tokenizer, documents, config, progress=progress),
        numbers=generate_numbers(model, tokenizer, documents, max_new_tokens=max_new_tokens, progress=progress),
    )


def score_choices(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> Rows:
    """Chooses the likeliest choice per byte of each record with choices, as the assistant's answer
    (see `multiple_choice`).
    """
    asked = [document for document in documents if document.meta.get("choices")]
    sequences: list[Scored] = []
    for document in asked:
        prompt = _prompt(tokenizer, document)
        sequences += [Scored([*prompt, *tokenizer.encode(text)], len(prompt)) for text in document.meta["choices"]]
    nats = sequence_nats(
        model,
        sequences,
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="choices",
    )
    rows, at = [], 0
    for document in asked:
        sizes = np.array([len(text.encode("utf-8")) for text in document.meta["choices"]])
        choice = int((nats[at : at + len(sizes)] / sizes).argmin())
        at += len(sizes)
        right = int(document.meta["right"])
        rows.append({"id": document.id, "choice": choice, "right": right, "correct": choice == right})
    return rows


def generate_numbers(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], *, max_new_tokens: int, progress: Progress
) -> Rows:
    """Generates greedy answers to the records whose reference answer has a number after `####`, and compares theirs. An
    answer's number is that in its last box, after its last `####`, or its last one. Prompts that leave no room for an
    answer in the model's context count as wrong.
    """
    answers = [(document, answer_text(document)) for document in documents]
    asked = [(d, number) for d, text in answers if MARKER in text and (number := final_number(text, "marker"))]
    prompts = [_prompt(tokenizer, document) for document, _ in asked]
    room = [model.config.max_seq_len - len(prompt) for prompt in prompts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=min(max_new_tokens, most), stop_ids=tokenizer.stop_ids)
        for most in room
        if most > 0
    ]
    progress.begin("exact match", len(params), "answers")
    fitting = [prompt for prompt, most in zip(prompts, room, strict=True) if most > 0]
    completions = iter(generate(model, fitting, params, on_step=progress.advance) if fitting else ())
    progress.end()
    rows = []
    for (document, reference), most in zip(asked, room, strict=True):
        text = tokenizer.decode(next(completions).token_ids) if most > 0 else ""
        number = final_number(text, "any")
        correct = number is not None and equal(number, reference, 0.0)
        rows.append({"id": document.id, "answer": text, "correct": correct})
    return rows


def _prompt(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Encodes the conversation before the last answer. Raises `DataError` with the record's id."""
    last = max(place for place, turn in enumerate(document.messages) if turn["role"] == "assistant")
    try:
        return tokenizer.chat.encode_prompt(
            document.messages[:last], tools=document.tools, variables=template_variables(document)
        )
    except DataError as error:
        raise DataError(f"{document.id}: {error}") from None


ANSWERS, TEXT = "answers", "text"


def record_costs(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """Scores documents; returns plain rows with `id`, `num_tokens`, `num_bytes` and `nats` in their order, by key:
    `answers` of conversations, `text` of other documents; a key without documents is left out.
    """
    spoken = [document for document in documents if document.kind == "qa" and document.has_answer]
    written = [document for document in documents if document.kind != "qa"]
    rows = {
        ANSWERS: score_answers(model, tokenizer, spoken, config, progress=progress) if spoken else [],
        TEXT: text_costs(model, tokenizer, written, config, progress=progress) if written else [],
    }
    return {name: found for name, found in rows.items() if found}


def text_costs(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> list[dict[str, Any]]:
    """Scores the whole text of each document, a conversation's included."""
    return [asdict(score) for score in score_documents(model, tokenizer, documents, config, progress=progress)]


Z_95 = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""


def wilson_interval(num_correct: int, num_trials: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); 95% by default. No trials: (0, 1)."""
    if num_trials == 0:
        return 0.0, 1.0
    share, spread = num_correct / num_trials, z * z / num_trials
    center = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num_trials + spread / (4 * num_trials)) / (1 + spread)
    return max(0.0, center - half), min(1.0, center + half)


def log10_binomial_tail(num_correct: int, num_trials: int, chance: float) -> float:
    """log10 of the exact one-sided p-value P(X >= num_correct), X ~ Binomial(num_trials, chance); 0 < chance < 1."""
    if num_correct <= 0:
        return 0.0
    terms: list[float] = []
    for k in range(num_correct, num_trials + 1):
        choices = math.lgamma(num_trials + 1) - math.lgamma(k + 1) - math.lgamma(num_trials - k + 1)
        terms.append(choices + k * math.log(chance) + (num_trials - k) * math.log1p(-chance))
    # The largest term is taken out of the sum, which could underflow otherwise.
    highest = max(terms)
    total = highest + math.log(math.fsum(math.exp(term - highest) for term in terms))
    return min(0.0, total) / math.log(10)


def log10_sign_test(num_better: int, num_worse: int) -> float:
    """log10 of the exact two-sided p-value that better and worse are equally likely (McNemar's exact test)."""
    # Two-sided: twice the tail of the larger count, at most 1.
    one_sided = log10_binomial_tail(max(num_better, num_worse), num_better + num_worse, 0.5)
    return min(0.0, one_sided + math.log10(2))


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of both models. low, high: 95% interval of `difference`, which is the second minus the first."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    num_records: int
    lower_is_better: bool
    won: int
    """Records on which the second model is better."""
    lost: int
    """Records on which the first model is better."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_scores(first: RecordScores, second: RecordScores, *, resamples: int, seed: int) -> list[Measure]:
    """Compares all measures that the records allow. Answers are compared per token where both models cut them into
    equally many tokens, and always per byte. Raises `ValueError` if the two were not scored on the same records.
    """
    measures: list[Measure] = []
    answers = _paired(first.answers, second.answers)
    nats = [np.array([row["nats"] for row in rows]) for rows in answers]
    if answers[0] and all(a["num_tokens"] == b["num_tokens"] for a, b in zip(*answers, strict=True)):
        tokens = np.array([float(row["num_tokens"]) for row in answers[0]])
        measures.append(_ratio("nats per token of answers", nats, tokens, resamples=resamples, seed=seed))
    if answers[0]:
        sizes = np.array([float(row["num_bytes"]) for row in answers[0]])
        bits = [one / math.log(2) for one in nats]
        measures.append(_ratio("bits per byte of answers", bits, sizes, resamples=resamples, seed=seed))
    for name, rows in (
        ("multiple choice", _paired(first.choices, second.choices)),
        ("exact match of numbers", _paired(first.numbers, second.numbers)),
    ):
        if rows[0]:
            correct = [np.array([float(row["correct"]) for row in of_one]) for of_one in rows]
            ones = np.ones(len(rows[0]))
            measures.append(_ratio(name, correct, ones, resamples=resamples, seed=seed, lower_is_better=False))
    return measures


def perplexities(scores: RecordScores) -> float:
    """Perplexity of all answers; nan without any."""
    num_tokens = sum(row["num_tokens"] for row in scores.answers)
    return perplexity(sum(row["nats"] for row in scores.answers) / num_tokens) if num_tokens else math.nan


def _paired(first: Rows, second: Rows) -> tuple[Rows, Rows]:
    if [row["id"] for row in first] != [row["id"] for row in second]:
        raise ValueError("the two models were scored on different records")
    return first, second


def _ratio(
    name: str,
    values: Sequence[np.ndarray],
    weights: np.ndarray,
    *,
    resamples: int,
    seed: int,
    lower_is_better: bool = True,
) -> Measure:
    """Compares two ratios sum(values) / sum(weights)."""
    one, other = values
    drawn = resampled_ratios(other - one, weights, resamples=resamples, seed=derive_seed(seed, "paired", name))
    low, high = np.quantile(drawn, [0.025, 0.975])
    # One is added to both counts, or a finite number of resamples could prove a probability of 0.
    side = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    better = (other < one) if lower_is_better else (other > one)
    worse = (other > one) if lower_is_better else (other < one)
    total = float(weights.sum())
    return Measure(
        name=name,
        first=float(one.sum()) / total,
        second=float(other.sum()) / total,
        difference=float((other - one).sum()) / total,
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * (side + 1) / (resamples + 1)),
        num_records=len(one),
        lower_is_better=lower_is_better,
        won=int(better.sum()),
        lost=int(worse.sum()),
    )
