"""Claim: the share that the measured techniques save of the bill of training and of serving, by the product's cost
model.

The workload is stated here; how much faster training and serving get comes from stored measurements of other claims
(`benchmarks/results`), of this machine where there are some, on an instance of the kind that they were measured on.
Training takes fewer hours by the measured factor over the fastest plain loop. Serving takes fewer instances by the
requests per second of INT8 over our own FP32. Storage and traffic stay unchanged. The sensitivity
is the product's tornado: each factor and each assumption alone a quarter lower and higher.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.config import parse
from modelwright_claims import efficiency_20x, serving_qps
from modelwright_claims.claim import UNTESTABLE, Claim, Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment, Lacks, names_between
from modelwright_claims.results import machine, machine_slug, read_records, verdict_on
from modelwright_claims.statistics import Estimate
from modelwright_plan.cost.bill import make_bill, tornado
from modelwright_plan.cost.prices import PriceTable, shipped_prices
from modelwright_plan.cost.workload import Workload

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
TRAINING_SAVED, INFERENCE_SAVED = 67.0, 54.0
"""Percent, as published."""
VARIED = 0.25
"""How far each assumption is moved, as a share of its value: the default of `modelwright plan cost`."""
NUM_BARS = 6


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A measured factor: the claim and the figure that it comes from."""

    claim: Claim
    figure: str


TRAINING_GAIN = Gain(claim=efficiency_20x.CLAIM, figure="one host: faster than the fastest plain loop")
SERVING_GAIN = Gain(claim=serving_qps.CLAIM, figure=serving_qps.OVER_FP32)
ASSUMED: Mapping[str, float] = {
    "training hours, plain": 2000.0,
    "tokens served a month": 4e10,  # many instances, so that whole ones round little
    "tokens a second of an instance, plain": 200.0,
    "utilization": 0.5,
    "interruptions an hour on spot instances": 0.2,
    "stall of a checkpoint, s": 5.0,
    "recovery, s": 180.0,
}
INSTANCE, PROVIDER, REGION, MONTHS = "c7i.xlarge", "aws", "us-east-1", 12
SAVED = "saved, "
PARTS = ("training", "inference", "training on spot instances too")


TRAINING_FACTOR, SERVING_FACTOR = "measured factor of training", "measured factor of serving"
"""How many times faster training and serving are: two more of the assumptions."""
Assumptions = Mapping[str, float]


def measure(setting: Setting) -> Measurement:
    records = read_records(RESULTS) if RESULTS.is_dir() else []
    training, serving = (find_factor(gain, records) for gain in (TRAINING_GAIN, SERVING_GAIN))
    if training is None or serving is None:
        missing = TRAINING_GAIN if training is None else SERVING_GAIN
        text = f"no stored full measurement of {missing.claim.name} has {missing.figure!r}"
        return Measurement(conditions={UNTESTABLE: text})
    prices = shipped_prices()
    assumed = {**ASSUMED, TRAINING_FACTOR: training.value, SERVING_FACTOR: serving.value}
    bounds = [(training.lower, serving.lower), (training.upper, serving.upper)]
    found = [saved(assumed, prices)]
    found += [saved({**ASSUMED, TRAINING_FACTOR: of, SERVING_FACTOR: other}, prices) for of, other in bounds]
    samples: dict[str, list[float]] = {SAVED + part: [each[part] for each in found] for part in PARTS}
    for part in PARTS[:2]:
        for name, ends in swings(assumed, prices, part).items():
            samples[f"{part} saved, at the ends of: {name}"] = list(ends)
    origins = {"training is faster by": training.origin, "inference is faster by": serving.origin}
    return Measurement(samples=samples, conditions={**_conditions(prices), **origins})


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A stored figure: its value, its confidence bounds (the value where they are missing), where it comes from."""

    value: float
    lower: float
    upper: float
    origin: str


def find_factor(gain: Gain, records: Sequence[Mapping[str, Any]]) -> Factor | None:
    """The figure in this machine's record, else in the latest one of another machine; None without any."""
    full = [record for record in records if record["name"] == gain.claim.name and not record["quick"]]
    figures = [(record, verdict_on(gain.claim, record).figures.get(gain.figure)) for record in full]
    own = machine_slug(machine())
    fitting = [(machine_slug(one["machine"]) == own, one["date"], one, figure) for one, figure in figures if figure]
    if not fitting:
        return None
    _, date, record, figure = max(fitting, key=lambda one: one[:2])
    where = f"{gain.claim.name} on {machine_slug(record['machine'])} of {date}, commit {record['commit'][:12]}"
    lower, upper = (figure.value if bound is None else bound for bound in (figure.lower, figure.upper))
    return Factor(value=figure.value, lower=lower, upper=upper, origin=f"{figure.value:.3g}x: {gain.figure} ({where})")


