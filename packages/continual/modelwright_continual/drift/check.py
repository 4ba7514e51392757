"""Comparison of requests with a frozen reference."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import DataError, derive_seed
from modelwright.core.progress import Progress, SilentProgress
from modelwright_continual.drift.calibrate import null_p_values
from modelwright_continual.drift.classifier_test import separation_test
from modelwright_continual.drift.features import EMBEDDING, FEATURES, NO_LABEL
from modelwright_continual.drift.marginal import LEAST_UNITS, UNKNOWN, Marginal
from modelwright_continual.drift.recent import RecentWindows
from modelwright_continual.drift.reference import DriftReference, example_texts
from modelwright_continual.drift.requests import RequestRecord, checked, in_order
from modelwright_continual.drift.sessions import Ints, Units, make_units, session_codes
from modelwright_continual.drift.statistics import Floats, adjusted_where_moved, bin_shares, decile_edges, psi

NUM_EXAMPLES = 3
REFERENCE_UNITS = 4
"""Number of reference sessions for each session of the window in the classifier test."""
_OWN_LABELS = {NO_LABEL: "have no label", UNKNOWN: "have a label that the reference has not"}
_MOST_UNITS = 1000
"""Maximum number of a window's sessions in the classifier test; from more, that many are drawn."""


@dataclass(frozen=True, kw_only=True)
class FeatureDrift:
    """Comparison of one feature in a window with the reference.

    statistic: the effect in standard errors, or the classifier test's statistic; effect: KS distance, total variation,
    or KS distance of the classifier's logits, each a lower bound of the probability mass that has moved; p_value:
    before the adjustment for several features, for prompts over this window and those before it (`RecentWindows`);
    adjusted_p: by Benjamini and Yekutieli; cause: a sentence without any words of a user; category: the label named by
    the cause, in the users' words, "" if there is none; window_examples, reference_examples: prompts and answers
    typical of the increase in the window, and of the decrease.
    """

    name: str
    statistic: float
    p_value: float
    adjusted_p: float
    effect: float
    psi: float
    alarm: bool
    cause: str
    category: str
    window_examples: tuple[str, ...]
    reference_examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """Comparison of a window with a reference. reference: its digest; first_time, last_time: Unix seconds."""

    reference: str
    first_id: str
    last_id: str
    first_time: float
    last_time: float
    num_requests: int
    num_sessions: int
    versions: tuple[str, ...]
    run_length: float
    features: tuple[FeatureDrift, ...]
    notes: tuple[str, ...]

    @property
    def alarm(self) -> bool:
        return any(feature.alarm for feature in self.features)

    @property
    def alarmed(self) -> tuple[str, ...]:
        """Names of the features that have drifted."""
        return tuple(feature.name for feature in self.features if feature.alarm)

    def as_json(self) -> dict[str, Any]:
        return {"alarm": self.alarm, **asdict(self)}


@dataclass(frozen=True)
class _Finding:
    """A feature's figures before the adjustment, and how typical each record is of the change."""

    name: str
    statistic: float
    p_value: float
    effect: float
    psi: float
    cause: str
    category: str
    window_scores: Floats
    reference_scores: Floats
    """Scores of the window's records [n] and of the reference's examples [examples]; higher is more typical of the
    increase in the window, or of the decrease."""


def check_windows(
    records: Sequence[RequestRecord], reference: DriftReference, progress: Progress | None = None
) -> Iterator[DriftReport]:
    """Yields a report for each whole window of the records, in order of time; an incomplete last window is left out.
    Each window is tested alone and together with those before it.
    """
    ordered = in_order(checked((f"record {number}", record) for number, record in enumerate(records, start=1)))
    size, recent = reference.config.window_requests, RecentWindows()
    for start in range(0, len(ordered) - size + 1, size):
        yield check(ordered[start : start + size], reference, progress, recent=recent)


