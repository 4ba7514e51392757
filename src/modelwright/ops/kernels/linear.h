// Linear layers of a few rows or many, with weights as they are stored; a row's result does not depend on its neighbors.

#pragma once

#include <type_traits>

#include "nibbles.h"
#include "products.h"

namespace {

// Of weights; kInt4 and kInt4Codes: codes of four bits, with FP32 and with INT8 activations.
enum Format : int64_t { kFp32, kBf16, kInt8, kInt4, kInt4Codes };

// A linear layer. row_sum: of INT8 rows, the sum of the codes. bias: null for none. Where activations are codes, too,
// scales are divided by the largest of them.
struct Matrix {
  const void* weight;
  Grid grid;  // of INT8 rows the scale alone
  const int32_t* row_sum;
  const float* bias;
  int64_t outputs, inputs, format;
};

// Whether activations are stored in another form before they are multiplied.
inline bool is_encoded(const Matrix& by) { return by.format >= kInt8; }

// Bytes of a row's activations in that form.
inline int64_t code_step(int64_t width, int64_t format) {
  if (format == kInt4) return up(width, kSplit) * sizeof(float);
  if (format == kInt4Codes)  // and a number of 32 bits for each eight
    return num_split_codes(width) * 3 / 2;
  return up(width, kCodes);
}

constexpr float kLargestCode = 127.0f;  // of an activation
constexpr float kTiniest = 1e-12f;      // ops/int_grid.py

// What layers multiply. codes: the numbers of each row as the weights' format wants them; peaks: the largest of each row,
// by which its codes were divided.
struct Rows {
  const float* numbers;
  int8_t* codes;
  float* peaks;
  int64_t count, width;
};

float peak_of(const float* from, int64_t width) {
  Vector most[2] = {};
  each_vector(width, [&](int64_t at, int which, auto size) {
    most[which] = larger(magnitude(some(from + at, size)), most[which]);
  });
  float largest = kTiniest;
  for (int lane = 0; lane < kLanes; ++lane) largest = larger(most[1][lane], larger(most[0][lane], largest));
  return largest;
}

inline Integers rounded(Vector numbers, float peak) {
  const Vector magic = all(12582912.0f), scaled = numbers / peak * kLargestCode;
  const Vector within = scaled < kLargestCode ? scaled : all(kLargestCode);  // a NaN, too
  return __builtin_convertvector((within + magic) - magic, Integers);
}

inline Bytes narrowed(Integers codes) { return __builtin_convertvector(__builtin_convertvector(codes, Shorts), Bytes); }

// The numbers of a row in the form in which they are multiplied.
void encode(const Matrix& by, const Rows& in, int64_t row) {
  const float* const from = in.numbers + row * in.width;
  int8_t* const codes = in.codes + row * code_step(in.width, by.format);
  if (by.format == kInt4) return split(from, in.width, reinterpret_cast<float*>(codes));
  const float peak = in.peaks[row] = peak_of(from, in.width);
  if (by.format == kInt8)
    return each_vector(in.width, [&](int64_t at, int, auto size) {
      put(narrowed(rounded(some(from + at, size), peak) + kOffset), codes + at, size);
    });
  for (int64_t first = 0; first < in.width; first += kSplitCodes) {
    int8_t block[kSplitCodes] = {};
    each_vector(std::min<int64_t>(kSplitCodes, in.width - first), [&](int64_t at, int, auto size) {
      put(narrowed(rounded(some(from + first + at, size), peak)), block + at, size);
    });
    split_codes(block, codes + first, codes + num_split_codes(in.width) + first / 2);
  }
}

// What belongs to the outputs of a tile, once for each of its rows.
template <int outs, class V, class T>
inline V of_outputs(const T* from, int64_t num_outs) {
#ifdef __AVX512F__  // through memory, a reading would have to wait for writings of parts of it
  if (num_outs == outs && outs == 4)
    return (V)_mm512_broadcast_f32x4(_mm_loadu_ps(reinterpret_cast<const float*>(from)));
#endif
  T parts[kLanes];
  for (int at = 0; at < kLanes; at += outs)
    if (num_outs == outs)
      std::memcpy(parts + at, from, outs * sizeof(T));
    else
      for (int out = 0; out < outs; ++out) parts[at + out] = from[std::min<int64_t>(out, num_outs - 1)];
  V found;
  std::memcpy(&found, parts, sizeof found);
  return found;
}

// The largest numbers of a tile's rows, each once for each output.
template <int outs>
inline Vector peaks_of(const Rows& in, int64_t row, int64_t num_rows) {
  float peaks[kLanes];
  for (int at = 0; at < kLanes; ++at) peaks[at] = in.peaks[row + std::min<int64_t>(at / outs, num_rows - 1)];
  return load(peaks);
}

template <int outs>
inline Vector scaled(const Matrix& by, Vector sums, Vector peaks, int64_t, int64_t) {
  return by.format == kInt4Codes ? sums * peaks : sums;
}

template <int outs>
inline Vector scaled(const Matrix& by, Integers sums, Vector peaks, int64_t first, int64_t num_outs) {
  if (kOffset) sums -= kOffset * of_outputs<outs, Integers>(by.row_sum + first, num_outs);
  return __builtin_convertvector(sums, Vector) * of_outputs<outs, Vector>(by.grid.step + first, num_outs) * peaks;
}

// Puts the results of a tile where they belong; to: of its first row.
template <int outs, class Sums>
inline void finish(const Matrix& by, Sums sums, Vector peaks, int64_t first, int64_t num_outs, int64_t num_rows,
                   float* to) {
  Vector results = scaled<outs>(by, sums, peaks, first, num_outs);
  if (by.bias) results += of_outputs<outs, Vector>(by.bias + first, num_outs);
  float parts[kLanes];
  store(parts, results);
  to += first;
  for (int64_t number = 0; number < num_rows; ++number, to += by.outputs)
    if (num_outs == outs)
      std::memcpy(to, parts + number * outs, outs * sizeof(float));
    else
      std::memcpy(to, parts + number * outs, num_outs * sizeof(float));
}

template <int outs, class W, class N>
inline __attribute__((always_inline)) void tile(const Matrix& by, int64_t first, int64_t end, const Rows& in,
                                                const N* numbers, int64_t step, int64_t row, int64_t num_rows,
                                                float* to) {
  const N* rows[kLanes / outs];
  for (int r = 0; r < kLanes / outs; ++r) rows[r] = numbers + (row + std::min<int64_t>(r, num_rows - 1)) * step;
  const Vector peaks = by.format == kInt8 || by.format == kInt4Codes ? peaks_of<outs>(in, row, num_rows) : Vector{};
  const int64_t num_stored = std::is_same_v<W, Pair> ? (by.inputs + 1) / 2 : by.inputs;
  for (; first < end; first += outs) {
    const W* weights[outs];
    int64_t outputs[outs];
    for (int out = 0; out < outs; ++out) {
      outputs[out] = std::min(first + out, end - 1);
      weights[out] = static_cast<const W*>(by.weight) + outputs[out] * num_stored;
    }
    const int64_t num_outs = std::min<int64_t>(outs, end - first);
    const auto done = [&](auto sums) __attribute__((always_inline)) {
      finish<outs>(by, sums, peaks, first, num_outs, num_rows, to + row * by.outputs);
    };
    if constexpr (std::is_same_v<W, Pair>)
      done(pair_products<outs>(by.grid, outputs, weights, rows, by.inputs));
    else if constexpr (std::is_same_v<W, int8_t>)
      done(code_products<outs>(weights, rows, by.inputs));
    else
      done(products<outs>(weights, rows, by.inputs));
  }
}

template <class W, class N>
void multiply_outputs(const Matrix& by, int64_t first, int64_t end, const Rows& in, const N* numbers, int64_t step,
                      float* to) {
  for (int64_t row = 0; row < in.count;) {
    const int64_t left = in.count - row;
    if (left == 1)
      tile<kLanes, W>(by, first, end, in, numbers, step, row, 1, to);
    else if (left == 2)
      tile<kLanes / 2, W>(by, first, end, in, numbers, step, row, 2, to);
    else
      tile<kLanes / 4, W>(by, first, end, in, numbers, step, row, std::min<int64_t>(4, left), to);
    row += 4;
  }
}

constexpr int64_t kFewestWidened = 8;   // rows from which it is faster to widen weights once for all of them
constexpr int64_t kMostWidened = 8192;  // inputs that are kept in FP32 for a tile's outputs

// 4-bit weights with FP32 activations of many rows. Sums are taken in the order of `pair_products`.
void multiply_widened(const Matrix& by, int64_t first, int64_t end, const Rows& in, float* to) {
  constexpr int outs = kLanes / 4;
  float widened[outs][kMostWidened];
  const int64_t count = up(by.inputs, kSplit), num_stored = (by.inputs + 1) / 2;
  for (; first < end; first += outs) {
    const int64_t num_outs = std::min<int64_t>(outs, end - first);
    const float* weights[outs];
    for (int64_t out = 0; out < outs; ++out) weights[out] = widened[std::min(out, num_outs - 1)];
    for (int64_t out = 0; out < num_outs; ++out) {
      const int64_t output = first + out;
      widen(by.grid, output, static_cast<const Pair*>(by.weight) + output * num_stored, by.inputs, widened[out]);
    }
    for (int64_t row = 0; row < in.count; row += 4) {
      const int64_t num_rows = std::min<int64_t>(4, in.count - row);
      const float* rows[4];
      for (int64_t r = 0; r < 4; ++r)
        rows[r] = reinterpret_cast<const float*>(in.codes) + (row + std::min(r, num_rows - 1)) * count;
      finish<outs>(by, products<outs>(weights, rows, count), Vector{}, first, num_outs, num_rows,
                   to + row * by.outputs);
    }
  }
}

#ifdef PACKS_INT8_WEIGHTS

// Number j of vector i becomes number i of vector j.
inline void transpose(Integers (&x)[kLanes]) {
  constexpr std::make_integer_sequence<int, kLanes> lanes{};
  for (int done = 1; done < kLanes; done *= 2) {
    Integers next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zipped<0>(x[i], x[i + kLanes / 2], lanes);
      next[2 * i + 1] = zipped<1>(x[i], x[i + kLanes / 2], lanes);
    }
    std::memcpy(x, next, sizeof next);
  }
}

