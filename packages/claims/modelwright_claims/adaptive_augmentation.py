"""Claim: augmentation whose strength follows the loss ends lower than none and than a constant strength.

On little data, which is trained on many times over, so that something can be gained. The published thresholds are in
nats, and a small model's loss stays above the upper one to the end: the rule is then a constant strength of 0.45,
which is one of the arms. The arm that follows the loss has the thresholds as fractions of the first losses.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright_claims import experiment
from modelwright_claims.batches import Augmentation
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, Tuning, best_rate, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.workbench import VOCAB_SIZE, Size, store_text

METHODS = ("random_swap", "random_deletion", "sentence_shuffle")
"""The methods of EDA that need no dictionary, and shuffling sentences."""
ADAPTIVE, NONE, WEAK, STRONG = ARMS = ("follows the loss", "none", "constant 0.3", "constant 0.45")


def constant(probability: float) -> Augmentation:
    """A strength that no loss changes."""
    return Augmentation(methods=METHODS, probability=probability, high_loss=1e9, low_loss=0.0)


AUGMENTATIONS: Mapping[str, Augmentation] = {
    ADAPTIVE: Augmentation(methods=METHODS, is_relative=True),
    NONE: constant(0.0),
    WEAK: constant(0.3),
    STRONG: constant(0.45),
}
RATES = (1e-3, 2e-3, 4e-3)
TUNING_SEED, FIRST_SEED, NUM_SEEDS = 3300, 3301, 5
NUM_EVALUATIONS = 20
FEWEST_CHARS, MOST_CHARS = 300, 1500
NUM_TEXTS, NUM_HELDOUT = 60, 200
FRACTION = 0.4
"""Share of the installed modules that are read."""


def measure(setting: Setting) -> Measurement:
    # A setting whose text is a few pages of this machine's prose.
    folder = setting.folder / "adaptive_augmentation"
    if not folder.exists():
        found: dict[str, dict[str, None]] = {"train": {}, "heldout": {}}
        for document in machine_corpus(fraction=FRACTION, skip=lambda reason, file: None):
            if document.kind == "prose" and len(document.text) >= FEWEST_CHARS:
                found[document.split][document.text[:MOST_CHARS]] = None
        rng = random.Random(0)
        train = rng.sample(list(found["train"]), NUM_TEXTS)
        others = list(found["heldout"])
        heldout = rng.sample(others, min(len(others), 2 * NUM_HELDOUT))
        tokenizer = train_tokenizer(list(found["train"]), TokenizerConfig(vocab_size=VOCAB_SIZE))
        store_text(folder, {"train": train, "validation": heldout[0::2], "test": heldout[1::2]}, tokenizer)
    setting = replace(setting, folder=folder, kept=None)
    size = Size(model_dim=128, num_layers=2, seq_len=64, batch_rows=8, num_steps=20 if setting.quick else 600)
    settings = {"eval_every_steps": max(5, size.num_steps // NUM_EVALUATIONS)}
    variants = {
        arm: Run(size=size, settings=settings, augmentation=augmentation, heldout_batches=4)
        for arm, augmentation in AUGMENTATIONS.items()
    }
    tuning = Tuning(values=RATES[1:2] if setting.quick else RATES, seeds=(TUNING_SEED,), criterion=lowest_loss)
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if setting.quick else NUM_SEEDS))
    return measurement(size, run_experiment(setting, Experiment(variants=variants, seeds=seeds, tuning=tuning)))


def lowest_loss(outcome: Outcome) -> float:
    """The held-out loss where one would have stopped."""
    return min([loss for _, loss in outcome.curve] or [outcome.heldout_loss])


def measurement(size: Size, found: experiment.Samples) -> Measurement:
    samples: dict[str, list[float]] = {}
    for arm in ARMS:
        runs: Sequence[Outcome] = found.runs[arm]
        samples |= {
            f"lowest loss, {arm}": [lowest_loss(run) for run in runs],
            f"final loss, {arm}": [run.heldout_loss for run in runs],
            f"strength, {arm}": [statistics.fmean(run.steps["augmentation_strength"]) for run in runs],
            f"rates, {arm}": list(found.tuning[arm]),
            f"tuning, {arm}": list(found.tuning[arm].values()),
        }
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | {
            "text": f"{NUM_TEXTS} documents of the interpreter's libraries; held out by module",
            "methods": ", ".join(METHODS),
            "thresholds": "0.8 and 0.3 of the mean loss of the first 50 steps",
            "loss": f"the lowest of {NUM_EVALUATIONS} evaluations, of every arm alike",
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    with judgment.part():
        for other in (NONE, WEAK, STRONG):
            own, its = samples[f"final loss, {ADAPTIVE}"], samples[f"final loss, {other}"]
            figure, what = f"loss difference to {other}", f"difference to {other}"
            judgment.ask(figure, differences(own, its), "nats", "<", 0.0, what=what)
            judgment.differs(own, its, f"p-value, {other}", f"{other}: p = {{p}}, not below 0.05")
            p_value = judgment.figures[f"p-value, {other}"].value
            judgment.said.append(f"{judgment.figures[figure].value:+.4f} nats to {other} (p = {p_value:.2g})")
    for arm in ARMS:
        judgment.show(samples, {f"lowest held-out loss, {arm}": f"lowest loss, {arm}"}, "nats")
        judgment.show(samples, {f"loss at the end, {arm}": f"final loss, {arm}"}, "nats")
        judgment.show(samples, {f"mean strength, {arm}": f"strength, {arm}"})
        with judgment.beside():
            judgment.figures[f"best rate, {arm}"] = best_rate(samples, arm)
    return judgment.verdict()


CLAIM = declared(__name__)