def saved(assumed: Assumptions, prices: PriceTable) -> dict[str, float]:
    """Percent of each part of the bill that is saved."""
    plain, better = costs({**assumed, TRAINING_FACTOR: 1.0, SERVING_FACTOR: 1.0}, prices), costs(assumed, prices)
    beside = dict(zip(PARTS, ("training", "inference", "training"), strict=True))
    return {part: 100 * (1 - better[part] / plain[other]) for part, other in beside.items()}


def costs(assumed: Assumptions, prices: PriceTable) -> dict[str, float]:
    """US dollars of each part, by the product's cost model."""
    hours = assumed["training hours, plain"] / assumed[TRAINING_FACTOR]
    spot = {
        "purchase": "spot",
        "interruptions_per_hour": assumed["interruptions an hour on spot instances"],
        "checkpoint_stall_s": assumed["stall of a checkpoint, s"],
        "recovery_s": assumed["recovery, s"],
    }
    training = {"instance": INSTANCE, "hours": hours}
    serving = {
        "name": "inference",
        "instance": INSTANCE,
        "months": MONTHS,
        "tokens_per_month": assumed["tokens served a month"],
        "tokens_per_s": assumed["tokens a second of an instance, plain"] * assumed[SERVING_FACTOR],
        "utilization": min(1.0, assumed["utilization"]),
    }
    workload = parse(
        Workload,
        {
            "name": "planned",
            "provider": PROVIDER,
            "region": REGION,
            "training": [
                {"name": "training", **training},
                {"name": "training on spot instances too", **training, **spot},
            ],
            "serving": [serving],
        },
    )
    return {line.use: float(line.amount) for line in make_bill(workload, prices).lines}


def swings(assumed: Assumptions, prices: PriceTable, part: str) -> dict[str, tuple[float, float]]:
    """Return the savings of a part at both ends of each assumption that matters, the widest first."""
    ranges = {name: (value * (1 - VARIED), value * (1 + VARIED)) for name, value in assumed.items()}
    bars = tornado(ranges, lambda name, value: saved({**assumed, name: value}, prices)[part])
    return {bar.name: (bar.at_low, bar.at_high) for bar in bars[:NUM_BARS] if bar.width > 0}


def _conditions(prices: PriceTable) -> Conditions:
    rows = {
        purchase: prices.price("compute", PROVIDER, REGION, INSTANCE, purchase) for purchase in ("on_demand", "spot")
    }
    shown = ", ".join(f"{purchase} {row.usd} $/h (believed for {row.date})" for purchase, row in rows.items())
    return {
        "instance": f"{INSTANCE}, {PROVIDER} {REGION}: {shown}; prices were not checked",
        "months of serving": MONTHS,
        "assumed": json.dumps(dict(ASSUMED)),
        "the factors hold on the instance": "an assumption: they were measured on the machine that is named",
        "compute alone": "storage and traffic are the same on both sides and left out",
        "varied": f"each assumption by {100 * VARIED:.0f}%, one at a time",
    }


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """The factors' bounds give those of the savings."""
    judgment = Judgment()

    def saved_part(part: str, gain: Gain, origin: str) -> Estimate:
        if gain.figure not in origin:  # of a record from before the baseline was changed
            raise Lacks(f"a factor of {part} by the figure {gain.figure!r} of {gain.claim.name}")
        value, lower, upper = samples[SAVED + part]
        return Estimate(mean=value, spread=0.0, count=2, lower=lower, upper=upper)

    parts = (("training", TRAINING_SAVED, TRAINING_GAIN), ("inference", INFERENCE_SAVED, SERVING_GAIN))
    for part, target, gain in parts:
        with judgment.part():
            origin = str(conditions[f"{part} is faster by"])
            share = saved_part(part, gain, origin)
            judgment.ask(f"cost saved, {part}", share, "%", ">=", target)
            judgment.said.append(f"{part} costs {-share.mean:+.0f}% at {origin}")
        prefix = f"{part} saved, at the ends of: "
        for name in names_between(samples, prefix):
            for end, value in zip(("lower", "higher"), samples[prefix + name], strict=True):
                judgment.ask(f"{part} saved with {name} a quarter {end}", value, "%")
    with judgment.beside():
        spot = saved_part(PARTS[2], TRAINING_GAIN, str(conditions["training is faster by"]))
        judgment.ask(f"cost saved, {PARTS[2]}", spot, "%")
        judgment.said.append(f"with spot instances training costs {-spot.mean:+.0f}%")
    judgment.said.append(f"assumed: {conditions['instance']}; {conditions['assumed']}")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    quick_decides=True,
    statement="By the cost model, the measured techniques save 67% of the cost of training and 54% of that of "
    "inference.",
    source="the product's cost model (`modelwright plan cost`) on a stated workload",
    published="training cost -67%, inference cost -54%; workload, prices and techniques not told",
    compared="the bill of a stated workload with plain training and serving, against the same with the measured "
    "factors of the ledger, on the same instances on demand",
    target=f"{TRAINING_SAVED:g}% of training and {INFERENCE_SAVED:g}% of inference, without counting spot instances",
    headline=("cost saved, training", "cost saved, inference", f"cost saved, {PARTS[2]}"),
)
