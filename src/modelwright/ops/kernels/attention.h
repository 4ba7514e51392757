// Causal attention within documents, forward and backward, block by block as FlashAttention does it (Dao et al. 2022), of
// all queries or of some of each head.
//
// Legend: T tokens of a row, H query heads, K key/value heads, G = H / K, d head width (a multiple of 16); a block is up
// to 64 queries or keys.

#pragma once

#include "vectors.h"

namespace {

constexpr int kBlock = 64;
// A tile of results stays in registers, kRows x kVectors: half of those that there are, which also is enough for as many
// multiplications under way as each takes to end.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8, kVectors = 2;  // of 32 registers
#else
constexpr int kRows = 4, kVectors = 2;  // of 16
#endif

constexpr int kStep = kRows > kLanes ? kRows : kLanes;  // of numbers of keys, which are rows of a factor and columns

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
      for (int v = 0; v < vectors; ++v) sums[row][v] = fused(right[v], left, sums[row][v]);
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

// The keys and values of a task, one head of a document: how many, and where the first stands in the tensors.
struct Keys {
  int64_t head, count, padded, step, first;
};

Keys keys_of(const Document& document, int64_t task, const Shape& shape) {
  const int64_t head = task % shape.num_kv_heads, count = document.end - document.start;
  const int64_t step = shape.num_kv_heads * shape.width;
  return {head, count, up(count, kStep), step, (document.row * shape.num_keys + document.start) * step + head * shape.width};
}

// A block of queries of one head: how many, also rounded up; each one's place among the document's keys, ascending, where
// padding continues; and where it and its denominator stand in their tensors.
struct Queries {
  int64_t count, num_rows, places[kBlock], at[kBlock], lse_at[kBlock];
  int64_t num_keys() const { return places[count - 1] + 1; }  // that the last one sees, and so all
};

// The queries of one head of a document, a block at a time: all, or those that are open, [tokens][heads], if it is given.
struct Reader {
  const Tile *tile, *last_tile;
  const Shape& shape;
  const uint8_t* open;
  int64_t head, next;

  Reader(const Document& document, const Tile* tiles, const Shape& shape, const uint8_t* open, int64_t head)
      : tile(tiles + document.first_tile), last_tile(tiles + document.last_tile), shape(shape), open(open), head(head),
        next(tile->first) {}

  bool read(Queries& to) {
    to.count = 0;
    while (tile < last_tile && to.count < kBlock) {
      for (; next < tile->end && to.count < kBlock; ++next) {
        const int64_t at = tile->at + next - tile->first, token = tile->row * shape.num_queries + at;
        if (open && !open[token * shape.num_heads + head]) continue;
        to.places[to.count] = next - tile->start;
        to.at[to.count] = (token * shape.num_heads + head) * shape.width;
        to.lse_at[to.count++] = (tile->row * shape.num_heads + head) * shape.num_queries + at;
      }
      if (next < tile->end) break;
      if (++tile == last_tile) break;
      next = tile->first;
      if (to.count && next - tile->start < to.num_keys()) break;  // the next block's, as places ascend
    }
    to.num_rows = up(to.count, kRows);
    for (int64_t row = to.count; to.count && row < to.num_rows; ++row) to.places[row] = to.places[row - 1] + 1;
    return to.count > 0;
  }
};

template <class T>
void copy_rows(const T* from, int64_t step, int64_t count, int64_t padded, int64_t width, float factor, float* to) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < width; ++i) to[row * width + i] = factor * wide(from[row * step + i]);
  std::fill(to + count * width, to + padded * width, 0.0f);
}

template <class T>
void copy_queries(const T* from, const Queries& queries, int64_t width, float factor, float* to) {
  for (int64_t row = 0; row < queries.count; ++row)
    for (int64_t i = 0; i < width; ++i) to[row * width + i] = factor * wide(from[queries.at[row] + i]);
  std::fill(to + queries.count * width, to + queries.num_rows * width, 0.0f);
}

// from [padded][width] to blocks [width][kBlock] in one piece each, so that it fits into the first cache.
void transpose(const float* from, int64_t padded, int64_t width, float* to) {
  for (int64_t first = 0; first < padded; first += kBlock, to += width * kBlock)
    for (int64_t i = 0; i < width; ++i)
      for (int64_t row = 0; row < std::min<int64_t>(kBlock, padded - first); ++row)
        to[i * kBlock + row] = from[(first + row) * width + i];
}

