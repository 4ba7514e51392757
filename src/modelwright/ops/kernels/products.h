// Products of a few rows with weights as PyTorch stores them, [outputs][inputs], in FP32, BF16 or INT8: nothing is packed
// or copied. Weights of four bits are in `nibbles.h`. A sum is taken in one order whatever the numbers of rows, outputs and threads, so that a row's result does
// not depend on its neighbors.

#pragma once

#include <utility>

#include "vectors.h"

namespace {

// Where number `at` comes from when the sums of neighboring pairs of units of two vectors are put side by side: of those
// in a group of four numbers for units of one, of those in the whole vector for units of four. odd: the pair's second.
constexpr int place(int unit, int odd, int at) {
  const int group = unit == 1 ? 4 : kLanes, half = group / unit / 2, number = at % group / unit;
  const int source = 2 * (number % half) + odd;
  return (number < half ? 0 : kLanes) + at / group * group + source * unit + at % unit;
}

template <int unit, int odd, class V, int... at>
inline V picked(V left, V right, std::integer_sequence<int, at...>) {
#ifdef __clang__
  return __builtin_shufflevector(left, right, place(unit, odd, at)...);
#else
  return __builtin_shuffle(left, right, Integers{place(unit, odd, at)...});
#endif
}

template <int unit, class V>
inline V paired(V left, V right) {
  constexpr std::make_integer_sequence<int, kLanes> lanes{};
  return picked<unit, 0>(left, right, lanes) + picked<unit, 1>(left, right, lanes);
}

// The numbers of two vectors in turn, of their first halves or, with odd, of their second ones.
template <int odd, class V, int... at>
inline V zipped(V left, V right, std::integer_sequence<int, at...>) {
#ifdef __clang__
  return __builtin_shufflevector(left, right, (at % 2 * kLanes + odd * kLanes / 2 + at / 2)...);
#else
  return __builtin_shuffle(left, right, Integers{(at % 2 * kLanes + odd * kLanes / 2 + at / 2)...});
#endif
}

// The sums of the numbers of each vector, side by side; each sum is taken in the same order.
template <class V>
inline V sums_of(const V (&x)[kLanes]) {
  V quarters[kLanes / 4];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes / 4; ++i)
    quarters[i] = paired<1>(paired<1>(x[4 * i], x[4 * i + 1]), paired<1>(x[4 * i + 2], x[4 * i + 3]));
  if constexpr (kLanes == 4) return quarters[0];
  if constexpr (kLanes == 8) return paired<4>(quarters[0], quarters[1]);
  if constexpr (kLanes == 16)
    return paired<4>(paired<4>(quarters[0], quarters[1]), paired<4>(quarters[2], quarters[3]));
}

// Keeps a vector in a register: GCC would read it again from memory for each of its uses, which costs half of the speed.
template <class V>
inline V held(V value) {
#if defined(__x86_64__)
  __asm__("" : "+v"(value));
#elif defined(__aarch64__)
  __asm__("" : "+w"(value));
#endif
  return value;
}

constexpr int64_t kAhead = 16384;

// Brings bytes of weights into the second cache before they are multiplied. Tiles of several outputs read as many rows of
// weights in turn, which the processor takes for streams of their own, too short to read ahead of: memory delivers a third
// of its rate. All rows of a tile lie next to each other, so `at` walks through them as one stream.
inline __attribute__((always_inline)) void fetch_ahead(const void* at) {
  __builtin_prefetch(static_cast<const char*>(at) + kAhead, 0, 2);
}

// Whether one row is multiplied with one output's weights after the other, which memory delivers up to twice as fast as
// those of all outputs in turn; long rows of FP32 come faster in turn (AMD EPYC with AVX-512). The sums are the same.
template <class W>
inline bool is_read_by_output(int64_t count) {
  return sizeof(W) < 4 || count <= 512;
}

