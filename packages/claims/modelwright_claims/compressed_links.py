"""Claim: compressed gradients make the all-reduce on a slow link dozens of times shorter."""

import statistics
from dataclasses import replace

from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described, untestable
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.gradient_compression import METHOD, METHODS
from modelwright_claims.judging import Judgment, Lacks
from modelwright_claims.netns import missing
from modelwright_claims.statistics import Estimate, estimate, percent_saved, ratios
from modelwright_claims.training_run import Outcome, Processes, Run
from modelwright_claims.workbench import Size

EXACT, AFTER = "exact", "exact-after"
NAMES = (EXACT, AFTER, "bf16", "powersgd-8", "int8-local-20", METHOD)
MBIT, FAST_MBIT = 100.0, 1000.0
UNLIMITED = 0.0
LINK_METHODS = {**METHODS, "exact-after": {"gradient_sync": {"overlap": False}}}
"""`exact-after`: exact sums that begin when backward has ended, so that all of their time shows."""
NUM_HOSTS = 2
WARM_UP = 20
"""Steps."""
REMOVED, SHORTER, THROUGHPUT = 98.0, 20.0, 0.9


def measure(setting: Setting) -> Measurement:
    """Every method on slow, on faster and on unlimited links, in turn; medians over three rounds."""
    if reason := missing():
        return untestable(reason)
    names = (EXACT, AFTER, METHOD) if setting.quick else NAMES
    links = (MBIT, UNLIMITED) if setting.quick else (MBIT, FAST_MBIT, UNLIMITED)
    num_steps = 42 if setting.quick else 60
    size = Size(model_dim=128, num_layers=2, seq_len=128, batch_rows=32, num_steps=num_steps, learning_rate=4e-3)
    variants = {f"{name}, {mbit:g} Mbit/s": variant(name, mbit, size) for name in names for mbit in links}
    rounds = range(1 if setting.quick else 3)
    samples = run_experiment(setting, Experiment(variants=variants, seeds=rounds, timed=True))
    found: dict[str, list[float]] = {}
    for name in names:
        for mbit in links:
            for run in map(after_warm_up, samples.runs[f"{name}, {mbit:g} Mbit/s"]):
                for what, value in run.items():
                    found.setdefault(sample_name(what, name, mbit), []).append(value)
    return Measurement(
        samples=found,
        conditions=size.describe() | described(__name__),
    )


def variant(name: str, mbit: float, size: Size) -> Run:
    """Return a run of one process of one thread on each host; its last step, an exact meeting, is not measured."""
    longer = replace(size, num_steps=size.num_steps + 1)
    return Run(size=longer, settings=LINK_METHODS[name], processes=Processes(hosts=NUM_HOSTS, threads=1, mbit=mbit))


def after_warm_up(outcome: Outcome) -> dict[str, float]:
    """Return means over the steps after the first `WARM_UP` ones, without the last."""
    comm_s, step_s, num_tokens = (
        statistics.fmean(outcome.steps[name][WARM_UP:-1]) for name in ("comm_s", "step_time_s", "num_tokens")
    )
    sent = outcome.steps["interface_bytes"][WARM_UP - 1 : -1]
    return {
        "bytes_per_step": (sent[-1] - sent[0]) / (len(sent) - 1),
        "exchange_ms": 1e3 * comm_s,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": num_tokens / step_s,
    }


def sample_name(what: str, name: str, mbit: float) -> str:
    return f"{what}, {name}, {f'{mbit:g} Mbit/s' if mbit else 'unlimited'}"


def beside_exact(samples: Samples, name: str, mbit: float) -> dict[str, Estimate]:
    """Compare a method with exact sums on the same links, round by round."""

    def of(what: str, other: str, link: float = mbit) -> list[float]:
        return list(samples[sample_name(what, other, link)])

    own = of("tokens_per_s", name)
    pairs = zip(own, of("tokens_per_s", name, UNLIMITED), strict=True)
    result = {_THROUGHPUT: estimate([100 * (one / other) for one, other in pairs])}
    result[_OVER_EXACT] = ratios(own, of("tokens_per_s", EXACT))
    if name not in (EXACT, AFTER):
        result[_REMOVED] = percent_saved(of("bytes_per_step", name), of("bytes_per_step", EXACT))
        result[_SHORTER] = ratios(of("exchange_ms", AFTER), of("exchange_ms", name))
    return result


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """The reason names the best of the methods that remove enough bytes, too."""
    judgment = Judgment()
    reached: dict[str, dict[str, Estimate]] = {}
    for name in NAMES:
        for mbit in (MBIT, FAST_MBIT):
            if sample_name("exchange_ms", name, mbit) not in samples:
                continue
            sample = sample_name("exchange_ms", name, mbit)
            judgment.show(samples, {f"exchange, {name}, {mbit:g} Mbit/s": sample}, "ms a step")
            result = beside_exact(samples, name, mbit)
            for what, one in result.items():
                unit = "x" if what in (_SHORTER, _OVER_EXACT) else "%"
                judgment.ask(f"{what}, {name}, {mbit:g} Mbit/s", one, unit)
            if mbit == MBIT and name not in (EXACT, AFTER):
                reached[name] = result
    if METHOD not in reached:
        raise Lacks(f"samples of {METHOD}")
    method = reached[METHOD]
    hidden = ratios(*(samples[sample_name("exchange_ms", name, MBIT)] for name in (EXACT, METHOD))).mean
    words = {
        name: f"{found[_REMOVED].mean:.2f}% of the bytes removed, communication {found[_SHORTER].mean:.1f}x shorter, "
        f"{found[_THROUGHPUT].mean:.0f}% of the unlimited link's throughput"
        for name, found in reached.items()
    }
    enough = {name: result for name, result in reached.items() if result[_REMOVED].mean >= REMOVED} or reached
    best = max(enough, key=lambda name: enough[name][_SHORTER].mean)
    judgment.said += [
        f"{METHOD} at {MBIT:g} Mbit/s: {words[METHOD]}; {hidden:.1f}x shorter than what exact sums that overlap with "
        "backward leave visible",
        f"best of those tried: {best}, {words[best]}",
    ]
    judgment.check(_REMOVED, method[_REMOVED], REMOVED, "%", ">=")
    judgment.check(_SHORTER, method[_SHORTER], SHORTER, "x", ">=")
    judgment.check(_THROUGHPUT, method[_THROUGHPUT], 100 * THROUGHPUT, "%", ">=")
    return judgment.verdict()


_REMOVED, _SHORTER, _THROUGHPUT = "bytes removed", "communication shorter", "throughput of the unlimited link's"
_OVER_EXACT = "throughput over exact"


CLAIM = declared(__name__)