constexpr int64_t kFewestPacked = 24;  // rows for which weights are packed, and at least one for so many inputs:
constexpr int64_t kInputsOfRow = 16;   // fewer rows gain less by it than packing takes
constexpr int64_t kMostPacked = 8192;  // inputs whose packed weights a thread's stack holds
constexpr int kPackedRows = kLanes / 2;  // at once: their sums fill half of the registers

// INT8 weights with many rows. Packed, four codes of each of kLanes outputs lie next to each other, so that the numbers of
// a vector of sums belong to different outputs, and none has to be summed across a vector. Sums of codes are exact in any
// order, so rows have the bits that they have among few others. Without VNNI, one row after the other is faster (AVX2).
void multiply_packed(const Matrix& by, int64_t first, int64_t end, const Rows& in, float* to) {
  Integers packed[kMostPacked / 4][2];
  const int64_t step = code_step(in.width, by.format), num_groups = up(by.inputs, kCodes) / 4;
  for (; first < end; first += 2 * kLanes) {
    for (int half = 0; half < 2; ++half)
      for (int64_t at = 0; at < by.inputs; at += kCodes) {
        Integers codes[kLanes];
        for (int out = 0; out < kLanes; ++out) {
          const int64_t output = std::min(first + half * kLanes + out, end - 1);
          const int8_t* const from = static_cast<const int8_t*>(by.weight) + output * by.inputs + at;
          codes[out] = (Integers)(at + kCodes <= by.inputs ? codes_at(from) : codes_at(from, by.inputs - at));
        }
        transpose(codes);
        for (int i = 0; i < kLanes; ++i) packed[at / 4 + i][half] = codes[i];
      }
    for (int64_t row = 0; row < in.count; row += kPackedRows) {
      const int64_t num_rows = std::min<int64_t>(kPackedRows, in.count - row);
      const int8_t* rows[kPackedRows];
      for (int r = 0; r < kPackedRows; ++r) rows[r] = in.codes + (row + std::min<int64_t>(r, num_rows - 1)) * step;
      Integers sums[kPackedRows][2] = {};
      for (int64_t group = 0; group < num_groups; ++group) {
        const CodeVector left = held((CodeVector)packed[group][0]), right = held((CodeVector)packed[group][1]);
#pragma GCC unroll 8
        for (int r = 0; r < kPackedRows; ++r) {
          int32_t four;
          std::memcpy(&four, rows[r] + 4 * group, 4);
          const CodeVector numbers = held((CodeVector)(four - Integers{}));
          sums[r][0] = add_products(sums[r][0], numbers, left);
          sums[r][1] = add_products(sums[r][1], numbers, right);
        }
      }
      // All of them, because sums that are chosen by a variable would be in memory throughout.
#pragma GCC unroll 8
      for (int r = 0; r < kPackedRows; ++r)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const int64_t output = first + half * kLanes;
          if (r < num_rows && output < end)
            finish<kLanes>(by, sums[r][half], all(in.peaks[row + r]), output, std::min<int64_t>(kLanes, end - output), 1,
                           to + (row + r) * by.outputs);
        }
    }
  }
}

