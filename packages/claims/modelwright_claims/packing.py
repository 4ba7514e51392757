"""Claim: packing documents into full rows trains faster than padding them, and learns the same per token."""

import statistics
from dataclasses import replace

from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, Tuning, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences, paired_t_test, ratios
from modelwright_claims.training_run import Run
from modelwright_claims.workbench import real_token_share

LOSS_TARGET = 0.02
RATES = (5e-4, 1e-3, 2e-3)
TUNING_SEED = 100
PACKED, PADDED = "packed", "padded"
EQUAL_TOKENS, EQUAL_TIME = "padded, equal tokens", "padded, equal time"
PACE, SHARE = "real tokens per second, ", "real tokens in "
MOST_BATCHES = 4
"""Most packed batches that are put together until a whole number of padded rows holds as many tokens."""


def measure(setting: Setting) -> Measurement:
    """Train on the same documents packed and padded.

    The padded batch has as many more rows as it takes to hold the real tokens of a packed batch. Twice: with the
    same updates (equal tokens), and with as many updates as fit into the packed run's time (equal time), the ratio of
    times being the median over the seeds. Each at its own best rate.
    """
    size = workbench.size(setting)
    packed_share, padded_share = (real_token_share(setting, size, mode=mode) for mode in ("best_fit", "one_per_row"))
    packed_rows, padded_rows = equal_batches(size.batch_rows, packed_share / padded_share)
    variants = {
        PACKED: Run(size=replace(size, batch_rows=packed_rows), mode="best_fit"),
        PADDED: Run(size=replace(size, batch_rows=padded_rows), mode="one_per_row"),
    }
    tuning = Tuning(values=RATES[1:2] if setting.quick else RATES, seeds=(TUNING_SEED,))
    seeds = range(2 if setting.quick else 5)
    result = run_experiment(setting, Experiment(variants=variants, seeds=seeds, tuning=tuning, timed=True))
    packed, padded = result.tuned[PACKED], result.tuned[PADDED]
    slower = statistics.median(
        b.step_s / a.step_s for a, b in zip(result.runs[PACKED], result.runs[PADDED], strict=True)
    )
    in_time = replace(padded, size=replace(padded.size, num_steps=max(1, round(size.num_steps / slower))))
    equal_time = run_experiment(setting, Experiment(variants={PADDED: in_time}, seeds=seeds))
    return Measurement(
        samples={
            PACKED: result.losses(PACKED),
            EQUAL_TOKENS: result.losses(PADDED),
            EQUAL_TIME: equal_time.losses(PADDED),
            **{f"{PACE}{arm}": [run.tokens_per_s for run in of] for arm, of in result.runs.items()},
            f"{SHARE}{PACKED} rows": [packed_share],
            f"{SHARE}{PADDED} rows": [padded_share],
        },
        conditions=packed.size.describe()
        | {
            "rows of a padded batch": in_time.size.batch_rows,
            "padded steps in equal time": in_time.size.num_steps,
            "rates tried": ", ".join(f"{rate:g}" for rate in RATES),
            "rates": f"packed {packed.size.learning_rate:g}, padded {in_time.size.learning_rate:g}",
        },
    )


def equal_batches(batch_rows: int, ratio: float) -> tuple[int, int]:
    """Packed and padded rows of a batch, multiples of `batch_rows` at most `MOST_BATCHES` times as large, so that both
    hold as many real tokens as whole numbers allow. ratio: real tokens of a packed row to those of a padded one."""

    def gap(packed: int) -> float:
        return abs(round(packed * ratio) / (packed * ratio) - 1.0)

    packed = min((batch_rows * times for times in range(1, MOST_BATCHES + 1)), key=gap)
    return packed, max(1, round(packed * ratio))


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment, others = Judgment(), (EQUAL_TOKENS, EQUAL_TIME)
    speed_up = ratios(samples[f"{PACE}{PACKED}"], samples[f"{PACE}{PADDED}"])
    at_tokens, at_time = (differences(samples[PACKED], samples[other]) for other in others)
    what, say = "speed in real tokens", "{0.mean:.2f}x the real tokens per second"
    judgment.ask("speed-up in real tokens", speed_up, "x", ">", 1.0, what=what, say=say)
    judgment.ask("loss difference at equal tokens", at_tokens, "nats", "<=", LOSS_TARGET)
    judgment.ask("loss difference at equal time", at_time, "nats", "<", 0.0)
    for name in (PACKED, PADDED):
        judgment.show(samples, [f"{SHARE}{name} rows"], "%", 100)
    with judgment.beside():
        bound = samples[f"{SHARE}{PACKED} rows"][0] / samples[f"{SHARE}{PADDED} rows"][0]
        judgment.ask("possible speed-up", bound, "x", say="{0.mean:.2f}x is what the padding leaves to gain")
    if at_tokens.count > 1:
        p_values = [paired_t_test(samples[PACKED], samples[other]).p_value for other in others]
        judgment.said.append(
            f"held-out loss {at_tokens.mean:+.4f} nats at equal tokens (p = {p_values[0]:.2g}), {at_time.mean:+.3f} at "
            f"equal time (p = {p_values[1]:.2g})"
        )
    return judgment.verdict()


CLAIM = declared(__name__)
