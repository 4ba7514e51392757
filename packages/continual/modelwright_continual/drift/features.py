"""The features of requests that are compared besides their embeddings, all listed in `FEATURES`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.records import EventKind
from modelwright_continual.drift.requests import RequestRecord

Value = float | str | None
"""A number, a category, or None for a missing value."""
NO_LABEL = "(none)"


@dataclass(frozen=True)
class RequestFeature:
    """A feature whose distribution over requests is compared: numbers by Kolmogorov-Smirnov, categories by total
    variation.
    """

    name: str
    kind: Literal["number", "category"]
    unit: str
    """Unit of the numbers, as reports show it."""
    values: Callable[[Sequence[RequestRecord], "TextScores"], Sequence[Value]]
    """Function from records and the model's scores of their prompts to values."""
    alarm: EventKind
    """Explanation of an alarm in this feature."""


@dataclass(frozen=True)
class TextScores:
    """Scores of the prompts by the served model. prompt_nats: mean negative log-likelihood of each prompt's tokens;
    empty without a model.
    """

    prompt_nats: Sequence[float] = ()


def _length_of(name: str) -> Callable[[Sequence[RequestRecord], TextScores], Sequence[Value]]:
    def lengths(records: Sequence[RequestRecord], scores: TextScores) -> list[Value]:
        return [None if record.get(name) is None else float(len(record[name])) for record in records]

    return lengths


def _prompt_nats(records: Sequence[RequestRecord], scores: TextScores) -> Sequence[Value]:
    return scores.prompt_nats or [None] * len(records)


def _labels(records: Sequence[RequestRecord], scores: TextScores) -> list[Value]:
    # a request without a label counts: that users stop to complain, or begin to, is a change
    return [record.get("feedback_label") or NO_LABEL for record in records]


def _feedback_scores(records: Sequence[RequestRecord], scores: TextScores) -> list[Value]:
    return [record.get("feedback_score") for record in records]


FEATURES = (
    RequestFeature(
        "prompt_length",
        "number",
        "characters",
        _length_of("prompt"),
        EventKind(
            "prompts have other lengths",
            "Another client, template or task: compare the examples (modelwright drift check). If it stays, train on "
            "such requests (modelwright continual run).",
        ),
    ),
    RequestFeature(
        "answer_length",
        "number",
        "characters",
        _length_of("answer"),
        EventKind(
            "answers have other lengths",
            "Other prompts, another version of the model or another limit of tokens: compare the examples (modelwright "
            "drift check), and both versions on the same records (modelwright compare).",
        ),
    ),
    RequestFeature(
        "prompt_perplexity",
        "number",
        "nats per token",
        _prompt_nats,
        EventKind(
            "prompts are less or more likely to the model",
            "Texts of another kind or language than those it knows: train on such texts (modelwright continual run).",
        ),
    ),
    RequestFeature(
        "feedback_label",
        "category",
        "",
        _labels,
        EventKind(
            "users label answers otherwise, or begin or cease to",
            "Worse answers, or another form for labels: read the examples (modelwright drift check), and judge the "
            "model on the frozen benchmark (modelwright continual gate).",
        ),
    ),
    RequestFeature(
        "feedback_score",
        "number",
        "points",
        _feedback_scores,
        EventKind(
            "users score answers otherwise",
            "Worse answers, or another scale: read the examples (modelwright drift check), and judge the model on the "
            "frozen benchmark (modelwright continual gate).",
        ),
    ),
)
EMBEDDING = "prompt_embedding"
"""Name of the classifier two-sample test among the features of a report."""
ALARMS: Mapping[str, EventKind] = {
    **{feature.name: feature.alarm for feature in FEATURES},
    EMBEDDING: EventKind(
        "prompts are about something else",
        "New topics or users: read the examples that were told apart best (modelwright drift check), and train on such "
        "requests (modelwright continual run).",
    ),
}
"""Explanations of alarms, by the name of the feature."""
