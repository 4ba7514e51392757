// Vectors of numbers, which are the compiler's own, so that one text serves every width of the processor's.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kLanes = 16;

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

inline void put(Bytes codes, int8_t* to, int64_t count) {
  if (count >= kLanes)
    std::memcpy(to, &codes, kLanes);
  else
    std::memcpy(to, &codes, count);
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

}  // namespace
