"""The bounds that the pages print, recomputed from the stored samples with Python's arithmetic alone.

Neither the package's statistics nor scipy is called: quantiles of Student's t come from its distribution in closed form
(Abramowitz and Stegun 26.7.3 and 26.7.4), bounds of a share from sums of binomial probabilities, both by bisection.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modelwright_claims.claim import Measurement
from modelwright_claims.judging import judge
from modelwright_claims.ledger import CLAIMS
from modelwright_claims.results import judged_for_page, read_results, verdict_on

ROOT = Path(__file__).parents[3]
BY_NAME = {claim.name: claim for claim in CLAIMS}
RECORDS = read_results(ROOT / "benchmarks/results")


def root(rises: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2


@cache
def t_quantile(freedom: int) -> float:
    """The 95% quantile of Student's t: the share within plus and minus it is 0.9."""

    def within(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        is_odd, term, total = freedom % 2, 1.0, 0.0
        for power in range(2 + is_odd, freedom + 1, 2):
            term = math.cos(angle) ** is_odd if power == 2 + is_odd else term
            total += term
            term *= math.cos(angle) ** 2 * (power - 1) / power
        return 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total

    return root(lambda t: within(t) - 0.9, 0.0, 10.0)


def tail(hits: int, count: int, share: float) -> float:
    """The probability of `hits` or more in a binomial distribution."""

    def log_choose(number: int) -> float:
        return math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)

    logs = (
        log_choose(one) + one * math.log(share) + (count - one) * math.log1p(-share) for one in range(hits, count + 1)
    )
    return math.fsum(map(math.exp, logs))


def test_quantiles_are_those_of_printed_tables() -> None:
    """Fisher and Yates, table III."""
    table = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 9: 1.833, 14: 1.761, 29: 1.699}
    assert {freedom: round(t_quantile(freedom), 3) for freedom in table} == table


