"""Reward models: pairwise logistic loss of a scalar head on the last token of an answer (Bradley and Terry 1952; Ouyang
et al. 2022, section 3.5), scores by such models, and the term `model` of a weighted sum of rewards. The rules of
`reward/` work without a model.

Legend: B rows, T tokens, S pieces of a row, P pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_sequence_classifier
from modelwright.objectives.next_token import numbered_batches
from modelwright.objectives.preference import Pairs, shares_right
from modelwright.ops.piece_sums import count_pieces, piece_ends, piece_sums
from modelwright.parallel.mesh import World, default_device, single
from modelwright.reward.build import REWARDS
from modelwright.reward.reward import Reward, RewardConfig, Sample, Score
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import BatchSource, Objective, Terms

HEAD = "score"
"""Name of the head in `Decoder.heads`."""


@dataclass(frozen=True)
class RewardModel:
    """A frozen model with a head that computes a token's reward."""

    frozen: FrozenModel

    @property
    def config(self) -> ModelConfig:
        return self.frozen.executor.model.config

    def score(self, batch: TokenBatch, *, num_parts: int = 1) -> Tensor:
        """Reward at the last token of every row, that of its last piece, [B] in FP32 at least; 0 for a row of padding.
        num_parts: number of chunks in which the rows are processed.
        """
        scores_BS = self.piece_scores(batch, num_parts=num_parts)
        if not scores_BS.shape[1]:
            return scores_BS.new_zeros(batch.num_rows)
        last_B = batch.segments_BT.to(scores_BS.device).amax(dim=1)
        return scores_BS.gather(1, last_B.clamp(min=0).long()[:, None])[:, 0] * (last_B >= 0)

    def piece_scores(self, batch: TokenBatch, *, num_parts: int = 1) -> Tensor:
        """Reward at the last token of every piece, [B, S] in FP32 at least; 0 for pieces that a row lacks."""
        rewards_BT = self.frozen.head_output(HEAD, batch, num_parts=num_parts)[..., 0]
        segments_BT = batch.segments_BT.to(rewards_BT.device)
        return piece_sums(rewards_BT * piece_ends(segments_BT), segments_BT, count_pieces(segments_BT))


ALONE = single()


def load_reward_model(folder: Path, world: World = ALONE) -> RewardModel:
    """Read a sequence classification with one label. Raises `ModelError` for a folder of another kind."""
    return reward_model(load_sequence_classifier(folder, head=HEAD), world)


def reward_model(model: Decoder, world: World = ALONE) -> RewardModel:
    """Returns a frozen copy of a model that has the head."""
    return RewardModel(FrozenModel(model, world))


PAIRWISE, CENTER = "pairwise", "center"
"""Names of the loss terms."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TrainConfig):
    """Training of a reward model on preference pairs."""

    learning_rate: float = 1e-5
    """Peak learning rate."""
    center_rewards_coefficient: float = 0.0
    """Weight of the mean of (chosen + rejected)^2, which centers rewards (Eisenstein et al. 2023); 0.01 is usual."""
    use_margins: bool = False
    """Require a chosen answer to be better by the `margin` of its record (Touvron et al. 2023, section 3.2.2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        coefficient = self.center_rewards_coefficient
        if coefficient < 0:
            raise ConfigError(f"center_rewards_coefficient: must not be negative, got {coefficient}; 0.01 is usual")


@dataclass(frozen=True)
class RewardModeling(Objective):
    """Logistic loss of the difference of two rewards, all pairs with equal weights."""

    # It is the binary cross-entropy of "the chosen answer is better" with that difference as its logit
    needs = frozenset({WHOLE_ROWS})
    metric_names = ("accuracy", "margin", "mean_reward")
    source: BatchSource
    config: RewardModelConfig

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        head = nn.Linear(config.model_dim, 1, bias=False)
        nn.init.normal_(head.weight, std=config.init_std)
        return {HEAD: head}

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return numbered_batches(self.source, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        count = Pairs.of(batch).count
        return {PAIRWISE: count, CENTER: count} if self.config.center_rewards_coefficient else {PAIRWISE: count}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        pairs, ends_BT = Pairs.of(batch), piece_ends(batch.segments_BT)
        rewards = pairs.sums(model.head_output(HEAD, output)[..., 0] * ends_BT)
        differences_P = rewards.chosen - rewards.rejected
        required_P = pairs.sums(batch.extras["values_BT"] * ends_BT).chosen if self.config.use_margins else 0.0
        losses = {PAIRWISE: -F.logsigmoid(differences_P - required_P).sum()}
        if self.config.center_rewards_coefficient:
            squares_P = (rewards.chosen + rewards.rejected).square()
            losses[CENTER] = self.config.center_rewards_coefficient * squares_P.sum()
        metrics = {
            "accuracy": shares_right(differences_P),
            "margin": differences_P,
            "mean_reward": (rewards.chosen + rewards.rejected) / 2,
        }
        return Terms(losses, pairs.means(metrics))


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
            tokens, mask = self.tokenizer.chat.encode_chat(messages)
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
        # 0 in padding, as in packed rows
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
