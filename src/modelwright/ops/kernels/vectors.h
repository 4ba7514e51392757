// Vectors of numbers, which are the compiler's own, so that one text serves every width of the processor's.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

// A vector fills one register of the processor: GCC lowers wider ones through memory, six times as slow (AVX2).
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr char kInstructionSet[] = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
constexpr char kInstructionSet[] = "avx2";
#elif defined(__ARM_NEON)
constexpr int kLanes = 4;
constexpr char kInstructionSet[] = "neon";
#elif defined(__x86_64__)
constexpr int kLanes = 4;
constexpr char kInstructionSet[] = "x86-64";
#else
constexpr int kLanes = 4;
constexpr char kInstructionSet[] = "generic";
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Bf16;
typedef Bf16 Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector all(float value) { return value - Vector{}; }  // x - 0 is x to the compiler, 0 + x is not
// a * b + c, rounded once where the processor has an instruction for it. A compiler that fuses by itself does so or not by
// the code around (GCC: `avoid-fma-max-bits`), and a row would have other bits among other rows: it is told not to.
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline Vector fused(Vector a, float b, Vector c) { return fused(a, all(b), c); }
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

// e^x within 2 units in the last place, for x from -87 to 88 (Cephes' polynomial).
inline Vector exponential_of_moderate(Vector x) {
  const Vector magic = all(12582912.0f), shifted = fused(x, 1.44269504088896341f, magic), n = shifted - magic;
  const Vector r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
  Vector p = fused(r, 1.9875691500e-4f, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p * r, r, r) + 1.0f;
  const Bits exponent = ((Bits)shifted - (Bits)magic) << 23;  // the casts keep the bits; unsigned, as a NaN overflows
  return (Vector)((Bits)p + exponent);
}

// The same for x up to 88, 0 below the range of normal numbers.
inline Vector exponential(Vector x) {
  const Integers is_zero = x < all(-87.0f);
  return is_zero ? Vector{} : exponential_of_moderate(is_zero ? all(-87.0f) : x);
}

inline float sum(Vector x) {
  float parts[kLanes];
  std::memcpy(parts, &x, sizeof parts);
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
  return parts[0];
}

inline float greatest(Vector x) {
  float parts[kLanes];
  std::memcpy(parts, &x, sizeof parts);
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) parts[lane] = std::max(parts[lane], parts[lane + half]);
  return parts[0];
}

// How much of a vector there is: all of it, or the first numbers of a row's last one.
struct Whole {};
struct Part {
  int64_t count;
};

// The numbers in FP32, zeros after them.
inline Vector some(const float* from, Whole) { return load(from); }
inline Vector some(const Bf16* from, Whole) {
#ifdef __AVX512F__  // GCC widens such a vector in two halves
  const __m256i found = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(found), 16);
#else  // GCC widens a loop of half a register's numbers by one instruction, a vector of them by four
  uint32_t bits[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) bits[lane] = static_cast<uint32_t>(from[lane]) << 16;
  Vector found;
  std::memcpy(&found, bits, sizeof found);
  return found;
#endif
}
template <class T>
inline Vector some(const T* from, Part part) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, part.count * sizeof(T));
  return some(padded, Whole{});
}

inline void put(Vector value, float* to, Whole) { store(to, value); }
inline void put(Vector value, Bf16* to, Whole) {  // as `narrow`
  const Bits bits = (Bits)value, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Integers is_number = value == value;
  const Halves halves = __builtin_convertvector((Bits)(is_number ? (Integers)nearest : Integers{} + 0x7fc0), Halves);
  std::memcpy(to, &halves, sizeof halves);
}
inline void put(Bytes codes, int8_t* to, Whole) { std::memcpy(to, &codes, sizeof codes); }
template <class V, class T>
inline void put(V value, T* to, Part part) {
  T padded[kLanes];
  put(value, padded, Whole{});
  std::memcpy(to, padded, part.count * sizeof(T));
}

// Calls body(at, which, size) for the vectors of a row; which: of two sums, so that two additions are under way at once.
template <class Body>
inline __attribute__((always_inline)) void each_vector(int64_t count, Body body) {
  int64_t at = 0;
  for (; at + 2 * kLanes <= count; at += 2 * kLanes) {
    body(at, 0, Whole{});
    body(at + kLanes, 1, Whole{});
  }
  for (; at + kLanes <= count; at += kLanes) body(at, 0, Whole{});
  if (at < count) body(at, 0, Part{count - at});
}

inline Vector magnitude(Vector x) { return (Vector)((Integers)x & 0x7fffffff); }
// What is not a number stays, so that a product of it is none either.
inline Vector larger(Vector a, Vector b) { return (a > b) | (a != a) ? a : b; }
inline float larger(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace
