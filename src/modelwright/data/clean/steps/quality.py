"""Quality: limits on the features of a text (`data/clean/features.py`), for each kind of document.

Every feature is measured of every document and stored, so that `thresholds: auto` can derive limits from the corpus'
own quantiles, and `clean --explain` can show them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import ConfigError, constant, is_installed
from modelwright.data.clean.features import FEATURES, measure
from modelwright.data.clean.steps.step import Columns, Decisions, Drop, Drops, MeasuredCorpus, StepSpec
from modelwright.data.document import KINDS, Document, Kind

_REASONS = {
    "num_chars": ("too short", "too long"), "num_words": ("too few words", "too many words"),
    "mean_word_chars": ("short words", "long words"), "char_entropy": ("low entropy", "high entropy"),
    "word_entropy": ("low word entropy", "high word entropy"), "digit_fraction": ("few digits", "many digits"),
    "symbol_fraction": ("few symbols", "many symbols"),
    "duplicate_line_fraction": ("few repeated lines", "repeated lines"),
    "data_fraction": ("little data", "table of data"),
    "top_ngram_fraction": ("few repeated phrases", "repeated phrase"),
    "compression_ratio": ("repetitive", "incompressible"),
    "stop_word_fraction": ("no stop words", "many stop words"),
    "ellipsis_fraction": ("few ellipses", "cut off"),
    "misordered_fraction": ("few misordered words", "words out of order"),
    "sorted_fraction": ("words out of alphabetical order", "word list"),
    "broken_word_fraction": ("few broken words", "broken words"),
    "record_fraction": ("few records", "log or records"), "error_fraction": ("few error messages", "error page"),
    "cut_end_fraction": ("few cut ends", "fragment"), "code_fraction": ("little code", "much code"),
}  # fmt: skip

LIMIT_OF = {
    reason: f"{side}_{name}"
    for name, reasons in _REASONS.items()
    for side, reason in zip(("min", "max"), reasons, strict=True)
}
"""The limit that a document violates, by the reason for which it is dropped."""

Limits = Mapping[str, float]
"""Limits by name, `min_FEATURE` or `max_FEATURE`."""

_ANY = {"min_num_chars": 20.0, "max_num_chars": 2_000_000.0, "max_data_fraction": 0.6}
DEFAULT_LIMITS: Mapping[Kind, Limits] = {
    "prose": _ANY | {
        "max_duplicate_line_fraction": 0.3, "max_top_ngram_fraction": 0.3, "max_digit_fraction": 0.5,
        "max_symbol_fraction": 0.3, "min_char_entropy": 2.0, "max_char_entropy": 8.0, "min_compression_ratio": 0.1,
        "max_mean_word_chars": 15.0, "min_stop_word_fraction": 0.07, "max_ellipsis_fraction": 0.3,
        "max_misordered_fraction": 0.1, "max_broken_word_fraction": 0.055, "max_record_fraction": 0.5,
        "max_sorted_fraction": 0.8, "max_error_fraction": 0.1, "max_cut_end_fraction": 0.75,
    },
    "code": _ANY | {
        "max_duplicate_line_fraction": 0.6, "min_char_entropy": 2.0, "min_compression_ratio": 0.05,
        "max_mean_word_chars": 30.0, "max_data_fraction": 0.75,
    },
    "qa": {"min_num_chars": 1.0, "max_num_chars": 2_000_000.0, "max_duplicate_line_fraction": 0.3},
    "image": {"min_num_chars": 1.0, "max_num_chars": 2_000_000.0},
}  # fmt: skip
"""Gopher's limits where it has them, wider for short documents; see `QualityConfig.limits`."""
IMAGE_LIMITS = ("image.min_side", "image.max_aspect", "image.max_hash_distance")
"""Limits that the step images applies (`steps/images.py`)."""
# Prose with a larger fraction of lines that look like code is judged as code: records often do not state a kind.
_CODE_LINES = 0.4
_OF_ANY_LENGTH = (
    "num_chars", "num_words", "duplicate_line_fraction", "data_fraction", "ellipsis_fraction", "misordered_fraction",
    "broken_word_fraction", "error_fraction", "cut_end_fraction",
)  # fmt: skip
# Long texts are more than their ends.
_OF_SHORT_TEXTS = ("cut_end_fraction",)
# Chats and comments are often written in lower case and without a full stop: where more of the short texts are than
# this, the ends say nothing.
_MOST_CUT_ENDS = 0.6
_NEVER_AUTOMATIC = ("num_chars", "num_words", "cut_end_fraction", "code_fraction")

