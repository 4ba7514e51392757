// A decode step: the newest token of each sequence through all layers of a decoder, with keys and values in a paged
// cache. One parallel region; threads take outputs of products, rows, or heads of rows, and wait for each other between.
// Everything is computed in FP32; only weights and cache may be narrower.
//
// Legend: N rows (tokens), D model width, H query heads, K key/value heads, d head width, F feed-forward width.

#pragma once

#include <chrono>
#include <initializer_list>

#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace {

enum Activation : int64_t { kSilu, kGelu, kGeluTanh };
enum Rotation : int64_t { kNone, kGlobal, kWindow };

// Products of the same activations have weights of one format. head_router: the query heads of a key/value head are computed where its output is positive; without outputs all are. norms: null for none. keys, values: of the cache, [blocks][K][tokens of a block][d]. window: tokens that a query sees, 0 for all.
struct Layer {
  Matrix q, k, v, output_gate, head_router, o, gate, up, down;
  const float *attention_norm, *attention_post_norm, *ffn_norm, *ffn_post_norm, *q_norm, *k_norm;
  void *keys, *values;
  int64_t window, rotation;
};

// soft_cap, 0 for none, as in `AttentionConfig`; score_scale: of products of queries and keys.
struct Decoder {
  const Layer* layers;
  const float* norm;
  Matrix embedding;
  int64_t num_layers, width, num_heads, num_kv_heads, head_dim, rotary_dim, ffn_width;
  int64_t activation, cache_format, block_len;
  float eps, soft_cap, score_scale, embedding_scale;
};

// blocks: block tables of all sequences; first_block: where that of a row begins. rope_rows: rows of the tables of
// cosines and sines, [...][rotary_dim], of layers that see all tokens and of those with a window.
struct Step {
  const int64_t *tokens, *positions, *rope_rows, *first_block, *blocks;
  const float *cos, *sin, *window_cos, *window_sin;
  int64_t num_rows, longest;
};

// Working memory of a step, all threads' together.
struct Memory {
  float *hidden, *normed, *q, *k, *v, *output_gate, *head_router, *attended, *out, *gate, *up, *peaks, *scores;
  int8_t* codes;
  int64_t scores_step, size;
};

// Hands out `from` piece by piece; of null only the size counts.
Memory memory_of(const Decoder& decoder, int64_t num_rows, int64_t longest, int threads, float* from) {
  Memory memory{};
  const auto take = [&](int64_t count) {
    float* const taken = from ? from + memory.size : nullptr;
    memory.size += up(count, 16);
    return taken;
  };
  const int64_t queries = decoder.num_heads * decoder.head_dim, pairs = decoder.num_kv_heads * decoder.head_dim;
  const int64_t group = std::min<int64_t>(4, decoder.num_heads / decoder.num_kv_heads);
  memory.hidden = take(num_rows * decoder.width);
  memory.normed = take(num_rows * decoder.width);
  memory.q = take(num_rows * queries);
  memory.k = take(num_rows * pairs);
  memory.v = take(num_rows * pairs);
  memory.output_gate = take(num_rows * queries);
  memory.head_router = take(num_rows * decoder.num_kv_heads);
  memory.attended = take(num_rows * queries);
  memory.out = take(num_rows * decoder.width);
  memory.gate = take(num_rows * decoder.ffn_width);
  memory.up = take(num_rows * decoder.ffn_width);
  memory.peaks = take(num_rows);
  memory.codes = reinterpret_cast<int8_t*>(take(num_rows * up(std::max({decoder.width, queries, decoder.ffn_width}),
                                                              kSplitCodes)));  // of any format
  memory.scores_step = up(group * up(longest, kLanes), 16);
  memory.scores = take(threads * memory.scores_step);
  return memory;
}

struct Product {
  const Matrix& by;
  float* to;
};

// All products of the same rows.
void multiply(const Member& member, const Rows& in, std::initializer_list<Product> products) {
  int64_t total = 0;
  for (const Product& one : products) total += num_pieces(one.by);
  member.each(total, [&](int64_t piece) {
    const Product* one = products.begin();
    for (; piece >= num_pieces(one->by); ++one) piece -= num_pieces(one->by);
    const int64_t first = piece * kOutputs;
    multiply_outputs(one->by, first, std::min(first + kOutputs, one->by.outputs), in, one->to);
  });
}

