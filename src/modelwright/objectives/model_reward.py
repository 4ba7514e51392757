"""Reward by a reward model: a term of a weighted sum, beside the rules of `reward/`, which know no model."""

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
"""The kind of such a reward."""


@dataclass(frozen=True, kw_only=True)
class ModelRewardConfig:
    """The score of a reward model."""

    path: str = ""
    """Folder of a sequence classification with one label, such as the stage `reward` writes; it brings its own
    tokenizer. "" is the reward model that the same run has trained before."""

    def __post_init__(self) -> None:
        if self.path and not Path(self.path).is_dir():
            raise ConfigError(f"path: there is no folder {self.path!r} (looked for in {Path.cwd()})")

    def build(self, name: str) -> Reward:
        if not self.path:
            raise ConfigError("path: names no folder; give that of a reward model")
        folder = Path(self.path)
        model = load_reward_model(folder, single(default_device()))
        return ModelReward(name, Tokenizer.load(folder), model.config.max_seq_len, model.score)


@dataclass(frozen=True)
class ModelReward:
    """Scores conversations that end with the answer.

    max_len: tokens of the longest conversation that the model can score. score_rows: the reward at the last token of
    each row, [B].
    """

    name: str
    tokenizer: Tokenizer
    max_len: int
    score_rows: Callable[[TokenBatch], Tensor]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample; a conversation that is longer than the model's context is a failure."""
        ids = [self._ids(sample) for sample in samples]
        too_long = f"the conversation has more tokens than the context of the reward model, {self.max_len}"
        scores = [Score.failure("too_long", too_long)] * len(samples)
        fitting = [number for number, one in enumerate(ids) if len(one) <= self.max_len]
        for first in range(0, len(fitting), ROWS_AT_ONCE):
            numbers = fitting[first : first + ROWS_AT_ONCE]
            rewards = self.score_rows(rows_of([ids[number] for number in numbers])).tolist()
            for number, reward in zip(numbers, rewards, strict=True):
                scores[number] = Score(reward)
        return scores

    def _ids(self, sample: Sample) -> np.ndarray:
        """Tokens up to the end of the answer; without the end token if the answer was cut off."""
        ids, mask = self.tokenizer.encode_chat([*sample.prompt, {"role": "assistant", "content": sample.answer}])
        end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else len(ids)
        cut_off = sample.finish_reason != "stop" and int(ids[end - 1]) in self.tokenizer.stop_ids
        return ids[: end - cut_off]


def rows_of(ids: Sequence[np.ndarray]) -> TokenBatch:
    """One row for each conversation, padded at the end."""
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
"""All kinds of rewards: those by rules, and that of a model."""


def model_terms(terms: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The options of the reward models among the terms of a sum, by the name of the term."""
    options = {name: one for name, one in terms.items() if isinstance(one, Mapping)}
    return {name: one for name, one in options.items() if one.get("kind", name) == MODEL}


def reward_model_folders(terms: Mapping[str, Any]) -> dict[str, str]:
    """The folders of the reward models among the terms of a sum, by the setting that names each."""
    return {f"rewards.{name}.path": str(one["path"]) for name, one in model_terms(terms).items() if one.get("path")}


def without_folder(terms: Mapping[str, Any]) -> list[str]:
    """The names of the terms that are the reward model of the run itself."""
    return [name for name, one in model_terms(terms).items() if not one.get("path")]


def with_folder(terms: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The terms of a sum with the reward model of `folder` in place of that of the run."""
    return {**terms, **{name: {**terms[name], "path": str(folder)} for name in without_folder(terms)}}
