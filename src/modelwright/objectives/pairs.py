"""Preference pairs in a batch: corresponding pieces of two neighboring rows, and sums over them.

Legend: B rows, T tokens, G groups of two rows, S pieces of a row, P pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.ops.piece_sums import count_pieces, piece_sums
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import Metric


class PairValues(NamedTuple):
    """A value of each answer of the pairs in a batch, [P] each."""

    chosen: Tensor
    rejected: Tensor

    def __truediv__(self, other: "PairValues") -> "PairValues":
        return PairValues(self.chosen / other.chosen, self.rejected / other.rejected)


@dataclass(frozen=True)
class Pairs:
    """Pairs of a batch: piece s of a group's first row is the chosen answer, that of its second the rejected one."""

    segments_BT: Tensor
    num_pieces: int
    is_pair_GS: Tensor
    lengths: PairValues
    """Number of labels of each answer."""

    @classmethod
    def of(cls, batch: TokenBatch) -> "Pairs":
        """Finds the pairs of a batch with groups of two rows."""
        num_pieces = count_pieces(batch.segments_BT)
        lengths_G2S = piece_sums(batch.labels_BT != IGNORED, batch.segments_BT, num_pieces).unflatten(0, (-1, 2))
        # Pieces without labels, such as padding, are skipped
        is_pair_GS = (lengths_G2S > 0).all(dim=1)
        return cls(batch.segments_BT, num_pieces, is_pair_GS, _selected(lengths_G2S, is_pair_GS))

    @property
    def count(self) -> Tensor:
        """Number of pairs, a scalar."""
        return self.is_pair_GS.sum()

    def sums(self, values_BT: Tensor) -> PairValues:
        """Sums the values over the tokens of each answer, with gradients."""
        sums_BS = piece_sums(values_BT, self.segments_BT, self.num_pieces)
        return _selected(sums_BS.unflatten(0, (-1, 2)), self.is_pair_GS)

    def means(self, values_P: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Returns the mean of each value over the pairs, as metrics."""
        return {name: (values.detach().sum(), self.count) for name, values in values_P.items()}


def _selected(values_G2S: Tensor, is_pair_GS: Tensor) -> PairValues:
    return PairValues(values_G2S[:, 0][is_pair_GS], values_G2S[:, 1][is_pair_GS])


def shares_right(margins_P: Tensor, resolution_P: Tensor | float = 0.0) -> Tensor:
    """Accuracy of each pair's order [P]: 1 where the chosen answer is ahead, 0 where the rejected one is, and one half
    for a tie, as in the area under the ROC curve. A margin of at most the resolution is a tie.
    """
    # The sign of such a margin is a matter of rounding. TRL counts ties as wrong and lacks a resolution, so that a
    # policy that equals its reference has an accuracy anywhere between 0 and 1 (`DPOTrainer`, `rewards/accuracies`)
    return (1 + margins_P.sign() * (margins_P.abs() > resolution_P)) / 2


def with_reference(batch: TokenBatch, reference: FrozenModel, *, num_parts: int) -> TokenBatch:
    """Adds `reference_BT` to a batch: reference log-probabilities of labels, FP32, in `num_parts` chunks of rows."""
    log_probs_BT = reference.log_probs(batch, num_parts=num_parts).to(batch.labels_BT.device)
    return replace(batch, extras={**batch.extras, "reference_BT": log_probs_BT})


def absent(names: Sequence[str], device: torch.device) -> dict[str, Metric]:
    """Returns metrics without a value, which are left out of the record."""
    nothing = torch.zeros((), device=device)
    return dict.fromkeys(names, (nothing, nothing))