inline void activate(float* gate, const float* up, int64_t count, int64_t activation) {
  if (activation == kSilu)
    return each_vector(count, [&](int64_t at, int, auto size) {
      const Vector g = some(gate + at, size);
      put(g * logistic(g) * some(up + at, size), gate + at, size);
    });
  for (int64_t at = 0; at < count; ++at) {
    const float g = gate[at];
    const float by_tanh = std::tanh(0.79788456080286536f * (g + 0.044715f * g * g * g));
    gate[at] = 0.5f * g * (1.0f + (activation == kGelu ? std::erf(g * 0.70710678118654752f) : by_tanh)) * up[at];
  }
}

// Both products of the feed-forward layer and the activation, to `gate`.
void multiply_gated(const Member& member, const Rows& in, const Matrix& gate_by, const Matrix& up_by,
                    int64_t activation, float* gate, float* up) {
  const int64_t width = gate_by.outputs;
  member.each(num_pieces(gate_by), [&](int64_t piece) {
    const int64_t first = piece * kOutputs, end = std::min(first + kOutputs, width);
    multiply_outputs(gate_by, first, end, in, gate);
    multiply_outputs(up_by, first, end, in, up);
    for (int64_t row = 0; row < in.count; ++row)
      activate(gate + row * width + first, up + row * width + first, end - first, activation);
  });
}

// Of a token's values so many vectors are summed at once, for up to four heads: half of the registers.
constexpr int kVectorsOfValues = kRows / 2;
constexpr int64_t kTokensAhead = 8;  // that are read into the cache

// What a head has in the cache of its row: within a block its tokens lie one after the other, so that heads that are not
// computed are not read.
template <class T>
struct Context {
  const T *keys, *values;
  const int64_t* blocks;
  int64_t first, count, shift, width, step;  // tokens; log2 of those of a block; numbers of a token, and of a block
  int64_t at(int64_t token) const {
    const int64_t position = first + token;
    return blocks[position >> shift] * step + (position & ((int64_t{1} << shift) - 1)) * width;
  }
  void prefetch(const T* from, int64_t token) const {
    if (token < count) __builtin_prefetch(from + at(token));
  }
};

// Scores of some heads' queries with all tokens. heads: their numbers; to: [heads][padded].
template <int outs, class T>
void score(const Decoder& decoder, const Context<T>& context, const float* queries, const int64_t* heads,
           int64_t num_heads, float* to, int64_t padded) {
  const float* rows[kLanes / outs];
  for (int head = 0; head < kLanes / outs; ++head)
    rows[head] = queries + heads[std::min<int64_t>(head, num_heads - 1)] * decoder.head_dim;
  for (int64_t first = 0; first < context.count; first += outs) {
    const T* keys[outs];
    for (int i = 0; i < outs; ++i) {
      keys[i] = context.keys + context.at(std::min(first + i, context.count - 1));
      context.prefetch(context.keys, first + outs + i);
    }
    float parts[kLanes];
    store(parts, products<outs>(keys, rows, decoder.head_dim) * decoder.score_scale);
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t i = 0; i < std::min<int64_t>(outs, context.count - first); ++i) {
        const float one = parts[head * outs + i];
        to[head * padded + first + i] = decoder.soft_cap ? decoder.soft_cap * std::tanh(one / decoder.soft_cap) : one;
      }
  }
}

// Scores to their exponentials; returns one over the sum of them.
inline float soften(float* scores, int64_t count, int64_t padded) {
  std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
  Vector most = load(scores), total{};
  for (int64_t at = kLanes; at < padded; at += kLanes) most = larger(load(scores + at), most);
  float largest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = larger(most[lane], largest);
  for (int64_t at = 0; at < padded; at += kLanes) {
    const Vector weights = exponential(load(scores + at) - largest);
    store(scores + at, weights);
    total += weights;
  }
  return 1.0f / sum(total);
}

// A piece of the sums of values by the weights of some heads: `vectors` of them, which stay in registers.
template <int heads, int vectors, class T, class Size>
inline void weigh_piece(const Context<T>& context, const float* weights, int64_t padded, const float* factors,
                        const int64_t* numbers, int64_t head_dim, int64_t at, Size size, float* to) {
  Vector sums[heads][vectors] = {};
  for (int64_t token = 0; token < context.count; ++token) {
    const T* const values = context.values + context.at(token) + at;
    context.prefetch(context.values + at, token + kTokensAhead);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) {
      const Vector value = held(some(values + i * kLanes, size));
#pragma GCC unroll 4
      for (int head = 0; head < heads; ++head)
        sums[head][i] = fused(value, weights[head * padded + token], sums[head][i]);
    }
  }
  for (int head = 0; head < heads; ++head)
    for (int i = 0; i < vectors; ++i)
      put(sums[head][i] * factors[head], to + numbers[head] * head_dim + at + i * kLanes, size);
}