def check(
    records: Sequence[RequestRecord],
    reference: DriftReference,
    progress: Progress | None = None,
    *,
    recent: RecentWindows | None = None,
) -> DriftReport:
    """Compares records, as one window, with the reference. recent: statistics of the windows before it, to which this
    one is added. Raises `DataError` for invalid request records.
    """
    progress, recent = progress or SilentProgress(), RecentWindows() if recent is None else recent
    records = in_order(checked((f"record {number}", record) for number, record in enumerate(records, start=1)))
    sessions, users = session_codes(records)
    if len(users) < LEAST_UNITS:
        raise DataError(
            f"{len(records)} requests of {len(users)} sessions are too few; give at least {LEAST_UNITS} sessions"
        )
    units = make_units(sessions, users, reference.max_user_share)
    texts = [record.get("prompt") or "" for record in records]
    scores = reference.reader.scores(texts, progress)
    columns = {feature.name: (feature, feature.values(records, scores)) for feature in FEATURES}
    findings: list[_Finding] = []
    for place, marginal in enumerate(reference.marginals):
        feature, values = columns[marginal.name]
        findings.append(_compare(marginal, marginal.coded(values), units, reference, place, feature.unit))
    if reference.has_embedding:
        embeddings = reference.reader.embed(texts, progress, is_reference=False)
        findings.append(_classify(reference.standard.apply(embeddings), units, records, reference, recent))
    versions = tuple(sorted({str(record["version"]) for record in records if record.get("version")}))
    judged = _judged(findings, records, reference)
    if any(one.name == EMBEDDING and one.alarm for one in judged):
        recent.forget()
    return DriftReport(
        reference=reference.digest,
        first_id=records[0]["id"],
        last_id=records[-1]["id"],
        first_time=float(records[0]["time"]),
        last_time=float(records[-1]["time"]),
        num_requests=len(records),
        num_sessions=len(users),
        versions=versions,
        run_length=reference.calibration.run_length,
        features=judged,
        notes=_notes(versions, reference),
    )


def _notes(versions: Sequence[str], reference: DriftReference) -> tuple[str, ...]:
    other = sorted(set(versions) - set(reference.versions))
    if not other or not reference.versions:
        return ()
    return (
        f"requests were answered by version {', '.join(other)}, and the reference is of version "
        f"{', '.join(reference.versions)}: freeze a reference for each version",
    )


def _judged(
    findings: Sequence[_Finding], records: Sequence[RequestRecord], reference: DriftReference
) -> tuple[FeatureDrift, ...]:
    p_values, effects = (np.array([getattr(one, name) for one in findings]) for name in ("p_value", "effect"))
    adjusted = adjusted_where_moved(p_values, effects, reference.config.min_effect)
    judged: list[FeatureDrift] = []
    for finding, adjusted_p in zip(findings, adjusted.tolist(), strict=True):
        alarm = adjusted_p <= reference.calibration.level
        judged.append(
            FeatureDrift(
                name=finding.name,
                statistic=finding.statistic,
                p_value=finding.p_value,
                adjusted_p=min(1.0, adjusted_p),
                effect=finding.effect,
                psi=finding.psi,
                alarm=alarm,
                cause=finding.cause,
                category=finding.category,
                window_examples=_shown([example_texts(one) for one in records], finding.window_scores) if alarm else (),
                reference_examples=_shown(
                    [(one.session, one.prompt, one.answer) for one in reference.examples], finding.reference_scores
                )
                if alarm
                else (),
            )
        )
    return tuple(judged)


def _shown(texts: Sequence[tuple[str, str, str]], scores: Floats) -> tuple[str, ...]:
    """Returns the records with the highest scores, each from a different session."""
    shown: dict[str, str] = {}
    for number in np.argsort(-scores, kind="stable").tolist():
        session, prompt, answer = texts[number]
        if np.isfinite(scores[number]):
            shown.setdefault(session, f"{prompt} -> {answer}" if answer else prompt)
        if len(shown) == NUM_EXAMPLES:
            break
    return tuple(shown.values())


def _compare(
    marginal: Marginal, values: Floats, units: Units, reference: DriftReference, place: int, unit: str
) -> _Finding:
    distance = marginal.compare(values, units)
    null = reference.calibration.nulls[place : place + 1]
    p_value = float(null_p_values(np.array([distance.statistic]), null)[0])
    mask = ~np.isnan(values)
    shares = np.zeros(len(marginal.edges) + 1)
    if mask.any():
        shares = marginal.shares(values[mask], units.present(mask))
    gains = shares - marginal.reference_shares
    numbers = np.array([one.number for one in reference.examples], dtype=np.int64)
    return _Finding(
        marginal.name,
        distance.statistic,
        p_value,
        distance.effect,
        distance.psi,
        *_cause(marginal, shares, unit),
        _scores_by_bin(values, marginal.edges, gains),
        _scores_by_bin(marginal.values[numbers], marginal.edges, -gains),
    )


def _scores_by_bin(values: Floats, edges: Floats, gains: Floats) -> Floats:
    """Returns the gain of each value's bin; minus infinity for a missing value or a bin that has not gained."""
    bins = np.searchsorted(edges, np.nan_to_num(values), side="left")
    scores = gains[bins]
    return np.where(np.isnan(values) | (scores <= 0), -np.inf, scores)