// What a block of queries (rows) sees of one of keys (columns), from `from_key` on. Tiles of rows read and write only
// those columns that one of their queries sees, `reach` of them, rounded up.
struct Scores {
  const Queries& queries;
  int64_t from_key, num_keys;
  int64_t num_rows() const { return queries.num_rows; }
  int64_t ahead(int64_t row) const { return queries.places[row] + 1 - from_key; }  // keys that a row sees, from here on
  int64_t seen(int64_t row) const { return std::clamp<int64_t>(ahead(row / kRows * kRows + kRows - 1), 0, num_keys); }
  int64_t reach(int64_t row) const { return up(seen(row), kStep); }
  bool is_whole() const { return ahead(0) >= num_keys; }
};

// to = factor (a block of queries' rows) times columns [width][kBlock], as far as each tile reaches.
void multiply_seen(const Scores& size, const float* factor, const float* columns, int64_t width, float* to) {
  const int64_t step = size.is_whole() ? size.num_rows() : kRows;
  for (int64_t row = 0; row < size.num_rows(); row += step)
    multiply<false>(step, size.reach(row), width, {factor + row * width, width, 1}, columns, kBlock, to + row * kBlock,
                    kBlock);
}

// to (+)= scores times rows of keys [keys][width].
void add_by_query(const Scores& size, const float* scores, const float* rows, int64_t width, float* to) {
  const int64_t step = size.is_whole() ? size.num_rows() : kRows;
  for (int64_t row = 0; row < size.num_rows(); row += step)
    multiply<true>(step, width, size.seen(row), {scores + row * kBlock, kBlock, 1}, rows, width, to + row * width, width);
}

// to (+)= scores' times rows of queries [queries][width].
void add_by_key(const Scores& size, const float* scores, const float* rows, int64_t width, float* to) {
  const int64_t num_rows = up(size.num_keys, kRows), step = size.is_whole() ? num_rows : kRows;
  for (int64_t key = 0, seeing = 0; key < num_rows; key += step) {
    while (size.ahead(seeing) <= key) ++seeing;
    const int64_t first = seeing / kRows * kRows;
    multiply<true>(step, width, size.queries.count - first, {scores + first * kBlock + key, 1, kBlock},
                   rows + first * width, width, to + key * width, width);
  }
}

// Scores of a block of queries (rows) with one of keys, those of later keys at minus infinity.
Scores score(const Queries& queries, const float* rows, const float* keys_across, int64_t from_key, int64_t width,
             float* to) {
  const Scores size{queries, from_key, std::min<int64_t>(kBlock, queries.num_keys() - from_key)};
  multiply_seen(size, rows, keys_across + from_key * width, width, to);
  for (int64_t row = 0; row < size.num_rows(); ++row) {
    const int64_t reach = size.reach(row);
    for (int64_t key = std::max<int64_t>(0, size.ahead(row)); key < reach; ++key)
      to[row * kBlock + key] = -std::numeric_limits<float>::infinity();
  }
  return size;
}

