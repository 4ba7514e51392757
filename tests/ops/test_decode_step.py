"""Products of the decode step against their definitions, for each instruction set, and their independence of
neighbors and threads. Whole models are tested in `tests/infer/test_decode_operator.py`.
"""

import copy
import ctypes

import pytest
import torch
from torch import nn

from modelwright.compress.int8 import (
    ActivationGrid,
    GridLinear,
    InputGrid,
    Int8Linear,
    int8_linear_naive,
    quantize_rows,
)
from modelwright.core.config import ModelwrightError
from modelwright.core.library_environment import LOWER, lowered
from modelwright.ops import cpu_kernels
from modelwright.ops.decode_step import Draw, RowProduct, Weight, drawn, summarized, summarized_naive
from modelwright.ops.int_grid import Codes, WeightGrid
from tolerances import TOLERANCES

SHAPES = [(1, 1), (3, 5), (60, 77), (64, 48), (257, 130)]
"""Inputs, outputs."""
MOST_ROWS = 9


@pytest.fixture(scope="module", params=["native", *LOWER], autouse=True)
def library(request) -> ctypes.CDLL:
    """The kernels for this processor, and for each older one that it can stand for."""
    own = cpu_kernels.instruction_set()
    names = ["avx512", *LOWER]
    if not own or (request.param != "native" and own not in names):
        pytest.skip("there are no such kernels here")
    if request.param != "native" and names.index(own) >= names.index(request.param):
        pytest.skip(f"kernels for this processor are those of {own}")
    library = (
        cpu_kernels.kernels() if request.param == "native" else cpu_kernels.compiled_for(LOWER[request.param].march)
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(cpu_kernels, "kernels", lambda: library)
    patch.setenv(cpu_kernels.SWITCH, "decode_step")
    yield library
    patch.undo()


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_definition(shape, dtype):
    num_inputs, num_outputs = shape
    weight, bias, x = (
        made(num_outputs, num_inputs).to(dtype),
        made(num_outputs, seed=1),
        made(MOST_ROWS, num_inputs, seed=2),
    )
    found = RowProduct(Weight(weight, bias_O=bias))(x)
    torch.testing.assert_close(found, x @ weight.float().T + bias, **TOLERANCES["fp32_op"])


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_exact(shape):
    """The integer sums are; scales are multiplied in the order of `Int8Linear`."""
    num_inputs, num_outputs = shape
    codes, scale = quantize_rows(made(num_outputs, num_inputs))
    x = made(MOST_ROWS, num_inputs, seed=2) * torch.logspace(-3, 3, MOST_ROWS)[:, None]
    x[1] = 0.0
    found = RowProduct(Weight(codes, scale))(x)
    assert torch.equal(found, Int8Linear(codes, scale, "int_mm")(x))
    torch.testing.assert_close(found, int8_linear_naive(x, codes, scale), rtol=1e-6, atol=1e-6)


def test_the_largest_codes_do_not_saturate():
    product = RowProduct(Weight(*quantize_rows(torch.ones(16, 512))))
    for num_rows in (2, 40):  # and weights that are packed
        for sign in (1.0, -1.0):
            found = product(sign * torch.ones(num_rows, 512))
            torch.testing.assert_close(found, sign * torch.full((num_rows, 16), 512.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_a_row_depends_on_neither_neighbors_nor_threads(shape, kind, monkeypatch):
    num_inputs, num_outputs = shape
    weight = made(num_outputs, num_inputs)
    own = Weight(*quantize_rows(weight)) if kind == "int8" else Weight(weight.to(cpu_dtype(kind)))
    product, x = RowProduct(own), made(33, num_inputs, seed=2)
    whole = product(x)
    for count in range(1, 10):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[-count:]), whole[-count:])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(product(x), whole)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(4, 1), (60, 33), (1409, 70), (8200, 20)])
def test_many_rows_have_the_bits_of_few(num_inputs: int, num_outputs: int) -> None:
    """The kernel packs INT8 weights for many rows, more of them for wide ones, and none of more than 8,192 inputs."""
    weight, scale_O = quantize_rows(made(num_outputs, num_inputs))
    product = RowProduct(Weight(weight, scale_O, bias_O=made(num_outputs, seed=1)))
    x = made(101, num_inputs, seed=2)
    few = [product(part) for part in x.split(4)]
    assert torch.equal(product(x), torch.cat(few))