def _cause(marginal: Marginal, shares: Floats, unit: str) -> tuple[str, str]:
    """Describes the bin that gained most; also returns its label if that is one of the users' labels, else ""."""
    gains = shares - marginal.reference_shares
    best = int(gains.argmax())
    category = ""
    if marginal.kind == "category":
        label = marginal.categories[best]
        place = _OWN_LABELS.get(label, "have the label that gained most")
        category = "" if label in _OWN_LABELS else label
    else:
        edges = marginal.edges
        low, high = (f"{edges[best - 1]:.4g}" if best else ""), (f"{edges[best]:.4g}" if best < len(edges) else "")
        words = f"{low} to {high}" if low and high else (f"above {low}" if low else f"at most {high}")
        place = f"have {words} {unit}"
    return f"{shares[best]:.1%} {place}, {marginal.reference_shares[best]:.1%} in the reference", category


def _classify(
    embeddings: NDArray[np.float32], units: Units, records: Sequence[RequestRecord], reference: DriftReference,
    recent: RecentWindows,
) -> _Finding:  # fmt: skip
    """Runs the classifier test between the window and a sample of the reference's sessions of similar sizes. recent:
    statistics of the windows before it, to which this window is added.
    """
    # Seeded by the window, so that a repeated check draws the same sessions and reports the same alarm.
    rng = np.random.default_rng(derive_seed(reference.config.seed, reference.digest, records[0]["id"], len(records)))
    window = np.arange(len(records))
    if len(units.weights) > _MOST_UNITS:
        window = np.flatnonzero(np.isin(units.of_record, rng.choice(len(units.weights), _MOST_UNITS, replace=False)))
    kept, codes = np.unique(units.of_record[window], return_inverse=True)
    chosen, reference_codes = like_sized(
        reference.blocks[reference.embedded], np.bincount(codes), REFERENCE_UNITS * len(kept), rng
    )
    num_reference = int(reference_codes.max()) + 1
    # The window's units come first.
    both = Units(
        np.concatenate([codes, len(kept) + reference_codes]),
        np.concatenate([units.weights[kept], np.ones(num_reference)]),
    )
    is_window = np.arange(len(both.weights)) < len(kept)
    rows = np.concatenate([embeddings[window], reference.embeddings[chosen]])
    result = separation_test(rows, both, is_window, rng)
    mine, theirs = result.logits[: len(window)], result.logits[len(window) :]
    weights = both.record_weights
    mine_weights, their_weights = (one / one.sum() for one in (weights[: len(window)], weights[len(window) :]))
    edges = decile_edges(theirs, their_weights)
    window_scores, reference_scores = np.full(len(records), -np.inf), np.full(len(reference.examples), -np.inf)
    window_scores[window] = mine
    logit_of = dict(zip(reference.embedded[chosen].tolist(), theirs.tolist(), strict=True))
    for place, example in enumerate(reference.examples):
        reference_scores[place] = -logit_of.get(example.number, np.inf)
    cause = f"a classifier tells at least {result.effect:.1%} of the prompts from those of the reference"
    p_value, num_before = recent.p_value(result), len(recent.statistics)
    if p_value < result.p_value:
        cause += f", and {num_before + 1} windows together differ more than this one"
    recent.add(result)
    return _Finding(
        EMBEDDING,
        result.statistic,
        p_value,
        result.effect,
        psi(bin_shares(theirs, their_weights, edges), bin_shares(mine, mine_weights, edges)),
        cause,
        "",
        window_scores,
        reference_scores,
    )


def like_sized(blocks: Ints, sizes: Ints, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draws at most `count` blocks and cuts them to the distribution of `sizes` where they are larger: if means on one
    side were over fewer requests, a permutation test would compare precision instead of location. blocks [N]. Returns
    the indices of records and their blocks, numbered from 0.
    """
    distinct, codes = np.unique(blocks, return_inverse=True)
    own_sizes = np.bincount(codes)
    chosen = rng.permutation(len(distinct))[:count]
    by_size = chosen[np.argsort(own_sizes[chosen], kind="stable")]
    # The i-th smallest block is cut to the i-th quantile of `sizes`.
    limits = np.quantile(sizes, (np.arange(len(by_size)) + 0.5) / len(by_size), method="inverted_cdf").astype(np.int64)
    limit_of = np.zeros(len(distinct), dtype=np.int64)
    limit_of[by_size] = limits
    # A random order within each block, whose first records are kept.
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    rank = np.arange(len(codes)) - (np.cumsum(own_sizes) - own_sizes)[codes[order]]
    places = np.sort(order[rank < limit_of[codes[order]]])
    return places, np.unique(codes[places], return_inverse=True)[1]
