"""KTO: Kahneman-Tversky optimization of single answers that are labeled as desirable or undesirable (Ethayarajh et al.
2024).

Legend: B rows, T tokens, S pieces of a row, A answers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import numbered_batches
from modelwright.objectives.pairs import absent, with_reference
from modelwright.ops.piece_sums import count_pieces, piece_sums
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import BatchSource, ForwardSums, Metric, Objective, Terms

KTO_LOSS = "kto"
PREFIX = "mismatched_"
"""Prefix of the extras with the tensors of mismatched rows."""
TENSORS = ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT")


@dataclass(frozen=True, kw_only=True)
class KtoConfig(TrainConfig):
    """Training on answers with a label."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    beta: float = 0.1
    """Regularization strength: higher values keep the policy closer to the reference."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable answers. The weights should make up for unequal numbers: the weighted number of
    desirable answers from 1 to 4/3 times that of the others (section 4.2)."""
    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable answers."""
    reference: str = ""
    """Hugging Face folder of the reference model; "" for the model that the stage starts from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}; the default is usual")


@dataclass(frozen=True)
class Kto(Objective):
    """Raises the log-probability of desirable answers, and lowers that of undesirable ones, against the KL divergence
    of policy and reference. Answers differ by their weights only.

    The source has groups of two rows, the second with mismatched answers (`data.preferences`). They are evaluated
    before the step, without gradient: the KL divergence is the mean of their log-ratios over the global batch, at least
    0, for any number of microbatches.
    """

    needs = frozenset({WHOLE_ROWS})
    metric_names = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
    source: BatchSource
    config: KtoConfig
    reference: FrozenModel

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in numbered_batches(self.source, first=first, rank=rank, world_size=world_size):
            yield self.prepare(batch, model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        batch = with_reference(batch, self.reference, num_parts=self.config.gradient_accumulation_steps)
        answers, others = batch.rows_at(0), batch.rows_at(1)
        mismatched = {name: getattr(others, name) for name in TENSORS} | dict(others.extras)
        extras = {f"{PREFIX}{name}": values for name, values in mismatched.items()}
        return replace(answers, extras={**answers.extras, **extras})

    def measure(self, batch: TokenBatch, model: Decoder, forward_sums: ForwardSums) -> TokenBatch:
        """Replaces the mismatched rows of a batch by their KL divergence, `kl_B`."""
        mismatched = {name: batch.extras[f"{PREFIX}{name}"] for name in TENSORS}
        # Extras are zeros in rows of padding, which would count as labels and pieces
        is_padding_B1 = (batch.segments_BT < 0).all(dim=1, keepdim=True)
        mismatched["labels_BT"] = mismatched["labels_BT"].masked_fill(is_padding_B1, IGNORED)
        mismatched["segments_BT"] = mismatched["segments_BT"].masked_fill(is_padding_B1, -1)
        reference = {"reference_BT": batch.extras[f"{PREFIX}reference_BT"]}

        def log_ratios(output: Tensor, rows: TokenBatch) -> Tensor:
            """Sum of the answers' log-ratios of policy and reference, and number of answers, [2]."""
            log_ratios_BT = model.token_log_probs(output, rows.labels_BT) - rows.extras["reference_BT"]
            lengths_BS = piece_sums(rows.labels_BT != IGNORED, rows.segments_BT, count_pieces(rows.segments_BT))
            return torch.stack([log_ratios_BT.double().sum(), (lengths_BS > 0).sum().double()])

        kl_sum, count = forward_sums(TokenBatch(**mismatched, extras=reference, group_size=1), log_ratios, size=2)
        # A KL divergence is not negative, but the mean of a sample may be
        kl = (kl_sum / count.clamp(min=1)).clamp(min=0).to(batch.extras["reference_BT"].dtype)
        extras = {name: values for name, values in batch.extras.items() if not name.startswith(PREFIX)}
        return replace(batch, extras={**extras, "kl_B": kl.to(batch.labels_BT.device).expand(batch.num_rows)})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        num_pieces = count_pieces(batch.segments_BT)
        return {KTO_LOSS: (piece_sums(batch.labels_BT != IGNORED, batch.segments_BT, num_pieces) > 0).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        log_probs_BT, segments_BT = model.token_log_probs(output, batch.labels_BT), batch.segments_BT
        num_pieces = count_pieces(segments_BT)
        is_answer_BS = piece_sums(batch.labels_BT != IGNORED, segments_BT, num_pieces) > 0
        is_desirable_A = (piece_sums(batch.extras["values_BT"], segments_BT, num_pieces) > 0)[is_answer_BS]
        log_ratios_A = piece_sums(log_probs_BT - batch.extras["reference_BT"], segments_BT, num_pieces)[is_answer_BS]
        kl_A = batch.extras["kl_B"][:, None].expand(is_answer_BS.shape)[is_answer_BS]
        weights = log_ratios_A.new_tensor([self.config.undesirable_weight, self.config.desirable_weight])
        weights_A = weights[is_desirable_A.long()]
        gains_A = torch.where(is_desirable_A, log_ratios_A - kl_A, kl_A - log_ratios_A)
        losses_A = weights_A * (1 - torch.sigmoid(self.config.beta * gains_A))
        metrics = absent(self.metric_names, output.device)
        log_probs_A = piece_sums(log_probs_BT.detach(), segments_BT, num_pieces)[is_answer_BS]
        values = {"rewards": self.config.beta * log_ratios_A.detach(), "logps": log_probs_A}
        for side, is_own_A in (("chosen", is_desirable_A), ("rejected", ~is_desirable_A)):
            metrics |= {f"{name}/{side}": _mean(values_A, is_own_A) for name, values_A in values.items()}
        is_real_B = (segments_BT >= 0).any(dim=1)
        return Terms({KTO_LOSS: losses_A.sum()}, metrics | {"kl": _mean(batch.extras["kl_B"], is_real_B)})


def _mean(values: Tensor, chosen: Tensor) -> Metric:
    return (values * chosen).sum(), chosen.sum()