template <class T>
void forward(const T* q, const T* k, const T* v, const Tile* tiles, int64_t num_tiles, const uint8_t* open, Shape shape,
             float scale, T* out, float* lse, float* scratch, int64_t scratch_step, int threads) {
  const std::vector<Document> documents = documents_of(tiles, num_tiles);
  const int64_t width = shape.width, group = shape.num_heads / shape.num_kv_heads;
  const int64_t num_tasks = static_cast<int64_t>(documents.size()) * shape.num_kv_heads;
#pragma omp parallel num_threads(threads)
  {
    Scratch own{scratch + omp_get_thread_num() * scratch_step};
    float *const queries = own.take(kBlock * width), *const sums = own.take(kBlock * width);
    float *const scores = own.take(kBlock * kBlock), *const rest = own.at;
    float maxima[kBlock], totals[kBlock];
    Queries block;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const Document& document = documents[task / shape.num_kv_heads];
      const auto [head, count, padded, key_step, first_key] = keys_of(document, task, shape);
      Scratch left{rest};
      float *const values = left.take(padded * width), *const keys_across = left.take(up(count, kBlock) * width);
      bool is_ready = false;
      for (int64_t one = head * group; one < (head + 1) * group; ++one)
        for (Reader reader{document, tiles, shape, open, one}; reader.read(block);) {
          if (!is_ready) {
            copy_rows(k + first_key, key_step, count, padded, width, 1.0f, values);
            transpose(values, padded, width, keys_across);
            copy_rows(v + first_key, key_step, count, padded, width, 1.0f, values);
            is_ready = true;
          }
          const int64_t num_rows = block.num_rows;
          copy_queries(q, block, width, scale, queries);
          std::fill(sums, sums + num_rows * width, 0.0f);
          std::fill(maxima, maxima + num_rows, -std::numeric_limits<float>::infinity());
          std::fill(totals, totals + num_rows, 0.0f);
          for (int64_t from = 0; from < block.num_keys(); from += kBlock) {
            const Scores size = score(block, queries, keys_across, from, width, scores);
            for (int64_t row = 0; row < size.num_rows(); ++row) {
              const int64_t num_columns = size.reach(row);
              if (num_columns == 0) continue;
              float* const of_row = scores + row * kBlock;
              Vector most = load(of_row);
              for (int64_t at = kLanes; at < num_columns; at += kLanes) {
                const Vector more = load(of_row + at);
                most = more > most ? more : most;
              }
              const float largest = std::max(maxima[row], greatest(most));
              const float kept = from > 0 ? std::exp(maxima[row] - largest) : 0.0f;
              Vector total{};
              for (int64_t at = 0; at < num_columns; at += kLanes) {
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
            add_by_query(size, scores, values + from * width, width, sums);
          }
          for (int64_t row = 0; row < block.count; ++row) {
            lse[block.lse_at[row]] = maxima[row] + std::log(totals[row]);
            const float share = 1.0f / totals[row];
            for (int64_t i = 0; i < width; i += kLanes)
              put(share * load(sums + row * width + i), out + block.at[row] + i, Whole{});
          }
        }
    }
  }
}

template <class T>
void backward(const T* grad, const T* q, const T* k, const T* v, const T* out, const float* lse, const Tile* tiles,
              int64_t num_tiles, const uint8_t* open, Shape shape, float scale, T* grad_q, T* grad_k, T* grad_v,
              float* scratch, int64_t scratch_step, int threads) {
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
    Queries block;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const Document& document = documents[task / shape.num_kv_heads];
      const auto [head, count, padded, key_step, first_key] = keys_of(document, task, shape);
      Scratch left{rest};
      float *const keys = left.take(padded * width), *const keys_across = left.take(up(count, kBlock) * width);
      float *const values_across = left.take(up(count, kBlock) * width);
      float *const of_keys = left.take(padded * width), *const of_values = left.take(padded * width);
      bool is_ready = false;
      for (int64_t one = head * group; one < (head + 1) * group; ++one)
        for (Reader reader{document, tiles, shape, open, one}; reader.read(block);) {
          if (!is_ready) {
            copy_rows(v + first_key, key_step, count, padded, width, 1.0f, keys);
            transpose(keys, padded, width, values_across);
            copy_rows(k + first_key, key_step, count, padded, width, 1.0f, keys);
            transpose(keys, padded, width, keys_across);
            std::fill(of_keys, of_keys + padded * width, 0.0f);
            std::fill(of_values, of_values + padded * width, 0.0f);
            is_ready = true;
          }
          const int64_t num_rows = block.num_rows;
          copy_queries(q, block, width, scale, queries);
          copy_queries(grad, block, width, 1.0f, incoming);
          std::fill(of_queries, of_queries + num_rows * width, 0.0f);
          for (int64_t row = 0; row < num_rows; ++row) {
            denominators[row] = row < block.count ? lse[block.lse_at[row]] : std::numeric_limits<float>::infinity();
            Vector products{};
            for (int64_t i = 0; row < block.count && i < width; i += kLanes)
              products = fused(load(incoming + row * width + i), some(out + block.at[row] + i, Whole{}), products);
            along[row] = sum(products);
          }
          for (int64_t from = 0; from < block.num_keys(); from += kBlock) {
            const Scores size = score(block, queries, keys_across, from, width, weights);
            multiply_seen(size, incoming, values_across + from * width, width, changes);
            for (int64_t row = 0; row < size.num_rows(); ++row) {
              const int64_t end = row * kBlock + size.reach(row);
              for (int64_t at = row * kBlock; at < end; at += kLanes) {
                const Vector weight = exponential(load(weights + at) - denominators[row]);
                store(weights + at, weight);
                store(changes + at, weight * (load(changes + at) - along[row]));
              }
            }
            add_by_key(size, weights, incoming, width, of_values + from * width);
            add_by_key(size, changes, queries, width, of_keys + from * width);
            add_by_query(size, changes, keys + from * width, width, of_queries);
          }
          for (int64_t row = 0; row < block.count; ++row)
            for (int64_t i = 0; i < width; ++i)
              narrow(scale * of_queries[row * width + i], grad_q + block.at[row] + i);
        }
      for (int64_t row = 0; is_ready && row < count; ++row)  // without queries the gradients stay zero
        for (int64_t i = 0; i < width; ++i) {
          narrow(of_keys[row * width + i], grad_k + first_key + row * key_step + i);
          narrow(of_values[row * width + i], grad_v + first_key + row * key_step + i);
        }
    }
  }
}

}  // namespace