@pytest.mark.slow
def test_compilers_that_fuse_otherwise_change_no_bit(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC 13 for the newest Intel processors, say, does not fuse what is added to a sum of several steps."""
    chosen, whole = request.node.callspec.params["library"], lowered()
    march = LOWER[chosen].march if chosen != "native" else whole.march if whole else "native"
    try:
        other = cpu_kernels.compiled_for(march, "--param=avoid-fma-max-bits=512")
    except ModelwrightError:
        pytest.skip("the compiler is not GCC")
    weight, x = made(77, 60), made(9, 60, seed=2)
    expected = RowProduct(Weight(weight))(x)
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: other)
    product = RowProduct(Weight(weight))
    for count in range(1, 10):
        assert torch.equal(product(x[:count]), expected[:count])


FOUR_BIT_GRIDS = [
    WeightGrid(bits=4, symmetric=symmetric, granularity=granularity)
    for symmetric in (True, False)
    for granularity in ("tensor", "channel", "group_32", "group_64", "group_128")
]
FOUR_BIT_SHAPES = {0: SHAPES, 32: [(32, 3), (96, 17), (352, 40)], 64: [(64, 5), (320, 33)], 128: [(384, 18)]}
"""Inputs and outputs by the size of groups; some end within a vector of 128 codes."""


def four_bits(grid: WeightGrid, activations: ActivationGrid, num_inputs: int, num_outputs: int) -> GridLinear:
    weight = made(num_outputs, num_inputs)
    weight[:, num_inputs // 2 :] += 0.7  # zero points that are not in the middle
    return GridLinear(grid.codes(weight, *grid.ranges(weight)), grid, InputGrid(kind=activations))


@pytest.mark.parametrize("activations", ["none", "token"])
@pytest.mark.parametrize("grid", FOUR_BIT_GRIDS, ids=lambda grid: f"{grid.granularity}-{grid.symmetric}")
def test_four_bit_products_are_those_of_the_definition(grid, activations, monkeypatch):
    for num_inputs, num_outputs in FOUR_BIT_SHAPES[grid.group_size]:
        linear = four_bits(grid, activations, num_inputs, num_outputs)
        x = made(MOST_ROWS, num_inputs, seed=2) * torch.logspace(-3, 3, MOST_ROWS)[:, None]
        x[1] = 0.0
        linear.bias = nn.Parameter(made(num_outputs, seed=1), requires_grad=False)
        monkeypatch.setenv(cpu_kernels.SWITCH, "0")
        wanted = linear(x)
        monkeypatch.setenv(cpu_kernels.SWITCH, "four_bits")
        found = linear(x)
        assert torch.equal(found, RowProduct(linear.packed_weight())(x) + linear.bias)
        scale = (x.abs() @ linear.weight.abs().T + linear.bias.abs()).clamp_min(1e-30)
        assert float(((found - wanted).abs() / scale).max()) < 2e-6


@pytest.mark.parametrize("activations", ["none", "token"])
@pytest.mark.parametrize("grid", FOUR_BIT_GRIDS[::2], ids=lambda grid: f"{grid.granularity}-{grid.symmetric}")
def test_a_row_of_four_bit_products_depends_on_neither_neighbors_nor_threads(grid, activations, monkeypatch):
    for num_inputs, num_outputs in FOUR_BIT_SHAPES[grid.group_size]:
        product = RowProduct(four_bits(grid, activations, num_inputs, num_outputs).packed_weight())
        x = made(33, num_inputs, seed=2)
        whole = product(x)
        for count in range(1, 10):
            assert torch.equal(product(x[:count]), whole[:count])
            assert torch.equal(product(x[-count:]), whole[-count:])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 3)
            assert torch.equal(product(x), whole)


def test_the_largest_four_bit_codes_do_not_saturate():
    grid = WeightGrid(bits=4, symmetric=False, granularity="channel")
    for sign in (1.0, -1.0):
        codes = Codes(torch.full((16, 512), 7 if sign > 0 else -8, dtype=torch.int8), torch.ones(16), torch.zeros(16))
        linear = GridLinear(codes, grid, InputGrid(kind="token"))
        found = RowProduct(linear.packed_weight())(sign * torch.ones(2, 512))
        torch.testing.assert_close(found, torch.full((2, 16), 512.0 * (7 if sign > 0 else 8)))


def test_a_copied_layer_points_to_its_own_codes(monkeypatch):
    monkeypatch.setenv(cpu_kernels.SWITCH, "four_bits")
    linear, x = four_bits(FOUR_BIT_GRIDS[2], "none", 96, 5), made(2, 96)
    wanted = linear(x)
    copied = copy.deepcopy(linear)
    linear.quantized.zero_()
    assert torch.equal(copied(x), wanted)
    assert not torch.equal(linear(x), wanted)


def cpu_dtype(kind: str) -> torch.dtype:
    return {name: dtype for dtype, name in cpu_kernels.NAMES.items()}[kind]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(wrong):
    x = torch.ones(5, 40)
    x[3, 39] = wrong
    codes, scale = quantize_rows(torch.ones(7, 40))
    grid = WeightGrid(bits=4)
    nibbles = [four_bits(grid, kind, 40, 7).packed_weight() for kind in ("none", "token")]
    for weight in (Weight(torch.ones(7, 40)), Weight(codes, scale), *nibbles):
        found = RowProduct(weight)(x)
        assert not found[3].isfinite().any()
        assert found[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("width", [1, 7, 64, 1003])
def test_rows_are_summarized(width):
    logits = 20 * made(5, width)
    logits[2] = 1.0  # the first of equal ones
    logits[3, width // 2 :] = -float("inf")
    logits[3, 0] = 2.0
    (likeliest, log_sums), (wanted, wanted_sums) = summarized(logits), summarized_naive(logits)
    assert torch.equal(likeliest, wanted)
    torch.testing.assert_close(log_sums, wanted_sums, **TOLERANCES["fp32_op"])
    assert all(
        torch.equal(one, whole[3:4]) for one, whole in zip(summarized(logits[3:4]), (likeliest, log_sums), strict=True)
    )
    logits[1, -1] = float("nan")
    assert summarized(logits)[1].isfinite().tolist() == [True, False, True, True, True]


def kept_masses(logits_V: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The definition of the limits in FP64: the share of each token, zeros where they leave it out."""
    shares_V = (logits_V.double() / draw.divisor).softmax(dim=0)
    order = sorted(range(len(logits_V)), key=lambda token: (-float(logits_V[token]), token))
    order = [token for token in order if shares_V[token] >= draw.min_p * shares_V.max()]
    order = order[: draw.top_k or None]
    kept_V, before, whole = torch.zeros_like(shares_V), 0.0, float(shares_V[order].sum())
    for number, token in enumerate(order):
        if number and draw.top_p < 1 and before >= draw.top_p * whole:
            break
        kept_V[token] = shares_V[token]
        before += float(shares_V[token])
    return kept_V


LIMITS = [  # none of which falls between two of the equally likely tokens
    {},
    {"temperature": 0.1},
    {"temperature": 1e-9},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.89993},
    {"top_p": 1e-9},
    {"top_p": 0.30003, "temperature": 3.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.93, "min_p": 0.01, "temperature": 0.8},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 1003, 5000])
