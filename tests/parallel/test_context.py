"""Rows cut over three ranks against whole rows: tokens, attention and its gradients."""

import warnings
from functools import partial
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

from distributed import run_distributed
from largest_output import largest_tensor
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import AttentionSpec
from modelwright.ops import flex_attention
from modelwright.ops.attention import TILE_LEN, document_mask, masked_attention_naive
from modelwright.ops.flex_attention import packed_block_mask
from modelwright.parallel.context_parallel import local_spans, ring_attention, shard_sequence
from modelwright.parallel.mesh import ContextAttention, ParallelConfig, World, build_mesh, single
from parallel.axis_cases import RANKS, ROW_LEN, Results, rows
from refusals import config_error

EXACT = {"rtol": 1e-11, "atol": 1e-12}
LONG = 8192


def own_attention(world: World) -> Results:
    """One layer's attention on the ranks' own tokens, with gradients."""
    context = build_mesh(world, ParallelConfig(context=world.size)).context
    _, part = shard_sequence(rows(), context)
    results = {"tokens": part.input_ids_BT, "labels": part.labels_BT, "positions": part.positions_BT}
    _, places = shard_sequence(numbered(), context)
    own = places.input_ids_BT[0]
    results["places"] = own
    for kind in get_args(ContextAttention):
        attend, _ = shard_sequence(rows(), context, kind)
        inputs = [x[:, own].requires_grad_() for x in queries_keys_values()]
        out = attend(AttentionSpec(0), *inputs)
        gradients = torch.autograd.grad((out * output_weights()[:, own]).sum(), inputs)
        results[f"{kind}/out"] = out.detach()
        results |= {f"{kind}/{name}": gradient for name, gradient in zip("qkv", gradients, strict=True)}
    return results


def fused_ring(world: World) -> Results:
    """One layer's attention as on CUDA, by FlexAttention's definition: its kernel has no backward on a CPU."""
    context = build_mesh(world, ParallelConfig(context=world.size)).context
    spans = [local_spans(ROW_LEN, context.size, rank) for rank in range(context.size)]
    own = torch.cat([torch.arange(*span) for span in spans[context.rank]])
    masks = [packed_block_mask(rows().segments_BT, 0, spans[context.rank], keys) for keys in spans]
    inputs = [x[:, own].requires_grad_() for x in queries_keys_values()]
    with (
        warnings.catch_warnings(),  # PyTorch warns that this is not the fused kernel, and about its own internals
        mock.patch.object(pytorch, "_validate_device"),
        mock.patch.object(flex_attention, "compiled_kernel", return_value=pytorch.flex_attention),
    ):
        warnings.simplefilter("ignore")
        out = ring_attention(*inputs, context, masks)
        gradients = torch.autograd.grad((out * output_weights()[:, own]).sum(), inputs)
    return {"places": own, "out": out.detach(), **dict(zip("qkv", gradients, strict=True))}


def largest_of_long_rows(world: World) -> dict[str, int]:
    """Elements of the largest tensor of forward and backward over rows of LONG tokens, by kind and soft cap."""
    context = build_mesh(world, ParallelConfig(context=world.size)).context
    whole = torch.arange(LONG).expand(1, -1)
    segments = (whole >= LONG - 1000).int()
    batch = TokenBatch(input_ids_BT=whole, labels_BT=whole, positions_BT=whole, segments_BT=segments)
    own = LONG // context.size
    inputs = [torch.randn(1, own, heads, 16, requires_grad=True) for heads in (2, 1, 1)]

    def train(kind: ContextAttention, soft_cap: float) -> None:
        attend, _ = shard_sequence(batch, context, kind)
        attend(AttentionSpec(0, 0, soft_cap), *inputs).sum().backward()

    cases: tuple[tuple[ContextAttention, float], ...] = (("all_gather", 0.0), ("all_gather", 5.0), ("ring", 0.0))
    return {f"{kind}, {cap}": largest_tensor(partial(train, kind, cap)) for kind, cap in cases}


def numbered() -> TokenBatch:
    """Rows whose tokens are their places."""
    places = torch.arange(ROW_LEN).expand(2, -1)
    return TokenBatch(input_ids_BT=places, labels_BT=places, positions_BT=places, segments_BT=rows().segments_BT)


def queries_keys_values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, ROW_LEN, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


def output_weights() -> Tensor:
    return torch.randn(2, ROW_LEN, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(own_attention, RANKS)


def test_every_token_is_on_one_rank_with_its_label_and_position(ranks):
    whole_rows = rows()
    places = torch.cat([rank["places"] for rank in ranks])
    assert places.sort().values.tolist() == list(range(ROW_LEN))
    for name, whole in (
        ("tokens", whole_rows.input_ids_BT),
        ("labels", whole_rows.labels_BT),
        ("positions", whole_rows.positions_BT),
    ):
        assert torch.equal(torch.cat([rank[name] for rank in ranks], 1), whole[:, places])


@pytest.mark.parametrize("kind", get_args(ContextAttention))
def test_attention_and_gradients_are_those_of_whole_rows(ranks, kind):
    inputs = [x.requires_grad_() for x in queries_keys_values()]
    out = masked_attention_naive(*inputs, document_mask(rows().segments_BT))
    gradients = torch.autograd.grad((out * output_weights()).sum(), inputs)
    for rank in ranks:
        own = rank["places"]
        torch.testing.assert_close(rank[f"{kind}/out"], out[:, own], **EXACT)
        for name, gradient in zip("qkv", gradients, strict=True):
            torch.testing.assert_close(rank[f"{kind}/{name}"], gradient[:, own], **EXACT)


def test_a_ring_of_fused_kernels_has_the_gradients_of_whole_rows():
    inputs = [x.requires_grad_() for x in queries_keys_values()]
    out = masked_attention_naive(*inputs, document_mask(rows().segments_BT))
    gradients = torch.autograd.grad((out * output_weights()).sum(), inputs)
    for rank in run_distributed(fused_ring, RANKS):
        torch.testing.assert_close(rank["out"], out[:, rank["places"]], **EXACT)
        for name, gradient in zip("qkv", gradients, strict=True):
            torch.testing.assert_close(rank[name], gradient[:, rank["places"]], **EXACT)


def test_long_rows_on_two_ranks_have_nothing_of_all_pairs():
    """On a CPU; for CUDA see the sizes in the graphs of a long row in tests/ops/test_flex_attention.py."""
    for rank in run_distributed(largest_of_long_rows, 2):
        assert len(rank) == 3
        # A tile's scores, of two heads that share keys; the pairs of a rank's queries and all keys are 16 times that.
        assert max(rank.values()) <= 2 * TILE_LEN * LONG, rank


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_causal_work_is_the_same_on_every_rank(num_ranks):
    row_len = 24 * num_ranks
    work = [
        sum(place + 1 for start, end in local_spans(row_len, num_ranks, rank) for place in range(start, end))
        for rank in range(num_ranks)
    ]
    assert len(set(work)) == 1
    assert sum(work) == row_len * (row_len + 1) // 2


def test_rows_that_do_not_divide_are_refused():
    with config_error("context"):
        local_spans(34, 2, 0)


def test_one_rank_has_whole_rows():
    whole_rows = rows()
    attend, mine = shard_sequence(whole_rows, single())
    assert mine is whole_rows
    inputs = queries_keys_values()
    expected = masked_attention_naive(*inputs, document_mask(whole_rows.segments_BT))
    torch.testing.assert_close(attend(AttentionSpec(0), *inputs), expected, **EXACT)
