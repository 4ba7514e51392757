"""Claim: in the time of the demo, the recipe learns more than the recipe before it and than nanoGPT.

All sides train on the same machine for the same time with all cores, on the rows that the recipe quickstart packs (the
recipe before it packed no conversations), and are scored on the same held-out documents. A seed is that of everything
random, the choice of held-out documents among it, so that each seed has its own text, on which all sides are compared.
A training's number of steps is its time over the median of timed steps. nanoGPT (`nano_gpt.py`) has a model of the
same width and layers, trains at the best of several rates, and reads the same tokens as one stream; its loss and ours
are over the same targets.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import RunDir, save_yaml
from modelwright.core.config import ModelwrightError, merge
from modelwright.core.records import column, read_records
from modelwright.core.resources import num_usable_cores
from modelwright.data.rows.loader import PackedRows
from modelwright.model.decoder import ModelConfig
from modelwright.model.hf import load_model
from modelwright.ops.matmul import is_emulated
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.rows import TEXT_ROWS
from modelwright_claims import nano_gpt
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import best_value, tune_grids
from modelwright_claims.judging import Judgment
from modelwright_claims.launch import answer_of
from modelwright_claims.nano_gpt import NanoJob
from modelwright_claims.product_runs import facts_of
from modelwright_claims.statistics import Estimate, differences, estimate
from modelwright_claims.training_run import HELDOUT_ROWS, loss_on

STAGE = "pretrain"
STAGES = ["clean", "tokenize", "pack", STAGE, "evaluate"]
KINDS = ("prose", "code")
LEAST_BITS, LEAST_NATS = 0.12, 1.0
"""Required distance of the recipe from the one before it (bits per byte) and from nanoGPT (nats per token)."""
MOST_BITS: Mapping[str, float] = {"prose": 1.58, "code": 1.56}
"""Limits for processors with BF16 instructions, in the time of the demo."""
TODAY, BEFORE, EQUAL, NANO = "quickstart", "before", "quickstart, tokens of before", "nanoGPT"
WHOLE = "quickstart, time of the demo"
OWN_PARAMETERS = "parameters of the recipe"
NUM_WHOLE = 2
"""Runs in the time of the demo: the fewest that give a bound."""
SECONDS, DEMO_SECONDS = 120.0, 380.0
"""Seconds of each compared training, of which there are a dozen, and the shortest pretraining of the demo on two cores
with BF16 instructions (491 s on another machine)."""
NANO_RATES = (1e-3, 2e-3, 4e-3)
TUNING_SEED = 100
NUM_ROWS_NANO = 4
"""Rows of a step: as many tokens as the recipe takes."""
RECIPE_BEFORE: Mapping[str, Any] = {
    "pack": {"text_kinds": ["prose", "code"]},
    "model": {"num_layers": 6, "model_dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_dim": 704},
    STAGE: {
        "batch_tokens": 1024,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "schedule": {"kind": "warmup_cosine", "final_lr_fraction": 0.05},
    },
}
"""The training settings of the quickstart before its budget was a time."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of a measurement. seconds: of a training that is compared; demo_seconds: of the one as in the demo."""

    seconds: float
    demo_seconds: float
    tuning_seconds: float
    num_seeds: int
    timed_steps: int
    settings: Mapping[str, Any]


