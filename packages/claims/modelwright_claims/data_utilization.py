"""Claim: cleaning raises the usable share of a corpus from 62% to 89%, and a model reaches a loss in 1.4 times fewer
steps.

Prose of this machine's libraries is spoiled in labeled ways until 62% of the documents are usable. Three arms train on
the corpus unchanged, on what cleaning keeps of it, and on the texts as they were before: what perfect cleaning would
give. Corpus, weights and order of rows belong to the seed; the step noise knows documents that are not in the corpus.
Cleaning by default settings, without that step, is compared by its usable share alone.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import derive_seed
from modelwright.data.clean.config import CleanConfig
from modelwright.data.clean.steps.format import normalize
from modelwright.data.clean.steps.noise import NoiseConfig
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.cleaning_scores import (
    FORMS,
    Result,
    Score,
    clean_entries,
    compare,
    document_of,
    judge_cleaning,
    spoil,
)
from modelwright_claims.experiment import Runner, Tuning, best_rate, best_value, tune, with_value
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import Estimate, estimate, ratios
from modelwright_claims.training_run import Outcome
from modelwright_claims.workbench import VOCAB_SIZE, Size, distinct_prose, store_text

RAW, CLEANED, UNSPOILED = ARMS = ("raw", "cleaned", "never spoiled")
BY_DEFAULT = ", default settings"
USABLE, GAIN = 89.0, 1.4
BEFORE, BEFORE_MARGIN = 62.0, 2.0
SHARE = 0.72
"""Share of the texts that are spoiled or copied. With an equal number of texts for each form, 62% of the documents are
usable then."""
TUNING_SEED, SEEDS = 3100, (3101, 3102, 3103)
RATES = (1e-3, 2e-3, 4e-3)
FEWEST_WORDS, MOST_CHARS = 80, 6000
"""Length of the texts that are taken: a page or less, and enough words for a copy at any level."""
NUM_TRUSTED = 600


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prose of this machine, without duplicates and in random order. trusted: the texts that the step noise learns
    from.
    """

    corpus: Sequence[str]
    trusted: Sequence[str]
    validation: Sequence[str]
    test: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """A spoiled corpus: its texts by arm, and how cleaning did, with the step noise and by default settings."""

    texts: Mapping[str, Sequence[str]]
    result: Result
    by_default: Result


def study_size(setting: Setting) -> Size:
    """Some 0.1 million parameters; in full about the tokens of the corpus once."""
    num_steps = 40 if setting.quick else 1600
    return Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=num_steps)


def measure(setting: Setting) -> Measurement:
    texts = read_texts(most=300, fraction=0.3) if setting.quick else read_texts(most=4000, fraction=1.0)
    size = study_size(setting)
    seeds = SEEDS[:2] if setting.quick else SEEDS
    cleaned = {seed: spoil_and_clean(setting, texts, seed) for seed in (TUNING_SEED, *seeds)}
    tokenizer = train_tokenizer(texts.trusted, TokenizerConfig(vocab_size=VOCAB_SIZE))
    runners = {
        (arm, seed): Runner(with_text(setting, f"{arm}-{seed}", one.texts[arm], texts, tokenizer))
        for seed, one in cleaned.items()
        for arm in ARMS
    }
    run = bench.variant(size, {})
    tuning = Tuning(values=RATES[1:2] if setting.quick else RATES, seeds=(TUNING_SEED,))
    tried = {arm: tune(runners[arm, TUNING_SEED], {arm: run}, tuning)[arm] for arm in ARMS}
    tuned = {arm: with_value(run, tuning.setting, best_value(of_arm)) for arm, of_arm in tried.items()}
    (reference,) = runners[RAW, TUNING_SEED].all([replace(tuned[RAW], seed=TUNING_SEED)])
    target = bench.target_of(reference, size.num_steps)
    outcomes = {arm: [runners[arm, seed].all([replace(tuned[arm], seed=seed)])[0] for seed in seeds] for arm in ARMS}
    results = [cleaned[seed].result for seed in seeds]
    by_default = [cleaned[seed].by_default for seed in seeds]
    return measurement(size, results, by_default, tried, outcomes, target)


def read_texts(*, most: int, fraction: float) -> Texts:
    """Read the prose of this machine; held-out modules give the held-out texts. most: texts of the corpus; fraction: of
    the modules.
    """
    found, heldout = distinct_prose(
        fraction=fraction,
        takes=lambda text: len(text.split()) >= FEWEST_WORDS,
        change=lambda text: normalize(text[:MOST_CHARS]),
    )
    train = random.Random(0).sample(found, len(found))
    return Texts(
        corpus=train[NUM_TRUSTED : NUM_TRUSTED + most],
        trusted=train[:NUM_TRUSTED],
        validation=heldout[0::2],
        test=heldout[1::2],
    )