inline bool is_packed(const Matrix& by, int64_t num_rows) {
  return num_rows >= std::max(kFewestPacked, by.inputs / kInputsOfRow) && by.inputs <= kMostPacked;
}

#endif

// Outputs first..end of all rows, to [rows][outputs].
void multiply_outputs(const Matrix& by, int64_t first, int64_t end, const Rows& in, float* to) {
  const int64_t step = code_step(in.width, by.format);
#ifdef PACKS_INT8_WEIGHTS
  if (by.format == kInt8 && is_packed(by, in.count)) return multiply_packed(by, first, end, in, to);
#endif
  if (by.format == kInt8)
    multiply_outputs<int8_t, int8_t>(by, first, end, in, in.codes, step, to);
  else if (by.format == kInt4 && in.count >= kFewestWidened && by.inputs <= kMostWidened)
    multiply_widened(by, first, end, in, to);
  else if (by.format == kInt4)
    multiply_outputs<Pair, float>(by, first, end, in, reinterpret_cast<const float*>(in.codes), step / 4, to);
  else if (by.format == kInt4Codes)
    multiply_outputs<Pair, int8_t>(by, first, end, in, in.codes, step, to);
  else if (by.format == kBf16)
    multiply_outputs<Bf16>(by, first, end, in, in.numbers, in.width, to);
  else
    multiply_outputs<float>(by, first, end, in, in.numbers, in.width, to);
}

// Threads take so many outputs at a time.
constexpr int64_t kOutputs = 2 * kLanes;

inline int64_t num_pieces(const Matrix& by) { return (by.outputs + kOutputs - 1) / kOutputs; }

}  // namespace