_LANGUAGE_CHARS = 2_000
# Values in place of the index of a limit: the language, and no violation.
_LANGUAGE, _NO_LIMIT = -1, -2
_NO_DOCUMENTS = np.empty((0, len(FEATURES)), np.float32)
FeatureColumn = Callable[[int], NDArray[np.float32]]
"""Reads one feature, by its number, of all documents of a kind with at least 50 words."""
# Fractions, ratios and entropies of shorter texts vary too much to be judged.
_SHORT_WORDS, _SHORT_CHARS = 50, 300


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Limits on features of a text, for each kind of document."""

    thresholds: Literal["fixed", "auto"] = "fixed"
    """`auto` tightens the limits by the corpus: to the 1% and 99% quantiles of each feature by kind, widened by half
    their distance from the median."""
    auto_tail: float = constant(0.01)
    """Tail of the distribution that `thresholds: auto` starts from."""
    limits: dict[str, float] = field(default_factory=dict)
    """Limits that replace the default or automatic ones, for all kinds (`max_digit_fraction: 0.4`) or one
    (`prose.max_digit_fraction: 0.4`); docs/data.md lists the features and defaults."""
    languages: tuple[str, ...] = ()
    """Keep only prose and pairs in these languages (ISO 639-1 codes, such as `en`); empty keeps all."""

    def __post_init__(self) -> None:
        if not 0 < self.auto_tail < 0.5:
            raise ConfigError(f"auto_tail: must be above 0 and below 0.5, got {self.auto_tail}; 0.01 is usual")
        for name in self.limits:
            if name in IMAGE_LIMITS:
                continue
            kind, _, limit = name.rpartition(".")
            if kind not in ("", *DEFAULT_LIMITS) or limit[:4] not in ("min_", "max_") or limit[4:] not in FEATURES:
                raise ConfigError(f"limits: {name!r} is not [KIND.]min_FEATURE or max_FEATURE; features: {FEATURES}")
        if self.languages and is_installed("clean"):  # without it, the step is refused
            import py3langid  # takes half a second

            known = sorted({code for code, _ in py3langid.rank("")})
            if unknown := [code for code in self.languages if code not in known]:
                text = f"languages: {unknown[0]!r} is not the code of a language that can be recognized"
                raise ConfigError(f"{text}, such as en, de or zh; known are {', '.join(known)}")


@dataclass(frozen=True)
class Quality:
    config: QualityConfig
    name: str = "quality"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures `features` [N, F] in the order of `FEATURES`, and `language` [N]: True for a wanted language."""
        features = np.array([measure(document) for document in documents], np.float32).reshape(-1, len(FEATURES))
        language = [has_language(document, self.config) for document in documents]
        return {"features": features, "language": np.array(language, np.bool_)}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Drops the documents that violate a limit, for the first limit violated."""
        if self.config.thresholds == "fixed":
            limits = limits_by_kind(self.config, {})
        else:
            with TemporaryDirectory(dir=corpus.folder) as folder:
                texts = _LongTexts.of(corpus, Path(folder))
                limits = limits_by_kind(self.config, {kind: partial(texts.column, kind) for kind in KINDS})
        if cut_is_usual(corpus) and not any("cut_end_fraction" in name for name in self.config.limits):
            limits["prose"].pop("max_cut_end_fraction", None)
        # Judging no document tells the order of the limits.
        judged: dict[Kind, list[tuple[str, str, float]]] = {
            kind: [entry[1:] for entry in judge(_NO_DOCUMENTS, limits[kind])] for kind in KINDS
        }
        violations = _Violations.of(corpus, limits)
        order = np.argsort(violations.numbers)

        def drop(place: int) -> Drop:
            index = order[place]
            if violations.places[index] == _LANGUAGE:
                return Drop("other language", f"not in {', '.join(self.config.languages)}")
            reason, feature, limit = judged[KINDS[violations.kinds[index]]][violations.places[index]]
            return Drop(reason, f"{feature} {violations.values[index]:.4g}, limit {limit:.4g}")

        shown = {kind: limits[kind] for number, kind in enumerate(KINDS) if number in violations.kinds_seen}
        report = {"limits": shown, "remedies": remedies(violations, judged)}
        return Decisions(drops=Drops(violations.numbers[order], drop), report=report)


@dataclass(frozen=True)
class _LongTexts:
    """Features of the L documents alive with at least 50 words, a file each. kinds [L]: that each is judged by."""

    folder: Path
    kinds: NDArray[np.int8]

    @classmethod
    def of(cls, corpus: MeasuredCorpus, folder: Path) -> "_LongTexts":
        all_kinds = [np.empty(0, np.int8)]
        columns = zip(corpus.starts[:-1], corpus.parts("features"), corpus.parts("kind"), strict=True)
        with ExitStack() as stack:
            files = [stack.enter_context(open(folder / name, "wb")) for name in FEATURES]
            for start, features, kinds in columns:
                is_long = features[:, FEATURES.index("num_words")] >= _SHORT_WORDS
                rows = np.flatnonzero(is_long & corpus.alive[start : start + len(kinds)])
                all_kinds.append(judged_kinds(features, kinds)[rows])
                for file, values in zip(files, features[rows].T, strict=True):
                    file.write(values.tobytes())
        return cls(folder, np.concatenate(all_kinds))

    def column(self, kind: Kind, feature: int) -> NDArray[np.float32]:
        return np.fromfile(self.folder / FEATURES[feature], np.float32)[self.kinds == KINDS.index(kind)]


@dataclass(frozen=True)
class _Violations:
    """Documents that are dropped: numbers [D], the kind that each is judged by, the first limit that it violates in
    the order of `judge`, or `_LANGUAGE`, and the value of the feature. kinds_seen: numbers of all kinds in the corpus.
    """

    numbers: NDArray[np.int64]
    kinds: NDArray[np.int8]
    places: NDArray[np.int8]
    values: NDArray[np.float32]
    kinds_seen: set[int]

    @classmethod
    def of(cls, corpus: MeasuredCorpus, limits: Mapping[Kind, Limits]) -> "_Violations":
        """Finds the violations of the documents that are alive, shard by shard."""
        parts: list[tuple[NDArray[Any], ...]] = [
            tuple(np.empty(0, dtype) for dtype in (np.int64, np.int8, np.int8, np.float32))
        ]
        seen: set[int] = set()
        columns = (corpus.parts(name) for name in ("features", "kind", "language"))
        for start, features, own_kinds, language in zip(corpus.starts[:-1], *columns, strict=True):
            kinds = judged_kinds(features, own_kinds)
            alive = corpus.alive[start : start + len(kinds)]
            seen |= set(map(int, np.unique(kinds)))
            places = np.where(alive & ~language, np.int8(_LANGUAGE), np.int8(_NO_LIMIT))
            values = np.zeros(len(kinds), np.float32)
            for number in np.unique(kinds[alive]):
                members = np.flatnonzero(alive & (kinds == number))
                judged = judge(features[members], limits[KINDS[number]])
                # Backward, so that the first limit that a document violates is written last and stays.
                for place, (violates, _, feature, _) in reversed(list(enumerate(judged))):
                    places[members[violates]] = place
                    values[members[violates]] = features[members[violates], FEATURES.index(feature)]
            rows = np.flatnonzero(places != _NO_LIMIT)
            parts.append((start + rows, kinds[rows], places[rows], values[rows]))
        numbers, all_kinds, places, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(numbers, all_kinds, places, values, seen)


QUALITY = StepSpec(
    name="quality",
    build=lambda config, seed: Quality(config),
    needs_clean=lambda config: ["languages"] if config.languages else [],
)


def cut_is_usual(corpus: MeasuredCorpus) -> bool:
    """True if most of the short texts of a corpus begin and end like fragments."""
    num_short = num_cut = 0
    for features, kinds in zip(corpus.parts("features"), corpus.parts("kind"), strict=True):
        num_words, num_chars, cut = (
            features[:, FEATURES.index(one)] for one in ("num_words", "num_chars", "cut_end_fraction")
        )
        is_short = (num_words < _SHORT_WORDS) & (num_chars < _SHORT_CHARS) & (kinds == KINDS.index("prose"))
        num_short += int(is_short.sum())
        num_cut += int((is_short & (cut == 1.0)).sum())
    return num_cut > _MOST_CUT_ENDS * num_short


def has_language(document: Document, config: QualityConfig) -> bool:
    """True for code, for a document in a wanted language, and if all languages are wanted."""
    return not config.languages or document.kind == "code" or language_of(document) in config.languages


def language_of(document: Document) -> str:
    """The language that a document begins in, as an ISO 639-1 code."""
    import py3langid  # takes half a second

    return py3langid.classify(document.text[:_LANGUAGE_CHARS])[0]


def judged_kinds(features: NDArray[np.float32], kinds: NDArray[np.int8]) -> NDArray[np.int8]:
    """The kinds [N] whose limits apply to documents [N]: prose whose lines look like code is judged as code."""
    is_code = (kinds == KINDS.index("prose")) & (features[:, FEATURES.index("code_fraction")] > _CODE_LINES)
    return np.where(is_code, np.int8(KINDS.index("code")), kinds)


def limits_by_kind(config: QualityConfig, columns: Mapping[Kind, FeatureColumn]) -> dict[Kind, dict[str, float]]:
    """Computes the limits in effect. columns: by kind; called for `thresholds: auto` only."""
    result: dict[Kind, dict[str, float]] = {}
    for kind, defaults in DEFAULT_LIMITS.items():
        limits = dict(defaults)
        if config.thresholds == "auto" and kind in columns:
            limits |= _automatic_limits(columns[kind], config.auto_tail, limits)
        limits |= {name: value for name, value in config.limits.items() if "." not in name}
        own = {name: value for name, value in config.limits.items() if name not in IMAGE_LIMITS}
        limits |= {name[len(kind) + 1 :]: value for name, value in own.items() if name.startswith(f"{kind}.")}
        result[kind] = limits
    return result


def judge(features: NDArray[np.float32], limits: Limits) -> list[tuple[NDArray[np.bool_], str, str, float]]:
    """For each limit in order, returns which of the documents [N] violate it, the reason, the feature and the limit.

    Documents of fewer than 50 words and 300 characters are judged by their length, lines, ends and words alone.
    """
    num_words, num_chars = (features[:, FEATURES.index(name)] for name in ("num_words", "num_chars"))
    is_short = (num_words < _SHORT_WORDS) & (num_chars < _SHORT_CHARS)
    result: list[tuple[NDArray[np.bool_], str, str, float]] = []
    for name in sorted(limits, key=lambda name: (FEATURES.index(name[4:]), name)):
        feature, limit = name[4:], limits[name]
        values = features[:, FEATURES.index(feature)]
        # In FP32 like the features: a value equal to its limit must not violate it by rounding.
        violates = values < np.float32(limit) if name.startswith("min_") else values > np.float32(limit)
        if feature not in _OF_ANY_LENGTH:
            violates = violates & ~is_short
        if feature in _OF_SHORT_TEXTS:
            violates = violates & is_short
        result.append((violates, _REASONS[feature][name.startswith("max_")], feature, limit))
    return result


def remedies(
    violations: _Violations, judged: Mapping[Kind, Sequence[tuple[str, str, float]]]
) -> dict[str, str]:  # fmt: skip
    """Maps each reason for drops to the options of the command line that would keep all documents dropped for it.

    judged: reason, feature and limit in the order of `judge`.
    """
    options: dict[tuple[str, Kind], str] = {}
    for number, kind in enumerate(KINDS):
        for place, (reason, *_) in enumerate(judged[kind]):
            values = violations.values[(violations.kinds == number) & (violations.places == place)]
            if not len(values):
                continue
            limit = LIMIT_OF[reason]
            is_max = limit.startswith("max_")
            value = float(values.max() if is_max else values.min())
            if value:
                # Three significant digits, rounded away from the limit in effect, so that the new one keeps the value.
                unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
                value = (math.ceil(value / unit) if is_max else math.floor(value / unit)) * unit
            options[reason, kind] = f"--clean.quality.limits.{kind}.{limit} {value:.10g}"
    result: dict[str, str] = {}
    for (reason, _), option in sorted(options.items()):
        result[reason] = f"{result[reason]} {option}" if reason in result else option
    return result


def _automatic_limits(column: FeatureColumn, tail: float, fixed: Limits) -> dict[str, float]:
    """Computes limits at the tails' quantiles, moved outward by half their distance from the median, but never wider
    than the fixed ones. Where a distribution has no tail on one side, nothing is cut there.
    """
    result: dict[str, float] = {}
    for number, name in enumerate(FEATURES):
        values = column(number) if name not in _NEVER_AUTOMATIC else ()
        if not len(values):
            continue
        low, middle, high = np.quantile(values, [tail, 0.5, 1 - tail])
        least, most = float(1.5 * low - 0.5 * middle), float(1.5 * high - 0.5 * middle)
        least = max(least, fixed.get(f"min_{name}", least))
        most = min(most, fixed.get(f"max_{name}", most))
        # Limits that no document can violate are left out, so that the report does not show them.
        if low < middle and least > 0:
            result[f"min_{name}"] = least
        if high > middle and (most < 1 or not name.endswith("_fraction")):
            result[f"max_{name}"] = most
    return result
