// Kernels for processors where a chain of PyTorch's operators costs more than what it computes. Plain C interface;
// `cpu_kernels.py` says what each does. Vectors are the compiler's own, so that one text serves every width.
//
// Working memory comes from the caller, a part for each thread, so that a lack of it is PyTorch's to report.
//
// Legend: T tokens of a row, H query heads, K key/value heads, G = H / K, d head width (a multiple of 16); a block is up
// to 64 queries or keys. Everything is computed in FP32, whatever the format of the tensors.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 64;
#ifdef __AVX512F__
constexpr int kRows = 8, kVectors = 2;  // of a tile of results that stays in registers
#else
constexpr int kRows = 4, kVectors = 1;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Bf16;

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector all(float value) { return Vector{} + value; }
inline int64_t up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline float wide(float value) { return value; }
inline float wide(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, Bf16* to) {  // to the nearest, ties to even; what is not a number stays so
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  *to = value != value ? 0x7fc0 : static_cast<Bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x within 2 units in the last place, 0 below the range of normal numbers (Cephes' polynomial).
inline Vector exponential(Vector x) {
  const Integers is_zero = x < all(-87.0f);
  x = is_zero ? all(-87.0f) : x;
  const Vector magic = all(12582912.0f), shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers exponent = ((Integers)shifted - (Integers)magic) << 23;  // these casts keep the bits
  return is_zero ? Vector{} : (Vector)((Integers)p + exponent);
}

inline float sum(Vector x) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += x[lane];
  return total;
}

// c (+)= a b; a by any strides, b and c row by row; num_rows a multiple of kRows, num_columns of kLanes.
struct Factor {
  const float* at;
  int64_t row, column;
};

template <int vectors, bool adds>
inline void multiply_tile(int64_t num_summed, Factor a, const float* b, int64_t b_row, float* c, int64_t c_row) {
  Vector sums[kRows][vectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < vectors; ++v) sums[row][v] = adds ? load(c + row * c_row + v * kLanes) : Vector{};
  for (int64_t k = 0; k < num_summed; ++k) {
    Vector right[vectors];
    for (int v = 0; v < vectors; ++v) right[v] = load(b + k * b_row + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const float left = a.at[row * a.row + k * a.column];
      for (int v = 0; v < vectors; ++v) sums[row][v] += left * right[v];
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < vectors; ++v) store(c + row * c_row + v * kLanes, sums[row][v]);
}

template <bool adds>
void multiply(int64_t num_rows, int64_t num_columns, int64_t num_summed, Factor a, const float* b, int64_t b_row,
              float* c, int64_t c_row) {
  constexpr int kColumns = kVectors * kLanes;
  for (int64_t column = 0; column < num_columns;) {
    const bool is_whole = num_columns - column >= kColumns;
    for (int64_t row = 0; row < num_rows; row += kRows) {
      const Factor part{a.at + row * a.row, a.row, a.column};
      float* to = c + row * c_row + column;
      if (is_whole)
        multiply_tile<kVectors, adds>(num_summed, part, b + column, b_row, to, c_row);
      else
        multiply_tile<1, adds>(num_summed, part, b + column, b_row, to, c_row);
    }
    column += is_whole ? kColumns : kLanes;
  }
}

struct Shape {
  int64_t num_queries, num_keys, num_heads, num_kv_heads, width;  // tokens of a row in the tensors of queries and keys
};

// A document of a row: tiles first..last of the list, whose keys lie in start..end.
struct Document {
  int64_t row, start, end, first_tile, last_tile;
};

struct Tile {
  int64_t row, start, first, end, at;
};

// A thread's working memory, handed out piece by piece.
struct Scratch {
  float* at;
  float* take(int64_t count) {
    float* const taken = at;
    at += count;
    return taken;
  }
};

std::vector<Document> documents_of(const Tile* tiles, int64_t num_tiles) {
  std::vector<Document> found;
  for (int64_t number = 0; number < num_tiles; ++number) {
    const Tile& tile = tiles[number];
    if (found.empty() || found.back().row != tile.row || found.back().start != tile.start)
      found.push_back({tile.row, tile.start, tile.end, number, number + 1});
    found.back().end = std::max(found.back().end, tile.end);
    found.back().last_tile = number + 1;
  }
  return found;
}

template <class T>
void copy_rows(const T* from, int64_t step, int64_t count, int64_t padded, int64_t width, float factor, float* to) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < width; ++i) to[row * width + i] = factor * wide(from[row * step + i]);
  std::fill(to + count * width, to + padded * width, 0.0f);
}

