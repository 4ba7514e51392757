"""The job on Modelwright: its objectives and its training loop, with their defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.artifacts import StageDir
from modelwright.core.config import parse
from modelwright.core.records import read_records
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.examples import PromptRecord
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.model.hf import load_model
from modelwright.objectives.experience import ReferenceModel
from modelwright.objectives.grpo import Grpo, GrpoConfig
from modelwright.objectives.next_token import NextToken
from modelwright.objectives.ppo import Ppo, PpoConfig, separate_value_model
from modelwright.objectives.preference import ModelReward, Preference, PreferenceConfig, load_reward_model
from modelwright.objectives.rollouts import HeldoutRewards, RolloutWorker
from modelwright.parallel.mesh import single
from modelwright.reward.build import Term, WeightedSum
from modelwright.reward.reward import Reward, Sample, Score
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.job import TrainJob
from modelwright.train.objective import Objective
from modelwright.train.technique import StepInfo, observer
from tuners.task import (
    BETAS,
    CLIP_NORM,
    EOS,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    SEED,
    VOCABULARY,
    Clock,
    Task,
    even_share,
    ids_of,
    mean_len,
    pairs,
    prompts,
    sequences,
    text,
)

ROLLOUTS_PER_ROW = 4
"""Completions with their prompts that a packed row holds."""


def run(task: Task, name: str, out: Path) -> dict[str, Any]:
    clock, tokens = Clock(task), list[float]()
    objective, config, updates = JOBS[task.case](task, out)

    def observe(info: StepInfo) -> None:
        tokens.append(info.num_tokens)
        if info.step % updates == 0:
            clock.tick()

    job = TrainJob(
        model=load_model(task.folder / "model"),
        objective=objective,
        config=config,
        num_steps=task.num_updates * updates,
        stage=StageDir(out),
        seed=SEED,
        name="benchmark",
        input_digest="benchmark",
        techniques=[observer("ticker", observe)],
    )
    train(job, single())
    of_updates = tokens[::updates]
    if task.case in ("sft", "lora"):
        samples = [one / mean_len(task) for one in of_updates]
    else:
        samples = [float(task.batch)] * task.num_updates
    first = next(one["loss"] for one in read_records(out / "metrics.jsonl") if "loss" in one)
    return {**clock.rates(samples, of_updates), "first_loss": first}


def settings(task: Task, *, batch_tokens: int, updates: int = 1) -> dict[str, Any]:
    """What all trainings share. updates: of one update of the task."""
    return {
        "num_steps": task.num_updates * updates,
        "batch_tokens": batch_tokens,
        "learning_rate": LEARNING_RATE,
        "betas": list(BETAS),
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "precision": {"policy": "bf16_mixed" if task.compute == "bf16" else "fp32"},
        "eval_every_steps": 0,
        "checkpoint_every_minutes": 0.0,
        "keep_best": False,
    }


Job = tuple[Objective, TrainConfig, int]
"""Objective, settings, and how many steps are one update of the task."""


def sft(task: Task, out: Path) -> Job:
    """Packed rows, in the loader's order."""
    packing = PackConfig(seq_len=task.seq_len)
    pack(((np.array(ids), None) for ids in sequences(task)), out / "rows", packing, vocab_size=VOCABULARY, eos_id=EOS)
    loader = PackedLoader(PackedRows(out / "rows"), batch_rows=task.batch, seed=SEED)
    shared = settings(task, batch_tokens=task.batch * task.seq_len)
    adapters = {"lora": {"r": LORA_RANK, "lora_alpha": float(LORA_ALPHA)}} if task.case == "lora" else {}
    return NextToken(loader), parse(TrainConfig, {**shared, **adapters}, constants=True), 1