def spoil_and_clean(setting: Setting, texts: Texts, seed: int) -> Cleaned:
    """Spoil the corpus by the seed and clean it twice: with the step noise and otherwise by default, and by default."""
    setting.progress.note(f"spoiling and cleaning {len(texts.corpus):,} texts, seed {seed}")
    trusted = setting.folder / "trusted.jsonl"
    write_atomic(trusted, "".join(json.dumps({"text": text}) + "\n" for text in texts.trusted))
    spoiled = spoil(texts.corpus, SHARE, derive_seed(seed, "spoil"))
    entries = [(document_of(label.id, text), label) for text, label in spoiled]
    config = CleanConfig(noise=NoiseConfig(trusted=(str(trusted),)))
    kept, dropped = clean_entries(entries, config)
    by_arm = {RAW: [document.text for document, _ in entries], CLEANED: list(kept.values()), UNSPOILED: texts.corpus}
    return Cleaned(
        texts=by_arm, result=compare(entries, kept, dropped, config), by_default=judge_cleaning(entries, CleanConfig())
    )


def with_text(setting: Setting, name: str, train: Sequence[str], texts: Texts, tokenizer: Tokenizer) -> Setting:
    """A setting whose text is this one. All arms have one tokenizer, so that losses compare."""
    folder = setting.folder / "data_utilization" / name
    store_text(folder, {"train": train, "validation": texts.validation, "test": texts.test}, tokenizer)
    return replace(setting, folder=folder, kept=None)


def measurement(
    size: Size,
    results: Sequence[Result],
    by_default: Sequence[Result],
    tried: Mapping[str, Mapping[float, float]],
    outcomes: Mapping[str, Sequence[Outcome]],
    target: float,
) -> Measurement:
    """Return usable shares, scores of the steps, and the steps to the target by arm. results, by_default, outcomes: by
    seed.
    """
    samples: dict[str, list[float]] = {
        "usable before": [100 * one.before / one.documents for one in results],
        "usable after": [100 * one.after / max(1, one.kept) for one in results],
        "documents kept": [100 * one.kept / one.documents for one in results],
        f"usable after{BY_DEFAULT}": [100 * one.after / max(1, one.kept) for one in by_default],
        f"documents kept{BY_DEFAULT}": [100 * one.kept / one.documents for one in by_default],
    }
    for step in dict.fromkeys(step for one in results for step in one.scores):
        scores = [one.scores.get(step, Score()) for one in results]
        samples[f"precision, {step}"] = [100 * (score.precision or 0.0) for score in scores]
        samples[f"recall, {step}"] = [100 * (score.recall or 0.0) for score in scores]
    for arm in ARMS:
        samples |= {
            f"steps, {arm}": [min(outcome.steps_to(target), size.num_steps) for outcome in outcomes[arm]],
            f"final loss, {arm}": [outcome.final_loss for outcome in outcomes[arm]],
            f"rates, {arm}": list(tried[arm]),
            f"tuning, {arm}": list(tried[arm].values()),
        }
    never = [sum(math.isinf(outcome.steps_to(target)) for outcome in outcomes[arm]) for arm in ARMS]
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | described(__name__)
        | {
            "documents": results[0].documents,
            "spoiled": f"{SHARE:.0%} of the texts, in equal parts by form: {', '.join(FORMS)}",
            "target": round(target, 4),
            "runs that never reached the target": ", ".join(f"{arm} {n}" for arm, n in zip(ARMS, never, strict=True)),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    with judgment.part():
        before, after = estimate(samples["usable before"]), estimate(samples["usable after"])
        judgment.ask("usable before", before, "%")
        judgment.require(
            abs(before.mean - BEFORE) <= BEFORE_MARGIN, f"the corpus was {before.mean:.1f}% usable, not {BEFORE:g}%"
        )
        judgment.ask("usable after", after, "%", ">=", USABLE, what="usable after cleaning")
        judgment.said.append(f"usable {before.mean:.1f}% before and {after.mean:.1f}% after")

    def fewer(arm: str) -> Estimate:
        return ratios(samples[f"steps, {RAW}"], samples[f"steps, {arm}"])

    with judgment.part():
        say = f"{{0.mean:.2f}}x fewer steps to a held-out loss of {conditions['target']}"
        judgment.ask("fewer steps", fewer(CLEANED), "x", ">=", GAIN, say=say)
    say = "{0.mean:.2f}x is what perfect cleaning would give"
    judgment.note("fewer steps on texts never spoiled", lambda: fewer(UNSPOILED), "x", say=say)
    name, say = f"usable after{BY_DEFAULT}", "{0.mean:.1f}% usable after default settings, without the step noise"
    judgment.note(name, lambda: estimate(samples[name]), "%", say=say)
    for one in samples:
        if one.startswith(("precision, ", "recall, ", "documents kept")):
            judgment.show(samples, [one], "%")
        if one.startswith("final loss, "):
            judgment.show(samples, {f"held-out loss at the end, {one.removeprefix('final loss, ')}": one}, "nats")
    with judgment.beside():
        judgment.figures |= {f"best rate, {arm}": best_rate(samples, arm) for arm in ARMS}
    return judgment.verdict()


CLAIM = declared(__name__)
