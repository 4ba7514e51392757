"""Claim: GRPO from a verifiable reward raises held-out accuracy, over fine-tuning on the same number of samples.

The recipe `arithmetic`, whose demonstrations are half wrong. Fine-tuning continues from the model that GRPO starts
from, once on demonstrations and once on the model's own answers that the reward has verified (rejection sampling).
About 13 minutes on two AVX-512 cores, by the CPU time of the parts of one seed.
"""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, read_manifest
from modelwright.core.config import derive_seed, merge
from modelwright.data.document import Document
from modelwright.data.rows.examples import PromptRecord
from modelwright.pipeline.run_config import read_run_config
from modelwright_claims import product_runs
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment
from modelwright_claims.product_runs import Answers, Asker, SeedJob, by_seed, make_run, shared_settings, write_documents
from modelwright_claims.statistics import differences

SEEDS = (21, 22, 23, 24, 25)
NUM_ANSWERS = 8
STAGES = ("clean", "tokenize", "pack", "pretrain", "sft", "grpo")
RIGHT = "numeric_match"
"""The only term of the recipe's reward: 1 for the right number."""
ACCURACY = "accuracy, "
BEFORE, GRPO = "before", "GRPO"
DEMONSTRATIONS, VERIFIED = "fine-tuning on demonstrations", "fine-tuning on verified answers"
MAJORITY, ANY = f"majority of {NUM_ANSWERS}", f"best of {NUM_ANSWERS} by the verifier"
NUM_SAMPLES, NUM_DISTINCT = "samples", "distinct verified answers"
NUM_PROBLEMS, NUM_STEPS = "held-out problems", "steps of further fine-tuning"
QUICK: Mapping[str, Any] = {
    "model": product_runs.QUICK_SHAPE, "pretrain": {"num_steps": 2}, "sft": {"num_steps": 40},
    "grpo": {"num_steps": 2, "batch_tokens": 1024},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of one seed. accuracies: in percent of the held-out problems, by arm; sizes: counts, by name."""

    accuracies: Mapping[str, float]
    sizes: Mapping[str, int]


def measure(setting: Setting) -> Measurement:
    """Run the recipe with each seed, fine-tune further from its start of GRPO, and ask all models the same problems."""
    seeds = SEEDS[:1] if setting.quick else SEEDS
    jobs = [SeedJob(folder=setting.folder / "arithmetic", seed=seed, quick=setting.quick) for seed in seeds]
    found = by_seed(setting, one_seed, jobs, sys.modules[__name__], name="grpo_arithmetic")
    runs = [Figures(**one) for one in found]
    sizes = runs[0].sizes
    return Measurement(
        samples={f"{ACCURACY}{arm}": [run.accuracies[arm] for run in runs] for arm in runs[0].accuracies},
        conditions=described(__name__)
        | {
            "seeds": ", ".join(map(str, seeds)),
            NUM_SAMPLES: sizes[NUM_SAMPLES],
            NUM_PROBLEMS: sizes[NUM_PROBLEMS],
            NUM_STEPS: sizes[NUM_STEPS],
            NUM_DISTINCT: ", ".join(str(run.sizes[NUM_DISTINCT]) for run in runs),
            MAJORITY: "the most frequent of the answers drawn at temperature 1 by the model before GRPO",
            ANY: "an upper bound for choosing among the same answers, because it needs the solution",
        },
    )


def one_seed(job: SeedJob) -> dict[str, Any]:
    """Make the runs of one seed; its `Figures`, as plain data. A process's whole work."""
    folder = job.folder / str(job.seed)
    settings = {**shared_settings(job), "name": "grpo-claim", "stages": list(STAGES), "grpo": {"keep_best": False}}
    run = make_run("arithmetic", merge(settings, QUICK) if job.quick else settings, folder / "grpo")
    start, asker = run.stage("sft").artifact, Asker.of(run, "grpo")
    config = read_run_config(run.config)
    num_samples = config.section("grpo").num_steps * config.section("grpo").batch_rows(config.section("pack").seq_len)
    problems, seed = asker.prompts("heldout"), derive_seed(job.seed, "claim", "answers")
    own = folder / "verified.jsonl"
    verified = verified_answers(asker, start, num_samples, seed)
    write_documents(own, verified)
    steps = steps_for(run, num_samples)
    models = {
        BEFORE: start,
        GRPO: run.stage("grpo").artifact,
        DEMONSTRATIONS: fine_tuned(job, start, "arithmetic", steps, folder / "demonstrations"),
        VERIFIED: fine_tuned(job, start, str(own.resolve()), steps, folder / "verified") if verified else start,
    }
    accuracies = {
        name: percent_right(asker.ask(model, problems, num_answers=1, seed=seed, greedy=True))
        for name, model in models.items()
    }
    drawn = asker.ask(start, problems, num_answers=NUM_ANSWERS, seed=seed)
    accuracies |= {MAJORITY: majority_right(drawn), ANY: 100 * float(drawn.rewards_PG[RIGHT].amax(dim=1).mean())}
    sizes = {NUM_SAMPLES: num_samples, NUM_DISTINCT: len(verified), NUM_PROBLEMS: len(problems), NUM_STEPS: steps}
    return {"accuracies": accuracies, "sizes": sizes}


def steps_for(run: RunDir, num_samples: int) -> int:
    """The steps of fine-tuning that read so many conversations."""
    config = read_run_config(run.config)
    rows = read_manifest(run.stage("pack").artifact).facts["sft/train"]
    of_a_step = config.section("sft").batch_rows(config.section("pack").seq_len)
    return math.ceil(num_samples / (of_a_step * rows["num_sequences"] / rows["num_rows"]))


def verified_answers(asker: Asker, model: Path, num_samples: int, seed: int) -> list[Document]:
    """The distinct right ones among so many answers, drawn evenly from all problems of training; those that say more
    than a number are left out."""
    problems = asker.prompts("train")
    answers = asker.ask(
        model, problems, num_answers=max(1, num_samples // len(problems)), seed=derive_seed(seed, "verified")
    )
    documents: list[Document] = []
    for problem, texts, right_G in zip(problems, answers.texts, answers.rewards_PG[RIGHT].tolist(), strict=True):
        kept = dict.fromkeys(text.strip() for text, right in zip(texts, right_G, strict=True) if right == 1)
        documents += [_document(problem, text) for text in kept if text.removeprefix("-").isdecimal()]
    return documents


def _document(problem: PromptRecord, answer: str) -> Document:
    question = problem.messages[-1]["content"]
    return Document(
        id=f"verified:{question}:{answer}",
        text=f"{question}\n\n{answer}",
        kind="qa",
        split="train",
        source="verified",
        meta={"question": question, "answer": answer},
    )


def fine_tuned(job: SeedJob, start: Path, source: str, steps: int, folder: Path) -> Path:
    """The model in `start`, fine-tuned further with the recipe's settings."""
    settings = {
        **shared_settings(job), "name": "sft-claim", "stages": ["clean", "pack", "sft"], "init_from": str(start),
        "data": {"sources": [source]}, "sft": {"num_steps": steps, "eval_every_steps": 0, "keep_best": False},
    }  # fmt: skip
    return make_run("arithmetic", settings, folder).stage("sft").artifact


def percent_right(answers: Answers) -> float:
    return 100 * float(answers.rewards_PG[RIGHT].mean())


def majority_right(answers: Answers) -> float:
    """Percent of the prompts whose most frequent answer is right; of several the one that was drawn first."""
    right = 0.0
    for texts, right_G in zip(answers.texts, answers.rewards_PG[RIGHT].tolist(), strict=True):
        stripped = [text.strip() for text in texts]
        right += right_G[stripped.index(Counter(stripped).most_common(1)[0][0])]
    return 100 * right / len(answers.texts)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    for rival in (BEFORE, DEMONSTRATIONS, VERIFIED, MAJORITY):
        with judgment.part():
            gain = differences(samples[ACCURACY + GRPO], samples[ACCURACY + rival])
            limit = (">", 0.0) if rival in (BEFORE, DEMONSTRATIONS) else ()
            figure, say = f"accuracy of GRPO over {rival}", f"{{0.mean:+.1f}} points over {rival}"
            judgment.ask(figure, gain, "points", *limit, say=say)
            is_better = rival == VERIFIED and gain.upper < 0
            judgment.require(not is_better, f"{rival} is better by {-gain.mean:.1f} points")
    with judgment.beside():
        after, most = (statistics.fmean(samples[ACCURACY + arm]) for arm in (GRPO, ANY))
        judgment.said.append(f"GRPO {after:.1f}% of {conditions[NUM_PROBLEMS]} problems; {ANY} {most:.1f}%")
    arms = (GRPO, BEFORE, DEMONSTRATIONS, VERIFIED, MAJORITY, ANY)
    judgment.show(samples, [ACCURACY + arm for arm in arms], "%")
    return judgment.verdict()


CLAIM = declared(__name__)