// from [padded][width] to [width][padded].
void transpose(const float* from, int64_t padded, int64_t width, float* to) {
  for (int64_t i = 0; i < width; ++i)
    for (int64_t row = 0; row < padded; ++row) to[i * padded + row] = from[row * width + i];
}

// Scores of a block of queries with one of keys, those of later keys at minus infinity.
struct Scores {
  int64_t num_rows, num_columns, num_keys;  // the first two rounded up
};

Scores score(const float* queries, int64_t num_queries, int64_t position, const float* keys_across, int64_t padded,
             int64_t from_key, int64_t width, float* to) {
  const int64_t num_keys = std::min<int64_t>(kBlock, position + num_queries - from_key);
  const Scores size{up(num_queries, kRows), up(num_keys, kLanes), num_keys};
  multiply<false>(size.num_rows, size.num_columns, width, {queries, width, 1}, keys_across + from_key, padded, to, kBlock);
  if (from_key + size.num_columns - 1 > position)
    for (int64_t row = 0; row < size.num_rows; ++row)
      for (int64_t key = std::max<int64_t>(0, position + row + 1 - from_key); key < size.num_columns; ++key)
        to[row * kBlock + key] = -std::numeric_limits<float>::infinity();
  return size;
}

template <class T>
void forward(const T* q, const T* k, const T* v, const Tile* tiles, int64_t num_tiles, Shape shape, float scale, T* out,
             float* lse, float* scratch, int64_t scratch_step, int threads) {
  const std::vector<Document> documents = documents_of(tiles, num_tiles);
  const int64_t width = shape.width, group = shape.num_heads / shape.num_kv_heads;
  const int64_t num_tasks = static_cast<int64_t>(documents.size()) * shape.num_kv_heads;
#pragma omp parallel num_threads(threads)
  {
    Scratch own{scratch + omp_get_thread_num() * scratch_step};
    float *const queries = own.take(kBlock * width), *const sums = own.take(kBlock * width);
    float *const scores = own.take(kBlock * kBlock), *const rest = own.at;
    float maxima[kBlock], totals[kBlock];
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const Document& document = documents[task / shape.num_kv_heads];
      const int64_t head = task % shape.num_kv_heads, count = document.end - document.start, padded = up(count, kBlock);
      const int64_t key_step = shape.num_kv_heads * width;
      const int64_t first_key = (document.row * shape.num_keys + document.start) * key_step + head * width;
      Scratch left{rest};
      float *const values = left.take(padded * width), *const keys_across = left.take(padded * width);
      copy_rows(k + first_key, key_step, count, padded, width, 1.0f, values);
      transpose(values, padded, width, keys_across);
      copy_rows(v + first_key, key_step, count, padded, width, 1.0f, values);
      for (int64_t number = document.first_tile; number < document.last_tile; ++number) {
        const Tile& tile = tiles[number];
        for (int64_t one = head * group; one < (head + 1) * group; ++one)
          for (int64_t first = tile.first; first < tile.end; first += kBlock) {
            const int64_t num_queries = std::min<int64_t>(kBlock, tile.end - first), position = first - tile.start;
            const int64_t num_rows = up(num_queries, kRows), query_step = shape.num_heads * width;
            const int64_t token = tile.row * shape.num_queries + tile.at + first - tile.first;
            const int64_t first_query = token * query_step + one * width;
            copy_rows(q + first_query, query_step, num_queries, num_rows, width, scale, queries);
            std::fill(sums, sums + num_rows * width, 0.0f);
            std::fill(maxima, maxima + num_rows, -std::numeric_limits<float>::infinity());
            std::fill(totals, totals + num_rows, 0.0f);
            for (int64_t from = 0; from < position + num_queries; from += kBlock) {
              const Scores size = score(queries, num_queries, position, keys_across, padded, from, width, scores);
              for (int64_t row = 0; row < size.num_rows; ++row) {
                float* const of_row = scores + row * kBlock;
                Vector most = load(of_row);
                for (int64_t at = kLanes; at < size.num_columns; at += kLanes) {
                  const Vector more = load(of_row + at);
                  most = more > most ? more : most;
                }
                float largest = maxima[row];
                for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, most[lane]);
                const float kept = std::exp(maxima[row] - largest);
                Vector total{};
                for (int64_t at = 0; at < size.num_columns; at += kLanes) {
                  const Vector weights = exponential(load(of_row + at) - largest);
                  store(of_row + at, weights);
                  total += weights;
                }
                totals[row] = totals[row] * kept + sum(total);
                maxima[row] = largest;
                if (from > 0 && kept != 1.0f)
                  for (int64_t i = 0; i < width; i += kLanes) {
                    float* const to = sums + row * width + i;
                    store(to, load(to) * kept);
                  }
              }
              multiply<true>(size.num_rows, width, size.num_keys, {scores, kBlock, 1}, values + from * width, width,
                             sums, width);
            }
            const int64_t first_lse = (tile.row * shape.num_heads + one) * shape.num_queries + tile.at + first - tile.first;
            for (int64_t row = 0; row < num_queries; ++row) {
              lse[first_lse + row] = maxima[row] + std::log(totals[row]);
              for (int64_t i = 0; i < width; ++i)
                narrow(sums[row * width + i] / totals[row], out + first_query + row * query_step + i);
            }
          }
      }
    }
  }
}

