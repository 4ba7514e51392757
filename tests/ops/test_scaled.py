"""Eight-bit products: codes and scales, the product against its definition, and what a format loses."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modelwright.core.library_environment import lowered
from modelwright.ops import lowp_linear
from modelwright.ops import quantize as scaled
from modelwright.ops.lowp_linear import E4M3, E5M2, Fp8, in_products
from modelwright.ops.lowp_linear import GRIDS as RECIPES
from modelwright.ops.quantize import (
    ROW_BLOCKS,
    ROWWISE,
    SQUARE_BLOCKS,
    TENSORWISE,
    dequantize,
    group_maxima,
    int8_product,
    quantize,
    scaled_mm,
    scaled_product,
    scaled_product_naive,
)

pytestmark = pytest.mark.usefixtures("either_way")

WAYS = {"forward": (False, False), "input gradient": (False, True), "weight gradient": (True, True)}
"""The three products of a layer, by the factors that are transposed views."""
GRIDS = {"tensor": TENSORWISE, "row": ROWWISE, "row blocks": ROW_BLOCKS, "squares": SQUARE_BLOCKS}


def values(num_rows: int = 150, num_columns: int = 300) -> torch.Tensor:
    """Rows and columns of very different sizes, so that it matters what shares a scale."""
    x = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(1))
    return x * torch.logspace(-2, 1, num_rows)[:, None] * torch.logspace(-1, 1, num_columns)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_each_group_has_the_largest_of_its_own_elements(grid):
    x = values()
    maxima = group_maxima(x, grid)
    rows, columns = grid[0] or x.shape[0], grid[1] or x.shape[1]
    for i in range(maxima.shape[0]):
        for j in range(maxima.shape[1]):
            group = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert maxima[i, j] == group.abs().max()
    assert maxima.shape == (-(-x.shape[0] // rows), -(-x.shape[1] // columns))


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize(("dtype", "step"), [(torch.int8, 1 / 127), (E4M3, 1 / 16), (E5M2, 1 / 8)])
def test_values_come_back_to_half_a_step(grid, dtype, step):
    """INT8: half a step of the group's largest; FP8: half a unit in the last place of the value itself."""
    x = values()
    codes, scales = quantize(x, grid, dtype)
    assert codes.dtype == dtype
    lost = (dequantize(codes, scales, grid) - x).abs()
    largest = dequantize(torch.ones_like(codes), scales, grid) * (
        127 if dtype == torch.int8 else torch.finfo(dtype).max
    )
    allowed = largest * step / 2 if dtype == torch.int8 else x.abs() * step + largest * 2.0**-15
    assert (lost <= allowed * (1 + 1e-4)).all()


def test_finer_groups_lose_less():
    x = values()
    lost = {
        name: float((dequantize(*quantize(x, grid, torch.int8), grid) - x).square().sum())
        for name, grid in GRIDS.items()
    }
    assert lost["row blocks"] < lost["row"] < lost["tensor"]


def test_random_rounding_is_right_in_the_mean_where_rounding_to_the_nearest_is_not():
    x = torch.cat([torch.full((1, 4000), 0.3), torch.full((1, 1), 127.0)], dim=1)
    nearest, _ = quantize(x, ROWWISE, torch.int8)
    at_random, _ = quantize(x, ROWWISE, torch.int8, stochastic=True)
    assert nearest[0, :-1].float().mean() == 0.0
    assert at_random[0, :-1].float().mean().item() == pytest.approx(0.3, abs=0.04)


def earlier(now: torch.Tensor) -> torch.Tensor:
    return torch.full_like(now, 2.0)


def test_known_maxima_cut_off_what_is_larger():
    codes, scales = quantize(torch.tensor([[1.0, 8.0]]), TENSORWISE, E4M3, maxima=earlier)
    assert dequantize(codes, scales, TENSORWISE).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("grid", [TENSORWISE, ROWWISE], ids=["tensorwise", "rowwise"])
def test_known_maxima_hide_no_overflow(grid, value, dtype):
    """What shares a scale with it becomes not finite, as under present maxima; other groups stay as they are."""
    x = torch.tensor([[1.0, value], [1.0, 0.5]])
    codes, scales = quantize(x, grid, dtype, maxima=earlier)
    found = dequantize(codes, scales, grid)
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all() == (grid == ROWWISE)
    ones = quantize(torch.ones(3, 2), grid, dtype)
    result = scaled_product((codes, scales), ones, (grid, grid), torch.float32)
    assert not result[0].isfinite().any()


@pytest.mark.parametrize("shape", [(1, 8, 16), (5, 24, 7), (33, 130, 65)])
def test_integer_products_are_exact(shape):
    m, k, n = shape
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    assert torch.equal(int8_product(a, b), (a.double() @ b.double().T).float())


@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_an_int8_product_is_its_definition(result):
    grids = (ROWWISE, ROWWISE)
    a, b = quantize(values(40, 96), ROWWISE, torch.int8), quantize(values(24, 96), ROWWISE, torch.int8)
    found, wanted = scaled_product(a, b, grids, result), scaled_product_naive(a, b, grids, torch.float32)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-5 if result == torch.float32 else 2**-8, atol=1e-4)