// numbers: of the heads, whose sums go to their places in `to`.
template <int heads, class T>
void weigh(const Context<T>& context, const float* weights, int64_t padded, const float* factors,
           const int64_t* numbers, int64_t head_dim, float* to) {
  int64_t at = 0;
  for (; at + kVectorsOfValues * kLanes <= head_dim; at += kVectorsOfValues * kLanes)
    weigh_piece<heads, kVectorsOfValues>(context, weights, padded, factors, numbers, head_dim, at, Whole{}, to);
  for (; at + kLanes <= head_dim; at += kLanes)
    weigh_piece<heads, 1>(context, weights, padded, factors, numbers, head_dim, at, Whole{}, to);
  if (at < head_dim)
    weigh_piece<heads, 1>(context, weights, padded, factors, numbers, head_dim, at, Part{head_dim - at}, to);
}

// The query heads of one key/value head of a row.
template <class T>
void attend(const Decoder& decoder, const Context<T>& context, const float* queries, float* scores, float* to) {
  const int64_t group = decoder.num_heads / decoder.num_kv_heads, width = decoder.head_dim;
  const int64_t padded = up(context.count, kLanes);
  for (int64_t head = 0; head < group;) {
    int64_t heads[4], taken = 0;
    for (; head < group && taken < 4; ++head) heads[taken++] = head;
    if (taken == 1)
      score<kLanes>(decoder, context, queries, heads, taken, scores, padded);
    else if (taken == 2)
      score<kLanes / 2>(decoder, context, queries, heads, taken, scores, padded);
    else
      score<kLanes / 4>(decoder, context, queries, heads, taken, scores, padded);
    float factors[4];
    for (int64_t one = 0; one < taken; ++one) factors[one] = soften(scores + one * padded, context.count, padded);
    if (taken == 1) weigh<1>(context, scores, padded, factors, heads, width, to);
    if (taken == 2) weigh<2>(context, scores, padded, factors, heads, width, to);
    if (taken == 3) weigh<3>(context, scores, padded, factors, heads, width, to);
    if (taken == 4) weigh<4>(context, scores, padded, factors, heads, width, to);
  }
}

// What the time of a step goes to. kNorms: embedding, norms, sums of the residual stream, codes of activations, gates;
// kHeads: norms and rotations of queries and keys, and writing the cache; kFeedForward: products and activation.
enum class StepPart { kProjections, kHeads, kAttention, kFeedForward, kNorms };

// Without a clock nothing is measured, and no instruction is there for it.
struct NoClock {
  void start(const Member&) {}
  void mark(StepPart) const {}
};

// Adds the time since the last mark to a part, as the first thread sees it: its own work, and waiting for the others.
struct StepClock {
  double* seconds;
  mutable std::chrono::steady_clock::time_point last{};
  bool is_first = false;

  void start(const Member& member) {
    is_first = member.number == 0;
    last = std::chrono::steady_clock::now();
  }

  void mark(StepPart part) const {
    if (!is_first) return;
    const auto now = std::chrono::steady_clock::now();
    seconds[static_cast<int>(part)] += std::chrono::duration<double>(now - last).count();
    last = now;
  }
};

// One step's view of the decoder, as each thread has it.
template <class T, class Clock>
struct Pass {
  const Decoder& decoder;
  const Step& step;
  const Memory& memory;
  const Member& member;
  const Clock& clock;

  int64_t queries() const { return decoder.num_heads * decoder.head_dim; }
  int64_t pairs() const { return decoder.num_kv_heads * decoder.head_dim; }

  Rows rows(const float* numbers, int64_t width) const {
    return {numbers, memory.codes, memory.peaks, step.num_rows, width};
  }

  void embed(int64_t row) const {
    const Matrix& by = decoder.embedding;
    const int64_t token = step.tokens[row], first = token * decoder.width;
    float* const to = memory.hidden + row * decoder.width;
    for (int64_t at = 0; at < decoder.width; ++at) {
      float number;
      if (by.format == kInt8)
        number = static_cast<const int8_t*>(by.weight)[first + at] * by.grid.step[token];
      else if (by.format == kBf16)
        number = wide(static_cast<const Bf16*>(by.weight)[first + at]);
      else
        number = static_cast<const float*>(by.weight)[first + at];
      to[at] = number * decoder.embedding_scale;
    }
  }