template <class T>
void backward(const T* grad, const T* q, const T* k, const T* v, const T* out, const float* lse, const Tile* tiles,
              int64_t num_tiles, Shape shape, float scale, T* grad_q, T* grad_k, T* grad_v, float* scratch,
              int64_t scratch_step, int threads) {
  const std::vector<Document> documents = documents_of(tiles, num_tiles);
  const int64_t width = shape.width, group = shape.num_heads / shape.num_kv_heads;
  const int64_t num_tasks = static_cast<int64_t>(documents.size()) * shape.num_kv_heads;
#pragma omp parallel num_threads(threads)
  {
    Scratch own{scratch + omp_get_thread_num() * scratch_step};
    float *const queries = own.take(kBlock * width), *const incoming = own.take(kBlock * width);
    float *const of_queries = own.take(kBlock * width), *const weights = own.take(kBlock * kBlock);
    float *const changes = own.take(kBlock * kBlock), *const rest = own.at;
    float along[kBlock], denominators[kBlock];
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const Document& document = documents[task / shape.num_kv_heads];
      const int64_t head = task % shape.num_kv_heads, count = document.end - document.start, padded = up(count, kBlock);
      const int64_t key_step = shape.num_kv_heads * width;
      const int64_t first_key = (document.row * shape.num_keys + document.start) * key_step + head * width;
      Scratch left{rest};
      float *const keys = left.take(padded * width), *const keys_across = left.take(padded * width);
      float *const values_across = left.take(padded * width);
      float *const of_keys = left.take(padded * width), *const of_values = left.take(padded * width);
      copy_rows(v + first_key, key_step, count, padded, width, 1.0f, keys);
      transpose(keys, padded, width, values_across);
      copy_rows(k + first_key, key_step, count, padded, width, 1.0f, keys);
      transpose(keys, padded, width, keys_across);
      std::fill(of_keys, of_keys + padded * width, 0.0f);
      std::fill(of_values, of_values + padded * width, 0.0f);
      for (int64_t number = document.first_tile; number < document.last_tile; ++number) {
        const Tile& tile = tiles[number];
        for (int64_t one = head * group; one < (head + 1) * group; ++one)
          for (int64_t first = tile.first; first < tile.end; first += kBlock) {
            const int64_t num_queries = std::min<int64_t>(kBlock, tile.end - first), position = first - tile.start;
            const int64_t num_rows = up(num_queries, kRows), query_step = shape.num_heads * width;
            const int64_t token = tile.row * shape.num_queries + tile.at + first - tile.first;
            const int64_t first_query = token * query_step + one * width;
            const int64_t first_lse = (tile.row * shape.num_heads + one) * shape.num_queries + tile.at + first - tile.first;
            copy_rows(q + first_query, query_step, num_queries, num_rows, width, scale, queries);
            copy_rows(grad + first_query, query_step, num_queries, num_rows, width, 1.0f, incoming);
            std::fill(of_queries, of_queries + num_rows * width, 0.0f);
            for (int64_t row = 0; row < num_rows; ++row) {
              along[row] = 0.0f;
              denominators[row] = row < num_queries ? lse[first_lse + row] : std::numeric_limits<float>::infinity();
              for (int64_t i = 0; row < num_queries && i < width; ++i)
                along[row] += incoming[row * width + i] * wide(out[first_query + row * query_step + i]);
            }
            for (int64_t from = 0; from < position + num_queries; from += kBlock) {
              const Scores size = score(queries, num_queries, position, keys_across, padded, from, width, weights);
              multiply<false>(size.num_rows, size.num_columns, width, {incoming, width, 1}, values_across + from,
                              padded, changes, kBlock);
              for (int64_t row = 0; row < size.num_rows; ++row)
                for (int64_t at = row * kBlock; at < row * kBlock + size.num_columns; at += kLanes) {
                  const Vector weight = exponential(load(weights + at) - denominators[row]);
                  store(weights + at, weight);
                  store(changes + at, weight * (load(changes + at) - along[row]));
                }
              const int64_t num_key_rows = up(size.num_keys, kRows);
              multiply<true>(num_key_rows, width, num_queries, {weights, 1, kBlock}, incoming, width,
                             of_values + from * width, width);
              multiply<true>(num_key_rows, width, num_queries, {changes, 1, kBlock}, queries, width,
                             of_keys + from * width, width);
              multiply<true>(size.num_rows, width, size.num_keys, {changes, kBlock, 1}, keys + from * width, width,
                             of_queries, width);
            }
            for (int64_t row = 0; row < num_queries; ++row)
              for (int64_t i = 0; i < width; ++i)
                narrow(scale * of_queries[row * width + i], grad_q + first_query + row * query_step + i);
          }
      }
      for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < width; ++i) {
          narrow(of_keys[row * width + i], grad_k + first_key + row * key_step + i);
          narrow(of_values[row * width + i], grad_v + first_key + row * key_step + i);
        }
    }
  }
}

typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(4)));

// Up to kLanes numbers in FP32, zeros after them.
inline Vector some(const float* from, int64_t count) {
  Vector found{};
  if (count >= kLanes)
    std::memcpy(&found, from, sizeof found);
  else
    std::memcpy(&found, from, count * sizeof(float));
  return found;
}

inline Vector some(const Bf16* from, int64_t count) {
  typedef Bf16 Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
  Halves found{};
  if (count >= kLanes)
    std::memcpy(&found, from, sizeof found);
  else
    std::memcpy(&found, from, count * sizeof(Bf16));
  return (Vector)(__builtin_convertvector(found, Bits) << 16);
}

inline Vector magnitude(Vector x) { return (Vector)((Integers)x & 0x7fffffff); }
// What is not a number stays, so that a product of it is none either.
inline Vector larger(Vector a, Vector b) { return (a > b) | (a != a) ? a : b; }
inline float larger(float a, float b) { return a > b || a != a ? a : b; }

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

inline void put(Bytes codes, int8_t* to, int64_t count) {
  if (count >= kLanes)
    std::memcpy(to, &codes, kLanes);
  else
    std::memcpy(to, &codes, count);
}

constexpr float kSmallest = 0x1p-100f;

template <class T>
void quantise(const T* x, int64_t num_rows, int64_t num_columns, bool by_column, bool stochastic, uint64_t seed,
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

inline void put(Vector value, float* to, int64_t count) {
  if (count >= kLanes)
    std::memcpy(to, &value, sizeof value);
  else
    std::memcpy(to, &value, count * sizeof(float));
}

inline void put(Vector value, Bf16* to, int64_t count) {  // as `narrow`
  typedef Bf16 Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
  const Bits bits = (Bits)value, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Integers is_number = value == value;
  const Halves halves = __builtin_convertvector((Bits)(is_number ? (Integers)nearest : Integers{} + 0x7fc0), Halves);
  if (count >= kLanes)
    std::memcpy(to, &halves, sizeof halves);
  else
    std::memcpy(to, &halves, count * sizeof(Bf16));
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

#define ATTENTION(NAME, T)                                                                                             \
  extern "C" void attention_forward_##NAME(const T* q, const T* k, const T* v, const int64_t* tiles, int64_t num_tiles, \
                                           const int64_t* shape, float scale, T* out, float* lse, float* scratch,      \
                                           int64_t scratch_step, int threads) {                                        \
    forward(q, k, v, reinterpret_cast<const Tile*>(tiles), num_tiles, *reinterpret_cast<const Shape*>(shape), scale,   \
            out, lse, scratch, scratch_step, threads);                                                                 \
  }                                                                                                                    \
  extern "C" void attention_backward_##NAME(const T* grad, const T* q, const T* k, const T* v, const T* out,           \
                                            const float* lse, const int64_t* tiles, int64_t num_tiles,                 \
                                            const int64_t* shape, float scale, T* grad_q, T* grad_k, T* grad_v,        \
                                            float* scratch, int64_t scratch_step, int threads) {                       \
    backward(grad, q, k, v, out, lse, reinterpret_cast<const Tile*>(tiles), num_tiles,                                 \
             *reinterpret_cast<const Shape*>(shape), scale, grad_q, grad_k, grad_v, scratch, scratch_step, threads);   \
  }

