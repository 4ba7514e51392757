"""Claim: batches by a token budget with length buckets waste less than rows padded to a fixed length.

Short texts, the docstrings of this machine's libraries: three ways to make batches with equally many real tokens an
update. Packing, the rival, puts several texts into a row and masks the attention between them.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelwright.core.config import derive_seed
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences, exact, ratios
from modelwright_claims.training_run import Outcome, Run, batch_loader
from modelwright_claims.workbench import VOCAB_SIZE, Mode, Size, distinct_prose, packed_rows, store_text

DYNAMIC, PADDED, PACKED = ARMS = ("length buckets", "padded", "packed")
MODES: Mapping[str, Mode] = {DYNAMIC: "length_buckets", PADDED: "one_per_row", PACKED: "best_fit"}
MOST_PADDING, LOSS_TARGET = 20.0, 0.03
SEEDS = range(3200, 3205)
NUM_COUNTED = 40
"""Batches over which padding is counted to make the batches of the arms equal."""
FEWEST_WORDS, MOST_CHARS = 10, 1500
"""Length of the texts that are taken: all fit into a row of 512 tokens."""
PACE = "real tokens per second, "


def measure(setting: Setting) -> Measurement:
    # A setting whose text is the short prose documents of this machine.
    folder = setting.folder / "dynamic_batching"
    if not folder.exists():
        train, heldout = distinct_prose(
            fraction=0.15 if setting.quick else 0.5,
            takes=lambda text: len(text) <= MOST_CHARS and len(text.split()) >= FEWEST_WORDS,
        )
        random.Random(0).shuffle(heldout)
        tokenizer = train_tokenizer(train, TokenizerConfig(vocab_size=VOCAB_SIZE))
        store_text(folder, {"train": train, "validation": heldout[0::2], "test": heldout[1::2]}, tokenizer)
    setting = replace(setting, folder=folder, kept=None)
    size = Size(model_dim=128, num_layers=2, seq_len=512, batch_rows=16, num_steps=60, learning_rate=2e-3)
    if setting.quick:
        size = Size(model_dim=64, num_layers=1, seq_len=128, batch_rows=8, num_steps=12, learning_rate=2e-3)
    sizes = equal_updates(setting, size)
    variants = {arm: Run(size=sizes[arm], mode=mode, heldout_batches=4) for arm, mode in MODES.items()}
    seeds = SEEDS[:2] if setting.quick else SEEDS
    result = run_experiment(setting, Experiment(variants=variants, seeds=seeds, timed=True))
    padding = {arm: padding_share(setting, sizes[arm], MODES[arm], sizes[arm].num_steps) for arm in ARMS}
    return measurement(size, sizes, result.runs, padding)


def equal_updates(setting: Setting, size: Size) -> dict[str, Size]:
    """The sizes of the arms, with as many rows a batch as hold the real tokens of a batch in length buckets."""
    real = {arm: 1.0 - padding_share(setting, size, MODES[arm], NUM_COUNTED) for arm in ARMS}
    # The last bucket of a block may be small, so that batches have fewer tokens than the budget.
    tokens = slots_of(setting, size, MODES[DYNAMIC], NUM_COUNTED) * real[DYNAMIC]
    rows = {arm: max(1, round(tokens / (size.seq_len * real[arm]))) for arm in (PADDED, PACKED)}
    return {DYNAMIC: size, **{arm: replace(size, batch_rows=of_arm) for arm, of_arm in rows.items()}}


def batch_shapes(setting: Setting, size: Size, mode: Mode, num_batches: int) -> list[tuple[int, int]]:
    """All tokens of each batch, and those that are padding."""
    rows = packed_rows(setting, seq_len=size.seq_len, mode=mode, split="train")
    loader = batch_loader(rows, size, mode, derive_seed(SEEDS[0], "order"))
    batches = (loader.batch(number) for number in range(num_batches))
    return [(batch.segments_BT.numel(), int((batch.segments_BT < 0).sum())) for batch in batches]


def padding_share(setting: Setting, size: Size, mode: Mode, num_batches: int) -> float:
    shapes = batch_shapes(setting, size, mode, num_batches)
    return sum(padding for _, padding in shapes) / sum(total for total, _ in shapes)


def slots_of(setting: Setting, size: Size, mode: Mode, num_batches: int) -> float:
    """The mean number of tokens of a batch, padding included."""
    return statistics.fmean(total for total, _ in batch_shapes(setting, size, mode, num_batches))


def measurement(
    size: Size, sizes: Mapping[str, Size], runs: Mapping[str, Sequence[Outcome]], padding: Mapping[str, float]
) -> Measurement:
    samples: dict[str, list[float]] = {}
    for arm in ARMS:
        samples |= {
            f"held-out loss, {arm}": [run.heldout_loss for run in runs[arm]],
            # Batches differ in their shapes: a median step would be that of one shape.
            f"{PACE}{arm}": [run.pace(3) for run in runs[arm]],
            f"tokens an update, {arm}": [statistics.fmean(run.steps["num_tokens"]) for run in runs[arm]],
            f"padding, {arm}": [100 * padding[arm]],
        }
    rows = {f"rows of a batch, {arm}": sizes[arm].batch_rows for arm in (PADDED, PACKED)}
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | rows
        | {
            "text": f"docstrings of the interpreter's libraries of at most {MOST_CHARS} characters, split by module",
            "token budget of a batch": size.batch_tokens,
            "learning rate": size.learning_rate,
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    with judgment.part():
        padding = {arm: samples[f"padding, {arm}"][0] for arm in ARMS}
        for arm, share in padding.items():
            limit = ("<=", MOST_PADDING) if arm == DYNAMIC else ()
            judgment.ask(f"padding, {arm}", exact(share), "%", *limit, what="padding in length buckets")
        judgment.said.append(", ".join(f"{arm} {share:.1f}% padding" for arm, share in padding.items()))
    for arm in (PADDED, PACKED):
        with judgment.part():
            speed_up = ratios(samples[f"{PACE}{DYNAMIC}"], samples[f"{PACE}{arm}"])
            loss = differences(samples[f"held-out loss, {DYNAMIC}"], samples[f"held-out loss, {arm}"])
            figure, what = f"speed in real tokens against {arm}", f"speed against {arm} rows"
            judgment.ask(figure, speed_up, "x", ">" if arm == PADDED else ">=", 1.0, what=what)
            limit = ("<=", LOSS_TARGET) if arm == PADDED else ()
            judgment.ask(f"loss difference to {arm}", loss, "nats", *limit, what="loss difference to padded rows")
            judgment.said.append(f"{speed_up.mean:.2f}x the real tokens per second of {arm}, {loss.mean:+.3f} nats")
    judgment.show(samples, [f"{PACE}{arm}" for arm in ARMS], "tokens/s")
    return judgment.verdict()


CLAIM = declared(__name__)
