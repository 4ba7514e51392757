"""Selection, quantization and place codes: against plain definitions, at odd sizes, and to the byte."""

import numpy as np
import pytest
import torch

from modelwright.ops import sparse_codec as sc

SIZES = [1, 2, 7, 255, 1000, 4097]


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_top_k_are_the_largest_in_order(size, share):
    values, k = torch.from_numpy(normal(size)), max(1, round(share * size))
    chosen = sc.top_k(values, k)
    naive = sorted(sorted(range(size), key=lambda i: -abs(float(values[i])))[:k])
    assert chosen.tolist() == naive


def test_sampled_threshold_keeps_about_the_share_and_never_a_zero():
    values = torch.from_numpy(normal(1_000_000))
    kept = sc.above(values, sc.sampled_threshold(values, 0.01, 65_536))
    assert 0.009 < len(kept) / len(values) < 0.011
    assert float(values[kept].abs().min()) >= float(values.abs().sort(descending=True).values[11_000])
    assert sc.above(torch.tensor([0.0, -2.0, 0.0, 1.0]), 0.0).tolist() == [1, 3]


@pytest.mark.parametrize("bits", range(2, 17))
def test_quantized_values_are_the_nearest_levels(bits):
    values = normal(999)
    quantized = sc.quantize(values, bits)
    levels = np.linspace(np.abs(values).min(), np.abs(values).max(), 1 << (bits - 1))
    nearest = np.sign(values) * levels[np.abs(np.abs(values)[:, None] - levels).argmin(axis=1)]
    np.testing.assert_allclose(quantized.values(), nearest, rtol=1e-5, atol=1e-6)
    assert np.abs(quantized.values() - values).max() <= (levels[1] - levels[0]) / 2 + 1e-6


@pytest.mark.parametrize("values", [[], [0.0], [-3.0], [2.0, 2.0, -2.0], [0.0, 0.0], [1e-45, 3e38], [1e-42, -2e-42]])
def test_quantization_of_degenerate_values(values):
    values = np.array(values, np.float32)
    found = sc.quantize(values, 4).values()
    assert np.isfinite(found).all()
    if len(values):
        assert np.abs(found - values).max() <= np.abs(values).max() / 14 + 1e-44


def test_width_is_the_narrowest_that_meets_the_error():
    values = normal(5000)
    errors = {bits: sc.relative_error(values, sc.quantize(values, bits)) for bits in range(4, 17)}
    for target in (0.5, 0.1, 0.03, 0.01, 1e-3):
        bits = sc.quantize_within(values, min_bits=4, max_bits=16, max_error=target).bits
        assert bits == min(width for width, error in errors.items() if error <= target)
    assert sc.quantize_within(values, min_bits=4, max_bits=6, max_error=1e-9).bits == 6
    heavy = values**9
    assert (
        sc.quantize_within(heavy, min_bits=4, max_bits=16, max_error=0.02).bits
        > sc.quantize_within(values, min_bits=4, max_bits=16, max_error=0.02).bits
    )


@pytest.mark.parametrize("bits", [1, 3, 4, 8, 13, 16])
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_bits_are_packed_without_gaps(bits, count):
    codes = np.random.default_rng(1).integers(0, 1 << bits, count).astype(np.uint16)
    packed = sc.pack_bits(codes, bits)
    assert len(packed) == (count * bits + 7) // 8
    assert sc.unpack_bits(packed, count, bits).tolist() == codes.tolist()
    text = "".join(f"{code:0{bits}b}" for code in codes)
    assert packed.tobytes() == int(text.ljust(len(packed) * 8, "0") or "0", 2).to_bytes(len(packed), "big")


@pytest.mark.parametrize("low", [0, 1, 5, 11])
def test_rice_code_is_the_textbook_one(low):
    gaps = np.random.default_rng(2).geometric(0.02, 300) - 1
    data = sc.rice_encode(gaps, low)
    assert sc.rice_decode(data, len(gaps), low).tolist() == gaps.tolist()
    unary = "".join("0" * (gap >> low) + "1" for gap in gaps)
    assert np.unpackbits(data[(len(gaps) * low + 7) // 8 :])[: len(unary)].tolist() == [int(bit) for bit in unary]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.2, 0.35, 0.5, 0.65, 0.9, 1.0])
def test_places_come_back_and_never_cost_more_than_a_bitmap(size, share):
    kept = np.random.default_rng(3).choice(size, round(share * size), replace=False)
    kept.sort()
    kind, data = sc.encode_places(kept, size)
    indices, used = sc.decode_places(kind, np.append(data, np.uint8(255)), len(kept), size)
    assert indices.tolist() == kept.tolist()
    assert used == len(data)
    assert len(data) <= (size + 7) // 8 + 1
    if share == 1.0:
        assert len(data) == 0


def test_places_of_one_percent_cost_close_to_their_entropy():
    size, kept = 100_000, np.sort(np.random.default_rng(4).choice(100_000, 1000, replace=False))
    _, data = sc.encode_places(kept, size)
    entropy = -(0.01 * np.log2(0.01) + 0.99 * np.log2(0.99)) * size
    assert entropy * 0.98 < 8 * len(data) < entropy * 1.05


@pytest.mark.parametrize("share", [0.05, 0.2, 0.27, 0.35, 0.4, 0.46, 0.54, 0.65, 0.8])
def test_places_of_any_density_cost_close_to_their_entropy(share):
    kept = np.flatnonzero(np.random.default_rng(5).random(100_001) < share)
    _, data = sc.encode_places(kept, 100_001)
    share = len(kept) / 100_001
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * 100_001
    assert entropy < 8 * len(data) < entropy * (1.012 if 0.25 < share < 0.75 else 1.025)


def test_blocks_that_are_cut_off_or_hold_other_places_are_refused():
    kept = np.flatnonzero(np.random.default_rng(6).random(1001) < 0.35)
    kind, data = sc.encode_places(kept, 1001)
    for damaged, count, size in [(data[:-2], len(kept), 1001), (data, len(kept) - 1, 1001), (data, len(kept), 100)]:
        with pytest.raises(ValueError, match="not a message"):
            sc.decode_places(kind, damaged, count, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.6, 1.0])
@pytest.mark.parametrize("bits", [2, 4, 9, 16])
def test_buckets_come_back_one_after_the_other(size, share, bits):
    values = normal(size)
    kept = sc.top_k(torch.from_numpy(values), round(share * size)).numpy() if share else np.zeros(0, np.int64)
    quantized = sc.quantize(values[kept], bits)
    data = sc.encode(kept, quantized, size)
    for tail in (np.zeros(0, np.uint8), data):
        indices, found, used = sc.decode(np.concatenate([data, tail]), size)
        assert used == len(data)
        assert indices.tolist() == kept.tolist()
        np.testing.assert_array_equal(found, quantized.values())
