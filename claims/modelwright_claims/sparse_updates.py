"""Claim: dynamic sparse updates need 60% fewer FLOPs at less than 0.5% of quality.

In three regimes, because the answer depends on it. A continual update takes new text, and old text against forgetting;
what counts is what is learned of the new and that the old is not forgotten. In a stream that nobody has cleaned half of
the rows are garbage, and choosing rows by what a short look at them tells leaves that out; in a clean stream every row
is worth something. In pretraining every row is new. Every form stands beside what it has to beat at equal compute and
at equal time: dense with fewer steps, a smaller dense model, rows drawn at random, plain freezing; each at its own best
rate, chosen on a seed of its own.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.experiment import Runner
from modelwright_claims.sparse_arms import (
    ARMS,
    BASELINES,
    BEFORE,
    BUDGETS,
    CLEAN,
    CLEANED,
    DENSE,
    FORMS,
    LIMIT_ALONE,
    METHOD,
    NUM_ROUNDS,
    NUM_TIMED_STEPS,
    PRETRAIN,
    RATES,
    SEEDS,
    SHARE_OF_CODE,
    SHARE_OF_GARBAGE,
    SIZE,
    TARGET_FLOPS,
    UPDATE,
    Arm,
    Bench,
    Comparison,
    at_budget,
    share_of_time,
)
from modelwright_claims.statistics import paired_t_test, spread
from modelwright_claims.training_run import Outcome, Processes
from modelwright_claims.workbench import Size

TARGET_TIME, TARGET_LOSS = 0.60, 0.5
TOO_SHORT = "so few steps only show that the measurement runs; measure without --quick"


def measure(setting: Setting) -> Result:
    """All regimes; in quick mode the first one, shortened."""
    bench = Bench(
        setting=setting,
        sizes={UPDATE: SIZE, PRETRAIN: replace(SIZE, num_steps=800), CLEAN: SIZE},
        before=replace(SIZE, **BEFORE),
        rates=RATES,
        seeds=SEEDS,
    )
    if setting.quick:
        bench = replace(
            bench,
            sizes={UPDATE: replace(SIZE, num_steps=15)},
            before=replace(bench.before, num_steps=30),
            rates={UPDATE: RATES[UPDATE][1:2]},
            seeds=SEEDS[:2],
            processes=Processes(),  # starting others takes longer than these runs
            at_once=1,
        )
    times = bench.times()
    outcomes = {regime: bench.compare(regime) for regime in bench.sizes}
    (base,) = Runner(setting).all([bench.base(Arm())])
    result = judge(outcomes, times, base=base, size=SIZE, before=bench.before)
    return replace(result, kind="cannot be tested here", reason=TOO_SHORT) if setting.quick else result


def judge(
    outcomes: Mapping[str, Comparison],
    times: tuple[Sequence[float], Sequence[float]],
    *,
    base: Outcome,
    size: Size,
    before: Size,
) -> Result:
    """Met when in the uncleaned update FLOPs, time, and the losses of the new text and of both are within their
    targets, and every baseline is worse in both, in the new text with p < 0.05."""
    figures, samples = _figures(outcomes)
    update = outcomes[UPDATE]
    flops = update.flops(METHOD) / update.flops(DENSE)
    time = share_of_time(*times)
    gap, both = statistics.fmean(update.above_dense(METHOD)), update.both_above_dense(METHOD)
    mine = update.losses(METHOD)
    paired = {name: paired_t_test(mine, update.losses(name)) for name in (*BASELINES, *LIMIT_ALONE)}
    figures |= {
        "executed FLOPs, method to dense": Figure(value=flops, unit="x"),
        "time of a step, method to dense": Figure(value=time, unit="x"),
        **{f"loss of the {kind} before the update": Figure(value=x, unit="nats") for kind, x in base.losses.items()},
        "held-out loss above dense": Figure(value=gap, unit="%", spread=spread(update.above_dense(METHOD))),
        "loss of both texts above dense": Figure(value=both, unit="%"),
        **{f"against {name}": Figure(value=one.mean, unit="nats", spread=one.std) for name, one in paired.items()},
        **{f"p-value against {name}": Figure(value=one.p_value, unit="") for name, one in paired.items()},
    }
    samples |= {"seconds a step, method": times[0], "seconds a step, dense": times[1]}
    worse = {name for name, one in paired.items() if one.mean < 0 and one.p_value < 0.05}
    better = [name for name in BASELINES if name not in worse or update.both_above_dense(name) <= both]
    met = flops <= TARGET_FLOPS and time <= TARGET_TIME and not better
    met &= gap <= TARGET_LOSS and both <= TARGET_LOSS
    garbage = SHARE_OF_GARBAGE[UPDATE]
    return Result(
        kind="met" if met else "short",
        reason=f"{UPDATE} from a stream of which {garbage:.0%} is garbage: {flops:.2f} of the FLOPs, {time:.2f} of the "
        f"time of a step, held-out loss of the new text {gap:+.2f}% from dense at equal tokens (targets "
        f"{TARGET_FLOPS:g}, {TARGET_TIME:g}, {TARGET_LOSS:g}%), of new and old text {both:+.2f}% ({TARGET_LOSS:g}%); "
        f"{_beaten(better)}; the limit alone, {_limit_alone(update)}; a perfect cleaner before dense training would "
        f"leave {update.both_above_dense(CLEANED):+.2f}%{_in_clean_text(outcomes)}{_best_in_pretraining(outcomes)}",
        figures=figures,
        conditions=size.describe()
        | {
            "regimes": f"{UPDATE}: {SHARE_OF_CODE[UPDATE]:.0%} code, which is new, {garbage:.0%} garbage (half of it "
            "prose whose tokens are in no order, half tokens drawn evenly), the rest prose from the training that the "
            f"model comes from ({before.num_steps} steps); {CLEAN}: {SHARE_OF_CODE[CLEAN]:.0%} code, the rest prose; "
            f"{PRETRAIN}: prose, from scratch",
            "method": "a third of the rows, none that the first weights predict worse than a guess; a quarter drawn",
            "rates tried": "; ".join(f"{regime}: {', '.join(map(str, RATES[regime]))}" for regime in outcomes)
            + "; and beyond where the best was at an end",
            "rates": "; ".join(
                f"{regime}, {name}: {rate:g}" for regime, one in outcomes.items() for name, rate in one.rates.items()
            ),
            "tuning": "each arm in a run of full length on a seed and a held-out split of their own, by the loss of "
            "both texts in their proportion in the stream",
            "baselines": f"as many steps as {TARGET_FLOPS:g} of the dense run's executed FLOPs pay for, or as take the "
            "method's time, rounded up to twentieths of the dense run's",
            "FLOPs": "counted where products run, the looks at rows included",
            "runs": "those that an earlier call of the same sources on this machine had finished were not made again",
            "time": f"{NUM_ROUNDS} alternated runs of {NUM_TIMED_STEPS} steps by one process of one thread, medians",
        },
        samples=samples,
    )


def _figures(outcomes: Mapping[str, Comparison]) -> tuple[dict[str, Figure], dict[str, Sequence[float]]]:
    figures: dict[str, Figure] = {}
    samples: dict[str, Sequence[float]] = {}
    for regime, outcome in outcomes.items():
        for name, found in outcome.final.items():
            losses = outcome.losses(name)
            figures[f"held-out loss, {name}, {regime}"] = Figure(
                value=statistics.fmean(losses), unit="nats", spread=spread(losses)
            )
            share = outcome.flops(name) / outcome.flops(DENSE)
            figures[f"executed FLOPs, {name}, {regime}"] = Figure(value=share, unit="x dense")
            if regime != PRETRAIN:
                above = outcome.both_above_dense(name)
                figures[f"loss of both texts above dense, {name}, {regime}"] = Figure(value=above, unit="%")
            for kind in ("prose", "code"):
                samples[f"{kind}, {name}, {regime}"] = [one.losses[kind] for one in found]
    return figures, samples


def _beaten(better: Sequence[str]) -> str:
    if better:
        return f"as good or better at equal FLOPs or time, or not worse with p < 0.05: {', '.join(better)}"
    return "better than every baseline at equal FLOPs, and than dense at equal time"


def _limit_alone(update: Comparison) -> str:
    """What is the filter's, and not the choice's."""
    return ", ".join(
        f"{name} ({update.flops(name) / update.flops(DENSE):.2f} of the FLOPs) "
        f"{statistics.fmean(update.above_dense(name)):+.2f}% and {update.both_above_dense(name):+.2f}%"
        for name in LIMIT_ALONE
    )


def _in_clean_text(outcomes: Mapping[str, Comparison]) -> str:
    """What the same method costs where there is nothing to leave out."""
    if CLEAN not in outcomes:
        return ""
    clean = outcomes[CLEAN]
    gap = statistics.fmean(clean.above_dense(METHOD))
    others = [name for name in ARMS[CLEAN] if name not in (METHOD, DENSE)]
    beside = ", ".join(
        f"{name} {statistics.fmean(clean.above_dense(name)):+.2f}% and {clean.both_above_dense(name):+.2f}%"
        for name in others
    )
    return (
        f"; {CLEAN}: {gap:+.2f}% from dense on the new text, {clean.both_above_dense(METHOD):+.2f}% on both, at "
        f"{clean.flops(METHOD) / clean.flops(DENSE):.2f} of the FLOPs ({beside})"
    )


def _best_in_pretraining(outcomes: Mapping[str, Comparison]) -> str:
    """Which form loses least at each budget."""
    if PRETRAIN not in outcomes:
        return ""
    outcome, said = outcomes[PRETRAIN], []
    for budget in BUDGETS:
        gaps = {form: statistics.fmean(outcome.above_dense(at_budget(form, budget))) for form in FORMS}
        best = min(gaps, key=gaps.__getitem__)
        said.append(f"at {budget:g} of the FLOPs {best}, {gaps[best]:+.2f}% from dense")
    return f"; {PRETRAIN}, best: {', '.join(said)}"


CLAIM = Claim(
    name="sparse_updates",
    statement="Dynamic sparse updates need 60% to 75% fewer FLOPs at less than 0.5% loss of quality.",
    source="published guides to DeepSeek-style training; the parts: Jiang et al. 2019, Accelerating Deep Learning by "
    "Focusing on the Biggest Losers (https://arxiv.org/abs/1910.00762); Wenzek et al. 2019, CCNet, whose filter by "
    "perplexity the limit is (https://arxiv.org/abs/1911.00359); Mindermann et al. 2022, RHO-LOSS "
    "(https://arxiv.org/abs/2206.07137); Liu et al. 2021, AutoFreeze (https://arxiv.org/abs/2102.01386)",
    published="60-75% fewer FLOPs, quality within 0.5%; machine and model not told",
    compared="choosing the rows of a batch by a short look, against dense training at equal tokens, against dense with "
    "fewer steps, a smaller dense model, random rows and plain freezing at equal FLOPs, against dense at equal time, "
    "and against drawing from the rows that the look does not rule out, each at its own best rate by the loss of new "
    "and old text; in a continual update from a stream that is half garbage, in one from a clean stream, and, with "
    "other forms beside them, in pretraining",
    target=f"in the uncleaned update executed FLOPs at most {TARGET_FLOPS:g} and time of a step at most "
    f"{TARGET_TIME:g} of dense, held-out loss at most {TARGET_LOSS:g}% above dense and below every baseline, both of "
    "the new text and of new and old in their proportion",
    headline=(
        "executed FLOPs, method to dense",
        "time of a step, method to dense",
        "held-out loss above dense",
        "loss of both texts above dense",
    ),
    measure=measure,
)
