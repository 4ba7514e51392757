"""Sums over the pieces of packed rows: log-probabilities of sequences, numbers of their tokens, values at their ends.

Legend: B rows, T tokens, S pieces.
"""

import torch
from torch import Tensor


def count_pieces(segments_BT: Tensor) -> int:
    """The largest number of pieces in any of the rows. segments_BT: as in `TokenBatch`, -1 for padding."""
    return int(segments_BT.max()) + 1 if segments_BT.numel() else 0


def piece_sums(values_BT: Tensor, segments_BT: Tensor, num_pieces: int) -> Tensor:
    """The sum of the values of each piece, [B, num_pieces], in FP32 at least, with gradients; 0 for a piece that a row
    does not have. Padding does not count.
    """
    # By comparison with each piece's number: the order of summation of a scatter varies from run to run on CUDA.
    values_BT = values_BT.to(torch.promote_types(values_BT.dtype, torch.float32))
    pieces_S = torch.arange(num_pieces, device=segments_BT.device)
    is_inside_BST = segments_BT[:, None, :] == pieces_S[:, None]
    return torch.where(is_inside_BST, values_BT[:, None, :], 0.0).sum(dim=-1)


def piece_ends(segments_BT: Tensor) -> Tensor:
    """Marks the last token of each piece, bool [B, T]; false for padding."""
    before_end_BT = torch.zeros_like(segments_BT, dtype=torch.bool)
    before_end_BT[:, :-1] = segments_BT[:, 1:] == segments_BT[:, :-1]
    return (segments_BT >= 0) & ~before_end_BT


def piece_means(hidden_BTD: Tensor, segments_BT: Tensor, num_pieces: int) -> Tensor:
    """The mean of each piece's hidden states, [B, num_pieces, D], with gradients; 0 for a piece that a row lacks."""
    pieces_S = torch.arange(num_pieces, device=segments_BT.device)
    is_inside_BST = (segments_BT[:, None, :] == pieces_S[:, None]).to(hidden_BTD.dtype)
    return (is_inside_BST @ hidden_BTD) / is_inside_BST.sum(dim=-1, keepdim=True).clamp(min=1.0)


def piece_keys(ids_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, num_pieces: int) -> Tensor:
    """Hash of each piece, int64 [B, num_pieces], equal for equal token sequences: among a million pieces the chance
    that any two different ones share one is below 1e-6. positions_BT: places within the piece.
    """
    mixed_BT = _mixed(_mixed(ids_BT + 1) + positions_BT)
    pieces_S = torch.arange(num_pieces, device=segments_BT.device)
    is_inside_BST = segments_BT[:, None, :] == pieces_S[:, None]
    return torch.where(is_inside_BST, mixed_BT[:, None, :], 0).sum(dim=-1)  # integers wrap around


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al. 2014), with arithmetic shifts."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
