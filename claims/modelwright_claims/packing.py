"""Claim: packing documents into full rows trains faster than padding them, and learns the same per token."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from modelwright_claims import workbench
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.experiment import Experiment, Tuning, run_experiment
from modelwright_claims.statistics import paired_t_test, spread
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.workbench import real_token_share

LOSS_TARGET = 0.02
RATES = (5e-4, 1e-3, 2e-3)
TUNING_SEED = 100
PACKED, PADDED = "packed", "padded"
MOST_BATCHES = 4
"""Of rows, packed, that are put together until a whole number of padded rows holds as many tokens."""


def measure(setting: Setting) -> Result:
    """Train on the same documents packed and padded.

    The padded batch has as many more rows as it takes to hold the real tokens of a packed batch. Twice: with the
    same updates (equal tokens), and with as many updates as fit into the packed run's time (equal time), the ratio of
    times being the median over the seeds. Each at its own best rate.
    """
    size = workbench.size(setting)
    packed_share, padded_share = (real_token_share(setting, size, mode=mode) for mode in ("best_fit", "pad"))
    packed_rows, padded_rows = equal_batches(size.batch_rows, packed_share / padded_share)
    variants = {
        PACKED: Run(size=replace(size, batch_rows=packed_rows), mode="best_fit"),
        PADDED: Run(size=replace(size, batch_rows=padded_rows), mode="pad"),
    }
    tuning = Tuning(values=RATES[1:2] if setting.quick else RATES, seeds=(TUNING_SEED,))
    seeds = range(2 if setting.quick else 5)
    found = run_experiment(setting, Experiment(variants=variants, seeds=seeds, tuning=tuning, timed=True))
    packed, padded = found.tuned[PACKED], found.tuned[PADDED]
    slower = statistics.median(b.step_s / a.step_s for a, b in zip(found.runs[PACKED], found.runs[PADDED], strict=True))
    in_time = replace(padded, size=replace(padded.size, num_steps=max(1, round(size.num_steps / slower))))
    equal_time = run_experiment(setting, Experiment(variants={PADDED: in_time}, seeds=seeds))
    return judge(
        found.runs[PACKED],
        found.runs[PADDED],
        equal_time.runs[PADDED],
        shares=(packed_share, padded_share),
        size=packed.size,
        padded=in_time.size,
    )


def equal_batches(batch_rows: int, ratio: float) -> tuple[int, int]:
    """Packed and padded rows of a batch, multiples of `batch_rows` at most `MOST_BATCHES` times as large, so that both
    hold as many real tokens as whole numbers allow. ratio: real tokens of a packed row to those of a padded one."""

    def gap(packed: int) -> float:
        return abs(round(packed * ratio) / (packed * ratio) - 1.0)

    packed = min((batch_rows * times for times in range(1, MOST_BATCHES + 1)), key=gap)
    return packed, max(1, round(packed * ratio))


def judge(
    packed: Sequence[Outcome],
    equal_tokens: Sequence[Outcome],
    equal_time: Sequence[Outcome],
    *,
    shares: tuple[float, float],
    size: workbench.Size,
    padded: workbench.Size,
) -> Result:
    """Met when packing trains more real tokens per second, loses at most `LOSS_TARGET` per token, wins per time.
    padded: the runs in equal time."""
    speed_ups = [a.tokens_per_s / b.tokens_per_s for a, b in zip(packed, equal_tokens, strict=True)]
    speed_up, bound = statistics.median(speed_ups), shares[0] / shares[1]
    losses = {
        "packed": [run.heldout_loss for run in packed],
        "padded, equal tokens": [run.heldout_loss for run in equal_tokens],
        "padded, equal time": [run.heldout_loss for run in equal_time],
    }
    at_tokens = paired_t_test(losses["packed"], losses["padded, equal tokens"])
    at_time = paired_t_test(losses["packed"], losses["padded, equal time"])
    met = speed_up > 1 and at_tokens.mean <= LOSS_TARGET and at_time.mean < 0
    reason = (
        f"{speed_up:.2f}x the real tokens per second ({bound:.2f}x is what the padding leaves to gain); held-out loss "
        f"{at_tokens.mean:+.4f} nats at equal tokens (p = {at_tokens.p_value:.2g}), {at_time.mean:+.3f} at equal time "
        f"(p = {at_time.p_value:.2g})"
    )
    return Result(
        kind="met" if met else "short",
        reason=reason,
        figures={
            "speed-up in real tokens": Figure(value=speed_up, unit="x", spread=spread(speed_ups)),
            "loss difference at equal tokens": Figure(value=at_tokens.mean, unit="nats", spread=at_tokens.std),
            "loss difference at equal time": Figure(value=at_time.mean, unit="nats", spread=at_time.std),
            "real tokens in packed rows": Figure(value=100 * shares[0], unit="%"),
            "real tokens in padded rows": Figure(value=100 * shares[1], unit="%"),
            "possible speed-up": Figure(value=bound, unit="x"),
        },
        conditions=size.describe()
        | {
            "rows of a padded batch": padded.batch_rows,
            "padded steps in equal time": padded.num_steps,
            "rates tried": ", ".join(f"{rate:g}" for rate in RATES),
            "rates": f"packed {size.learning_rate:g}, padded {padded.learning_rate:g}",
        },
        samples={
            **losses,
            "real tokens per second, packed": [run.tokens_per_s for run in packed],
            "real tokens per second, padded": [run.tokens_per_s for run in equal_tokens],
        },
    )


CLAIM = Claim(
    name="packing",
    statement="Packing documents into full rows, without attention between them, trains more real tokens per second "
    "than padding and learns as much from each.",
    source="Krell et al., Efficient Sequence Packing without Cross-contamination, 2021 (arXiv:2107.02027)",
    published="2x in BERT phase 2 (Wikipedia at 512 tokens, half of it padding), same accuracy",
    compared="best-fit packed rows with document masks against one document piece a row with padding; same documents, "
    "same real tokens an update; at equal updates (equal tokens) and at equal time; paired seeds, each at its own "
    "best rate, chosen from the same ones on a seed and a held-out split that are not reported",
    target=f"more real tokens per second, at most {LOSS_TARGET} nats worse at equal tokens, better at equal time",
    measure=measure,
)
