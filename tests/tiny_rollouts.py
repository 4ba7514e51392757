"""What tests of rollouts share: a tokenizer, a model of its vocabulary, prompts, and a reward."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tiny_run
import torch

from modelwright.data.prompts import PromptRecord
from modelwright.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.objectives.rollouts import RolloutConfig, RolloutWorker
from modelwright.reward.reward import Sample, Score
from modelwright.reward.weighted_sum import Term, WeightedSum

MAX_NEW = 12
SHAPE = replace(tiny_run.SHAPE, vocab_size=264, init_std=0.2, max_seq_len=64)


@functools.cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(["abc def"] * 4, TokenizerConfig(vocab_size=263))


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    made = Decoder(SHAPE)
    made.init_weights(seed)
    return made.to(dtype)


def prompts(count: int) -> list[PromptRecord]:
    """Prompts of different lengths."""
    questions = [{"role": "user", "content": "a" * (1 + number % 5)} for number in range(count)]
    return [PromptRecord(ids=tokenizer().encode_prompt([one]), messages=[one]) for one in questions]


@dataclass(frozen=True)
class EvenTokens:
    """The share of characters whose code is even; a fault is a sample with this many tokens."""

    name: str = "even"
    fault: int = -1

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if sample.num_tokens == self.fault:
            return Score.failure("fault")
        return Score(sum(ord(one) % 2 == 0 for one in sample.answer) / max(1, len(sample.answer)))


def worker(count: int = 4, *, fault: int = -1, **options: Any) -> RolloutWorker:
    return RolloutWorker(
        prompts=prompts(count),
        tokenizer=tokenizer(),
        reward=WeightedSum([Term(EvenTokens(fault=fault), 1.0)]),
        config=RolloutConfig(max_completion_length=MAX_NEW),
        seed=3,
        **options,
    )
