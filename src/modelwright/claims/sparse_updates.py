"""Claim: dynamic sparse updates need 60% fewer FLOPs at less than 0.5% of quality.

In two regimes, because the answer depends on it. In a continual update most of the stream is text like that which the
model was trained on, against forgetting; what counts is what is learned of the new text, and that the old is not
forgotten. Choosing rows by what a short look at them tells leaves most of the old text out. In pretraining every row is
new. Every form stands beside what it has to beat at equal compute: dense with fewer steps, a smaller dense model,
rows drawn at random, plain freezing; each at its own best rate, chosen on a seed of its own.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelwright.claims.claim import Claim, Figure, Result, Setting
from modelwright.claims.sparse_arms import (
    BASELINES,
    BEFORE,
    DENSE,
    METHODS,
    NUM_ROUNDS,
    NUM_TIMED_STEPS,
    PRETRAIN,
    RATES,
    SEEDS,
    SHARE_OF_CODE,
    SIZE,
    TARGET_FLOPS,
    UPDATE,
    Arm,
    Bench,
    Outcome,
    weights_of,
)
from modelwright.claims.sparse_probe import Found
from modelwright.claims.statistics import paired_t_test, spread
from modelwright.claims.workbench import Size

TARGET_TIME, TARGET_LOSS = 0.60, 0.5
TOO_SHORT = "so few steps only show that the measurement runs; measure without --quick"


def measure(setting: Setting) -> Result:
    """Both regimes; in quick mode the first one, shortened."""
    update, before = SIZE, replace(SIZE, **BEFORE)
    bench = Bench(
        setting=setting,
        folder=setting.folder / "sparse",
        sizes={UPDATE: update, PRETRAIN: replace(SIZE, num_steps=800)},
        rates=RATES,
        seeds=SEEDS,
    )
    if setting.quick:
        short = replace(SIZE, num_steps=15)
        bench = replace(
            bench,
            sizes={UPDATE: short},
            rates={UPDATE: RATES[UPDATE][1:2]},
            seeds=SEEDS[:2],
            tuning_share={UPDATE: 1.0},
        )
        before = replace(before, num_steps=30)
    bench.begin(before)
    outcomes = {regime: bench.compare(regime) for regime in bench.sizes}
    times = bench.times(outcomes[UPDATE].method)
    result = judge(outcomes, times, base=bench.before[weights_of(Arm())], size=update, before=before)
    return replace(result, kind="cannot be tested here", reason=TOO_SHORT) if setting.quick else result


def judge(
    outcomes: Mapping[str, Outcome],
    times: tuple[Sequence[float], Sequence[float]],
    *,
    base: Found,
    size: Size,
    before: Size,
) -> Result:
    """Met when in the continual update FLOPs, time, and the losses of the new text and of the whole stream are within
    their targets, and no baseline is better in either."""
    figures, samples = _figures(outcomes)
    update = outcomes[UPDATE]
    flops = update.flops(update.method) / update.flops(DENSE)
    time = statistics.median(mine / dense for mine, dense in zip(*times, strict=True))
    gap = statistics.fmean(update.above_dense(update.method, UPDATE))
    mine = update.losses(update.method, UPDATE)
    forgotten = {
        name: 100 * (statistics.fmean(one.losses["prose"] for one in update.final[name]) / base.losses["prose"] - 1)
        for name in (DENSE, update.method)
    }
    paired = {name: paired_t_test(mine, update.losses(name, UPDATE)) for name in BASELINES}
    both = {name: 100 * (update.mixed(name) / update.mixed(DENSE) - 1) for name in (*BASELINES, update.method)}
    figures |= {
        "executed FLOPs, method to dense": Figure(value=flops, unit="x"),
        "time of a step, method to dense": Figure(value=time, unit="x"),
        **{
            f"loss of the old text above that before, {name}": Figure(value=x, unit="%")
            for name, x in forgotten.items()
        },
        "held-out loss above dense": Figure(
            value=gap, unit="%", spread=spread(update.above_dense(update.method, UPDATE))
        ),
        "loss of both texts above dense": Figure(value=both[update.method], unit="%"),
        **{f"against {name}": Figure(value=one.mean, unit="nats", spread=one.std) for name, one in paired.items()},
        **{f"p-value against {name}": Figure(value=one.p_value, unit="") for name, one in paired.items()},
    }
    samples |= {"seconds a step, method": times[0], "seconds a step, dense": times[1]}
    better = [name for name, one in paired.items() if one.mean >= 0 or both[name] <= both[update.method]]
    met = flops <= TARGET_FLOPS and time <= TARGET_TIME and not better
    met &= gap <= TARGET_LOSS and both[update.method] <= TARGET_LOSS
    return Result(
        kind="met" if met else "short",
        reason=f"{UPDATE}, {update.method}: {flops:.2f} of the FLOPs, {time:.2f} of the time of a step, held-out loss "
        f"of the new text {gap:+.2f}% from dense at equal tokens (targets {TARGET_FLOPS:g}, {TARGET_TIME:g}, "
        f"{TARGET_LOSS:g}%), of both texts in the stream's proportion {both[update.method]:+.2f}% ({TARGET_LOSS:g}%), "
        f"of the old text {forgotten[update.method]:+.2f}% from before, dense {forgotten[DENSE]:+.2f}%; "
        f"{_beaten(better)}{_best_in_pretraining(outcomes)}",
        figures=figures,
        conditions=size.describe()
        | {
            "regime": f"continual update: {SHARE_OF_CODE[UPDATE]:.0%} code, which is new; the rest prose from the "
            f"training that the model comes from ({before.num_steps} steps)",
            "rates tried": "; ".join(f"{regime}: {', '.join(map(str, RATES[regime]))}" for regime in outcomes),
            "rates": "; ".join(
                f"{regime}, {name}: {rate:g}" for regime, one in outcomes.items() for name, rate in one.rates.items()
            ),
            "tuning": "each arm on a seed of its own, in the update by the loss of both texts in the stream's "
            "proportion and in runs of full length, in pretraining of a quarter; so the method among "
            + ", ".join(METHODS),
            "baselines": f"as many steps as {TARGET_FLOPS:g} of the dense run's executed FLOPs pay for",
            "FLOPs": "counted where products run, the looks at rows included",
            "runs": "those that an earlier call of the same sources on this machine had finished were not made again",
            "time": f"{NUM_ROUNDS} alternated runs of {NUM_TIMED_STEPS} steps by one process of one thread, medians",
        },
        samples=samples,
    )


def _figures(outcomes: Mapping[str, Outcome]) -> tuple[dict[str, Figure], dict[str, Sequence[float]]]:
    figures: dict[str, Figure] = {}
    samples: dict[str, Sequence[float]] = {}
    for regime, outcome in outcomes.items():
        for name, found in outcome.final.items():
            losses = outcome.losses(name, regime)
            figures[f"held-out loss, {name}, {regime}"] = Figure(
                value=statistics.fmean(losses), unit="nats", spread=spread(losses)
            )
            share = outcome.flops(name) / outcome.flops(DENSE)
            figures[f"executed FLOPs, {name}, {regime}"] = Figure(value=share, unit="x dense")
            if regime == UPDATE:
                both = 100 * (outcome.mixed(name) / outcome.mixed(DENSE) - 1)
                figures[f"loss of both texts in the stream's proportion above dense, {name}"] = Figure(
                    value=both, unit="%"
                )
            for kind in ("prose", "code"):
                samples[f"{kind}, {name}, {regime}"] = [one.losses[kind] for one in found]
    return figures, samples


def _beaten(better: Sequence[str]) -> str:
    if better:
        return f"as good or better at equal FLOPs: {', '.join(better)}"
    return "better than every baseline at equal FLOPs"


def _best_in_pretraining(outcomes: Mapping[str, Outcome]) -> str:
    """Which arm loses least among those that cost at most half of the dense run."""
    if PRETRAIN not in outcomes:
        return ""
    outcome = outcomes[PRETRAIN]
    cheap = [name for name in outcome.final if outcome.flops(name) <= 0.5 * outcome.flops(DENSE)]
    best = min(cheap, key=lambda name: statistics.fmean(outcome.losses(name, PRETRAIN)))
    gap = statistics.fmean(outcome.above_dense(best, PRETRAIN))
    return f"; {PRETRAIN}: best at up to half of the FLOPs is {best}, {gap:+.2f}% from dense"


CLAIM = Claim(
    name="sparse_updates",
    statement="Dynamic sparse updates need 60% to 75% fewer FLOPs at less than 0.5% loss of quality.",
    source="published guides to DeepSeek-style training; the parts: Jiang et al. 2019, Accelerating Deep Learning by "
    "Focusing on the Biggest Losers (https://arxiv.org/abs/1910.00762); Mindermann et al. 2022, RHO-LOSS "
    "(https://arxiv.org/abs/2206.07137); Liu et al. 2021, AutoFreeze (https://arxiv.org/abs/2102.01386)",
    published="60-75% fewer FLOPs, quality within 0.5%; machine and model not told",
    compared="choosing the rows of a batch by a short look, against dense training at equal tokens, and against dense "
    "with fewer steps, a smaller dense model, random rows and plain freezing at equal FLOPs, each at its own best "
    "rate by the loss of the whole stream; in a continual update and, with other forms beside them, in pretraining",
    target=f"in the continual update executed FLOPs at most {TARGET_FLOPS:g} and time of a step at most "
    f"{TARGET_TIME:g} of dense, held-out loss at most {TARGET_LOSS:g}% above dense and below every baseline, both of "
    "the new text and of the whole stream",
    headline=(
        "executed FLOPs, method to dense",
        "time of a step, method to dense",
        "held-out loss above dense",
        "loss of both texts above dense",
    ),
    measure=measure,
)
