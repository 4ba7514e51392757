"""Claim: dynamic gated attention computes 35% less attention at 98% of the quality.

The method is learned selection of heads (`model/head_selection.py`). It stands beside what a user would do for the same
saving: fewer heads from the start, heads that are pruned half-way (by what they contribute), and a sliding window in
three of four layers. All read as many tokens, each at its own best rate, chosen on a seed and a split of their own.
"""

from collections.abc import Sequence

from modelwright_claims.claim import Claim, Conditions, Figure, Measurement, Samples, Setting, Verdict
from modelwright_claims.head_arms import (
    BUDGET,
    CHANGED,
    CLOSED,
    GATED,
    METHOD,
    NUM_HEADS,
    NUM_ROUNDS,
    NUM_STATIC,
    OPEN,
    OWN,
    PLAIN,
    RATES,
    RIVALS,
    STREAMS,
    TARGET_COMPUTE,
    Bench,
    Comparison,
    describe_shape,
)
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.statistics import differences, estimate, paired_t_test, percent_above, ratios
from modelwright_claims.training_run import Processes
from modelwright_claims.workbench import VOCAB_SIZE, Size

TARGET_LOSS, TARGET_TIME = 2.0, 0.70
LOSS, FLOPS, TRAINING, DECODING = (
    "held-out loss, ",
    "attention FLOPs, ",
    "attention in training, s, ",
    "decode step, s, ",
)
OPEN_SHARE = "share of open heads"
QUICK = Size(model_dim=64, num_layers=2, seq_len=128, batch_rows=4, num_steps=20)


def measure(setting: Setting) -> Measurement:
    """All arms; in quick mode shortened, at one rate and on two seeds."""
    bench = Bench(setting)
    if setting.quick:
        bench = Bench(
            setting,
            size=QUICK,
            rates=RATES[1:2],
            seeds=bench.seeds[:2],
            processes=Processes(),  # starting others takes longer than these runs
            at_once=1,
            num_rounds=3,
        )
    return measurement(bench.compare(), bench.size)


