"""Reward by a reward model: a term of a weighted sum. The rules of `reward/` work without a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.objectives.reward_model import load_reward_model
from modelwright.parallel.mesh import default_device, single
from modelwright.reward.build import REWARDS
from modelwright.reward.reward import Reward, RewardConfig, Sample, Score

ROWS_AT_ONCE = 16
MODEL = "model"
"""Kind of such a reward."""


@dataclass(frozen=True, kw_only=True)
class ModelRewardConfig:
    """Score of a reward model."""

    path: str = ""
    """Folder of a sequence classification with one label and its tokenizer, such as the stage `reward` writes. "" is
    the reward model that the same run has trained before."""

    def __post_init__(self) -> None:
        if self.path and not Path(self.path).is_dir():
            raise ConfigError(f"path: no such folder: {self.path!r} (looked for in {Path.cwd()})")

    def build(self, name: str) -> Reward:
        if not self.path:
            raise ConfigError("path: names no folder; give that of a reward model")
        folder = Path(self.path)
        model = load_reward_model(folder, single(default_device()))
        return ModelReward(name, Tokenizer.load(folder), model.config.max_seq_len, model.score)


@dataclass(frozen=True)
class ModelReward:
    """Scores conversations that end with the answer.

    max_len: tokens of the longest conversation that the model can score. score_rows: returns the reward at the last
    token of each row, [B].
    """

    name: str
    tokenizer: Tokenizer
    max_len: int
    score_rows: Callable[[TokenBatch], Tensor]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns a score for each sample; a conversation that is longer than the model's context is a failure."""
        ids: list[np.ndarray] = []
        for sample in samples:
            messages = [*sample.prompt, {"role": "assistant", "content": sample.answer}]
            tokens, mask = self.tokenizer.encode_chat(messages)
            # Up to the end of the answer: templates may add text after it; an answer that was cut off has no end token
            end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else len(tokens)
            cut_off = sample.finish_reason != "stop" and int(tokens[end - 1]) in self.tokenizer.stop_ids
            ids.append(tokens[: end - cut_off])
        too_long = f"the conversation has more tokens than the context of the reward model, {self.max_len}"
        scores = [Score.failure("too_long", too_long)] * len(samples)
        fitting = [number for number, one in enumerate(ids) if len(one) <= self.max_len]
        for first in range(0, len(fitting), ROWS_AT_ONCE):
            numbers = fitting[first : first + ROWS_AT_ONCE]
            rewards = self.score_rows(rows_of([ids[number] for number in numbers])).tolist()
            for number, reward in zip(numbers, rewards, strict=True):
                scores[number] = Score(reward)
        return scores


def rows_of(ids: Sequence[np.ndarray]) -> TokenBatch:
    """Builds a row for each conversation, padded at the end."""
    shape = (len(ids), max(map(len, ids)))
    input_ids_BT = torch.zeros(shape, dtype=torch.int64)
    segments_BT = torch.full(shape, -1, dtype=torch.int32)
    for row, one in enumerate(ids):
        input_ids_BT[row, : len(one)] = torch.from_numpy(one)
        segments_BT[row, : len(one)] = 0
    return TokenBatch(
        input_ids_BT=input_ids_BT,
        labels_BT=torch.full(shape, IGNORED, dtype=torch.int64),
        positions_BT=torch.arange(shape[1]).expand(shape).contiguous() * (segments_BT >= 0),
        segments_BT=segments_BT,
    )


MODEL_REWARDS: Mapping[str, type[RewardConfig]] = {**REWARDS, MODEL: ModelRewardConfig}
"""All kinds of rewards, by rules and by a model."""


def model_terms(terms: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the options of the reward models among the terms of a sum, by the name of the term."""
    options = {name: one for name, one in terms.items() if isinstance(one, Mapping)}
    return {name: one for name, one in options.items() if one.get("kind", name) == MODEL}


def reward_model_folders(terms: Mapping[str, Any]) -> dict[str, str]:
    """Returns the folders of the reward models among the terms of a sum, by the setting that names each."""
    return {f"rewards.{name}.path": str(one["path"]) for name, one in model_terms(terms).items() if one.get("path")}


def without_folder(terms: Mapping[str, Any]) -> list[str]:
    """Returns the names of the terms that use the run's own reward model."""
    return [name for name, one in model_terms(terms).items() if not one.get("path")]


def with_folder(terms: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the terms of a sum with the reward model of `folder` in place of the run's own."""
    return {**terms, **{name: {**terms[name], "path": str(folder)} for name in without_folder(terms)}}