  // The residual stream plus a layer's output.
  void add(int64_t row, const float* post_norm) const {
    float *const stream = memory.hidden + row * decoder.width, *const more = memory.out + row * decoder.width;
    if (post_norm) normalize(more, post_norm, decoder.width, decoder.eps, more);
    each_vector(decoder.width, [&](int64_t at, int, auto size) {
      put(some(stream + at, size) + some(more + at, size), stream + at, size);
    });
  }

  void norm(int64_t row, const float* weight, float* to) const {
    normalize(memory.hidden + row * decoder.width, weight, decoder.width, decoder.eps, to + row * decoder.width);
  }

  void norm(int64_t row, const float* weight, const Matrix& next) const {
    norm(row, weight, memory.normed);
    if (is_encoded(next)) encode(next, rows(memory.normed, decoder.width), row);
  }

  // Norm and rotation of each head of a row.
  void prepare(float* heads, int64_t count, const float* norm, const Layer& layer, int64_t row) const {
    const int64_t half = decoder.rotary_dim / 2, first = step.rope_rows[row] * decoder.rotary_dim;
    const float* const cos = (layer.rotation == kWindow ? step.window_cos : step.cos) + first;
    const float* const sin = (layer.rotation == kWindow ? step.window_sin : step.sin) + first;
    for (float* head = heads; head < heads + count * decoder.head_dim; head += decoder.head_dim) {
      if (norm) normalize(head, norm, decoder.head_dim, decoder.eps, head);
      if (layer.rotation != kNone) turn(head, cos, sin, sin + half, half, head);
    }
  }

  void write(const float* from, void* cache, int64_t row) const {
    const int64_t position = step.positions[row], block = step.blocks[step.first_block[row] + position / decoder.block_len];
    const int64_t width = decoder.head_dim;
    T* to = static_cast<T*>(cache) + block * decoder.block_len * pairs() + position % decoder.block_len * width;
    from += row * pairs();
    for (int64_t head = 0; head < decoder.num_kv_heads; ++head, from += width, to += decoder.block_len * width)
      each_vector(width, [&](int64_t at, int, auto size) { put(some(from + at, size), to + at, size); });
  }

  void attend_all(const Layer& layer) const {
    const int64_t num_tasks = step.num_rows * decoder.num_kv_heads, group = queries() / decoder.num_kv_heads;
    float* const scores = memory.scores + member.number * memory.scores_step;
    member.each_as_it_comes(num_tasks, [&](int64_t task) {
      const int64_t row = task / decoder.num_kv_heads, head = task % decoder.num_kv_heads;
      const int64_t position = step.positions[row];
      float* const to = memory.attended + row * queries() + head * group;
      if (layer.head_router.outputs && memory.head_router[row * decoder.num_kv_heads + head] <= 0.0f) {
        std::fill(to, to + group, 0.0f);
        return;
      }
      const int64_t first = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
      const int64_t skipped = head * decoder.block_len * decoder.head_dim;
      const Context<T> context{static_cast<const T*>(layer.keys) + skipped,
                               static_cast<const T*>(layer.values) + skipped,
                               step.blocks + step.first_block[row], first, position + 1 - first,
                               __builtin_ctzll(decoder.block_len), decoder.head_dim, decoder.block_len * pairs()};
      attend(decoder, context, memory.q + row * queries() + head * group, scores, to);
    });
  }

  // Attention's output times the sigmoids of the output gate, one for each head or for each number.
  void gate_output(int64_t row, int64_t num_gates) const {
    float* const out = memory.attended + row * queries();
    const float* const gates = memory.output_gate + row * num_gates;
    const int64_t width = queries() / num_gates;
    for (int64_t at = 0; at < queries(); ++at) out[at] /= 1.0f + std::exp(-gates[at / width]);
  }

  void attention(const Layer& layer) const {
    const Rows in = rows(memory.normed, decoder.width), attended = rows(memory.attended, queries());
    multiply(member, in, {{layer.q, memory.q}, {layer.k, memory.k}, {layer.v, memory.v},
                          {layer.output_gate, memory.output_gate}, {layer.head_router, memory.head_router}});
    clock.mark(StepPart::kProjections);
    member.each(step.num_rows, [&](int64_t row) {
      prepare(memory.q + row * queries(), decoder.num_heads, layer.q_norm, layer, row);
      prepare(memory.k + row * pairs(), decoder.num_kv_heads, layer.k_norm, layer, row);
      write(memory.k, layer.keys, row);
      write(memory.v, layer.values, row);
    });
    clock.mark(StepPart::kHeads);
    attend_all(layer);
    clock.mark(StepPart::kAttention);
    if (layer.output_gate.outputs || is_encoded(layer.o))
      member.each(step.num_rows, [&](int64_t row) {
        if (layer.output_gate.outputs) gate_output(row, layer.output_gate.outputs);
        if (is_encoded(layer.o)) encode(layer.o, attended, row);
      });
    clock.mark(StepPart::kNorms);
    multiply(member, attended, {{layer.o, memory.out}});
    clock.mark(StepPart::kProjections);
  }

