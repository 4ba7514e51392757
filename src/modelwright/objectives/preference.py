"""Preference objectives on pairs of a chosen and a rejected answer: DPO, with label smoothing (cDPO) and length
normalization, IPO and ORPO.

Legend: B rows, T tokens, P pairs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import numbered_batches
from modelwright.objectives.pairs import Pairs, PairValues, absent, shares_right, with_reference
from modelwright.ops.lowp_linear import Format
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import BatchSource, Metric, Objective, Terms

PREFERENCE, NLL = "preference", "nll"
"""Names of the loss terms."""
MOST_LOG_PROB = -1e-12
"""Where odds p / (1 - p) are cut, so that they stay finite."""
RESOLUTION: Mapping[Format, float] = {
    "fp32": 2**-20, "fp16": 2**-10, "bf16": 2**-8, "int8": 2**-6, "fp8": 2**-4,
}  # fmt: skip
"""Largest margin that rounding makes of a policy that equals its reference, by the format of its matrix products,
relative to the root of the sum of the squared log-probabilities of the pair's tokens: errors of tokens are independent.
Of 200 pairs of answers of 5 to 120 tokens the largest was 2**-23 in FP32 and 2**-10 in BF16. The others follow from
BF16's by the ratio of the formats' unit roundoffs."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TrainConfig):
    """Training on preference pairs."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "orpo"] = "sigmoid"
    """`sigmoid`: DPO (Rafailov et al. 2023); `sigmoid_norm`: with log-probabilities divided by the number of tokens
    (Lambert et al. 2024, section 5); `ipo`: identity preference optimization (Azar et al. 2023), divided in the same
    way; `orpo`: odds ratios, without a reference model (Hong et al. 2024)."""
    beta: float = 0.1
    """How strongly the policy is kept near the reference: beta of DPO, tau of IPO, lambda of ORPO."""
    label_smoothing: float = field(default=0.0, metadata=only_for("loss", "sigmoid", "sigmoid_norm"))
    """Probability that a label is wrong (conservative DPO, Mitchell 2023)."""
    rpo_alpha: float = field(default=0.0, metadata=only_for("loss", "sigmoid", "sigmoid_norm", "ipo"))
    """Weight of the chosen answers' negative log-likelihood per token, which is added to the loss (Pang et al. 2024).
    ORPO always has it, with weight 1."""
    reference: str = field(default="", metadata=only_for("loss", "sigmoid", "sigmoid_norm", "ipo"))
    """Hugging Face folder of the reference model; "" for the model that the stage starts from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise ConfigError(f"beta: must be above 0, got {self.beta}; 0.1 is usual")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing: must be in [0, 0.5), got {self.label_smoothing}; 0 trusts all labels")
        if self.rpo_alpha < 0:
            raise ConfigError(f"rpo_alpha: must not be negative, got {self.rpo_alpha}; 0 disables it")

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss != "orpo"

    @property
    def sft_weight(self) -> float:
        """The weight of the chosen answers' negative log-likelihood."""
        return 1.0 if self.loss == "orpo" else self.rpo_alpha


@dataclass(frozen=True)
class Preference(Objective):
    """Raises the log-probability of chosen answers against that of rejected ones. Every pair counts the same."""

    needs = frozenset({WHOLE_ROWS})
    metric_names = (
        "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
        "logps/rejected", "log_odds_ratio", "log_odds_chosen", "nll_loss",
    )  # fmt: skip
    source: BatchSource
    config: PreferenceConfig
    reference: FrozenModel | None
    """None where the loss has none (`PreferenceConfig.has_reference`)."""

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in numbered_batches(self.source, first=first, rank=rank, world_size=world_size):
            yield self.prepare(batch, model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        if self.reference is None:
            return batch
        return with_reference(batch, self.reference, num_parts=self.config.gradient_accumulation_steps)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        pairs = Pairs.of(batch)
        weights = {PREFERENCE: pairs.count}
        return weights | {NLL: pairs.lengths.chosen.sum()} if self.config.sft_weight else weights

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        log_probs_BT, pairs = model.token_log_probs(output, batch.labels_BT), Pairs.of(batch)
        log_probs = pairs.sums(log_probs_BT)
        metrics, losses = absent(self.metric_names, output.device), dict[str, Tensor]()
        if self.config.sft_weight:
            nll, num_tokens = -log_probs.chosen.sum(), pairs.lengths.chosen.sum()
            losses[NLL] = self.config.sft_weight * nll
            metrics["nll_loss"] = nll, num_tokens
        if self.reference is None:
            scores = log_probs = log_probs / pairs.lengths
            log_odds_P = log_odds(scores.chosen) - log_odds(scores.rejected)
            losses[PREFERENCE] = -self.config.beta * F.logsigmoid(log_odds_P).sum()
            metrics |= pairs.means({"log_odds_ratio": F.logsigmoid(log_odds_P), "log_odds_chosen": log_odds_P})
        else:
            # Subtracted token by token: the sums of long answers are large, and their difference is small.
            scores = pairs.sums(log_probs_BT - batch.extras["reference_BT"])
            losses[PREFERENCE] = self._losses_P(scores, pairs.lengths).sum()
        # Odds ratios have no reference whose rounding could be taken for a difference.
        resolution_P = 0.0 if self.reference is None else self._resolution_P(pairs, log_probs_BT.detach())
        return Terms(losses, metrics | self._pair_metrics(pairs, log_probs, scores, resolution_P))

    def _losses_P(self, scores: PairValues, lengths: PairValues) -> Tensor:
        """The loss of each pair [P]. scores: log-ratios of policy and reference."""
        if self.config.loss != "sigmoid":
            scores = scores / lengths
        margins_P, smoothing = scores.chosen - scores.rejected, self.config.label_smoothing
        if self.config.loss == "ipo":
            return (margins_P - 1 / (2 * self.config.beta)).square()  # equation 17 of Azar et al.
        logits_P = self.config.beta * margins_P
        return -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)

    def _resolution_P(self, pairs: Pairs, log_probs_BT: Tensor) -> Tensor:
        """The largest difference of two log-ratios [P] that may be rounding."""
        precision, squares = self.config.precision, pairs.sums(log_probs_BT.square())
        formats = ("bf16",) if precision.policy == "auto" else precision.possible  # the coarsest that `auto` may become
        return max(RESOLUTION[one] for one in formats) * (squares.chosen + squares.rejected).sqrt()

    def _pair_metrics(
        self, pairs: Pairs, log_probs: PairValues, scores: PairValues, resolution_P: Tensor | float
    ) -> dict[str, Metric]:
        """Under TRL's names; rewards are beta times the score, which is not divided by the length."""
        chosen_P, rejected_P = self.config.beta * scores.chosen, self.config.beta * scores.rejected
        margins_P = chosen_P - rejected_P
        return pairs.means(
            {
                "rewards/chosen": chosen_P,
                "rewards/rejected": rejected_P,
                "rewards/accuracies": shares_right(margins_P, self.config.beta * resolution_P),
                "rewards/margins": margins_P,
                "logps/chosen": log_probs.chosen,
                "logps/rejected": log_probs.rejected,
            }
        )


def log_odds(log_probs_P: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p."""
    log_probs_P = log_probs_P.clamp(max=MOST_LOG_PROB)
    return log_probs_P - (-log_probs_P.expm1()).log()
