"""Runs of the product's own pipeline for claims: a recipe with other settings, in a folder; several side by side."""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from modelwright.core.artifacts import RunDir, read_manifest, write_atomic
from modelwright.core.config import derive_seed, merge
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.data.document import Document
from modelwright.data.rows.examples import PromptRecord, read_prompts
from modelwright.data.sources.corpora import sentence_pairs
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_model
from modelwright.objectives.preference import MODEL_REWARDS, with_folder
from modelwright.objectives.rollouts import Rollout, RolloutConfig, RolloutWorker
from modelwright.parallel.mesh import single
from modelwright.pipeline.run import execute
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.rollout_training import fitting
from modelwright.recipes.load import load
from modelwright.reward.build import build_reward
from modelwright_claims.claim import Setting
from modelwright_claims.experiment import open_cache

AT_ONCE = 2
HeldOut = Literal["test", "validation"]
SHARES: Mapping[HeldOut, tuple[float, float]] = {"test": (0.0, 0.2), "validation": (0.2, 0.35)}
"""The held-out part, chosen by a hash: the part that the recipes hold out is too small to tell two models apart."""
SPLITS = "20% held out for what is reported, 15% for tuning, by a hash"
QUICK_SHAPE: Mapping[str, Any] = {
    "num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 32,
}  # fmt: skip
Job = TypeVar("Job")
AnySeedJob = TypeVar("AnySeedJob", bound="SeedJob")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SeedJob:
    """The work of one process. folder: of its runs; everything else decides the result."""

    folder: Path
    seed: int
    quick: bool

    @property
    def key(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "folder"}


def by_seed(
    setting: Setting,
    work: Callable[[AnySeedJob], Result],
    jobs: Sequence[AnySeedJob],
    *sources: ModuleType,
    name: str,
    before: Callable[[Sequence[AnySeedJob]], object] = bool,
) -> list[Result]:
    """Return the results of jobs in their order; results that an earlier call finished are kept, also if it was
    killed.

    sources: modules that decide the results; name: of the cache; before: makes what the missing jobs start from.
    """
    cache = open_cache(setting, sys.modules[__name__], *sources, name=name)
    missing = [job for job in jobs if job.key not in cache]
    before(missing)
    for first in range(0, len(missing), AT_ONCE):
        together = missing[first : first + AT_ONCE]
        for job, result in zip(together, make(setting, work, together), strict=True):
            cache[job.key] = result
    return [cache[job.key] for job in jobs]


def make(
    setting: Setting, work: Callable[[Job], Result], jobs: Sequence[Job], *, at_once: int = AT_ONCE
) -> list[Result]:
    """Return the results of jobs in their order, made in processes; of a quick measurement in this process, because a
    process takes longer to start than such a job."""
    if not setting.quick:
        return side_by_side(setting, work, jobs, at_once=at_once)
    num_threads = torch.get_num_threads()
    try:
        return [work(job) for job in jobs]
    finally:
        torch.set_num_threads(num_threads)


def side_by_side(
    setting: Setting, work: Callable[[Job], Result], jobs: Sequence[Job], *, at_once: int = AT_ONCE
) -> list[Result]:
    """Return the results of jobs in their order, each made in a process with one thread. work: a module's function."""
    results: list[Result] = []
    setting.progress.begin("runs", len(jobs), "runs")
    start = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=start) as pool:
        for result in pool.map(work, jobs):
            results.append(result)
            setting.progress.advance(len(results))
    setting.progress.end()
    return results


def make_run(target: str, settings: Mapping[str, Any], folder: Path) -> RunDir:
    """Carry out a recipe with other settings in `folder`, or the rest of it."""
    request = load(target, settings, str(folder))
    words = ["run", target, "--run-dir", str(folder)]
    execute(request.config, request.run, only=(), origin=request.origin, words=words, progress=SilentProgress())
    return request.run


def facts_of(run: RunDir, stage: str) -> Mapping[str, Any]:
    """Return the facts of a finished stage."""
    return read_manifest(run.stage(stage).artifact).facts


def shared_settings(job: SeedJob) -> dict[str, Any]:
    """Return the settings of all runs."""
    return {"seed": job.seed, "hardware": {"device": "cpu", "num_threads": 1}, "clean": {"num_workers": 1}}


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{document.to_json()}\n" for document in documents))


def pairs_file(folder: Path, heldout: HeldOut) -> Path:
    """The pairs of the recipe `preference`."""
    return split_file(folder, "pairs", heldout, sentence_pairs, lambda one: one.text + one.rejected[0]["content"])


def split_file(
    folder: Path,
    name: str,
    heldout: HeldOut,
    make_documents: Callable[[], Iterable[Document]],
    key: Callable[[Document], str],
) -> Path:
    """Documents with one of `SHARES` held out and the other left out. They are written in `folder` once, as `name`.
    key: what decides the share of a document."""
    paths: dict[HeldOut, Path] = {one: (folder / f"{name}-{one}.jsonl").resolve() for one in SHARES}
    if not all(path.exists() for path in paths.values()):
        documents = list(make_documents())
        for one, path in paths.items():
            write_documents(path, _split(documents, one, key))
    return paths[heldout]


