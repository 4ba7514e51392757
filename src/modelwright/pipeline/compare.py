"""`modelwright compare`: two models on the same records, as a table or as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.core.config import ConfigError, DataError
from modelwright.core.progress import Progress
from modelwright.data.sources.forms import FORMS
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import (
    EvaluateConfig,
    Measure,
    RecordScores,
    compare_scores,
    perplexities,
    score_records,
)
from modelwright.model.hf import load_model
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.resolve import resolved_device


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Settings of a comparison of two models."""

    resamples: int = 10_000
    """Resamples of the paired bootstrap."""
    max_new_tokens: int = 512
    """Maximum tokens of a generated answer."""
    num_records: int = 0
    """Number of records, from the start; 0 uses all."""

    def __post_init__(self) -> None:
        for name, least in (("resamples", 100), ("max_new_tokens", 1), ("num_records", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """Result of a comparison; models and perplexities in the order in which the models were named."""

    models: tuple[str, str]
    perplexities: tuple[float, float]
    measures: Sequence[Measure]

    def as_json(self) -> str:
        perplexities = [None if math.isnan(value) else value for value in self.perplexities]
        measures = [measure.as_json() for measure in self.measures]
        return json.dumps({"models": self.models, "perplexities": perplexities, "measures": measures}, indent=1)

    def table(self) -> str:
        """Formats the result as a table for a terminal."""
        header = ["", "A", "B", "B - A", "95% interval", "p", "B better", "B worse", "records"]
        rows: list[list[str]] = []
        if not math.isnan(self.perplexities[0]):
            rows.append(["perplexity of answers", *map(_number, self.perplexities), "", "", "", "", "", ""])
        for one in self.measures:
            interval = f"{one.low:+.4f} to {one.high:+.4f}"
            cells = [_number(one.first), _number(one.second), f"{one.difference:+.4f}", interval, f"{one.p_value:.4f}"]
            rows.append([one.name, *cells, str(one.won), str(one.lost), str(one.num_records)])
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in pairs)
            for row in [header, *rows]
            for pairs in [list(enumerate(zip(row, widths, strict=True)))]
        ]
        names = [f"{letter}  {name}" for letter, name in zip("AB", self.models, strict=True)]
        return "\n".join([*names, "", *(line.rstrip() for line in lines)])


def compare_models(
    first: FoundModel, second: FoundModel, sources: Sequence[str], config: CompareConfig, progress: Progress
) -> ModelComparison:
    """Scores both models, one after the other, on the question/answer records of the sources. Raises `DataError`
    without such records.
    """
    # Nothing is held out: every record is compared.
    source = SourceConfig(sources=tuple(sources), validation_fraction=0.0, learns=False)
    documents = (d for d in read_documents(source, report=SourceReport()) if d.has_answer and not d.is_undesirable)
    records = list(islice(documents, config.num_records or None))
    if not records:
        raise DataError(
            f"{', '.join(sources)}: no record is a question with its answer or a conversation; accepted are {FORMS}"
        )
    scores: list[RecordScores] = []
    for folder in (first.source.folder, second.source.folder):
        model: Any = load_int8(folder, Int8WeightsConfig()) if is_int8_folder(folder) else load_model(folder)
        scores.append(
            score_records(
                model.to(resolved_device("auto")).eval(),
                Tokenizer.load(folder),
                records,
                EvaluateConfig(),
                max_new_tokens=config.max_new_tokens,
                progress=progress,
            )
        )
        del model  # before the second one is loaded
    return ModelComparison(
        models=(first.source.describe(), second.source.describe()),
        perplexities=(perplexities(scores[0]), perplexities(scores[1])),
        measures=compare_scores(scores[0], scores[1], resamples=config.resamples, seed=EvaluateConfig().seed),
    )


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"
