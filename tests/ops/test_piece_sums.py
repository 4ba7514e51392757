"""Sums over the pieces of packed rows against a loop over tokens."""

import torch
from torch import Tensor

from modelwright.ops.piece_sums import count_pieces, piece_ends, piece_sums

SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, -1, -1, -1], [-1] * 6], dtype=torch.int32)


def naive_sums(values_BT: Tensor, segments_BT: Tensor, num_pieces: int) -> Tensor:
    """Token by token."""
    sums_BS = [[values_BT.new_zeros(()) for _ in range(num_pieces)] for _ in segments_BT]
    for row, segments in enumerate(segments_BT.tolist()):
        for place, piece in enumerate(segments):
            if piece >= 0:
                sums_BS[row][piece] = sums_BS[row][piece] + values_BT[row, place]
    return torch.stack([torch.stack(row) for row in sums_BS])


def test_sums_and_gradients_equal_those_of_a_loop() -> None:
    values_BT = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weights_BS = torch.randn(3, 3, dtype=torch.float64)
    assert count_pieces(SEGMENTS) == 3
    found, expected = piece_sums(values_BT, SEGMENTS, 3), naive_sums(values_BT, SEGMENTS, 3)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((sums * weights_BS).sum(), values_BT)[0] for sums in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_counts_are_exact_and_rows_of_padding_have_none() -> None:
    assert piece_sums(SEGMENTS >= 0, SEGMENTS, 3).tolist() == [[2, 3, 1], [1, 2, 0], [0, 0, 0]]
    assert count_pieces(SEGMENTS[2:]) == 0
    assert piece_sums(torch.ones(1, 6), SEGMENTS[2:], 0).shape == (1, 0)


def test_ends_of_pieces() -> None:
    assert piece_ends(SEGMENTS).nonzero().tolist() == [[0, 1], [0, 4], [0, 5], [1, 0], [1, 2]]
