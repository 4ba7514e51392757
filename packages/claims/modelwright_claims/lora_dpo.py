"""Claim: in DPO low-rank adapters keep the held-out accuracy of training all weights, with less memory and more speed.

Accuracy: the problems and the model of the recipe `arithmetic`, fine-tuned on right and wrong demonstrations first; a
pair is the right answer and the one that forgets the carry. Memory and pace: a wider model with untrained weights,
because in the recipe's own the weights hardly count.
About 25 minutes on two AVX-512 cores, by the CPU time of the parts of one seed.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import RunDir, read_attempts
from modelwright.core.config import merge
from modelwright.core.records import column, read_records
from modelwright.data.document import Document
from modelwright.data.sources.corpora import arithmetic_problems
from modelwright_claims import product_runs
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.experiment import best_rate, best_value, tune_grids
from modelwright_claims.judging import Judgment
from modelwright_claims.product_runs import (
    HeldOut,
    SeedJob,
    by_seed,
    facts_of,
    make,
    make_run,
    shared_settings,
    split_file,
)
from modelwright_claims.statistics import differences, estimate, percent_above, ratios

FULL, LORA = "all weights", "LoRA"
RANK = 16
ARMS: Mapping[str, Mapping[str, Any]] = {FULL: {}, LORA: {"lora": {"r": RANK, "lora_alpha": 2.0 * RANK}}}
"""Settings of the stage `dpo`."""
RATES: Mapping[str, Sequence[float]] = {FULL: (3e-5, 1e-4, 3e-4), LORA: (3e-4, 1e-3, 3e-3)}
"""Adapters want about ten times the rate (docs/guides/fine-tune.md); a grid is extended until its best rate is inside.
"""
TUNING_SEED, SEEDS = 30, tuple(range(36, 46))
NUM_STEPS = 16
"""Steps of one pass over the pairs: after several passes both arms rank nearly all pairs correctly and no longer
differ."""
MOST_LOST, CHANCE = 2.0, 50.0
"""Points of accuracy, about six of the held-out pairs; percent."""
NUM_REPEATS, NUM_TIMED_STEPS, NUM_UNTIMED_STEPS = 5, 8, 2
WIDE: Mapping[str, Any] = {
    "num_layers": 8,
    "model_dim": 512,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
    "ffn_dim": 1376,
}
WIDE_BATCH = 1024
ACCURACY, LOSS, PACE, PEAK = "accuracy, ", "held-out loss, ", "tokens per second, ", "peak bytes, "
NUM_PAIRS = "held-out pairs"
GAP, MEMORY, SPEED = "accuracy over all weights", "peak memory to all weights", "pace over all weights"
QUICK: Mapping[str, Any] = {
    "model": product_runs.QUICK_SHAPE, "pretrain": {"num_steps": 2}, "sft": {"num_steps": 4},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BaseJob(SeedJob):
    """The fine-tuned model that DPO starts from, of one seed. demonstrations: their file."""

    demonstrations: str

    @property
    def target(self) -> Path:
        return self.folder / f"base-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class DpoJob(SeedJob):
    """A single run of DPO. base: folder of the model; pairs: file of the pairs, whose held-out part is `heldout`."""

    arm: str
    rate: float
    num_steps: int
    heldout: HeldOut
    base: Path
    pairs: str

    @property
    def key(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "quick", "arm", "rate", "num_steps", "heldout")}


@dataclass(frozen=True, kw_only=True)
class PaceJob:
    """A single timed run of the wide model, whose peak a separate process takes."""

    folder: Path
    arm: str
    repeat: int
    base: Path
    pairs: str
    num_threads: int
    num_steps: int


@dataclass
class Bench:
    """Makes the runs of both arms, in `setting.folder`."""

    setting: Setting

    @property
    def folder(self) -> Path:
        return self.setting.folder / "dpo"

    @property
    def seeds(self) -> Sequence[int]:
        return SEEDS[:1] if self.setting.quick else SEEDS

    @property
    def num_steps(self) -> int:
        return 4 if self.setting.quick else NUM_STEPS

    def bases(self) -> dict[int, Path]:
        """The folder of the fine-tuned model by seed, that of tuning included; a quick measurement has one for all."""
        seeds = (TUNING_SEED, *self.seeds)
        file = str(demonstrations_file(self.folder))
        jobs = [
            BaseJob(folder=self.folder, seed=seed, quick=self.setting.quick, demonstrations=file)
            for seed in (seeds[:1] if self.setting.quick else seeds)
        ]
        made = make(self.setting, make_base, jobs)
        return dict(zip(seeds, made * len(seeds) if self.setting.quick else made, strict=True))

    def tune(self, base: Path) -> dict[str, dict[float, float]]:
        """Return the held-out loss by rate of each arm, on pairs that are not reported."""

        def losses(tried: Sequence[tuple[str, float]]) -> list[float]:
            jobs = [self.job(arm, rate, TUNING_SEED, base, "validation") for arm, rate in tried]
            return [run[LOSS] for run in self.dpo(jobs)]

        grids = {arm: rates[:1] if self.setting.quick else rates for arm, rates in RATES.items()}
        return tune_grids(grids, losses, "rate")

    def job(self, arm: str, rate: float, seed: int, base: Path, heldout: HeldOut) -> DpoJob:
        return DpoJob(
            folder=self.folder,
            seed=seed,
            quick=self.setting.quick,
            arm=arm,
            rate=rate,
            num_steps=self.num_steps,
            heldout=heldout,
            base=base,
            pairs=str(pairs_file(self.folder, heldout)),
        )

    def dpo(self, jobs: Sequence[DpoJob]) -> list[dict[str, float]]:
        return by_seed(self.setting, one_run, jobs, sys.modules[__name__], name="lora_dpo")

    def paces(self, base: Path) -> dict[str, list[dict[str, float]]]:
        """The figures of a model of each arm, by repeat; the arms of a repeat run one after the other, alone."""
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for repeat in range(1 if self.setting.quick else NUM_REPEATS):
            for arm in ARMS:
                job = PaceJob(
                    folder=self.folder,
                    arm=arm,
                    repeat=repeat,
                    base=base,
                    pairs=str(pairs_file(self.folder, "test")),
                    num_threads=torch.get_num_threads(),
                    num_steps=NUM_UNTIMED_STEPS + (2 if self.setting.quick else NUM_TIMED_STEPS),
                )
                found[arm] += make(self.setting, pace_of, [job], at_once=1)
        return found


def measure(setting: Setting) -> Measurement:
    """Tune both arms, run each at its best rate for every seed, and time them on the wide model."""
    bench = Bench(setting)
    bases = bench.bases()
    tuned = bench.tune(bases[TUNING_SEED])
    jobs = [bench.job(arm, best_value(tuned[arm]), seed, bases[seed], "test") for seed in bench.seeds for arm in ARMS]
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for job, run in zip(jobs, bench.dpo(jobs), strict=True):
        found[job.arm].append(run)
    wide = bases[TUNING_SEED] if setting.quick else wide_base(bench.folder)
    paces = bench.paces(wide)
    samples: dict[str, list[float]] = {}
    for arm in ARMS:
        samples |= {what + arm: [run[what] for run in found[arm]] for what in (ACCURACY, LOSS)}
        samples |= {what + arm: [run[what] for run in paces[arm]] for what in (PACE, PEAK)}
        samples |= {f"rates, {arm}": list(tuned[arm]), f"tuning, {arm}": list(tuned[arm].values())}
    return Measurement(
        samples=samples,
        conditions=described(__name__)
        | {
            "seeds": ", ".join(map(str, bench.seeds)),
            "steps of DPO": bench.num_steps,
            NUM_PAIRS: int(found[FULL][0][NUM_PAIRS]),
            "LoRA": f"rank {RANK}, alpha {2 * RANK}, all projections",
            "memory and pace": f"a model of {WIDE['num_layers']} layers of {WIDE['model_dim']} after one step of "
            f"training, {WIDE_BATCH} tokens a step in four microbatches, {torch.get_num_threads()} threads, arms in "
            f"turn, median of {NUM_TIMED_STEPS} steps",
            "instruction set": torch.backends.cpu.get_cpu_capability(),
        },
    )


def demonstrations_file(folder: Path) -> Path:
    """Two demonstrations of each problem, one of them wrong."""
    return split_file(folder, "demonstrations", "test", arithmetic_problems, problem_of)


def pairs_file(folder: Path, heldout: HeldOut) -> Path:
    """A single pair of each problem."""
    return split_file(folder, "pairs", heldout, arithmetic_pairs, problem_of)


def problem_of(document: Document) -> str:
    """Return a key that is equal for a sum in either order."""
    return " ".join(sorted(document.meta["question"].split()))


def arithmetic_pairs() -> Iterator[Document]:
    """Yield for each problem the right answer, chosen, and the one that forgets the carry, rejected."""
    every = list(arithmetic_problems())
    wrong = {one.meta["question"]: one.meta["answer"] for one in every if one.meta["answer"] != one.meta["solution"]}
    for document in every:
        question, answer = document.meta["question"], document.meta["answer"]
        if answer == document.meta["solution"]:
            rejected = [{"role": "assistant", "content": wrong[question]}]
            meta = {"question": question, "answer": answer, "rejected": rejected, "prompt_turns": 1}
            yield replace(document, id=f"pair:{question}", meta=meta)


def make_base(job: BaseJob) -> Path:
    """The recipe up to fine-tuning; the folder of the model. A process's whole work."""
    settings = {
        **shared_settings(job), "name": "dpo-base", "stages": ["clean", "tokenize", "pack", "pretrain", "sft"],
        "data": {"sources": [job.demonstrations]}, "sft": {"eval_every_steps": 0, "keep_best": False},
    }  # fmt: skip
    run = make_run("arithmetic", merge(settings, QUICK) if job.quick else settings, job.target)
    return run.stage("sft").artifact.resolve()


def one_run(job: DpoJob) -> dict[str, float]:
    """Make one run; its held-out figures. A process's whole work."""
    dpo = {**ARMS[job.arm], "learning_rate": job.rate, "num_steps": job.num_steps}
    settings = {**shared_settings(job), **dpo_settings(job.base, job.pairs, dpo)}
    folder = job.folder / f"dpo-{job.heldout}-{job.seed}-{job.arm}-{job.rate:g}".replace(" ", "-")
    run = make_run("arithmetic", settings, folder)
    facts = facts_of(run, "dpo")
    return {
        ACCURACY: 100 * float(facts["heldout_metrics"]["rewards/accuracies"]),
        LOSS: float(facts["heldout_loss"]),
        NUM_PAIRS: float(facts_of(run, "pack")["preference_pairs/heldout"]["num_sequences"]),
    }


def dpo_settings(base: Path, pairs: str, dpo: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run of DPO alone, which is evaluated at its end on all held-out pairs."""
    return {
        "name": "dpo-claim", "stages": ["clean", "pack", "dpo"], "init_from": str(base),
        "data": {"sources": [pairs]}, "validation_tokens": 0,
        "dpo": {"batch_tokens": 2048, "gradient_accumulation_steps": 4, "eval_every_steps": 0, "keep_best": False,
                **dpo},
    }  # fmt: skip


def wide_base(folder: Path) -> Path:
    """A wide model after one step; its speed does not depend on its training."""
    settings = {
        "name": "dpo-wide", "stages": ["clean", "tokenize", "pack", "pretrain"], "model": WIDE,
        "data": {"sources": [str(demonstrations_file(folder))]}, "pretrain": {"num_steps": 1},
    }  # fmt: skip
    return make_run("arithmetic", settings, folder / "wide").stage("pretrain").artifact.resolve()


def pace_of(job: PaceJob) -> dict[str, float]:
    """Make one run of the wide model; its pace and its peak memory. A process's whole work."""
    dpo = {**ARMS[job.arm], "num_steps": job.num_steps, "batch_tokens": WIDE_BATCH}
    settings = dpo_settings(job.base, job.pairs, dpo) | {
        "hardware": {"device": "cpu", "num_threads": job.num_threads}, "clean": {"num_workers": 1},
        "validation_tokens": WIDE_BATCH,
    }  # fmt: skip
    run = make_run("arithmetic", settings, job.folder / f"wide-{job.arm}-{job.repeat}".replace(" ", "-"))
    rates = [rate for _, rate in column(read_records(run.stage("dpo").metrics), "tokens_per_s")]
    return {
        PACE: statistics.median(rates[NUM_UNTIMED_STEPS:]),
        PEAK: float(max(1, peak_of(run, "dpo") - peak_of(run, "pack"))),
    }


def peak_of(run: RunDir, stage: str) -> int:
    """The most memory that was resident while the stage ran, as its journal has it."""
    return int(read_attempts(run.stage(stage))[-1]["peak_bytes"])


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Return where training all weights orders no more pairs than chance does, there is nothing to keep."""
    judgment = Judgment()
    judgment.ask("", lambda: estimate(samples[ACCURACY + FULL]), "%", ">", CHANCE, what=f"{ACCURACY}{FULL}")
    for figure, compare, what, unit, *limit, say in (
        (GAP, differences, ACCURACY, "points", ">=", -MOST_LOST, "accuracy {0.mean:+.2f} points beside training all "
         "weights"),
        (MEMORY, ratios, PEAK, "x", "<", 1.0, "{0.mean:.2f}x the peak memory"),
        (SPEED, percent_above, PACE, "%", ">", 0.0, "{0.mean:+.0f}% tokens per second"),
    ):  # fmt: skip
        judgment.ask(
            figure, lambda compare=compare, what=what: compare(samples[what + LORA], samples[what + FULL]), unit,
            *limit, say=say,
        )  # fmt: skip
    for arm in ARMS:
        for what, unit, size in ((ACCURACY, "%", 1), (LOSS, "nats", 1), (PACE, "/s", 1), (PEAK, "MiB", 2**20)):
            judgment.show(samples, [what + arm], unit, 1 / size)
        with judgment.beside():
            judgment.figures[f"rate, {arm}"] = best_rate(samples, arm)
    return judgment.verdict()


CLAIM = declared(__name__)
