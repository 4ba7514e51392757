"""Rows cut over three ranks against whole rows: tokens, attention and its gradients."""

from typing import get_args

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.ops.attention import document_mask, masked_attention_naive
from modelwright.parallel.config import ContextAttention
from modelwright.parallel.context import attention_of, own_spans
from modelwright.parallel.mesh import single
from parallel import axis_run

EXACT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(scope="module")
def ranks():
    return [axis_run.of_check("context", rank) for rank in range(axis_run.RANKS)]


def test_every_token_is_on_one_rank_with_its_label_and_position(ranks):
    rows = axis_run.rows()
    places = torch.cat([rank["places"] for rank in ranks])
    assert places.sort().values.tolist() == list(range(axis_run.ROW_LEN))
    for name, whole in (("tokens", rows.input_ids_BT), ("labels", rows.labels_BT), ("positions", rows.positions_BT)):
        assert torch.equal(torch.cat([rank[name] for rank in ranks], 1), whole[:, places])


@pytest.mark.parametrize("kind", get_args(ContextAttention))
def test_attention_and_gradients_are_those_of_whole_rows(ranks, kind):
    inputs = [x.requires_grad_() for x in axis_run.queries_keys_values()]
    out = masked_attention_naive(*inputs, document_mask(axis_run.rows().segments_BT))
    gradients = torch.autograd.grad((out * axis_run.output_weights()).sum(), inputs)
    for rank in ranks:
        own = rank["places"]
        torch.testing.assert_close(rank[f"{kind}/out"], out[:, own], **EXACT)
        for name, gradient in zip("qkv", gradients, strict=True):
            torch.testing.assert_close(rank[f"{kind}/{name}"], gradient[:, own], **EXACT)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_causal_work_is_the_same_on_every_rank(num_ranks):
    row_len = 24 * num_ranks
    work = [
        sum(place + 1 for start, end in own_spans(row_len, num_ranks, rank) for place in range(start, end))
        for rank in range(num_ranks)
    ]
    assert len(set(work)) == 1
    assert sum(work) == row_len * (row_len + 1) // 2


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"^context: rows of 34 tokens"):
        own_spans(34, 2, 0)


def test_one_rank_has_whole_rows():
    rows = axis_run.rows()
    attend, mine = attention_of(rows, single())
    assert mine is rows
    inputs = axis_run.queries_keys_values()
    expected = masked_attention_naive(*inputs, document_mask(rows.segments_BT))
    torch.testing.assert_close(attend(0, *inputs), expected, **EXACT)