def scale_of(setting: Setting) -> Scale:
    if setting.quick:
        tiny = {"num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 64}
        settings = {
            "data": {"stdlib_fraction": 0.03},
            "model": {**tiny, "vocab_size": 400},
            "tokenizer": {"vocab_size": 400},
            "evaluate": {"max_bytes_per_domain": 3000},
        }
        return Scale(seconds=2.0, demo_seconds=2.0, tuning_seconds=1.0, num_seeds=1, timed_steps=6, settings=settings)
    return Scale(
        seconds=SECONDS, demo_seconds=DEMO_SECONDS, tuning_seconds=SECONDS, num_seeds=3, timed_steps=120, settings={}
    )


def measure(setting: Setting) -> Measurement:
    scale, folder = scale_of(setting), setting.folder / "demo_recipe"
    seeds = range(1, scale.num_seeds + 1)
    texts = {
        seed: _run(folder / f"text-{seed}", merge(scale.settings, {"stages": STAGES[:3], "seed": seed}))
        for seed in seeds
    }
    first = texts[seeds[0]]
    recipes = {TODAY: scale.settings, BEFORE: merge(RECIPE_BEFORE, scale.settings)}
    pace = {name: _step_s(setting, first, recipe, scale, name) for name, recipe in recipes.items()}
    steps = {name: max(1, round(scale.seconds / pace[name])) for name in recipes}
    trained = {name: facts_of(RunDir(folder / f"{name}-timed"), STAGE) for name in recipes}
    tokens = {name: trained[name]["num_tokens"] / trained[name]["num_steps"] for name in recipes}
    arms = {TODAY: (recipes[TODAY], steps[TODAY]), BEFORE: (recipes[BEFORE], steps[BEFORE])}
    arms[EQUAL] = (recipes[TODAY], max(1, round(steps[BEFORE] * tokens[BEFORE] / tokens[TODAY])))
    samples: dict[str, list[float]] = {}
    for seed, text in texts.items():
        for name, (recipe, num_steps) in arms.items():
            run = _trained(text, folder / f"{name}-{seed}".replace(" ", "-"), recipe, num_steps)
            _take(setting, samples, name, run, text)
    num_steps = max(1, round(scale.demo_seconds / pace[TODAY]))
    for seed, text in list(texts.items())[:NUM_WHOLE]:
        _take(setting, samples, WHOLE, _trained(text, folder / f"whole-{seed}", recipes[TODAY], num_steps), text)
    best, rates = _nano(setting, scale, texts, samples)
    return Measurement(samples=samples, conditions=_conditions(scale, arms, best, rates, first))


def _run(folder: Path, settings: Mapping[str, Any]) -> RunDir:
    """`modelwright run` on the quickstart with other settings, in a separate process."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(folder.name + ".yaml")
    save_yaml(file, {"recipe": "quickstart", "name": folder.name, **settings})
    # The folder may hold what a run of another model prepared; stages whose settings are the same stay.
    command = [sys.executable, "-m", "modelwright.cli.main", "run", str(file), "--run-dir", str(folder), "--restart"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelwrightError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return RunDir(folder)


def _trained(text: RunDir, folder: Path, recipe: Mapping[str, Any], num_steps: int) -> RunDir:
    """A run that trains for some steps on prepared rows, where its settings agree with it, with its seed."""
    shutil.copytree(text.path, folder, symlinks=True)
    lengths = {"num_steps": num_steps, "eval_every_steps": num_steps}
    seed = read_run_config(text.config).seed
    asked = {"stages": STAGES, "seed": seed, STAGE: lengths, "evaluate": {"multiple_choice": {"num_questions": 0}}}
    return _run(folder, merge(recipe, asked))


def _step_s(setting: Setting, text: RunDir, recipe: Mapping[str, Any], scale: Scale, name: str) -> float:
    run = _trained(text, text.path.with_name(f"{name}-timed"), recipe, scale.timed_steps)
    times = [value for _, value in column(read_records(run.stage(STAGE).metrics), "step_time_s")]
    step_s = statistics.median(times[len(times) // 3 :])
    setting.progress.note(f"{name}: {step_s:.3f} s a step")
    return step_s


def _take(setting: Setting, samples: dict[str, list[float]], name: str, run: RunDir, text: RunDir) -> None:
    """Add the figures of a run to the samples. Its loss is that on the held-out rows of `text`, so that it needs the
    tokenizer of them.
    """
    if _tokenizer(run) != _tokenizer(text):
        raise ModelwrightError(f"{run.path} has another tokenizer than {text.path}: their losses cannot be compared")
    facts = facts_of(run, STAGE)
    results = json.loads((run.stage("evaluate").artifact / "results.json").read_text(encoding="utf-8"))
    bits = results["models"][STAGE]["bits_per_byte"]
    model = load_model(run.stage(STAGE).artifact)
    heldout = PackedRows(_rows(text) / "heldout")
    found = {kind: bits[kind]["bits_per_byte"] for kind in KINDS}
    found |= {"nats": loss_on(model.eval(), list(heldout.batches(HELDOUT_ROWS))), "seconds": facts["train_time_s"]}
    found["tokens"] = facts["num_tokens"]
    for figure, value in found.items():
        samples.setdefault(f"{figure}, {name}", []).append(float(value))
    setting.progress.note(f"{name}: " + ", ".join(f"{figure} {value:.4g}" for figure, value in found.items()))
    shutil.rmtree(run.path)


def _rows(text: RunDir) -> Path:
    """The folder of the rows on which the recipe pretrains."""
    return text.stage("pack").artifact / TEXT_ROWS.name


def _tokenizer(run: RunDir) -> bytes:
    return (run.stage("tokenize").artifact / "tokenizer.json").read_bytes()


def _nano(
    setting: Setting, scale: Scale, texts: Mapping[int, RunDir], samples: dict[str, list[float]]
) -> tuple[float, Mapping[float, float]]:
    """Train nanoGPT at its best rate on every seed; that rate, and the losses of all."""
    first = next(iter(texts.values()))
    model = read_run_config(first.config).model
    job = NanoJob(
        rows=str(_rows(first)),
        vocab_size=model.vocab_size,
        num_layers=layers_of_nano(model),
        num_heads=model.num_heads,
        model_dim=model.model_dim,
        batch_rows=NUM_ROWS_NANO,
        learning_rate=0.0,
        seconds=scale.tuning_seconds,
        seed=TUNING_SEED,
        threads=num_usable_cores(),
        bf16=_has_bf16(),
        compiles=not setting.quick,
    )
    grid = NANO_RATES[1:2] if setting.quick else NANO_RATES
    losses = tune_grids(
        {NANO: grid},
        lambda tried: [_nano_run(setting, replace(job, learning_rate=rate))["loss"] for _, rate in tried],
        "rate",
    )[NANO]
    best = best_value(losses)
    for seed, text in texts.items():
        found = _nano_run(
            setting, replace(job, rows=str(_rows(text)), learning_rate=best, seconds=scale.seconds, seed=seed)
        )
        for figure in ("loss", "seconds", "tokens", "parameters"):
            samples.setdefault(f"{'nats' if figure == 'loss' else figure}, {NANO}", []).append(float(found[figure]))
    samples[OWN_PARAMETERS] = [float(model.num_parameters)]
    return best, losses


def layers_of_nano(model: ModelConfig) -> int:
    """How many layers nanoGPT needs for no fewer parameters: 12 D^2 a layer, beside one embedding of tokens."""
    missing = model.num_parameters - model.vocab_size * model.model_dim
    return max(1, math.ceil(missing / (12 * model.model_dim**2)))


def _nano_run(setting: Setting, job: NanoJob) -> dict[str, float]:
    file = Path(job.rows).parents[2] / "nano.json"
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    found = answer_of([sys.executable, "-m", nano_gpt.__name__, str(file)], NANO, env=environment)
    setting.progress.note(f"{NANO} at {job.learning_rate:g}: {found['loss']:.4f} nats in {found['seconds']:.0f} s")
    return found


def _has_bf16() -> bool:
    return not is_emulated(torch.bfloat16, torch.device("cpu"))


def _conditions(
    scale: Scale,
    arms: Mapping[str, tuple[Mapping[str, Any], int]],
    best: float,
    rates: Mapping[float, float],
    text: RunDir,
) -> Conditions:
    rows = PackedRows(_rows(text) / "train")
    return {
        "seconds of a training": f"{scale.seconds:g}; as in the demo {scale.demo_seconds:g}, {NUM_WHOLE} runs",
        **{f"steps, {name}": num_steps for name, (_, num_steps) in arms.items()},
        "rate of nanoGPT": f"{best:g}, of "
        + ", ".join(f"{rate:g} ({loss:.3f} nats)" for rate, loss in rates.items())
        + f" in {scale.tuning_seconds:.0f} s on another seed",
        "nanoGPT": f"{NUM_ROWS_NANO} rows of {rows.seq_len} tokens a step, torch.compile, compilation not counted",
        "tokens to train on": rows.num_tokens,
        "text": "what the recipe quickstart reads; the recipe before it packs no conversations",
        "recipe before": "8.6 million parameters, AdamW at 2e-3 with a cosine, 1,024 tokens a step",
        "BF16 instructions": _has_bf16(),
        "seeds": f"{scale.num_seeds}, each with held-out documents and a tokenizer of its own",
    }


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()

    def below(kind: str, arm: str, other: str) -> Callable[[], Estimate]:
        return lambda: differences(samples[f"{kind}, {other}"], samples[f"{kind}, {arm}"])

    for kind in KINDS:
        name, unit = f"{kind}, below the recipe before", "bits per byte"
        say = kind + " {0.mean:.3f} bits per byte below the recipe before"
        judgment.ask(name, below(kind, TODAY, BEFORE), unit, ">=", LEAST_BITS, say=say)
        judgment.ask(f"{name} at equal tokens", below(kind, EQUAL, BEFORE), unit, ">", 0.0)
        with judgment.part():
            reached = estimate(samples[f"{kind}, {WHOLE}"])
            limit = ("<=", MOST_BITS[kind]) if conditions["BF16 instructions"] else ()
            judgment.ask(f"{kind}, {WHOLE}", reached, unit, *limit, what=kind)
    with judgment.part():
        (own,), theirs = samples[OWN_PARAMETERS], min(samples[f"parameters, {NANO}"])
        judgment.require(
            theirs >= own, f"nanoGPT has {theirs:,.0f} parameters, fewer than the {own:,.0f} of the recipe"
        )
    say = "{0.mean:.2f} nats per token below nanoGPT"
    judgment.ask("below nanoGPT", below("nats", TODAY, NANO), "nats per token", ">=", LEAST_NATS, say=say)
    for arm in (TODAY, BEFORE, EQUAL, WHOLE, NANO):
        judgment.show(samples, [f"seconds, {arm}"], "s")
        judgment.show(samples, [f"tokens, {arm}"])
        judgment.show(samples, {f"held-out loss, {arm}": f"nats, {arm}"}, "nats per token")
    return judgment.verdict()


CLAIM = declared(__name__)
