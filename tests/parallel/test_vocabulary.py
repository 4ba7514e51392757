"""Loss, logits and embedding over a vocabulary of 68 on three ranks against the whole head."""

import pytest
import torch

from modelwright.parallel.vocabulary import own_rows
from parallel import axis_run
from tolerances import TOLERANCES


@pytest.fixture(scope="module")
def expected():
    return axis_run.losses(lambda: axis_run.model().float())


@pytest.mark.parametrize("result", ["loss", "hidden", "head"])
@pytest.mark.parametrize("labels", ["some", "all", "none"])
def test_loss_and_gradients_are_those_of_the_whole_head(expected, labels, result):
    found = axis_run.of_check("loss")[f"{labels}/{result}"]
    torch.testing.assert_close(found, expected[f"{labels}/{result}"], **TOLERANCES["fp32_gradient"])


@pytest.mark.parametrize("result", ["loss", "hidden", "head"])
def test_bf16_products_keep_fp32_sums(expected, result):
    found = axis_run.of_check("loss")[f"bf16/{result}"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected[f"some/{result}"], **TOLERANCES["bf16_gradient"])
    assert not torch.equal(found, expected[f"some/{result}"])


def test_all_ranks_have_the_same_bits():
    first, *others = (axis_run.of_check("loss", rank) for rank in range(axis_run.RANKS))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_no_label_no_loss_and_no_gradient():
    found = axis_run.of_check("loss")
    assert all(torch.count_nonzero(found[f"none/{result}"]) == 0 for result in ("loss", "hidden", "head"))


@pytest.mark.parametrize(("vocab_size", "num_ranks"), [(68, 3), (8, 2), (7, 4), (5, 4), (1, 2)])
def test_rows_are_cut_as_a_dtensor_cuts_them(vocab_size, num_ranks):
    pieces = torch.arange(vocab_size).chunk(num_ranks)
    for rank in range(num_ranks):
        expected = pieces[rank].tolist() if rank < len(pieces) else []
        assert list(own_rows(vocab_size, num_ranks, rank)) == expected
