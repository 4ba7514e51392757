// Products with weights of four bits, two to a byte, which are read in place and widened in registers. The byte has the
// codes, plus 8, of two neighboring inputs, the first in its low half. Activations are therefore split, block by block,
// into those of even and of odd inputs, so that the two halves of a vector of bytes meet the right ones as they are.
// A code q of a group stands for (q - zero) * step.

#pragma once

#include "products.h"

namespace {

struct Pair {
  uint8_t codes;
};

// Steps and zero points of all groups, [outputs][groups]. zero: null where all are zero. group: inputs of one, a multiple
// of 32, or all inputs.
struct Grid {
  const float *step, *zero;
  int64_t groups, group;
};

constexpr int64_t kSplit = 2 * kLanes;       // FP32 activations of a block
constexpr int64_t kSplitCodes = 2 * kCodes;  // and INT8 ones
constexpr int64_t kLine = 128;               // weights of a line of the cache
constexpr int kShift = 8;                    // what is added to a code of the weight before it is stored

// Every second number of two vectors.
template <int odd, int... at>
inline Vector alternate(Vector left, Vector right, std::integer_sequence<int, at...>) {
#ifdef __clang__
  return __builtin_shufflevector(left, right, 2 * at + odd...);
#else
  return __builtin_shuffle(left, right, Integers{2 * at + odd...});
#endif
}

// FP32 activations: in each block the even ones, then the odd ones; zeros at the end.
inline void split(const float* from, int64_t width, float* to) {
  for (int64_t at = 0; at < width; at += kSplit) {
    float padded[kSplit] = {};
    const float* block = from + at;
    if (at + kSplit > width) {
      std::memcpy(padded, block, (width - at) * sizeof(float));
      block = padded;
    }
    const Vector left = load(block), right = load(block + kLanes);
    constexpr std::make_integer_sequence<int, kLanes> lanes{};
    store(to + at, alternate<0>(left, right, lanes));
    store(to + at + kLanes, alternate<1>(left, right, lanes));
  }
}

// The values of a group of one output's weights. AVX-512 looks a code's value up in a register.
struct Values {
#ifdef __AVX512F__
  Vector of_code;
  Values() = default;
  Values(float step, float zero)
      : of_code((Vector{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} - zero) * step) {}
#else
  Vector step, zero;
  Values() = default;
  Values(float own_step, float own_zero) : step(all(own_step)), zero(all(own_zero + kShift)) {}
#endif
  // Of the weights of even and of odd inputs.
  inline __attribute__((always_inline)) void widen(const Pair* from, Vector& even, Vector& odd) const {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    even = (Vector)_mm512_permutexvar_ps(bytes, (__m512)of_code);
    odd = (Vector)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), (__m512)of_code);
#else
#if defined(__AVX2__)
    const Integers bytes = (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    Integers bytes;
    for (int lane = 0; lane < kLanes; ++lane) bytes[lane] = from[lane].codes;
#endif
    even = (__builtin_convertvector(bytes & 15, Vector) - zero) * step;
    odd = (__builtin_convertvector(bytes >> 4, Vector) - zero) * step;
#endif
  }
};

inline Values values_of(const Grid& grid, int64_t output, int64_t group) {
  const int64_t at = output * grid.groups + group;
  return Values(grid.step[at], grid.zero ? grid.zero[at] : 0.0f);
}

// The bytes of a row's last block, which may end before it.
struct Padded {
  Pair bytes[kCodes] = {};
  Padded(const Pair* from, int64_t count) { std::memcpy(bytes, from, count); }
};

// A tile as in `products`; rows: split activations; outputs: which rows of weights these are.
template <int outs>
inline __attribute__((always_inline)) Vector pair_products(const Grid& grid, const int64_t (&outputs)[outs],
                                                           const Pair* const (&weights)[outs],
                                                           const float* const (&rows)[kLanes / outs], int64_t count) {
  Vector sums[kLanes] = {};
  const int64_t whole = count / kSplit * kSplit;
  const auto add = [&](const Values& values, int out, const Pair* from, int64_t at) __attribute__((always_inline)) {
    Vector even, odd;
    values.widen(from, even, odd);
#pragma GCC unroll 16
    for (int row = 0; row < kLanes / outs; ++row) {
      Vector& total = sums[row * outs + out];
      total = fused(odd, load(rows[row] + at + kLanes), fused(even, load(rows[row] + at), total));
    }
  };
  const auto add_group = [&](int64_t group, int first, auto num_outs) __attribute__((always_inline)) {
    const int64_t start = group * grid.group, end = std::min(start + grid.group, count);
    Values values[num_outs.value];
#pragma GCC unroll 16
    for (int i = 0; i < num_outs.value; ++i) values[i] = values_of(grid, outputs[first + i], group);
    for (int64_t at = start; at < std::min(end, whole); at += kSplit)
#pragma GCC unroll 16
      for (int i = 0; i < num_outs.value; ++i) {
        if (kLanes == 16 && at % kLine == 0)  // on AVX2 it does not pay
          fetch_ahead(weights[first] + (at * num_outs.value + i * kLine) / 2);
        add(values[i], first + i, weights[first + i] + at / 2, at);
      }
    if (end > whole)
#pragma GCC unroll 16
      for (int i = 0; i < num_outs.value; ++i)
        add(values[i], first + i, Padded(weights[first + i] + whole / 2, (count + 1) / 2 - whole / 2).bytes, whole);
  };
  constexpr int together = outs == kLanes ? 4 : outs;  // some chains of sums at once, and few streams of memory
#pragma GCC unroll 16
  for (int first = 0; first < outs; first += together)
    for (int64_t group = 0; group < grid.groups; ++group)
      add_group(group, first, std::integral_constant<int, together>{});
  return sums_of(sums);
}