def test_tokens_are_drawn_as_defined(width: int, limits: dict[str, float]) -> None:
    logits = 4 * made(4, width)
    logits[1] = logits[1].round()  # many equal ones
    logits[2, 1:] = logits[2, 1:].where(made(width - 1, seed=1) > 0, -torch.inf)
    logits[3] = 0.5
    uniforms = [*torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist(), 0.0, 1.0 - 2**-53]
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    draws = [Draw(row=row, uniform=uniform, **settings) for row in range(4) for uniform in uniforms]
    tokens = drawn(logits, draws)
    assert tokens is not None
    for row in range(4):
        kept_V = kept_masses(logits[row], draws[row * len(uniforms)])
        sums_V = kept_V.cumsum(0) / kept_V.sum()
        for draw, token in list(zip(draws, tokens, strict=True))[row * len(uniforms) : (row + 1) * len(uniforms)]:
            assert kept_V[token] > 0
            # The number falls into the token's share of the sum, to the rounding of FP32.
            below = float(sums_V[token - 1]) if token else 0.0
            assert below - 1e-5 <= draw.uniform <= float(sums_V[token]) + 1e-5
    assert [drawn(logits, [draw]) for draw in draws[::17]] == [[token] for token in tokens[::17]]


def test_draws_of_rows_that_are_not_finite_end() -> None:
    """Which token they find does not matter: the row's log-sum-exp tells the engine."""
    logits = made(4, 100)
    logits[0, 50], logits[1, 3], logits[2] = float("nan"), float("inf"), -float("inf")
    logits[3] = float("nan")
    for limits in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
        tokens = drawn(logits, [Draw(row=row, uniform=0.7, **settings) for row in range(4)])
        assert tokens is not None
        assert all(0 <= token < 100 for token in tokens)