// A tile of kLanes products: `outs` rows of weights times kLanes / outs rows of numbers. Product number row * outs + out
// of the result is that of a row and an output.
template <int outs, class W>
inline __attribute__((always_inline)) Vector products(const W* const (&weights)[outs],
                                                      const float* const (&rows)[kLanes / outs], int64_t count) {
  Vector sums[kLanes] = {};
  if (outs == kLanes && is_read_by_output<W>(count)) {
#pragma GCC unroll 16
    for (int out = 0; out < outs; ++out) {
      int64_t at = 0;
      for (; at + kLanes <= count; at += kLanes)
        sums[out] = fused(some(weights[out] + at, Whole{}), some(rows[0] + at, Whole{}), sums[out]);
      const Part rest{count - at};
      if (at < count) sums[out] = fused(some(weights[out] + at, rest), some(rows[0] + at, rest), sums[out]);
    }
    return sums_of(sums);
  }
  const auto add = [&](int64_t at, auto size) __attribute__((always_inline)) {
    Vector numbers[kLanes / outs];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes / outs; ++row) numbers[row] = held(some(rows[row] + at, size));
#pragma GCC unroll 16
    for (int out = 0; out < outs; ++out) {
      if (outs == kLanes / 4) fetch_ahead(weights[0] + at * outs + out * kLanes);  // with fewer rows it does not pay
      const Vector weight = held(some(weights[out] + at, size));
#pragma GCC unroll 16
      for (int row = 0; row < kLanes / outs; ++row)
        sums[row * outs + out] = fused(weight, numbers[row], sums[row * outs + out]);
    }
  };
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) add(at, Whole{});
  if (at < count) add(at, Part{count - at});
  return sums_of(sums);
}

// INT8: four products to a number of the sum. Codes of rows are stored with an offset where the instructions multiply
// unsigned by signed bytes. Without VNNI these add two products in 16 bits, which weights within 64 do not overflow.
constexpr int kCodes = 4 * kLanes;
typedef int8_t CodeVector __attribute__((vector_size(kCodes), aligned(1)));

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define PACKS_INT8_WEIGHTS  // for many rows, see `multiply_packed`
constexpr int kOffset = 128;
inline Integers add_products(Integers sum, CodeVector row, CodeVector weight) {
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)weight);
}
#elif defined(__AVX512BW__)
constexpr int kOffset = 128;
inline Integers add_products(Integers sum, CodeVector row, CodeVector weight) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)row, (__m512i)weight);
  return sum + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kOffset = 128;
inline Integers add_products(Integers sum, CodeVector row, CodeVector weight) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)row, (__m256i)weight);
  return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kOffset = 0;
inline Integers add_products(Integers sum, CodeVector row, CodeVector weight) {
  return (Integers)vdotq_s32((int32x4_t)sum, (int8x16_t)row, (int8x16_t)weight);
}
#else
constexpr int kOffset = 0;
inline Integers add_products(Integers sum, CodeVector row, CodeVector weight) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 4 * lane; i < 4 * lane + 4; ++i) sum[lane] += static_cast<int32_t>(row[i]) * weight[i];
  return sum;
}
#endif

inline CodeVector codes_at(const void* from) {
  CodeVector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// The first of them, zeros after them.
inline CodeVector codes_at(const int8_t* from, int64_t count) {
#ifdef __AVX512BW__  // reading through memory would have to wait for the writing of parts
  return (CodeVector)_mm512_maskz_loadu_epi8((__mmask64{1} << count) - 1, from);
#else
  int8_t padded[kCodes] = {};
  std::memcpy(padded, from, count);
  return codes_at(padded);
#endif
}

template <int outs>
inline __attribute__((always_inline)) Integers code_products(const int8_t* const (&weights)[outs],
                                                             const int8_t* const (&rows)[kLanes / outs],
                                                             int64_t count) {
  Integers sums[kLanes] = {};
  if (outs == kLanes) {  // as `is_read_by_output`
#pragma GCC unroll 16
    for (int out = 0; out < outs; ++out) {
      int64_t at = 0;
      for (; at + kCodes <= count; at += kCodes)
        sums[out] = add_products(sums[out], codes_at(rows[0] + at), codes_at(weights[out] + at));
      if (at < count) sums[out] = add_products(sums[out], codes_at(rows[0] + at), codes_at(weights[out] + at, count - at));
    }
    return sums_of(sums);
  }
  const auto add = [&](int64_t at, auto weight_at) __attribute__((always_inline)) {
    CodeVector numbers[kLanes / outs];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes / outs; ++row) numbers[row] = held(codes_at(rows[row] + at));
#pragma GCC unroll 16
    for (int out = 0; out < outs; ++out) {
      fetch_ahead(weights[0] + at * outs + out * kCodes);
      const CodeVector weight = held(weight_at(weights[out] + at));
#pragma GCC unroll 16
      for (int row = 0; row < kLanes / outs; ++row)
        sums[row * outs + out] = add_products(sums[row * outs + out], numbers[row], weight);
    }
  };
  int64_t at = 0;
  for (; at + kCodes <= count; at += kCodes) add(at, [](const int8_t* from) { return codes_at(from); });
  if (at < count) add(at, [&](const int8_t* from) { return codes_at(from, count - at); });
  return sums_of(sums);
}

}  // namespace
