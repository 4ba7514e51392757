"""Contrastive losses of pairs in one space: NT-Xent, its form with negatives of the other view alone, and SigLIP.

A pair is a text and what it belongs to (an image, a piece of code). A process computes the losses of its own pairs
against the pairs of all processes; the sum over the processes is the loss of the whole batch. Pairs with the same text
are neither positives nor negatives of each other.

Legend: P own pairs, N all pairs, E width of the space.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ContrastiveLoss = Literal["nt_xent", "clip", "siglip"]


class PairEmbeddings(NamedTuple):
    """Both sides of some pairs, [P, E] or [N, E] each, of length 1."""

    texts: Tensor
    others: Tensor


def contrastive_losses(
    loss: ContrastiveLoss,
    own: PairEmbeddings,
    everyone: PairEmbeddings,
    places_P: Tensor,
    is_same_PN: Tensor,
    *,
    scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """The loss of each own pair [P], in FP32 at least, with gradients. places_P: where the own pairs are among all;
    is_same_PN: which of all pairs have the text of an own pair, itself included. scale: of cosines, 1 / temperature;
    bias: added to them by `siglip`.

    `nt_xent` (Chen et al. 2020, section 2.1): both sides of a pair are anchors in turn, and both sides of all other
    pairs their negatives; the mean of the two cross-entropies. `clip` (Radford et al. 2021, section 2.3): the negatives
    are the other side's alone. `siglip` (Zhai et al. 2023, section 3.2): a logistic loss of every text with every other
    side.
    """
    own, everyone = _widened(own), _widened(everyone)
    if loss == "siglip":
        return _siglip(own, everyone, places_P, is_same_PN, scale, bias)
    within = loss == "nt_xent"
    of_texts = _cross_entropies(own.texts, everyone.others, everyone.texts, places_P, is_same_PN, scale, within)
    of_others = _cross_entropies(own.others, everyone.texts, everyone.others, places_P, is_same_PN, scale, within)
    return (of_texts + of_others) / 2


def _cross_entropies(
    anchors_PE: Tensor, across_NE: Tensor, beside_NE: Tensor, places_P: Tensor, is_same_PN: Tensor, scale: Tensor,
    within: bool,
) -> Tensor:  # fmt: skip
    """[P]. across: the side that has the positives; beside: the anchors' own side; within: whether it counts."""
    across_PN = scale * (anchors_PE @ across_NE.T)
    is_positive_PN = places_P[:, None] == torch.arange(len(across_NE), device=places_P.device)
    logits_PK = across_PN.masked_fill(is_same_PN & ~is_positive_PN, -torch.inf)
    if within:
        beside_PN = scale * (anchors_PE @ beside_NE.T)
        logits_PK = torch.cat([logits_PK, beside_PN.masked_fill(is_same_PN, -torch.inf)], dim=1)
    return logits_PK.logsumexp(dim=1) - across_PN.gather(1, places_P[:, None])[:, 0]


def _siglip(
    own: PairEmbeddings, everyone: PairEmbeddings, places_P: Tensor, is_same_PN: Tensor, scale: Tensor, bias: Tensor
) -> Tensor:
    logits_PN = scale * (own.texts @ everyone.others.T) + bias
    is_positive_PN = places_P[:, None] == torch.arange(len(everyone.others), device=places_P.device)
    losses_PN = -F.logsigmoid(torch.where(is_positive_PN, logits_PN, -logits_PN))
    return torch.where(is_same_PN & ~is_positive_PN, 0.0, losses_PN).sum(dim=1)


def _widened(pairs: PairEmbeddings) -> PairEmbeddings:
    dtype = torch.promote_types(pairs.texts.dtype, torch.float32)
    return PairEmbeddings(pairs.texts.to(dtype), pairs.others.to(dtype))
