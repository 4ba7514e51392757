"""Codes that several layers share: only of the very same values, and no longer than those live."""

import weakref

import pytest
import torch

from modelwright.ops.lowp_linear import E4M3, E5M2, SharedCodes
from modelwright.ops.quantize import ROWWISE, TENSORWISE, quantize


def test_views_of_one_tensor_have_the_codes_of_quantize_once():
    shared, x = SharedCodes(), torch.randn(2, 3, 8)
    codes, scales = shared(x.flatten(0, -2), TENSORWISE, E4M3)
    again = shared(x.flatten(0, -2), TENSORWISE, E4M3)
    assert again[0] is codes
    assert again[1] is scales
    wanted = quantize(x.flatten(0, -2), TENSORWISE, E4M3)
    assert torch.equal(codes.float(), wanted[0].float())
    assert torch.equal(scales, wanted[1])


@pytest.mark.parametrize(
    "change",
    {
        "written to": lambda x: (x.mul_(2.0), TENSORWISE, E4M3),
        "another tensor": lambda x: (x.clone(), TENSORWISE, E4M3),
        "a part": lambda x: (x[1:], TENSORWISE, E4M3),
        "turned": lambda x: (x.T, TENSORWISE, E4M3),
        "another grid": lambda x: (x, ROWWISE, E4M3),
        "another format": lambda x: (x, TENSORWISE, E5M2),
    }.items(),
    ids=lambda one: one[0],
)
def test_anything_else_is_quantized_anew(change):
    shared, x = SharedCodes(), torch.randn(8, 8)
    before = shared(x, TENSORWISE, E4M3)
    given = change[1](x)
    codes, scales = shared(*given)
    assert codes is not before[0]
    wanted = quantize(*given)
    assert torch.equal(codes.float(), wanted[0].float())
    assert torch.equal(scales, wanted[1])


def test_codes_die_with_the_tensor_and_keep_no_tensor_alive():
    shared, x = SharedCodes(), torch.randn(8, 8)
    codes, of_x = weakref.ref(shared(x, TENSORWISE, E4M3)[0]), weakref.ref(x)
    assert codes() is not None
    del x
    assert of_x() is None
    assert codes() is None


def test_inference_tensors_have_no_version_and_share_nothing():
    shared = SharedCodes()
    with torch.inference_mode():
        x = torch.ones(4, 4)
        first = shared(x, TENSORWISE, E4M3)
        x.mul_(2.0)
        assert shared(x, TENSORWISE, E4M3)[1] == 2 * first[1]
