"""Reward modeling: a scalar head on the last token of an answer, learned from preference pairs by pairwise logistic
loss (Bradley and Terry 1952; Ouyang et al. 2022, section 3.5).

Legend: B rows, T tokens, P pairs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import numbered_batches
from modelwright.objectives.pairs import Pairs, shares_right
from modelwright.objectives.reward_model import HEAD
from modelwright.ops.piece_sums import piece_ends
from modelwright.train.config import TrainConfig
from modelwright.train.objective import BatchSource, Objective, Terms

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