ATTENTION(fp32, float)
ATTENTION(bf16, Bf16)

#define INT8(NAME, T)                                                                                                  \
  extern "C" void quantise_##NAME(const T* x, int64_t num_rows, int64_t num_columns, int by_column, int stochastic,    \
                                  uint64_t seed, int8_t* codes, float* scales, float* scratch, int threads) {          \
    quantise(x, num_rows, num_columns, by_column, stochastic, seed, codes, scales, scratch, threads);                  \
  }                                                                                                                    \
  extern "C" void rescale_##NAME(const int32_t* sums, int64_t num_rows, int64_t num_columns, const float* of_rows,     \
                                 const float* of_columns, T* to, int threads) {                                        \
    rescale(sums, num_rows, num_columns, of_rows, of_columns, to, threads);                                            \
  }

INT8(fp32, float)
INT8(bf16, Bf16)

#define NORM(NAME, X, Y)                                                                                               \
  extern "C" void norm_forward_##NAME(const X* x, const float* weight, int64_t num_rows, int64_t width, float eps,     \
                                      Y* y, float* inverse, int threads) {                                             \
    norm_forward(x, weight, num_rows, width, eps, y, inverse, threads);                                                \
  }                                                                                                                    \
  extern "C" void norm_backward_##NAME(const Y* grad, const X* x, const float* weight, const float* inverse,           \
                                       int64_t num_rows, int64_t width, X* of_x, float* of_weight, int threads) {      \
    norm_backward(grad, x, weight, inverse, num_rows, width, of_x, of_weight, threads);                                \
  }

NORM(fp32_fp32, float, float)
NORM(fp32_bf16, float, Bf16)
NORM(bf16_fp32, Bf16, float)
NORM(bf16_bf16, Bf16, Bf16)

#define ELEMENTS(NAME, T)                                                                                              \
  extern "C" void swiglu_forward_##NAME(const T* gate, const T* up, int64_t count, T* out, int threads) {              \
    swiglu_forward(gate, up, count, out, threads);                                                                     \
  }                                                                                                                    \
  extern "C" void swiglu_backward_##NAME(const T* grad, const T* gate, const T* up, int64_t count, T* of_gate,         \
                                         T* of_up, int threads) {                                                      \
    swiglu_backward(grad, gate, up, count, of_gate, of_up, threads);                                                   \
  }                                                                                                                    \
  extern "C" void rotate_##NAME(const T* x, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads, \
                                int64_t width, int back, T* y, int threads) {                                          \
    rotate(x, cos, sin, num_tokens, num_heads, width, back, y, threads);                                               \
  }

ELEMENTS(fp32, float)
ELEMENTS(bf16, Bf16)
