"""What the claims about alignment share: documents with splits of their own, runs for each seed, and answers of
a run's models to held-out prompts with their rewards.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from modelwright.core.artifacts import write_atomic
from modelwright.core.rundir import RunDir
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document
from modelwright.data.rows.examples import PromptRecord, read_prompts
from modelwright.data.sources.corpora import sentence_pairs
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_model
from modelwright.objectives.reward_model import MODEL_REWARDS, with_folder
from modelwright.objectives.rollouts import Rollout, RolloutConfig, RolloutWorker
from modelwright.parallel.mesh import single
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.rollout_training import fitting
from modelwright.reward.build import build_reward
from modelwright_claims import product_runs
from modelwright_claims.claim import Setting
from modelwright_claims.experiment import open_cache
from modelwright_claims.product_runs import side_by_side

HeldOut = Literal["test", "validation"]
AT_ONCE = 2
SHARES: Mapping[HeldOut, tuple[float, float]] = {"test": (0.0, 0.2), "validation": (0.2, 0.35)}
"""Which part is held out, by a hash: what the recipes hold out is too little to tell two models apart."""
SPLITS = "20% held out for what is reported, 15% for tuning, by a hash"
QUICK_SHAPE: Mapping[str, Any] = {
    "num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 32,
}  # fmt: skip

Job = TypeVar("Job", bound="SeedJob")
AnyJob = TypeVar("AnyJob")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SeedJob:
    """What one process does. folder: of its runs; everything else decides the result."""

    folder: Path
    seed: int
    quick: bool

    @property
    def key(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "folder"}


def by_seed(
    setting: Setting, work: Callable[[Job], Result], jobs: Sequence[Job], *sources: ModuleType, name: str
) -> list[Result]:
    """The results of jobs in their order; what an earlier call finished is kept, also if it was killed.

    sources: modules that decide the results; name: of the cache.
    """
    cache = open_cache(setting, product_runs, sys.modules[__name__], *sources, name=name)
    missing = [job for job in jobs if job.key not in cache]
    for first in range(0, len(missing), AT_ONCE):
        together = missing[first : first + AT_ONCE]
        for job, result in zip(together, make(setting, work, together), strict=True):
            cache[job.key] = result
    return [cache[job.key] for job in jobs]


def make(
    setting: Setting, work: Callable[[AnyJob], Result], jobs: Sequence[AnyJob], *, at_once: int = AT_ONCE
) -> list[Result]:
    """The results of jobs in their order, in processes; of a quick measurement in this process, because a process takes
    longer to start than such a job."""
    if not setting.quick:
        return side_by_side(setting, work, jobs, at_once=at_once)
    num_threads = torch.get_num_threads()
    try:
        return [work(job) for job in jobs]
    finally:
        torch.set_num_threads(num_threads)


def shared_settings(job: SeedJob) -> dict[str, Any]:
    """What all runs have."""
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
