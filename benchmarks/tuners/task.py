"""The job that every tuner gets, and what it reports. It imports nothing of Modelwright: peers have interpreters of
their own.

A job is a folder: `model/` (a Llama of random weights, the same for all), `reward/` (a sequence classification of the
same shape) and `task.json`. The texts are random words, which each tuner draws from the same seed.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np

VOCABULARY, PAD, EOS = 8192, 0, 1
SEED = 0
LEARNING_RATE, BETAS, CLIP_NORM = 1e-4, (0.9, 0.999), 1.0
"""AdamW without decay at a constant rate: no tuner computes less than another."""
LORA_RANK, LORA_ALPHA = 16, 32
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Case = Literal["sft", "lora", "dpo", "grpo", "ppo"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train: `num_updates` updates of `batch` rows (sft, lora), pairs (dpo) or completions (grpo, ppo), the
    first `num_warmup` untimed. An update of ppo is a rollout with all of its epochs.
    """

    folder: Path
    case: Case
    compute: Literal["fp32", "bf16"]
    threads: int
    num_updates: int
    num_warmup: int
    batch: int
    seq_len: int = 512
    """Tokens of a packed row (sft, lora)."""
    prompt_len: int = 32
    """Tokens of a prompt (grpo, ppo)."""
    completion_len: int = 64
    """Tokens that are generated (grpo, ppo)."""
    num_generations: int = 4
    """Completions of a prompt (grpo)."""
    num_epochs: int = 2
    """Updates from each rollout (ppo)."""

    def save(self, path: Path) -> None:
        content = {**asdict(self), "folder": str(self.folder)}
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "folder": Path(content["folder"])})


def _words(dice: np.random.Generator, num_tokens: int) -> list[int]:
    return dice.integers(2, VOCABULARY, size=num_tokens).tolist()


def sequences(task: Task) -> list[list[int]]:
    """Texts of an eighth of a row to seven eighths, each with an end token; enough for all updates."""
    dice, shortest = np.random.default_rng(SEED), task.seq_len // 8
    count = 4 * task.num_updates * task.batch
    return [[*_words(dice, int(dice.integers(shortest, 7 * shortest))), EOS] for _ in range(count)]


def samples_of_update(task: Task) -> int:
    """How many texts have as many tokens as the packed rows of an update (sft, lora)."""
    return max(1, round(task.batch * task.seq_len / mean_len(task)))


def mean_len(task: Task) -> float:
    """Mean number of tokens of a text (sft, lora)."""
    return float(np.mean([len(one) for one in sequences(task)]))


def pairs(task: Task) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts of 16 to 48 words, each with two answers of 16 to 96, end token included."""
    dice = np.random.default_rng(SEED)
    return [
        (
            _words(dice, int(dice.integers(16, 48))),
            [*_words(dice, int(dice.integers(16, 96))), EOS],
            [*_words(dice, int(dice.integers(16, 96))), EOS],
        )
        for _ in range(task.num_updates * task.batch)
    ]


def prompts(task: Task) -> list[list[int]]:
    """Prompts of one length, each used once."""
    dice = np.random.default_rng(SEED)
    return [_words(dice, task.prompt_len) for _ in range(task.num_updates * task.batch)]


def text(ids: Sequence[int]) -> str:
    """The words of tokens, without the end token."""
    return "".join(f" w{token}" for token in ids if token != EOS)


def ids_of(words: str) -> list[int]:
    return [int(word[1:]) for word in words.split()]


def even_share(ids: Sequence[int]) -> float:
    """The reward of grpo: the share of even tokens, without the end token."""
    counted = [one for one in ids if one != EOS]
    return sum(one % 2 == 0 for one in counted) / max(1, len(counted))


@dataclass
class Clock:
    """Notes what each update was: when it ended, in wall time and in processor time, with its samples and tokens."""

    task: Task
    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)

    def tick(self) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())

    def rates(self, samples: Sequence[float], tokens: Sequence[float]) -> dict[str, float]:
        """Throughput over the timed updates, from the end of the last warm-up update to the end of the last one.
        samples, tokens: of each update, without padding.
        """
        first, count = self.task.num_warmup, self.task.num_updates
        assert len(self.ends) == count, f"{len(self.ends)} updates of {count} were clocked"
        wall_s, cpu_s = (ends[-1] - ends[first - 1] for ends in (self.ends, self.cpu_ends))
        num_samples, num_tokens = sum(samples[first:count]), sum(tokens[first:count])
        return {
            "samples_per_s": num_samples / wall_s,
            "tokens_per_s": num_tokens / wall_s,
            "samples_per_cpu_s": num_samples / cpu_s,
            "tokens_per_cpu_s": num_tokens / cpu_s,
            "tokens_per_update": num_tokens / (count - first),
        }
