// Kernels that go over the rows of a matrix: norms, rotations, the gated activation, INT8 codes and their scaling.

#pragma once

#include "vectors.h"

namespace {

// In [0, 1), by the number of an element and a seed (Wellons' hash of 32 bits).
inline Vector uniform(uint32_t first, uint32_t seed, uint32_t more) {
  const Bits lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Bits x = (lanes + first) * 0x9e3779b9u + seed;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = ((x ^ (x >> 15)) + more) * 0x846ca68bu;
  x ^= x >> 16;
  return __builtin_convertvector((Integers)(x >> 8), Vector) * 0x1p-24f;
}

// Codes of numbers that were divided by their scale: to the nearest, ties to even, or at random.
inline Bytes code(Vector scaled, bool stochastic, uint32_t number, uint32_t seed, uint32_t more) {
  const Vector magic = all(12582912.0f);
  Vector rounded = (scaled + magic) - magic;
  if (stochastic) {
    const Vector shifted = scaled + uniform(number, seed, more);
    rounded = (shifted + magic) - magic;
    rounded = rounded > shifted ? rounded - 1.0f : rounded;  // floor
  }
  rounded = rounded > all(127.0f) ? all(127.0f) : rounded;
  rounded = rounded < all(-127.0f) ? all(-127.0f) : rounded;
  return __builtin_convertvector(__builtin_convertvector(rounded, Integers), Bytes);
}

constexpr float kSmallest = 0x1p-100f;

template <class T>
void quantize(const T* x, int64_t num_rows, int64_t num_columns, bool by_column, bool stochastic, uint64_t seed,
              int8_t* codes, float* scales, float* scratch, int threads) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  const int64_t padded = up(num_columns, kLanes);
  float* const maxima = scratch + threads * padded;  // scratch: [threads + 1][padded]
  if (by_column) std::fill(scratch, maxima + padded, 0.0f);
#pragma omp parallel num_threads(threads)
  {
    if (by_column) {
      float* const own = scratch + omp_get_thread_num() * padded;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t at = 0; at < num_columns; at += kLanes)
          store(own + at, larger(magnitude(some(x + row * num_columns + at, num_columns - at)), load(own + at)));
#pragma omp single
      {
        for (float* one = scratch; one < maxima; one += padded)
          for (int64_t at = 0; at < padded; at += kLanes) store(maxima + at, larger(load(one + at), load(maxima + at)));
        for (int64_t at = 0; at < padded; ++at) maxima[at] = std::max(maxima[at] / 127.0f, kSmallest);
        std::copy(maxima, maxima + num_columns, scales);
      }
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* const from = x + row * num_columns;
      float scale = 0.0f;
      if (!by_column) {
        Vector most{};
        for (int64_t at = 0; at < num_columns; at += kLanes) most = larger(magnitude(some(from + at, num_columns - at)), most);
        for (int lane = 0; lane < kLanes; ++lane) scale = larger(most[lane], scale);
        scales[row] = scale = std::max(scale / 127.0f, kSmallest);
      }
      for (int64_t at = 0; at < num_columns; at += kLanes) {
        const Vector divisor = by_column ? load(maxima + at) : all(scale);
        const Vector scaled = some(from + at, num_columns - at) / divisor;
        const uint32_t number = static_cast<uint32_t>(row * num_columns + at);
        put(code(scaled, stochastic, number, low, high), codes + row * num_columns + at, num_columns - at);
      }
    }
  }
}

template <class T>
void rescale(const int32_t* sums, int64_t num_rows, int64_t num_columns, const float* of_rows, const float* of_columns,
             T* to, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t column = 0; column < num_columns; ++column)
      narrow(static_cast<float>(sums[row * num_columns + column]) * of_rows[row] * of_columns[column],
             to + row * num_columns + column);
}

template <class X, class Y>
void norm_forward(const X* x, const float* weight, int64_t num_rows, int64_t width, float eps, Y* y, float* inverse,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < num_rows; ++row) {
    const X* const from = x + row * width;
    Vector squares{};
    for (int64_t at = 0; at < width; at += kLanes) {
      const Vector value = some(from + at, width - at);
      squares += value * value;
    }
    const float factor = inverse[row] = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (int64_t at = 0; at < width; at += kLanes)
      put(some(from + at, width - at) * factor * some(weight + at, width - at), y + row * width + at, width - at);
  }
}

// of_weight: [threads][width rounded up to kLanes], zeros, to be summed.
template <class X, class Y>
void norm_backward(const Y* grad, const X* x, const float* weight, const float* inverse, int64_t num_rows,
                   int64_t width, X* of_x, float* of_weight, int threads) {
#pragma omp parallel num_threads(threads)
  {
    float* const own = of_weight + omp_get_thread_num() * up(width, kLanes);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t first = row * width;
      const float factor = inverse[row];
      Vector along{};
      for (int64_t at = 0; at < width; at += kLanes) {
        const int64_t count = width - at;
        const Vector unit = some(x + first + at, count) * factor, product = some(grad + first + at, count) * unit;
        store(own + at, load(own + at) + product);
        along += product * some(weight + at, count);
      }
      const float mean = sum(along) / width;
      for (int64_t at = 0; at < width; at += kLanes) {
        const int64_t count = width - at;
        const Vector unit = some(x + first + at, count) * factor;
        const Vector weighted = some(grad + first + at, count) * some(weight + at, count);
        put((weighted - unit * mean) * factor, of_x + first + at, count);
      }
    }
  }
}

inline Vector logistic(Vector x) {
  const Integers is_zero = x < all(-88.0f);
  return is_zero ? Vector{} : 1.0f / (1.0f + exponential(is_zero ? Vector{} : -x));
}

template <class T>
void swiglu_forward(const T* gate, const T* up, int64_t count, T* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t at = 0; at < count; at += kLanes) {
    const Vector g = some(gate + at, count - at);
    put(g * logistic(g) * some(up + at, count - at), out + at, count - at);
  }
}

template <class T>
void swiglu_backward(const T* grad, const T* gate, const T* up, int64_t count, T* of_gate, T* of_up, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t at = 0; at < count; at += kLanes) {
    const int64_t left = count - at;
    const Vector g = some(gate + at, left), dy = some(grad + at, left), share = logistic(g);
    put(dy * some(up + at, left) * share * (1.0f + g * (1.0f - share)), of_gate + at, left);
    put(dy * g * share, of_up + at, left);
  }
}

// Rotates by the angles of cos and sin, [tokens][width], the sines of the first half with the minus sign; or back.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads, int64_t width,
            bool back, T* y, int threads) {
  const int64_t half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float *const c = cos + token * width, *const s = sin + token * width;
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t first = (token * num_heads + head) * width;
      for (int64_t at = 0; at < half; at += kLanes) {
        const Vector low = some(x + first + at, kLanes), high = some(x + first + half + at, kLanes);
        const Vector of_low = load(s + at), of_high = load(s + half + at);
        put(low * load(c + at) + high * (back ? of_high : of_low), y + first + at, kLanes);
        put(high * load(c + half + at) + low * (back ? of_low : of_high), y + first + half + at, kLanes);
      }
    }
  }
}

}  // namespace
