"""`RewardModel`: scores answers by a model with a scalar head; `RewardEnsemble`: by several of them.

Legend: B rows, T tokens, S pieces of a row, M models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_sequence_classifier
from modelwright.ops.piece_sums import count_pieces, piece_ends, piece_sums
from modelwright.parallel.mesh import World, single
from modelwright.train.frozen_model import FrozenModel

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


@dataclass(frozen=True)
class EnsembleScores:
    """Rewards by several models, [B] each. std_B: deviation of the models' rewards from their mean; 0 for one model."""

    mean_B: Tensor
    std_B: Tensor


@dataclass(frozen=True)
class RewardEnsemble:
    """Several reward models, whose disagreement measures the uncertainty of a reward (Coste et al. 2023)."""

    models: Sequence[RewardModel]

    def score(self, batch: TokenBatch, *, num_parts: int = 1) -> EnsembleScores:
        """Mean and standard deviation of the rewards at the last token of every row."""
        scores_MB = torch.stack([model.score(batch, num_parts=num_parts) for model in self.models])
        # Without Bessel's correction, which would make the deviation of one model NaN
        return EnsembleScores(scores_MB.mean(dim=0), scores_MB.std(dim=0, correction=0))


ALONE = single()


def load_reward_model(folder: Path, world: World = ALONE) -> RewardModel:
    """Read a sequence classification with one label. Raises `ModelError` for a folder of another kind."""
    return reward_model(load_sequence_classifier(folder, head=HEAD), world)


def load_reward_ensemble(folders: Sequence[Path], world: World = ALONE) -> RewardEnsemble:
    """Read several reward models. Raises `ConfigError` without folders or for different vocabularies."""
    if not folders:
        raise ConfigError("reward models: the list is empty; give one folder or more")
    models = [load_reward_model(folder, world) for folder in folders]
    sizes = [model.config.vocab_size for model in models]
    if len(set(sizes)) > 1:
        raise ConfigError(f"reward models: their vocabularies differ ({sizes}); give models with one tokenizer")
    return RewardEnsemble(models)


def reward_model(model: Decoder, world: World = ALONE) -> RewardModel:
    """Returns a frozen copy of a model that has the head."""
    return RewardModel(FrozenModel(model, world))