def measurement(found: Comparison, size: Size) -> Measurement:
    """Return losses, FLOPs and seconds of every arm by seed."""
    samples: dict[str, Sequence[float]] = {}
    for name, outcomes in found.final.items():
        costs = found.costs[name]
        samples[LOSS + name] = [outcome.heldout_loss for outcome in outcomes]
        samples[FLOPS + name] = [cost.flops for cost in costs]
        samples[TRAINING + name] = [cost.seconds for cost in costs]
    samples[OPEN_SHARE] = [cost.open_share for cost in found.costs[METHOD]]
    if all(found.decoding):
        samples |= {DECODING + kind: [times[kind] for times in found.decoding] for kind in (OWN, OPEN, CLOSED)}
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | {
            "model": describe_shape(size, VOCAB_SIZE),
            "method": f"a budget of {BUDGET:g} of the heads",
            "rivals": f"{NUM_STATIC} of {NUM_HEADS} heads from the start; all heads for half of the steps, then the "
            f"{NUM_STATIC} that contribute most; a window of {found.window} tokens in all but every fourth layer, the "
            f"longest whose attention takes at most {TARGET_COMPUTE:g} of the FLOPs of attention of all heads",
            "changed": CHANGED,
            "rates tried": ", ".join(map(str, RATES)) + "; and beyond where the best was at an end",
            "rates": "; ".join(f"{name}: {rate:g}" for name, rate in found.rates.items()),
            "tuning": "each arm in a run of full length on a seed and a held-out split of their own; for pruned heads "
            "the rate of their second half",
            "gate": f"{GATED}, at the rate of {PLAIN}, with a sigmoid for each head's output; no target speaks of it",
            "FLOPs": "scores, sums of values, routers and gates of a forward pass over held-out rows, by what heads "
            "were open and what tokens see; projections, which no arm but those with fewer heads saves, are left out",
            "time in training": "attention and routers of all layers, forward and backward, on held-out rows, without "
            f"projections; one thread's own time, the least of {NUM_ROUNDS} alternated rounds",
            "time in decoding": f"steps of {STREAMS} streams with contexts of {size.seq_len - 1} held-out tokens; "
            "attention is what a step takes longer than one of the same model with all heads closed, and all heads are "
            "those of the same model with all of them open",
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when loss, FLOPs and both times are within their targets, and every rival is worse with p < 0.05."""
    judgment = Judgment()
    gap = percent_above(samples[LOSS + METHOD], samples[LOSS + PLAIN])
    judgment.figures["held-out loss above all heads"] = gap.figure("%")
    judgment.said.append(f"held-out loss {gap.mean:+.2f}% from attention of all heads at equal tokens")
    judgment.at_most("loss above all heads", gap, TARGET_LOSS, "%")
    flops = ratios(samples[FLOPS + METHOD], samples[FLOPS + PLAIN])
    judgment.figures["attention FLOPs, dynamic to all heads"] = flops.figure("x")
    judgment.said.append(f"{flops.mean:.2f} of the FLOPs of attention")
    judgment.at_most("FLOPs of attention", flops, TARGET_COMPUTE, "x")
    training = ratios(samples[TRAINING + METHOD], samples[TRAINING + PLAIN])
    judgment.figures["time of attention in training, dynamic to all heads"] = training.figure("x")
    judgment.said.append(f"{training.mean:.2f} of its time in training")
    judgment.at_most("time of attention in training", training, TARGET_TIME, "x")
    with judgment.part():
        own, whole, none = (samples[DECODING + kind] for kind in (OWN, OPEN, CLOSED))
        decoding = ratios(*([one - floor for one, floor in zip(of, none, strict=True)] for of in (own, whole)))
        judgment.figures["time of attention in decoding, dynamic to all heads"] = decoding.figure("x")
        judgment.figures["time of a decode step, dynamic to all heads"] = ratios(own, whole).figure("x")
        judgment.said.append(f"{decoding.mean:.2f} of it in decoding")
        judgment.at_most("time of attention in decoding", decoding, TARGET_TIME, "x")
    for rival in RIVALS:
        with judgment.part():
            _compare(judgment, samples, rival)
    with judgment.beside():
        judgment.figures[OPEN_SHARE] = estimate(samples[OPEN_SHARE]).figure("")
    for arm in names_between(samples, LOSS):
        judgment.figures[f"held-out loss, {arm}"] = estimate(samples[LOSS + arm]).figure("nats")
    return judgment.verdict()


def _compare(judgment: Judgment, samples: Samples, rival: str) -> None:
    """The method has to be below a rival's loss; the rival's costs are figures."""
    local, other = samples[LOSS + METHOD], samples[LOSS + rival]
    gap = differences(local, other)
    judgment.figures[f"against {rival}"] = gap.figure("nats")
    judgment.figures[f"attention FLOPs, {rival} to all heads"] = ratios(
        samples[FLOPS + rival], samples[FLOPS + PLAIN]
    ).figure("x")
    judgment.figures[f"time of attention in training, {rival} to all heads"] = ratios(
        samples[TRAINING + rival], samples[TRAINING + PLAIN]
    ).figure("x")
    judgment.said.append(f"{gap.mean:+.4f} nats from {rival}")
    judgment.below(f"difference to {rival}", gap, 0.0, " nats")
    if gap.count > 1:
        p_value = paired_t_test(local, other).p_value
        judgment.figures[f"p-value against {rival}"] = Figure(value=p_value, unit="")
        judgment.require(p_value < 0.05, f"not different from {rival} with p < 0.05 (p = {p_value:.2g})")


CLAIM = Claim(
    name="gated_attention",
    statement="Dynamic gated attention needs 35% less attention compute at 98% of the quality.",
    source="published guides to DeepSeek-style training; the parts: Jin et al. 2024, MoH: Multi-Head Attention as "
    "Mixture-of-Head Attention (https://arxiv.org/abs/2410.11842); Bengio et al. 2013, Estimating or Propagating "
    "Gradients Through Stochastic Neurons (https://arxiv.org/abs/1308.3432)",
    published="35% less attention compute, 98% of the quality; machine and model not told",
    compared="learned selection of heads for each token, against attention of all heads, fewer heads from the start, "
    "heads pruned half-way and a sliding window in three of four layers, at equal tokens, each at its own best rate",
    target=f"executed FLOPs of attention at most {TARGET_COMPUTE:g} and its time at most {TARGET_TIME:g} of those of "
    f"all heads, in training and in decoding; held-out loss at most {TARGET_LOSS:g}% above all heads and below every "
    "rival with p < 0.05",
    headline=(
        "attention FLOPs, dynamic to all heads",
        "time of attention in training, dynamic to all heads",
        "time of attention in decoding, dynamic to all heads",
        "held-out loss above all heads",
    ),
    measure=measure,
    judge=judge,
)
