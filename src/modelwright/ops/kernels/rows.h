// Kernels that go over the rows of a matrix: norms, rotations, the gated activation, INT8 codes and their scaling.

#pragma once

#include "vectors.h"

namespace {

// In [0, 1), by the number of an element and a seed (Wellons' hash of 32 bits).
inline Vector uniform(uint32_t first, uint32_t seed, uint32_t more) {
  Bits lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
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
  const Integers integers = __builtin_convertvector(rounded, Integers);
  return __builtin_convertvector(__builtin_convertvector(integers, Shorts), Bytes);  // by number, in one step
}

constexpr float kSmallest = 0x1p-100f;

template <class T>
void quantize(const T* x, int64_t num_rows, int64_t num_columns, bool by_column, bool stochastic, uint64_t seed,
              int8_t* codes, float* scales, float* scratch, int threads) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  float* const maxima = scratch + threads * num_columns;  // scratch: [threads + 1][num_columns]
  if (by_column) std::fill(scratch, maxima + num_columns, 0.0f);
#pragma omp parallel num_threads(threads)
  {
    if (by_column) {
      float* const own = scratch + omp_get_thread_num() * num_columns;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row)
        each_vector(num_columns, [&](int64_t at, int, auto size) {
          put(larger(magnitude(some(x + row * num_columns + at, size)), some(own + at, size)), own + at, size);
        });
#pragma omp single
      {
        for (float* one = scratch; one < maxima; one += num_columns)
          for (int64_t at = 0; at < num_columns; ++at) maxima[at] = larger(one[at], maxima[at]);
        for (int64_t at = 0; at < num_columns; ++at) maxima[at] = std::max(maxima[at] / 127.0f, kSmallest);
        std::copy(maxima, maxima + num_columns, scales);
      }
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* const from = x + row * num_columns;
      float scale = 0.0f;
      if (!by_column) {
        Vector most[2] = {};
        each_vector(num_columns, [&](int64_t at, int which, auto size) {
          most[which] = larger(magnitude(some(from + at, size)), most[which]);
        });
        for (int lane = 0; lane < kLanes; ++lane) scale = larger(most[1][lane], larger(most[0][lane], scale));
        scales[row] = scale = std::max(scale / 127.0f, kSmallest);
      }
      each_vector(num_columns, [&](int64_t at, int, auto size) {
        const Vector divisor = by_column ? some(maxima + at, size) : all(scale);
        const uint32_t number = static_cast<uint32_t>(row * num_columns + at);
        put(code(some(from + at, size) / divisor, stochastic, number, low, high), codes + row * num_columns + at, size);
      });
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

// Returns what the row was multiplied by before the weight. `to` may be `from`.
template <class X, class Y>
inline float normalize(const X* from, const float* weight, int64_t width, float eps, Y* to) {
  Vector squares[2] = {};
  each_vector(width, [&](int64_t at, int which, auto size) {
    const Vector value = some(from + at, size);
    squares[which] = fused(value, value, squares[which]);
  });
  const float factor = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / width + eps);
  each_vector(width, [&](int64_t at, int, auto size) {
    put(some(from + at, size) * factor * some(weight + at, size), to + at, size);
  });
  return factor;
}

template <class X, class Y>
void norm_forward(const X* x, const float* weight, int64_t num_rows, int64_t width, float eps, Y* y, float* inverse,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < num_rows; ++row)
    inverse[row] = normalize(x + row * width, weight, width, eps, y + row * width);
}

// of_weight: [threads][width], zeros, to be summed.
template <class X, class Y>
void norm_backward(const Y* grad, const X* x, const float* weight, const float* inverse, int64_t num_rows,
                   int64_t width, X* of_x, float* of_weight, int threads) {
#pragma omp parallel num_threads(threads)
  {
    float* const own = of_weight + omp_get_thread_num() * width;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const X* const from = x + row * width;
      const Y* const dy = grad + row * width;
      X* const to = of_x + row * width;
      const float factor = inverse[row];
      Vector along[2] = {};
      each_vector(width, [&](int64_t at, int which, auto size) {
        const Vector product = some(dy + at, size) * (some(from + at, size) * factor);
        put(some(own + at, size) + product, own + at, size);
        along[which] = fused(product, some(weight + at, size), along[which]);
      });
      const float mean = sum(along[0] + along[1]) / width;
      each_vector(width, [&](int64_t at, int, auto size) {
        const Vector unit = some(from + at, size) * factor, weighted = some(dy + at, size) * some(weight + at, size);
        put(fused(unit, -mean, weighted) * factor, to + at, size);
      });
    }
  }
}

inline Vector logistic(Vector x) {
  const Integers is_zero = x < all(-88.0f), is_one = x > all(87.0f);
  const Vector moderate = is_zero ? Vector{} : is_one ? all(87.0f) : x;
  return is_zero ? Vector{} : 1.0f / (1.0f + exponential_of_moderate(-moderate));
}

// Threads take pieces of so many numbers, a multiple of every vector's.
constexpr int64_t kPiece = 4096;

template <class Body>
void each_piece(int64_t count, int threads, Body body) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < count; first += kPiece)
    each_vector(std::min(kPiece, count - first), [&](int64_t at, int, auto size) { body(first + at, size); });
}

template <class T>
void swiglu_forward(const T* gate, const T* up, int64_t count, T* out, int threads) {
  each_piece(count, threads, [=](int64_t at, auto size) {
    const Vector g = some(gate + at, size);
    put(g * logistic(g) * some(up + at, size), out + at, size);
  });
}

template <class T>
void swiglu_backward(const T* grad, const T* gate, const T* up, int64_t count, T* of_gate, T* of_up, int threads) {
  each_piece(count, threads, [=](int64_t at, auto size) {
    const Vector g = some(gate + at, size), dy = some(grad + at, size), share = logistic(g);
    put(dy * some(up + at, size) * share * fused(g, 1.0f - share, all(1.0f)), of_gate + at, size);
    put(dy * g * share, of_up + at, size);
  });
}

// One head: the cosines of a token, and the sines that its first and its second half are multiplied by. `to` may be
// `from`.
template <class T>
inline void turn(const T* from, const float* cos, const float* of_low, const float* of_high, int64_t half, T* to) {
  each_vector(half, [&](int64_t at, int, auto size) {
    const Vector low = some(from + at, size), high = some(from + half + at, size);
    put(fused(low, some(cos + at, size), high * some(of_low + at, size)), to + at, size);
    put(fused(high, some(cos + half + at, size), low * some(of_high + at, size)), to + half + at, size);
  });
}

// Rotates by the angles of cos and sin, [tokens][width], the sines of the first half with the minus sign; or back.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads, int64_t width,
            bool back, T* y, int threads) {
  const int64_t half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float *const c = cos + token * width, *const s = sin + token * width;
    for (int64_t head = token * num_heads; head < (token + 1) * num_heads; ++head)
      turn(x + head * width, c, back ? s + half : s, back ? s : s + half, half, y + head * width);
  }
}

}  // namespace
