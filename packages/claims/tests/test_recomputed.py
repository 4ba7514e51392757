"""The bounds that the pages print, recomputed from the stored samples with scipy alone.

Nothing here calls the package's statistics: bounds of a mean come from `scipy.stats.t`, those of a share from the
binomial distribution by root finding.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import optimize, stats

from modelwright_claims.ledger import CLAIMS
from modelwright_claims.results import judged_for_page, read_results, verdict_on

ROOT = Path(__file__).parents[3]
BY_NAME = {claim.name: claim for claim in CLAIMS}
RECORDS = read_results(ROOT / "benchmarks/results")


def mean_bounds(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, standard deviation and the one-sided 95% bounds by Student's t."""
    mean, std, count = statistics.fmean(values), statistics.stdev(values), len(values)
    low, high = stats.t.interval(0.90, count - 1, loc=mean, scale=std / math.sqrt(count)) if std else (mean, mean)
    return mean, std, float(low), float(high)


def clopper_pearson(hits: int, count: int) -> tuple[float, float]:
    """Exact one-sided 95% bounds of a share in percent: where the tail of the binomial is 5%."""
    low = high = 0.0
    if hits:
        low = float(optimize.brentq(lambda share: stats.binom.sf(hits - 1, count, share) - 0.05, 0, 1, xtol=1e-14))  # type: ignore[arg-type]
    if hits < count:
        high = float(optimize.brentq(lambda share: stats.binom.cdf(hits, count, share) - 0.05, 0, 1, xtol=1e-14))  # type: ignore[arg-type]
    return 100 * low, 100 * high if hits < count else 100.0


def comparisons(samples: Mapping[str, Sequence[float]]) -> Iterator[list[float]]:
    """Every series that a figure may be the mean of: samples, and paired differences, ratios and percentages."""
    lists = {name: list(values) for name, values in samples.items() if 1 < len(values) <= 50}
    yield from lists.values()
    for one, other in itertools.permutations(lists.values(), 2):
        if len(one) == len(other):
            yield [a - b for a, b in zip(one, other, strict=True)]
            if all(other):
                yield [a / b for a, b in zip(one, other, strict=True)]


DERIVED = {
    "activation_checkpointing": "memory saved, ",  # of the peak above the states
    "compressed_links": "throughput over exact, exact, ",  # of itself: 1
    "distillation": "share of the teacher's score, ",  # of its one score
    "forgetting": "compute of the updates to that from scratch, ",  # a sum of updates
    "gated_attention": "time of attention in decoding, ",  # a difference of two times
    "sparse_updates": "",  # means over both texts
    "update_time": "change of ",  # the gate's own bounds over documents
}
"""Figures of several series at once, by the start of their names: their arithmetic is tested beside their claims."""


def bounded(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: figure for name, figure in record["figures"].items() if "lower" in figure}


def recomputed(record: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The names of the figures that some comparison of the samples gives, bounds and all."""
    wanted = dict[str, list[str]]()
    for name, figure in figures.items():
        wanted.setdefault(f"{figure['value']:.6g}", []).append(name)
    found = set[str]()
    for values in comparisons(record["samples"]):
        if not all(map(math.isfinite, values)):
            continue
        mean = statistics.fmean(values)
        for scale, offset in itertools.product((1.0, 100.0, 1000.0, 1e-6, 2.0**-20, -100.0), (0.0, 100.0, -100.0)):
            names = wanted.get(f"{scale * mean + offset:.6g}", ())
            for name in names:
                figure = figures[name]
                center, std, low, high = mean_bounds([scale * value + offset for value in values])
                parts = zip(
                    (center, std, low, high), (figure["value"], figure["spread"], figure["lower"], figure["upper"]),
                    strict=True,
                )  # fmt: skip
                if all(math.isclose(own, shown, rel_tol=1e-6, abs_tol=1e-9) for own, shown in parts):
                    found.add(name)
    return found


def test_bounds_of_shares_are_those_of_clopper_and_pearson() -> None:
    (record,) = (record for record in RECORDS if record["name"] == "ab_false_alarms")
    figures = bounded(judged_for_page(BY_NAME["ab_false_alarms"], record))
    shares = {name: list(map(int, values)) for name, values in record["samples"].items() if set(values) <= {0.0, 1.0}}
    of_shares = {(sum(hits), len(hits)): clopper_pearson(sum(hits), len(hits)) for hits in shares.values()}
    checked = 0
    for figure in figures.values():
        for (hits, count), (low, high) in of_shares.items():
            if math.isclose(figure["value"], 100 * hits / count):
                assert (figure["lower"], figure["upper"]) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
                checked += 1
    assert checked >= len(figures) >= 5


@pytest.mark.parametrize("record", RECORDS, ids=lambda one: one["file"].removesuffix(".json"))
def test_bounds_of_means_follow_from_the_samples(record: Mapping[str, Any]) -> None:
    """A figure is some comparison of two series of samples; whichever it is, its bounds are those of Student's t."""
    claim = BY_NAME[record["name"]]
    figures = bounded(judged_for_page(claim, record))
    if record["name"] == "ab_false_alarms" or not figures:
        pytest.skip("has no bounds by Student's t")
    missing = set(figures) - recomputed(record, figures)
    derived = DERIVED.get(record["name"])
    assert {name for name in missing if derived is None or not name.startswith(derived)} == set()
    assert derived is not None or len(missing) < len(figures)


def test_met_and_short_follow_from_the_parts_of_the_reason() -> None:
    """No record is met that misses a bound which its reason prints."""
    for record in RECORDS:
        verdict = verdict_on(BY_NAME[record["name"]], record)
        assert (", not " in verdict.reason.split(". ")[0]) <= (verdict.kind != "met"), record["file"]