def mean_bounds(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, standard deviation and the one-sided 95% bounds by Student's t."""
    mean, std, count = statistics.fmean(values), statistics.stdev(values), len(values)
    margin = t_quantile(count - 1) * std / math.sqrt(count)
    return mean, std, mean - margin, mean + margin


def clopper_pearson(hits: int, count: int) -> tuple[float, float]:
    """Exact one-sided 95% bounds of a share in percent: where the tail of the binomial is 5%."""
    low = root(lambda share: tail(hits, count, share) - 0.05, 1e-12, 1 - 1e-12) if hits else 0.0
    high = root(lambda share: tail(hits + 1, count, share) - 0.95, 1e-12, 1 - 1e-12) if hits < count else 1.0
    return 100 * low, 100 * high


def comparisons(samples: Mapping[str, Sequence[float]]) -> Iterator[list[float]]:
    """Every series that a figure may be the mean of: samples, and paired differences, ratios and percentages."""
    lists = {name: list(values) for name, values in samples.items() if 1 < len(values) <= 50}
    yield from lists.values()
    yield from (list(map(abs, values)) for values in lists.values())
    for one, other in itertools.permutations(lists.values(), 2):
        if len(one) == len(other):
            yield [a - b for a, b in zip(one, other, strict=True)]
            if all(other):
                yield [a / b for a, b in zip(one, other, strict=True)]
                yield [abs(a / b - 1) for a, b in zip(one, other, strict=True)]


def against_the_faster(record: Mapping[str, Any]) -> Iterator[list[float]]:
    """Yields, for `half_precision_latency`, each format's seconds beside the faster FP32 of the same round."""
    if record["name"] != "half_precision_latency":
        return
    samples = record["samples"]
    for what in ("a prompt", "a decode step"):
        of_fp32 = [samples[name] for name in samples if name.startswith("seconds, FP32") and name.endswith(what)]
        fp32 = list(map(min, zip(*of_fp32, strict=True)))
        for name in (name for name in samples if name.endswith(what)):
            yield [own / fastest for own, fastest in zip(samples[name], fp32, strict=True)]


def beside_a_step_that_computes(record: Mapping[str, Any]) -> Iterator[list[float]]:
    """Yields, for `loading_latency`, the share of each repeat's step that a step without loading takes."""
    samples = record["samples"]
    for alone in samples.get("milliseconds of a step that computes alone", ()):
        yield from ([alone / step for step in values] for name, values in samples.items() if name.startswith("step, "))


def beside_theory(record: Mapping[str, Any]) -> Iterator[list[float]]:
    """Yields, for each case of `zero_memory`, how far states are from theory and the planner from measured peaks."""
    if record["name"] != "zero_memory":
        return
    samples, whole, start = record["samples"], 12 * int(record["conditions"]["parameters"]), "bytes of states, "
    for name in (name for name in samples if name.startswith(start)):
        sharded, ranks = name.removeprefix(start).removesuffix(" ranks").split(", ")
        theory = whole / (1 if sharded == "none" else int(ranks))
        yield [abs(value / theory - 1) for value in samples[name]]
    errors = list(map(abs, samples["memory model's error, %"]))
    yield from ([one, other] for one, other in zip(errors[::2], errors[1::2], strict=True))


DERIVED = {
    "activation_checkpointing": "memory saved, ",  # of the peak above the states
    "compressed_links": "throughput over exact, exact, ",  # of itself: 1
    "distillation": "share of the teacher's score, ",  # of its one score
    "forgetting": "compute of the updates to that from scratch, ",  # a sum of updates
    "gated_attention": "time of attention in decoding, ",  # a difference of two times
    "planned_cost": "cost saved, ",  # by factors of other records, see below
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
    own_series = (one(record) for one in (against_the_faster, beside_a_step_that_computes, beside_theory))
    for values in itertools.chain(comparisons(record["samples"]), *own_series):
        if not all(map(math.isfinite, values)):
            continue
        mean = statistics.fmean(values)
        for scale, offset in itertools.product(
            (1.0, 100.0, 1000.0, 1e-6, 1 / 3600, 2.0**-20, -100.0), (0.0, 100.0, -100.0)
        ):
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


SILENT = 3
"""How `silent_errors` stores that a file was read otherwise than it says, and nothing was said."""


def hits_and_misses(record: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yields every series of zeros and ones that a figure may be the share of: samples, and which files of a form that
    some tool documents, or of all, were silent errors.
    """
    samples = record["samples"]
    yield from (list(map(int, values)) for values in samples.values() if set(values) <= {0.0, 1.0})
    outcomes, forms = (
        [values for name, values in samples.items() if name.startswith(f"{start}, ")]
        for start in ("outcome", "documented")
    )
    for values, chosen in itertools.product(outcomes, [*forms, *([1.0] * len(values) for values in outcomes[:1])]):
        yield [int(one == SILENT) for one, is_chosen in zip(values, chosen, strict=True) if is_chosen]


SHARES = ("ab_false_alarms", "silent_errors")
OF_SHARES = [record for record in RECORDS if record["name"] in SHARES]


@pytest.mark.slow
@pytest.mark.parametrize("record", OF_SHARES, ids=lambda record: f"{record['name']}-{record['date']}")
def test_bounds_of_shares_are_those_of_clopper_and_pearson(record: Mapping[str, Any]) -> None:
    figures = bounded(judged_for_page(BY_NAME[record["name"]], record))
    of_shares = {(sum(hits), len(hits)): clopper_pearson(sum(hits), len(hits)) for hits in hits_and_misses(record)}
    for name, figure in figures.items():
        shown = pytest.approx((figure["lower"], figure["upper"]), rel=1e-9, abs=1e-9)
        assert any(
            math.isclose(figure["value"], 100 * hits / count) and bounds == shown
            for (hits, count), bounds in of_shares.items()
        ), name
    assert len(figures) >= 5


@pytest.mark.parametrize("record", RECORDS, ids=lambda one: one["file"].removesuffix(".json"))
def test_bounds_of_means_follow_from_the_samples(record: Mapping[str, Any]) -> None:
    """A figure is some comparison of two series of samples; whichever it is, its bounds are those of Student's t."""
    claim = BY_NAME[record["name"]]
    figures = bounded(judged_for_page(claim, record))
    if record["name"] in SHARES or not figures:
        pytest.skip("has no bounds by Student's t")
    missing = set(figures) - recomputed(record, figures)
    derived = DERIVED.get(record["name"])
    assert {name for name in missing if derived is None or not name.startswith(derived)} == set()
    assert derived is not None or len(missing) < len(figures)


def test_what_training_saves_follows_from_the_runs_of_the_other_record() -> None:
    """A factor of x saves the share 1 - 1/x of the hours, at its mean and at both bounds."""
    name = "training is faster by"
    figure = "one host: faster than the fastest plain loop"
    planned = [one for one in RECORDS if one["name"] == "planned_cost" and figure in one["conditions"].get(name, "")]
    assert planned
    for one in planned:
        sources = [other for other in RECORDS if other["commit"][:12] in one["conditions"][name]]
        (samples,) = (other["samples"] for other in sources if other["name"] == "efficiency_20x")
        plain = (samples.get(f"one host: seconds, {arm}") for arm in ("plain", "plain, products by oneDNN"))
        fastest = min((seconds for seconds in plain if seconds), key=statistics.fmean)
        ratios = [slow / fast for slow, fast in zip(fastest, samples["one host: seconds, everything"], strict=True)]
        mean, _, lower, upper = mean_bounds(ratios)
        expected = [100 * (1 - 1 / factor) for factor in (mean, lower, upper)]
        assert one["samples"]["saved, training"] == pytest.approx(expected, rel=1e-3)


MISS = re.compile(
    r"(?:^|; )(?P<what>[^;]+?) (?P<mean>-?[\d.,e-]+)\S*(?: \S+)? "
    r"\((?:(?P<side>lower|upper) bound (?P<bound>-?[\d.,e-]+)[^)]*|exact|one repeat, no bound)\), "
    r"not (?P<relation>at least|at most|above|below) (?P<limit>-?[\d.e-]+)"
)


def test_met_and_short_follow_from_the_parts_of_the_reason() -> None:
    """No record is met that misses a bound which its reason prints, and what is called a miss is one."""
    num_misses = 0
    for record in RECORDS:
        verdict = verdict_on(BY_NAME[record["name"]], record)
        first = verdict.reason.split(". ")[0]
        assert (", not " in first) <= (verdict.kind != "met"), record["file"]
        for miss in MISS.finditer(first):
            bound, limit = (float((miss[name] or miss["mean"]).replace(",", "")) for name in ("bound", "limit"))
            is_floor = miss["relation"] in ("at least", "above")
            assert miss["side"] in (None, "lower" if is_floor else "upper"), miss[0]
            assert bound <= limit if is_floor else bound >= limit, miss[0]
            num_misses += 1
    assert num_misses > 40


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS, ids=lambda one: one["file"].removesuffix(".json"))
def test_a_record_that_lacks_something_is_judged_without_a_crash_and_never_better(record: Mapping[str, Any]) -> None:
    """Whatever is taken away, a record does not become met."""
    claim, samples, conditions = BY_NAME[record["name"]], record["samples"], record["conditions"]
    before = judge(claim, Measurement(samples=samples, conditions=conditions)).kind
    changed = [{**record, "samples": {}}, {**record, "conditions": {}}]
    changed += [{**record, "samples": {one: of for one, of in samples.items() if one != name}} for name in samples]
    changed += [
        {**record, "conditions": {one: conditions[one] for one in conditions if one != name}} for name in conditions
    ]
    for one in changed[:: max(1, len(changed) // 40)]:
        after = judge(claim, Measurement(samples=one["samples"], conditions=one["conditions"])).kind
        assert after != "met" or before == "met"
