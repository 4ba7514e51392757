"""Contrastive losses against those written out pair by pair, and over 1, 2 and 4 ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_distributed
from modelwright.objectives.contrastive import ContrastiveLoss, PairEmbeddings, contrastive_losses
from modelwright.ops.piece_sums import piece_keys
from modelwright.parallel.mesh import World, gather_rows, single

LOSSES: tuple[ContrastiveLoss, ...] = ("nt_xent", "clip", "siglip")
NUM_PAIRS, WIDTH = 11, 5
TEXT_OF_PAIR = [0, 1, 2, 3, 1, 4, 5, 1, 6, 7, 8]
"""Pairs 1, 4 and 7 have the same text."""


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    texts, others = (torch.randn(NUM_PAIRS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    scale, bias = torch.tensor(3.0, dtype=torch.float64), torch.tensor(-0.7, dtype=torch.float64)
    return texts, others, scale, bias


def naive(loss: ContrastiveLoss, texts: Tensor, others: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The sum over all pairs, one exponential after the other."""
    texts = texts / texts.norm(dim=1, keepdim=True)
    others = others / others.norm(dim=1, keepdim=True)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(NUM_PAIRS):
        negatives = [j for j in range(NUM_PAIRS) if TEXT_OF_PAIR[j] != TEXT_OF_PAIR[i]]
        if loss == "siglip":
            total = total + (1 + (-(scale * (texts[i] @ others[i]) + bias)).exp()).log()
            for j in negatives:
                total = total + (1 + (scale * (texts[i] @ others[j]) + bias).exp()).log()
            continue
        for anchors, across in ((texts, others), (others, texts)):
            positive = (scale * (anchors[i] @ across[i])).exp()
            denominator = positive
            for j in negatives:
                denominator = denominator + (scale * (anchors[i] @ across[j])).exp()
                if loss == "nt_xent":
                    denominator = denominator + (scale * (anchors[i] @ anchors[j])).exp()
            total = total - (positive / denominator).log() / 2
    return total


def share_of(loss: ContrastiveLoss, rows: list[int], world: World, leaves: list[Tensor]) -> Tensor:
    """This rank's part of the sum: the losses of the pairs `rows`."""
    texts, others, scale, bias = leaves
    own = PairEmbeddings(*(torch.nn.functional.normalize(x[rows], dim=1) for x in (texts, others)))
    gathered, first = gather_rows(torch.cat(own, dim=1), world)
    everyone = PairEmbeddings(*gathered.chunk(2, dim=1))
    keys, _ = gather_rows(torch.tensor([TEXT_OF_PAIR[row] for row in rows], dtype=torch.int64), world)
    places = first + torch.arange(len(rows))
    is_same = keys[places][:, None] == keys
    return contrastive_losses(loss, own, everyone, places, is_same, scale=scale, bias=bias).sum()


def on_rank(world: World) -> list[dict[str, Any]]:
    """Each rank differentiates its own part, of another number of pairs than the others; the strategies of training
    then sum gradients over the ranks, as is done here.
    """
    ends = {1: [11], 2: [4, 11], 4: [3, 3, 8, 11]}[world.size]
    rows = list(range(0 if world.rank == 0 else ends[world.rank - 1], ends[world.rank]))
    results = []
    for loss in LOSSES:
        leaves = [one.requires_grad_() for one in inputs()]
        part = share_of(loss, rows, world, leaves)
        part.backward()
        gradients = [one.grad if one.grad is not None else torch.zeros_like(one) for one in leaves]
        results.append(
            {
                "loss": world.all_reduce_sum(part.detach()),
                "gradients": [world.all_reduce_sum(one) for one in gradients],
            }
        )
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_gives_the_loss_and_the_gradients_of_the_naive_sum(world_size: int) -> None:
    ranks = [on_rank(single())] if world_size == 1 else run_distributed(on_rank, world_size)
    for number, loss in enumerate(LOSSES):
        leaves = [one.requires_grad_() for one in inputs()]
        expected = naive(loss, *leaves)
        gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
        assert all(one is not None and one.any() for one in gradients[:3])
        for found in ranks:
            torch.testing.assert_close(found[number]["loss"], expected.detach(), rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(found[number]["gradients"], gradients, strict=True):
                theirs = torch.zeros_like(ours) if theirs is None else theirs
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_batch_whose_pairs_all_have_one_text_has_no_negatives() -> None:
    own = PairEmbeddings(*(torch.eye(3) for _ in range(2)))
    same = torch.ones(3, 3, dtype=torch.bool)
    options = {"scale": torch.tensor(2.0), "bias": torch.tensor(0.5)}
    for loss in ("nt_xent", "clip"):
        found = contrastive_losses(loss, own, own, torch.arange(3), same, **options)
        torch.testing.assert_close(found, torch.zeros(3))
    found = contrastive_losses("siglip", own, own, torch.arange(3), same, **options)
    torch.testing.assert_close(found, torch.full((3,), math.log1p(math.exp(-2.5))))


def test_half_precision_is_widened() -> None:
    pairs = PairEmbeddings(*(torch.randn(4, 8).bfloat16() for _ in range(2)))
    options = {"scale": torch.tensor(50.0), "bias": torch.tensor(0.0)}
    same = torch.eye(4, dtype=torch.bool)
    found = contrastive_losses("nt_xent", pairs, pairs, torch.arange(4), same, **options)
    wide = PairEmbeddings(*(one.float() for one in pairs))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, contrastive_losses("nt_xent", wide, wide, torch.arange(4), same, **options))


def test_keys_are_equal_where_the_tokens_are_and_nowhere_else() -> None:
    pieces = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3], [0], [0, 0], [2, 1, 3]]
    ids = torch.tensor([token for piece in pieces for token in piece])[None]
    positions = torch.tensor([place for piece in pieces for place in range(len(piece))])[None]
    segments = torch.tensor([number for number, piece in enumerate(pieces) for _ in piece])[None]
    keys = piece_keys(ids, positions, segments, len(pieces))[0].tolist()
    assert keys[0] == keys[3]
    assert len(set(keys)) == len(pieces) - 1