@dataclass(frozen=True)
class InOrder:
    """Update k learns from the pairs from k * batch on, packed for itself, as TRL's sequential sampler takes them.

    The two rows have room for just these pairs: so few leave a third of rows of `seq_len` tokens empty, which a whole
    data set does not.
    """

    task: Task
    folder: Path

    @property
    def num_batches_per_epoch(self) -> int:
        return self.task.num_updates

    def write(self) -> None:
        """Pack the rows of all updates."""
        every = pairs(self.task)
        for index in range(self.task.num_updates):
            own = every[index * self.task.batch : (index + 1) * self.task.batch]
            answers = [self._sequence(prompt, answer) for prompt, *both in own for answer in both]
            longest = sum(
                max(len(one.ids), len(other.ids)) for one, other in zip(answers[::2], answers[1::2], strict=True)
            )
            config = PackConfig(seq_len=longest)
            pack(answers, self.folder / str(index), config, vocab_size=VOCABULARY, eos_id=EOS, group_size=2)

    def _sequence(self, prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
        return TokenSequence(np.array([*prompt, *answer]), mask)

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        rows = PackedRows(self.folder / str(index))
        return rows.gather(np.arange(rows.num_groups))


def dpo(task: Task, out: Path) -> Job:
    source = InOrder(task, out / "rows")
    source.write()
    shared = settings(task, batch_tokens=2 * task.batch * task.seq_len)
    config = parse(PreferenceConfig, {**shared, "loss": "sigmoid", "beta": 0.1}, constants=True)
    reference = FrozenModel(load_model(task.folder / "model"), single())
    return Preference(source, config, reference), config, 1


@dataclass(frozen=True)
class Words:
    """What rollouts and reward models need of a tokenizer."""

    vocab_size: int = VOCABULARY
    stop_ids: tuple[int, ...] = (EOS,)

    @property
    def chat(self) -> "Words":
        return self

    def decode(self, ids: Sequence[int]) -> str:
        return text(ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and a mask of the last answer."""
        parts = [ids_of(one["content"]) for one in messages]
        mask = np.repeat([0, 1], [sum(map(len, parts[:-1])), len(parts[-1])])
        return np.array([token for part in parts for token in part]), mask


class EvenWords:
    """`even_share` as one of our rewards, which see text."""

    name = "even"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(even_share(ids_of(sample.answer))) for sample in samples]


def rollout_parts(task: Task, reward: Reward, config: Any) -> dict[str, Any]:
    """What objectives that roll out are made of."""
    words: Any = Words()
    records = [PromptRecord(ids=ids, messages=[{"role": "user", "content": text(ids)}]) for ids in prompts(task)]
    worker = RolloutWorker(
        prompts=records, tokenizer=words, reward=WeightedSum([Term(reward, 1.0)]), config=config, seed=SEED
    )
    row_len = ROLLOUTS_PER_ROW * (task.prompt_len + task.completion_len)
    start = task.folder / "model"
    return {
        "worker": worker,
        "heldout": HeldoutRewards(worker=worker),
        "reference": ReferenceModel(load=lambda: FrozenModel(load_model(start), single()), row_len=row_len),
        "num_completions": task.batch,
        "row_len": row_len,
    }


def rollout_settings(task: Task, updates: int = 1) -> dict[str, Any]:
    tokens = task.batch * (task.prompt_len + task.completion_len)
    shared = settings(task, batch_tokens=tokens, updates=updates)
    return {**shared, "rollout": {"max_completion_length": task.completion_len}}


def grpo(task: Task, out: Path) -> Job:
    changes = {"num_generations": task.num_generations, "num_iterations": 1, "beta": 0.0}
    config = parse(GrpoConfig, {**rollout_settings(task), **changes}, constants=True)
    return Grpo(config=config, **rollout_parts(task, EvenWords(), config.rollout)), config, 1


def ppo(task: Task, out: Path) -> Job:
    """With a value model of its own, as TRL's."""
    changes = {"num_ppo_epochs": task.num_epochs, "value_model": "reward"}
    config = parse(PpoConfig, {**rollout_settings(task, task.num_epochs), **changes}, constants=True)
    judge = load_reward_model(task.folder / "reward")
    words: Any = Words()
    reward = ModelReward("taste", words, judge.config.max_seq_len, judge.score)
    value = separate_value_model(task.folder / "reward")
    return Ppo(config=config, value=value, **rollout_parts(task, reward, config.rollout)), config, task.num_epochs


JOBS: Mapping[str, Callable[[Task, Path], Job]] = {"sft": sft, "lora": sft, "dpo": dpo, "grpo": grpo, "ppo": ppo}