// The values of one output's weights, in the order of split activations.
inline void widen(const Grid& grid, int64_t output, const Pair* from, int64_t count, float* to) {
  for (int64_t at = 0; at < count; at += kSplit) {
    Vector even, odd;
    const Values values = values_of(grid, output, grid.groups == 1 ? 0 : at / grid.group);
    if (at + kSplit <= count)
      values.widen(from + at / 2, even, odd);
    else
      values.widen(Padded(from + at / 2, (count + 1) / 2 - at / 2).bytes, even, odd);
    store(to + at, even);
    store(to + at + kLanes, odd);
  }
}

inline int64_t num_split_codes(int64_t width) { return up(width, kSplitCodes); }

typedef uint8_t PairVector __attribute__((vector_size(kCodes), aligned(1)));

inline Integers integers_at(const void* from) {
  Integers found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// INT8 activations of a block: the even ones, then the odd ones; and where the sums of products begin, which takes
// `kShift` off the weights again: minus 8 times the sum of the eight activations of a lane.
inline void split_codes(const int8_t* block, int8_t* to, void* starts) {
  for (int64_t at = 0; at < kCodes; ++at) {
    to[at] = block[2 * at];
    to[kCodes + at] = block[2 * at + 1];
  }
  const CodeVector eights = CodeVector{} + kShift;
  const Integers sums = -add_products(add_products(Integers{}, eights, codes_at(to)), eights, codes_at(to + kCodes));
  std::memcpy(starts, &sums, sizeof sums);
}

// Which groups the lanes of a block belong to; a lane stands for eight inputs. Groups are powers of two, or all inputs.
struct Lanes {
  int64_t first;  // group
  Integers places;
  bool is_one_group;
  int64_t left;  // groups

  Lanes(const Grid& grid, int64_t at) : first(0), places{}, is_one_group(true), left(1) {
    if (grid.groups == 1) return;
    const int shift = __builtin_ctzll(grid.group);
    first = at >> shift;
    left = grid.groups - first;
    is_one_group = grid.group >= kSplitCodes;
    for (int lane = 0; lane < kLanes; ++lane) places[lane] = lane;
    places >>= shift - 3;
  }

  // One of them of an output, whose numbers begin at `from`, for each lane.
  inline __attribute__((always_inline)) Vector of(const float* from) const {
    if (is_one_group) return all(from[first]);
#ifdef __AVX512F__
    const __mmask16 mask = left < 4 ? (1 << left) - 1 : 15;
    return (Vector)_mm512_permutexvar_ps((__m512i)places, _mm512_maskz_loadu_ps(mask, from + first));
#else
    float parts[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) parts[lane] = from[first + std::min<int64_t>(places[lane], left - 1)];
    return load(parts);
#endif
  }
};

template <int outs, bool has_zeros>
inline __attribute__((always_inline)) Vector code_pair_products(const Grid& grid, const int64_t (&outputs)[outs],
                                                                const Pair* const (&weights)[outs],
                                                                const int8_t* const (&rows)[kLanes / outs],
                                                                int64_t count) {
  Vector sums[kLanes] = {};
  const int64_t starts = num_split_codes(count);
  const auto add = [&](const Lanes& lanes, int out, int64_t at, CodeVector codes) __attribute__((always_inline)) {
    const PairVector both = (PairVector)codes;
    const CodeVector even = (CodeVector)(both & 15), odd = (CodeVector)(both >> 4);
    const Vector step = lanes.of(grid.step + outputs[out] * grid.groups);
    const Vector zero = has_zeros ? lanes.of(grid.zero + outputs[out] * grid.groups) / float{kShift} : Vector{};
#pragma GCC unroll 16
    for (int row = 0; row < kLanes / outs; ++row) {
      const Integers start = integers_at(rows[row] + starts + at / 2);
      const Integers dots =
          add_products(add_products(start, even, codes_at(rows[row] + at)), odd, codes_at(rows[row] + at + kCodes));
      Vector found = __builtin_convertvector(dots, Vector);
      if (has_zeros) found = fused(zero, __builtin_convertvector(start, Vector), found);
      sums[row * outs + out] = fused(found, step, sums[row * outs + out]);
    }
  };
  const auto add_block = [&](int first, int num_outs, int64_t at, auto is_whole,
                             auto codes_of) __attribute__((always_inline)) {
    const Lanes lanes(grid, at);
#pragma GCC unroll 16
    for (int i = 0; i < num_outs; ++i) {
      if constexpr (is_whole.value) fetch_ahead(weights[first] + at / 2 * num_outs + i * kCodes);
      add(lanes, first + i, at, codes_of(reinterpret_cast<const int8_t*>(weights[first + i] + at / 2)));
    }
  };
  constexpr int together = outs == kLanes ? 4 : outs;
#pragma GCC unroll 16
  for (int first = 0; first < outs; first += together) {
    int64_t at = 0;
    for (; at + kSplitCodes <= count; at += kSplitCodes)
      add_block(first, together, at, std::true_type{}, [](const int8_t* from) { return codes_at(from); });
    if (at < count)
      add_block(first, together, at, std::false_type{},
                [&](const int8_t* from) { return codes_at(from, (count + 1) / 2 - at / 2); });
  }
  return sums_of(sums);
}

// The same for INT8 activations; what the rows were divided by is still missing.
template <int outs>
inline __attribute__((always_inline)) Vector pair_products(const Grid& grid, const int64_t (&outputs)[outs],
                                                           const Pair* const (&weights)[outs],
                                                           const int8_t* const (&rows)[kLanes / outs], int64_t count) {
  return grid.zero ? code_pair_products<outs, true>(grid, outputs, weights, rows, count)
                   : code_pair_products<outs, false>(grid, outputs, weights, rows, count);
}

}  // namespace