  void feed_forward(const Layer& layer) const {
    const Rows activated = rows(memory.gate, decoder.ffn_width);
    multiply_gated(member, rows(memory.normed, decoder.width), layer.gate, layer.up, decoder.activation, memory.gate,
                   memory.up);
    clock.mark(StepPart::kFeedForward);
    if (is_encoded(layer.down)) member.each(step.num_rows, [&](int64_t row) { encode(layer.down, activated, row); });
    clock.mark(StepPart::kNorms);
    multiply(member, activated, {{layer.down, memory.out}});
    clock.mark(StepPart::kFeedForward);
  }

  // to: [N][D], after the final norm.
  void run(float* to) const {
    member.each(step.num_rows, [&](int64_t row) {
      embed(row);
      norm(row, decoder.layers[0].attention_norm, decoder.layers[0].q);
    });
    clock.mark(StepPart::kNorms);
    for (int64_t number = 0; number < decoder.num_layers; ++number) {
      const Layer& layer = decoder.layers[number];
      attention(layer);
      member.each(step.num_rows, [&](int64_t row) {
        add(row, layer.attention_post_norm);
        norm(row, layer.ffn_norm, layer.gate);
      });
      clock.mark(StepPart::kNorms);
      feed_forward(layer);
      member.each(step.num_rows, [&](int64_t row) {
        add(row, layer.ffn_post_norm);
        if (number + 1 < decoder.num_layers)
          norm(row, decoder.layers[number + 1].attention_norm, decoder.layers[number + 1].q);
        else
          norm(row, decoder.norm, to);
      });
      clock.mark(StepPart::kNorms);
    }
  }
};

template <class Clock>
void decode_step(const Decoder& decoder, const Step& step, float* scratch, float* to, int threads, const Clock& clock) {
  const Memory memory = memory_of(decoder, step.num_rows, step.longest, threads, scratch);
  Team::run(threads, [&](const Member& member) {
    Clock own = clock;
    own.start(member);
    if (decoder.cache_format == kBf16)
      Pass<Bf16, Clock>{decoder, step, memory, member, own}.run(to);
    else
      Pass<float, Clock>{decoder, step, memory, member, own}.run(to);
  });
}

// in [num_rows][inputs] times a matrix; peaks [num_rows] and codes are memory as `Rows` has it.
void multiply_all(const Matrix& by, const float* in, int64_t num_rows, float* peaks, int8_t* codes, float* to,
                  int threads) {
  const Rows rows{in, codes, peaks, num_rows, by.inputs};
  Team::run(threads, [&](const Member& member) {
    if (is_encoded(by)) member.each(num_rows, [&](int64_t row) { encode(by, rows, row); });
    multiply(member, rows, {{by, to}});
  });
}

// The place of the largest number of each row, the first of equal ones, and the logarithm of the sum of exponentials. It
// ends every step of decoding, so the team does it: one of OpenMP's threads, woken for it, would take a core from a
// member of the team for as long as it waits for more work.
void summarize(const float* x, int64_t num_rows, int64_t width, int64_t* largest_at, float* log_sums, int threads) {
  const auto one = [&](int64_t row) {
    const float* const from = x + row * width;
    float largest = from[0];
    if (width >= kLanes) {
      Vector most = load(from);
      for (int64_t at = kLanes; at + kLanes <= width; at += kLanes) most = larger(most, load(from + at));
      for (int lane = 0; lane < kLanes; ++lane) largest = larger(largest, most[lane]);
    }
    for (int64_t at = width / kLanes * kLanes; at < width; ++at) largest = larger(largest, from[at]);
    int64_t at = 0;
    while (at < width && from[at] < largest) ++at;
    largest_at[row] = std::min(at, width - 1);
    Vector sums[2] = {};
    float rest = 0.0f;
    for (at = 0; at + kLanes <= width; at += kLanes) sums[at / kLanes % 2] += exponential(load(from + at) - largest);
    for (; at < width; ++at) rest += std::exp(from[at] - largest);
    log_sums[row] = largest + std::log(sum(sums[0] + sums[1]) + rest);
  };
  // Waking the team for a single row would take longer than the row.
  Team::run(num_rows > 1 ? threads : 1, [&](const Member& member) { member.each(num_rows, one); });
}

}  // namespace