def _split(documents: Iterable[Document], heldout: HeldOut, key: Callable[[Document], str]) -> Iterable[Document]:
    for document in documents:
        place = derive_seed(0, "claims", key(document)) / 2**63
        inside = [name for name, (low, high) in SHARES.items() if low <= place < high]
        if not inside:
            yield replace(document, split="train")
        elif heldout in inside:
            yield replace(document, split="heldout")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers of a model to prompts. Legend: P prompts, G answers of each.

    rewards_PG: by the terms of the reward, NaN where one failed; texts: by prompt.
    """

    rewards_PG: Mapping[str, Tensor]
    texts: Sequence[Sequence[str]]
    rollout: Rollout


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Has models of a run answer its prompts, scored by the reward of one of its stages."""

    run: RunDir
    stage: str
    """`ppo` or `grpo`: its section has the reward and the limit of an answer's length."""
    row_len: int

    @classmethod
    def of(cls, run: RunDir, stage: str) -> "Asker":
        return cls(run=run, stage=stage, row_len=read_run_config(run.config).section("pack").seq_len)

    @property
    def rollout(self) -> RolloutConfig:
        return read_run_config(self.run.config).section(self.stage).rollout

    def prompts(self, split: Literal["train", "heldout"]) -> list[PromptRecord]:
        """The prompts of a split that leave room for an answer, each once."""
        every = read_prompts(self.run.stage("pack").artifact / "prompts" / split)
        kept = fitting(every, self.row_len, self.rollout, self.stage, lambda note: None)
        return list({tuple(one.ids): one for one in kept}.values())

    def ask(
        self, model: Path, prompts: Sequence[PromptRecord], *, num_answers: int, seed: int, greedy: bool = False
    ) -> Answers:
        """Answers of the model in a folder, drawn at temperature 1 or, with one of each, greedy."""
        terms = read_run_config(self.run.config).section(self.stage).rewards
        reward = build_reward(with_folder(terms, self.run.stage("reward").artifact), kinds=MODEL_REWARDS)
        worker = RolloutWorker(
            prompts=prompts, tokenizer=Tokenizer.load(model), reward=reward, config=self.rollout, seed=seed
        )
        rollout = worker.roll_out(
            load_model(model),
            single(),
            range(len(prompts)),
            num_generations=num_answers,
            stream=("claim",),
            greedy=greedy,
        )
        texts = [
            worker.text_of(ids_L[begin:end].tolist())
            for ids_L, begin, end in zip(
                rollout.ids_CL, rollout.prompt_lens_C.tolist(), rollout.lens_C.tolist(), strict=True
            )
        ]
        by_term = zip(worker.term_names, rollout.terms_CR.T, strict=True)
        return Answers(
            rewards_PG={name: values_C.view(-1, num_answers) for name, values_C in by_term},
            texts=[texts[first : first + num_answers] for first in range(0, len(texts), num_answers)],
            rollout=rollout,
        )


NUM_UNTIMED_STEPS = 3
ROW_TOKENS = 2
"""A row of the recipe `vision` is one image."""
Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class VisionJob(SeedJob):
    """A single run of the recipe `vision`. settings: of the stage, over the recipe's."""

    arm: str
    settings: Mapping[str, Any]
    num_threads: int = 1

    def run(self) -> RunDir:
        settings = {
            **shared_settings(self), "hardware": {"device": "cpu", "num_threads": self.num_threads}, "name": "vision",
            "stages": ["clean", "tokenize", "pack", "vision"], "vision": dict(self.settings),
        }  # fmt: skip
        return make_run("vision", settings, self.folder / f"{self.arm}-{self.seed}".replace(" ", "-"))


def accuracies(setting: Setting, arms: Arms, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the accuracy in percent on held-out digits by seed, of each arm."""
    folder, short = setting.folder / "vision", {"num_epochs": 0.2, "eval_every_steps": 0} if setting.quick else {}
    jobs = [
        VisionJob(folder=folder, seed=seed, quick=setting.quick, arm=arm, settings=merge(settings, short))
        for seed in seeds
        for arm, settings in arms.items()
    ]
    found = by_seed(setting, accuracy_of, jobs, name="vision")
    return {arm: [value for job, value in zip(jobs, found, strict=True) if job.arm == arm] for arm in arms}


def accuracy_of(job: VisionJob) -> float:
    return 100 * float(facts_of(job.run(), "vision")["heldout_images"]["accuracy"])


def paces(setting: Setting, arms: Arms, *, num_repeats: int, num_threads: int) -> dict[str, list[float]]:
    """Return the images per second of each arm's median step, by repeat; the arms of a repeat run in turn, alone."""
    folder, found = setting.folder / "vision-pace", {arm: list[float]() for arm in arms}
    for repeat in range(num_repeats):
        for arm, settings in arms.items():
            job = VisionJob(
                folder=folder, seed=repeat, quick=setting.quick, arm=arm, settings=settings, num_threads=num_threads
            )
            rates = column(read_records(job.run().stage("vision").metrics), "tokens_per_s")
            found[arm].append(statistics.median([rate for _, rate in rates][NUM_UNTIMED_STEPS:]) / ROW_TOKENS)
            setting.progress.note(f"{arm}, repeat {repeat + 1}: {found[arm][-1]:.0f} images/s")
    return found
