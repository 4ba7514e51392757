"""`RewardModel`: scores answers by a model with a scalar head; `RewardEnsemble`: by several of them.

Legend: B rows, T tokens, S pieces of a row, M models.

Reward modeling: a scalar head on the last token of an answer, learned from preference pairs by pairwise logistic
loss (Bradley and Terry 1952; Ouyang et al. 2022, section 3.5).

Legend: B rows, T tokens, P pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_sequence_classifier
from modelwright.objectives.next_token import numbered_batches
from modelwright.objectives.pairs import Pairs, shares_right
from modelwright.ops.piece_sums import count_pieces, piece_ends, piece_sums
from modelwright.parallel.mesh import World, single
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
