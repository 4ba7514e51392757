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
from modelwright.objectives.pairs import Pairs, absent, shares_right, with_reference
from modelwright.ops.lowp_linear import Format
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import BatchSource, Objective, Terms

PREFERENCE, NLL = "preference", "nll"
"""Names of the loss terms."""
MOST_LOG_PROB = -1e-12
"""Upper limit of log p in odds p / (1 - p), which keeps them finite."""
RESOLUTION: Mapping[Format, float] = {
    "fp32": 2**-20, "fp16": 2**-10, "bf16": 2**-8, "int8": 2**-6, "fp8": 2**-4,
}  # fmt: skip
"""Largest margin from rounding for a policy that equals its reference, by the format of its matrix products, relative
to the root of the sum of the squared log-probabilities of the pair's tokens: errors of tokens are independent. Among
200 pairs of answers of 5 to 120 tokens the largest was 2**-23 in FP32 and 2**-10 in BF16. The others follow from BF16's
by the ratio of the formats' unit roundoffs."""


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
    """Regularization strength: beta of DPO and tau of IPO, which keep the policy near the reference; lambda of ORPO."""
    label_smoothing: float = field(default=0.0, metadata=only_for("loss", "sigmoid", "sigmoid_norm"))
    """Probability that a label is wrong (conservative DPO, Mitchell 2023)."""
    rpo_alpha: float = field(default=0.0, metadata=only_for("loss", "sigmoid", "sigmoid_norm", "ipo"))
    """Weight of the chosen answers' negative log-likelihood per token (Pang et al. 2024); ORPO has it with 1."""
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
        """True if the loss compares with a reference model."""
        return self.loss != "orpo"

    @property
    def sft_weight(self) -> float:
        """Weight of the chosen answers' negative log-likelihood."""
        return 1.0 if self.loss == "orpo" else self.rpo_alpha


@dataclass(frozen=True)
class Preference(Objective):
    """Raises the log-probability of chosen answers against that of rejected ones, all pairs with equal weights."""

    needs = frozenset({WHOLE_ROWS})
    metric_names = (
        "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
        "logps/rejected", "log_odds_ratio", "log_odds_chosen", "nll_loss",
    )  # fmt: skip
    source: BatchSource
    config: PreferenceConfig
    reference: FrozenModel | None
    """Reference model, None for a loss without (`PreferenceConfig.has_reference`)."""

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
        beta, smoothing = self.config.beta, self.config.label_smoothing
        # Odds ratios have no reference whose rounding could be mistaken for a difference.
        resolution_P: Tensor | float = 0.0
        if self.config.sft_weight:
            nll, num_tokens = -log_probs.chosen.sum(), pairs.lengths.chosen.sum()
            losses[NLL] = self.config.sft_weight * nll
            metrics["nll_loss"] = nll, num_tokens
        if self.reference is None:
            scores = log_probs = log_probs / pairs.lengths
            log_odds_P = log_odds(scores.chosen) - log_odds(scores.rejected)
            losses[PREFERENCE] = -beta * F.logsigmoid(log_odds_P).sum()
            metrics |= pairs.means({"log_odds_ratio": F.logsigmoid(log_odds_P), "log_odds_chosen": log_odds_P})
        else:
            # Subtracted token by token: the sums of long answers are large, and their difference is small.
            scores = pairs.sums(log_probs_BT - batch.extras["reference_BT"])
            compared = scores if self.config.loss == "sigmoid" else scores / pairs.lengths
            margins_P = compared.chosen - compared.rejected
            if self.config.loss == "ipo":
                losses_P = (margins_P - 1 / (2 * beta)).square()  # equation 17 of Azar et al.
            else:
                logits_P = beta * margins_P
                losses_P = -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)
            losses[PREFERENCE] = losses_P.sum()
            # Differences of log-ratios up to this may be rounding; BF16 is the coarsest format that `auto` may become
            precision, squares = self.config.precision, pairs.sums(log_probs_BT.detach().square())
            formats = ("bf16",) if precision.policy == "auto" else precision.possible
            resolution_P = max(RESOLUTION[one] for one in formats) * (squares.chosen + squares.rejected).sqrt()
        # Under TRL's names; rewards are beta times the score, which is not divided by the length
        chosen_P, rejected_P = beta * scores.chosen, beta * scores.rejected
        metrics |= pairs.means(
            {
                "rewards/chosen": chosen_P,
                "rewards/rejected": rejected_P,
                "rewards/accuracies": shares_right(chosen_P - rejected_P, beta * resolution_P),
                "rewards/margins": chosen_P - rejected_P,
                "logps/chosen": log_probs.chosen,
                "logps/rejected": log_probs.rejected,
            }
        )
        return Terms(losses, metrics)


def log_odds(log_probs_P: Tensor) -> Tensor:
    """Computes log(p / (1 - p)) from log p."""
    log_probs_P = log_probs_P.clamp(max=MOST_LOG_PROB)
    return log_probs_P - (-log_probs_P.expm1()).log()
