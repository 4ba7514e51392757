"""Claim: packing documents into full rows trains faster than padding them, and learns the same per token."""

import statistics
from dataclasses import replace

from modelwright.claims import workbench
from modelwright.claims.claim import Claim, Figure, Result, Setting
from modelwright.claims.statistics import paired_t_test, spread

LOSS_TARGET = 0.02


def measure(setting: Setting) -> Result:
    """Train on the same documents packed and padded.

    The padded batch has as many more rows as it takes to hold the real tokens of a packed batch. Twice: with the
    same updates (equal tokens), and with as many updates as fit into the packed run's time (equal time), the ratio of
    times being the median over the seeds.
    """
    size = workbench.size(setting)
    text = workbench.prepare_text(setting)
    packed_share = workbench.real_token_share(setting, text, size, mode="best_fit")
    padded_share = workbench.real_token_share(setting, text, size, mode="pad")
    rows = max(1, round(size.batch_rows * packed_share / padded_share))
    padded_size = replace(size, batch_rows=rows)
    seeds = range(2 if setting.quick else 5)
    packed, equal_tokens = [], []
    for seed in seeds:
        packed.append(workbench.run(setting, text, size, size.train_config(), seed=seed))
        equal_tokens.append(_padded(setting, text, padded_size, seed))
    slower = statistics.median(b.step_s / a.step_s for a, b in zip(packed, equal_tokens, strict=True))
    in_time = replace(padded_size, num_steps=max(1, round(size.num_steps / slower)))
    equal_time = [_padded(setting, text, in_time, seed) for seed in seeds]
    return judge(
        packed,
        equal_tokens,
        equal_time,
        shares=(packed_share, padded_share),
        size=size,
        rows=rows,
        steps_in_time=in_time.num_steps,
    )


def _padded(setting: Setting, text: workbench.Text, size: workbench.Size, seed: int) -> workbench.Run:
    return workbench.run(setting, text, size, size.train_config(), seed=seed, mode="pad")


def judge(
    packed: list[workbench.Run],
    equal_tokens: list[workbench.Run],
    equal_time: list[workbench.Run],
    *,
    shares: tuple[float, float],
    size: workbench.Size,
    rows: int,
    steps_in_time: int,
) -> Result:
    """Met when packing trains more real tokens per second, loses at most `LOSS_TARGET` per token, wins per time."""
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
        conditions=size.describe() | {"rows of a padded batch": rows, "padded steps in equal time": steps_in_time},
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
    "same real tokens an update; at equal updates (equal tokens) and at equal time; paired seeds",
    target=f"more real tokens per second, at most {LOSS_TARGET} nats worse at equal tokens, better at equal time",
    measure=measure,
)
