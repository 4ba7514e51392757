// Kernels for processors where a chain of PyTorch's operators costs more than what it computes. Plain C interface;
// `cpu_kernels.py` says what each does. Working memory comes from the caller, a part for each thread, so that a lack of
// it is PyTorch's to report. Everything is computed in FP32, whatever the format of the tensors.

#include "attention.h"
#include "decode.h"
#include "draw.h"
#include "rows.h"
#include "sparse_codec.h"

extern "C" const char* instruction_set() { return kInstructionSet; }

// Returns how many cores they are on.
extern "C" int spread_threads(int threads) {
  Cores cores(threads);
#pragma omp parallel num_threads(threads)
  {
    const int number = omp_get_thread_num();
    cores.arrive(number);
#pragma omp barrier
    cores.leave_shared(number);
    cores.arrive(number);
  }
  return cores.count();
}

#define ATTENTION(NAME, T)                                                                                             \
  extern "C" void attention_forward_##NAME(const T* q, const T* k, const T* v, const int64_t* tiles, int64_t num_tiles,\
                                           const uint8_t* open, const int64_t* shape, float scale, T* out, float* lse, \
                                           float* scratch, int64_t scratch_step, int threads) {                        \
    forward(q, k, v, reinterpret_cast<const Tile*>(tiles), num_tiles, open, *reinterpret_cast<const Shape*>(shape),    \
            scale, out, lse, scratch, scratch_step, threads);                                                          \
  }                                                                                                                    \
  extern "C" void attention_backward_##NAME(const T* grad, const T* q, const T* k, const T* v, const T* out,           \
                                            const float* lse, const int64_t* tiles, int64_t num_tiles,                 \
                                            const uint8_t* open, const int64_t* shape, float scale, T* grad_q,         \
                                            T* grad_k, T* grad_v, float* scratch, int64_t scratch_step, int threads) { \
    backward(grad, q, k, v, out, lse, reinterpret_cast<const Tile*>(tiles), num_tiles, open,                           \
             *reinterpret_cast<const Shape*>(shape), scale, grad_q, grad_k, grad_v, scratch, scratch_step, threads);   \
  }

ATTENTION(fp32, float)
ATTENTION(bf16, Bf16)

#define INT8(NAME, T)                                                                                                  \
  extern "C" void quantize_##NAME(const T* x, int64_t num_rows, int64_t num_columns, int by_column, int stochastic,    \
                                  uint64_t seed, int8_t* codes, float* scales, float* scratch, int threads) {          \
    quantize(x, num_rows, num_columns, by_column, stochastic, seed, codes, scales, scratch, threads);                  \
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

extern "C" int64_t decode_scratch(const Decoder* decoder, int64_t num_rows, int64_t longest, int threads) {
  return memory_of(*decoder, num_rows, longest, threads, nullptr).size;
}

extern "C" void decode_step(const Decoder* decoder, const Step* step, float* scratch, float* to, int threads) {
  decode_step(*decoder, *step, scratch, to, threads, NoClock{});
}

extern "C" void decode_step_timed(const Decoder* decoder, const Step* step, float* scratch, float* to, int threads,
                                  double* seconds) {
  decode_step(*decoder, *step, scratch, to, threads, StepClock{seconds});
}

extern "C" int64_t code_bytes(int64_t width, int64_t format) { return code_step(width, format); }

extern "C" void multiply_rows(const Matrix* by, const float* in, int64_t num_rows, float* peaks, int8_t* codes,
                              float* to, int threads) {
  multiply_all(*by, in, num_rows, peaks, codes, to, threads);
}

extern "C" void summarize_rows(const float* x, int64_t num_rows, int64_t width, int64_t* largest_at, float* log_sums,
                               int threads) {
  summarize(x, num_rows, width, largest_at, log_sums, threads);
}

extern "C" void draw_rows(const float* logits, int64_t width, const int64_t* rows, const Draw* draws, int64_t num_draws,
                          float* scratch, int64_t* tokens, int threads) {
  draw_tokens(logits, width, rows, draws, num_draws, scratch, tokens, threads);
}

extern "C" int64_t entries_above(const float* values, int64_t numel, float threshold, int64_t* indices) {
  return above(values, numel, threshold, indices);
}

extern "C" int64_t encode_levels(const int64_t* indices, const float* values, int64_t count, const int64_t* bounds,
                                 int64_t num_buckets, const uint16_t* codes, int32_t* gaps, uint8_t* alive,
                                 uint8_t* to) {
  const uint8_t* const start = to;
  for (int64_t bucket = 0, at = 0; bucket < num_buckets && to; ++bucket) {
    const int64_t first = bounds[bucket], last = bounds[bucket + 1];
    if (last - first > std::numeric_limits<int32_t>::max()) return -1;
    const int64_t begin = at;
    while (at < count && indices[at] < last) ++at;
    to = write_levels(indices + begin, values + begin, at - begin, first, last - first, codes, gaps, alive, to);
  }
  return to ? to - start : -1;
}

extern "C" int64_t decode_levels(const uint8_t* from, int64_t num_bytes, const int64_t* bounds, int64_t num_buckets,
                                 const uint32_t* entries, int64_t* indices, float* values, int32_t* reached) {
  const uint8_t* const end = from + num_bytes;
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    const int64_t first = bounds[bucket], numel = bounds[bucket + 1] - first;
    if (numel > std::numeric_limits<int32_t>::max()) return -1;
    const int64_t count = read_levels(&from, end, numel, entries, indices + total, values + total, reached);
    if (count < 0) return -1;
    for (int64_t i = 0; i < count; ++i) indices[total + i] += first;
    total += count;
  }
  return total;
}

extern "C" int64_t encode_moves(const float* moves, int64_t numel, const uint16_t* codes, int32_t* scratch,
                                uint8_t* to) {
  return write_moves(moves, numel, codes, scratch, to);
}

extern "C" int64_t decode_moves(const uint8_t* from, int64_t num_bytes, int64_t numel, const uint32_t* entries,
                                int32_t* places, float* moves) {
  return read_moves(from, num_bytes, numel, entries, places, moves);
}
