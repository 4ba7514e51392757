"""Kernels for the processor against the operators whose place they take, outputs and gradients, and doing without."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modelwright.core.library_environment import LOWER
from modelwright.ops import cpu_kernels, sparse_codec
from modelwright.ops.attention import document_mask, masked_attention_naive, packed_attention, packed_cuts, packed_tiles
from modelwright.ops.cpu_kernels import KERNELS, UNMEASURED, faster_kernels, kernels_for, speed
from modelwright.ops.quantize import ROWWISE, dequantize, quantize, quantize_naive, scaled_product, scaled_product_naive
from modelwright.ops.rope_norm_swiglu import (
    apply_rope,
    apply_rope_naive,
    rms_norm,
    rms_norm_naive,
    rope_tables,
    swiglu,
    swiglu_naive,
)
from rank_processes import TIMEOUT_S
from refusals import config_error
from tolerances import TOLERANCES

needs_kernels = pytest.mark.usefixtures("own_kernels")
FORMATS = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=["native", *LOWER])
def library(request) -> ctypes.CDLL:
    """The kernels for this processor, and for each older one that it can stand for."""
    own = cpu_kernels.instruction_set()
    if not own:
        pytest.skip("needs a C++ compiler")
    if request.param == "native":
        library = cpu_kernels.kernels()
        assert library is not None
        return library
    names = ["avx512", *LOWER]
    if own not in names or names.index(own) >= names.index(request.param):
        pytest.skip(f"kernels for this processor are those of {own}")
    library = cpu_kernels.compiled_for(LOWER[request.param].march)
    assert library.instruction_set().decode() == request.param
    return library


@pytest.fixture
def own_kernels(library, monkeypatch):
    """All kernels are used, whatever is faster."""
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: library)
    monkeypatch.setenv(cpu_kernels.SWITCH, ",".join(KERNELS))


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def assert_equal_with_gradients(fast, naive, inputs):
    """fast and naive: of the same inputs; the naive one in FP32 or wider."""
    ours, reference = fast(*inputs), naive(*(one.detach().float().requires_grad_() for one in inputs))
    wide = [one.detach().float().requires_grad_() for one in inputs]
    reference = naive(*wide)
    grad = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    found = [ours, *torch.autograd.grad(ours, inputs, grad.to(ours.dtype))]
    wanted = [reference, *torch.autograd.grad(reference, wide, grad.to(ours.dtype).to(reference.dtype))]
    narrow = torch.bfloat16 in (ours.dtype, *(one.dtype for one in inputs))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one.float(), other.float(), **TOLERANCES["bf16_gradient" if narrow else "fp32_gradient"]
        )


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (6, 2, 32), (3, 1, 48), (2, 2, 128)])
@pytest.mark.parametrize(
    "lengths", [[[13], [13]], [[64, 1, 65], [130]], [[63, 3, 40, 24], [66, 64]], [[1] * 20]], ids=str
)
def test_attention(lengths, heads, kv_heads, dim, dtype):
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    segments = torch.stack(rows)
    shapes = [(*segments.shape, count, dim) for count in (heads, kv_heads, kv_heads)]
    inputs = [made(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    for tiles in (packed_cuts(segments), packed_tiles(segments, 10)):
        assert len(tiles.bounds_P5)
        assert_equal_with_gradients(
            lambda q, k, v, tiles=tiles: packed_attention(q, k, v, tiles),
            lambda q, k, v: masked_attention_naive(q, k, v, document_mask(segments)),
            inputs,
        )


@needs_kernels
def test_attention_of_large_scores_and_with_any_number_of_threads(monkeypatch):
    """Weights that underflow are zero; results have the same bits for one thread and for three."""
    segments = torch.zeros(1, 150, dtype=torch.int64)
    inputs = [made(1, 150, 2, 32, seed=seed) for seed in range(3)]
    tiles = packed_cuts(segments)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        out = packed_attention(60 * inputs[0], inputs[1], inputs[2], tiles)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    exact = masked_attention_naive(60 * inputs[0], inputs[1], inputs[2], document_mask(segments))
    torch.testing.assert_close(found[0][0], exact, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("out_dtype", FORMATS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 33), (2, 3, 4, 32), (70, 64)])
def test_norm(shape, dtype, out_dtype):
    weight = made(shape[-1], seed=1)
    assert_equal_with_gradients(
        lambda x, w: rms_norm(x, w, 1e-5, out_dtype=out_dtype),
        lambda x, w: rms_norm_naive(x, w, 1e-5),
        [made(*shape, dtype=dtype), weight],
    )


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 5, 48)])
def test_swiglu(shape, dtype):
    gate = (made(*shape).detach() * 10).to(dtype).requires_grad_()
    assert_equal_with_gradients(swiglu, swiglu_naive, [gate, made(*shape, dtype=dtype, seed=1)])


@needs_kernels
def test_swiglu_of_the_largest_numbers():
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30], requires_grad=True)
    out = swiglu(gate, torch.ones(7))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), rtol=1e-5, atol=1e-30)
    assert torch.autograd.grad(out.sum(), gate)[0].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS)
def test_rope(dtype):
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 5, 100, 511, 3]])
    tables = rope_tables(positions, 32, 1e4)
    assert_equal_with_gradients(
        lambda x: apply_rope(x, *tables),
        lambda x: apply_rope_naive(x, positions, 1e4),
        [made(2, 5, 3, 32, dtype=dtype)],
    )


@needs_kernels
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (37, 53), (64, 96)])
def test_int8_codes_are_those_of_the_definition(shape, dtype, across):
    x = made(*shape, dtype=dtype).detach()
    x[0] = 0.0
    x = x.T if across else x
    codes, scales = quantize(x, ROWWISE, torch.int8)
    for ours, wanted in zip((codes, scales), quantize_naive(x, ROWWISE, torch.int8), strict=True):
        assert torch.equal(ours, wanted)
    assert codes.stride() == x.stride()


@needs_kernels
@pytest.mark.parametrize("across", [False, True])
def test_random_rounding_is_right_in_the_mean_and_follows_the_seed(across):
    x = torch.rand(32, 48, generator=torch.Generator().manual_seed(0)) * 3 - 1.5
    x = x.T if across else x
    exact = x / quantize(x, ROWWISE, torch.int8)[1]
    torch.manual_seed(1)
    drawn = [quantize(x, ROWWISE, torch.int8, stochastic=True)[0].float() for _ in range(2000)]
    assert all(((codes - exact).abs() < 1.0 + 1e-4).all() for codes in drawn)
    mean = torch.stack(drawn).mean(0)
    deviation = ((exact - exact.floor()) * (exact.ceil() - exact) / len(drawn)).sqrt()
    assert ((mean - exact).abs() <= 5.5 * deviation + 1e-4).all()
    torch.manual_seed(1)
    assert torch.equal(quantize(x, ROWWISE, torch.int8, stochastic=True)[0].float(), drawn[0])
    assert not torch.equal(drawn[0], drawn[1])


@needs_kernels
@pytest.mark.parametrize("result", FORMATS)
def test_scaled_product(result):
    a, b = (quantize(made(rows, 80, seed=rows).detach(), ROWWISE, torch.int8) for rows in (33, 24))
    ours = scaled_product(a, b, (ROWWISE, ROWWISE), result)
    wanted = scaled_product_naive(a, b, (ROWWISE, ROWWISE), torch.float32)
    assert ours.dtype == result
    torch.testing.assert_close(
        ours.float(), wanted, **TOLERANCES["bf16_gradient" if result != torch.float32 else "fp32_op"]
    )
    torch.testing.assert_close(dequantize(*a, ROWWISE) @ dequantize(*b, ROWWISE).T, wanted)


@needs_kernels
def test_numbers_that_are_none_stay_so_and_are_seen():
    x = torch.ones(2, 32)
    x[0, 3] = float("nan")
    for dtype in FORMATS:
        out = rms_norm(x.to(dtype), torch.ones(32), 1e-5, out_dtype=dtype)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
        assert swiglu(x.to(dtype), x.to(dtype)).isnan().sum() == 1


@needs_kernels
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5, 20, 39])
def test_int8_products_of_what_is_no_number_are_none(wrong, place, across):
    """So that a step that overflowed is seen as one: all results of that row, and of no other."""
    x = torch.ones(40, 40)
    x[3, place] = wrong
    x = x.T.contiguous().T if across else x
    found = scaled_product(
        quantize(x, ROWWISE, torch.int8), quantize(torch.ones(7, 40), ROWWISE, torch.int8), (ROWWISE, ROWWISE), x.dtype
    )
    assert found.isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    assert found[3].isnan().all()


@needs_kernels
def test_attention_of_what_is_no_number_is_none():
    """From that token on in its document, and in its gradients."""
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor([70, 30]))[None]
    q, k, v = (made(1, 100, 1, 16, seed=seed).detach() for seed in range(3))
    k[0, 66] = float("nan")
    q, k, v = (one.requires_grad_() for one in (q, k, v))
    out = packed_attention(q, k, v, packed_cuts(segments))
    assert out.isnan().all(-1).flatten().nonzero().flatten().tolist() == [66, 67, 68, 69]
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad[0, 66].isnan().any() for grad in grads)
    assert all(grad[0, 70:].isfinite().all() for grad in grads)


@needs_kernels
def test_fake_tensors_have_the_shapes_and_keep_the_bytes():
    def run():
        x, gate = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 32, requires_grad=True)
        y = rms_norm(x, torch.ones(32), 1e-5, out_dtype=torch.bfloat16)
        turned = apply_rope(x.view(2, 5, 1, 32), torch.ones(2, 5, 1, 32), torch.ones(2, 5, 1, 32))
        codes = quantize(x.view(10, 32), ROWWISE, torch.int8, stochastic=True)[0]
        out = swiglu(x, gate)
        (out.sum() + y.float().sum() + turned.sum()).backward()
        return [(one.shape, one.dtype, one.stride()) for one in (y, turned, codes, out, x.grad, gate.grad)]

    real = run()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert run() == real


def test_without_a_compiler_the_operators_do_their_work(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, "modelwright.ops"):
        assert cpu_kernels.kernels.__wrapped__() is None
    (record,) = caplog.records
    assert "'no-such-compiler'; set MODELWRIGHT_CPU_KERNELS=0" in record.message


def test_the_switch_names_kernels(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "instruction_set", lambda: "avx2")
    for setting, wanted in (
        ("0", set()),
        ("norm,int8", {"norm", "int8"}),
        ("1", kernels_for("avx2")),
    ):
        monkeypatch.setenv(cpu_kernels.SWITCH, setting)
        assert cpu_kernels.used() == wanted
        assert cpu_kernels.take("norm", torch.ones(3)) == ("norm" in wanted)
        assert cpu_kernels.as_setting(cpu_kernels.used()) == {cpu_kernels.SWITCH: ",".join(sorted(wanted)) or "0"}
    monkeypatch.setenv(cpu_kernels.SWITCH, "norms")
    with config_error("MODELWRIGHT_CPU_KERNELS"):
        cpu_kernels.used()


def test_a_kernel_is_used_if_no_case_is_slower():
    def rows(*ratios: float) -> list[dict[str, object]]:
        return [{"kernel": "norm", "case": "", "own_us": ratio, "pytorch_us": 1.0} for ratio in ratios]

    assert faster_kernels(rows(0.5, 1.04)) == {"norm"}
    assert not faster_kernels(rows(0.5, 1.06))
    assert not faster_kernels(rows(1.01, 1.0))
    assert not faster_kernels([])
    for name, entry in speed().items():
        unmeasured = UNMEASURED.get(name, frozenset()) - {row["kernel"] for row in entry["rows"]}
        assert kernels_for(name) == faster_kernels(entry["rows"]) | unmeasured
    assert {"norm", "decode_step"} <= kernels_for("avx512")
    assert not kernels_for("unknown")


def vector(kind: str, numel: int) -> np.ndarray:
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    return {
        "normal": values,
        "all levels": values**5,
        "denormal": values * np.float32(1e-40),
        "equal": np.full(numel, -1.5, np.float32),
        "some zeros": values * (np.arange(numel) % 3 > 0),
        "few": values * (np.arange(numel) % 200 == 7),
    }[kind]


def outcome(call, *arguments):
    """What a call returns, as lists, or the error that it raises."""
    try:
        result = call(*arguments)
        return [one.tolist() for one in result] if isinstance(result, tuple) else result.tolist()
    except (IndexError, ValueError) as error:
        return type(error), str(error)


@needs_kernels
@pytest.mark.parametrize("kind", ["normal", "all levels", "denormal", "equal", "some zeros", "few"])
@pytest.mark.parametrize("numel", [1, 7, 64, 1001, 70_001])
def test_messages_by_levels_are_the_references_bytes(numel, kind):
    values = vector(kind, numel)
    bounds = [0, numel // 3, numel // 3, numel] if numel > 3 else [0, numel]
    with np.errstate(over="ignore"):
        for threshold in (0.0, 0.4, float(np.abs(values).max()), 1e9):
            kept = sparse_codec.above(torch.from_numpy(values), threshold).numpy()
            np.testing.assert_array_equal(kept, np.flatnonzero((np.abs(values) >= threshold) & (values != 0)))
            for places in (kept, np.arange(numel)):
                message = sparse_codec.encode_levels(places, values[places], bounds)
                assert message.tobytes() == sparse_codec.encode_levels_naive(places, values[places], bounds).tobytes()
                indices, found = sparse_codec.decode_levels(message, bounds)
                naive_indices, naive = sparse_codec.decode_levels_naive(message, bounds)
                np.testing.assert_array_equal(indices, naive_indices)
                assert found.tobytes() == naive.tobytes()
    np.testing.assert_array_equal(naive_indices, np.arange(numel))


@needs_kernels
@pytest.mark.parametrize("numel", [2, 5, 13, 64, 1001, 20_003])
def test_places_of_any_density_are_the_references_bytes(numel):
    draws = np.random.default_rng(numel).random(numel)
    signs = np.where(draws * 1000 % 2 < 1, np.float32(-1), np.float32(1))
    for density in np.linspace(0, 1, 41):
        # Sparser at the end than at the start, so that the codes of blocks are no exact fit.
        places = np.flatnonzero(draws < density * np.linspace(1.1, 0.9, numel))
        message = sparse_codec.encode_levels(places, signs[places], [0, numel])
        assert message.tobytes() == sparse_codec.encode_levels_naive(places, signs[places], [0, numel]).tobytes()
        for decode in (sparse_codec.decode_levels, sparse_codec.decode_levels_naive):
            indices, values = decode(message, [0, numel])
            np.testing.assert_array_equal(indices, places)
            np.testing.assert_array_equal(values, signs[places])


@needs_kernels
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3, 0.6, 1.0, 3.0, 30.0, 1e6])
@pytest.mark.parametrize("numel", [1, 2, 64, 1001, 70_001])
def test_messages_of_moves_are_the_references_bytes(numel, spread):
    for middle in (0, -3, 1000):
        moves = np.rint(vector("normal", numel) * spread + middle).astype(np.float32)
        message = sparse_codec.encode_moves(moves)
        assert message.tobytes() == sparse_codec.encode_moves_naive(moves).tobytes()
        np.testing.assert_array_equal(sparse_codec.decode_moves(message, numel), moves)
        np.testing.assert_array_equal(sparse_codec.decode_moves_naive(message, numel), moves)


@needs_kernels
def test_damaged_messages_end_as_they_do_in_the_references():
    """Cut anywhere, or with another byte in the header, the places or the signs; some places are blocks."""
    values, bounds = vector("all levels", 300), [0, 100, 300]
    kept = sparse_codec.above(torch.from_numpy(values), 0.3).numpy()
    message = sparse_codec.encode_levels(kept, values[kept], bounds)
    moves = -np.abs(np.rint(vector("normal", 300) * 0.6))
    coded = sparse_codec.encode_moves(moves)
    assert all(128 <= kind < 150 for kind in (message[9], coded[10]))
    for fast, naive, data, size in (
        (sparse_codec.decode_levels, sparse_codec.decode_levels_naive, message, bounds),
        (sparse_codec.decode_moves, sparse_codec.decode_moves_naive, coded, 300),
    ):
        for length in range(len(data)):
            assert outcome(fast, data[:length], size) == outcome(naive, data[:length], size)
        for at in range(len(data)):
            for bit in (1, 128):
                damaged = data.copy()
                damaged[at] ^= bit
                assert outcome(fast, damaged, size) == outcome(naive, damaged, size)


@needs_kernels
def test_values_that_are_not_finite_are_left_to_the_references():
    values = vector("normal", 100)
    values[[3, 50]] = np.inf, np.nan
    kept = sparse_codec.above(torch.from_numpy(values), 1.0).numpy()
    assert 3 in kept
    assert 50 not in kept
    message = sparse_codec.encode_levels(kept, values[kept], [0, 100])
    assert message.tobytes() == sparse_codec.encode_levels_naive(kept, values[kept], [0, 100]).tobytes()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which((os.environ.get("CXX") or "g++").split()[0]), reason="needs a C++ compiler")
def test_processes_that_build_at_once_leave_one_library(tmp_path):
    code = "from modelwright.ops import cpu_kernels; assert cpu_kernels.kernels() is not None"
    environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    environment["CXX"] = str(hasty := tmp_path / "hasty")
    hasty.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX") or "g++"} "$@" -O0\n')  # optimizing takes 20 s twice over
    hasty.chmod(0o755)
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [one.wait(timeout=TIMEOUT_S) for one in both] == [0, 0]
    assert [path.suffix for path in (tmp_path / "modelwright").iterdir()] == [".so"]