@pytest.mark.parametrize("grids", [(TENSORWISE, TENSORWISE), (ROWWISE, ROWWISE)], ids=["tensorwise", "rowwise"])
def test_the_definition_is_what_pytorch_multiplies(grids):
    """`torch._scaled_mm` runs on the CPU too, slowly, for these two recipes."""
    a, b = (quantize(values(32, 64), grid, E4M3) for grid in grids)
    (a_codes, a_scales), (b_codes, b_scales) = a, b
    if grids[0] == TENSORWISE:
        a_scales, b_scales = a_scales.view(()), b_scales.view(())
    else:
        b_scales = b_scales.T
    try:
        theirs = torch._scaled_mm(a_codes, b_codes.T, scale_a=a_scales, scale_b=b_scales, out_dtype=torch.float32)
    except RuntimeError as error:
        if lowered() is not None and "primitive descriptor" in str(error):
            pytest.skip("PyTorch asks oneDNN by the processor's own instruction set, and oneDNN is held to a lower one")
        if "per-tensor scaling" not in str(error):
            raise
        pytest.skip("this version of PyTorch has one scale on this processor")
    torch.testing.assert_close(scaled_product(a, b, grids, torch.float32), theirs, rtol=1e-5, atol=1e-5)


def strides_of_scales(grid: tuple[int, int], num_rows: int, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides that the product wants of a factor's scales (PyTorch's `ScaledBlas.cpp`; 128 x 128: cuBLAS's
    "leading dimension in multiples of four")."""
    return {
        TENSORWISE: ((), ()),
        ROWWISE: ((num_rows, 1), (1, 1)),
        ROW_BLOCKS: ((num_rows, num_blocks), (1, num_rows)),
        SQUARE_BLOCKS: ((num_rows // 128, num_blocks), (-(-num_blocks // 4) * 4, 1)),
    }[grid]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_blocks", [3, 4, 5])
@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_s_product_takes_the_layouts_of_all_three_products(monkeypatch, recipe, way, num_blocks):
    """By PyTorch's own check of shapes and of the codes' strides, which needs no card; the card alone would look at the
    strides of scales."""
    checked, scaled_mm_of_torch = [], torch._scaled_mm
    (of_rows, of_weights), num_summed = RECIPES[recipe], 128 * num_blocks
    grids = (of_rows, of_rows if way == "weight gradient" else of_weights)

    def only_check(*tensors: torch.Tensor, out_dtype: torch.dtype, **scales: torch.Tensor) -> torch.Tensor:
        def on_card(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        with FakeTensorMode():
            made = {name: on_card(x) for name, x in scales.items()}
            found = scaled_mm_of_torch(*map(on_card, tensors), out_dtype=out_dtype, **made)
        checked.append((tuple(found.shape), found.dtype))
        for x, grid, num_rows in zip((scales["scale_a"], scales["scale_b"].t()), grids, (384, 256), strict=True):
            assert (x.shape, x.stride()) == strides_of_scales(grid, num_rows, num_blocks)
        return torch.empty(found.shape, dtype=found.dtype)

    monkeypatch.setattr(torch, "_scaled_mm", only_check)
    factors = []
    for num_rows, grid, is_view in zip((384, 256), grids, WAYS[way], strict=True):
        x = values(num_summed, num_rows).T if is_view else values(num_rows, num_summed)
        factors.append(quantize(x, grid, E4M3))
        assert factors[-1][0].is_contiguous() != is_view
    scaled_mm(factors[0], factors[1], grids, torch.bfloat16)
    assert checked == [((384, 256), torch.bfloat16)]


@pytest.mark.parametrize(
    ("recipe", "num_summed", "fits"),
    [
        ("tensorwise", 48, True),
        ("tensorwise", 40, False),
        ("rowwise", 16, True),
        ("blockwise", 48, False),
        ("blockwise", 256, True),
    ],
)
def test_the_summed_dimension_is_what_the_recipe_s_kernel_wants(monkeypatch, recipe, num_summed, fits):
    """A card stands here: PyTorch's "meta" device, whose tensors have shapes only."""
    calls = []
    monkeypatch.setattr(scaled, "scaled_mm", lambda *_: calls.append(recipe))
    a, b = (quantize(torch.ones(32, num_summed, device="meta"), grid, E4M3) for grid in RECIPES[recipe])
    scaled_product(a, b, RECIPES[recipe], torch.bfloat16, has_kernel=True)
    assert calls == [recipe] * fits


def test_a_product_without_a_kernel_is_logged_once(monkeypatch, caplog):
    scaled._say_that_it_is_slow.cache_clear()
    x, weight = torch.ones(32, 40, device="meta"), torch.ones(16, 40, device="meta", requires_grad=True)
    with caplog.at_level(logging.WARNING, "modelwright.ops"):
        for recipe in ("tensorwise", "tensorwise", "rowwise"):
            in_products(Fp8(recipe=recipe, result=torch.float32).products(), torch.float32, x, weight).sum().backward()
        monkeypatch.setattr(lowp_linear, "has_fp8_kernel", lambda *_: True)
        blockwise = Fp8(recipe="blockwise", result=torch.float32).products()
        for factors in ((x, weight), (torch.ones(32, 40), torch.ones(16, 40))):  # on a processor nothing is said
            in_products(blockwise, torch.float32, *factors)
    said = [record.message.partition(". ")[0] for record in caplog.records]
    assert said == [
        "fp8 tensorwise, forward: the device has no kernel for its formats and scales",
        "fp8 tensorwise, weight gradient: the device has no kernel for its formats and scales",
        "fp8 rowwise, forward: the device has no kernel for its formats and scales",
        "fp8 rowwise, weight gradient: the device has no kernel for its formats and scales",
        "fp8 blockwise, forward: the device has no kernel for its shapes",
    ]
