// What a slot of the cache holds, and what the matrix units multiply.
//
// Values of 16 bits are multiplied as they are. Those of 8 bits (e4m3) stay so in the cache and on their way through
// shared memory, and are widened to fp16, exactly, on their way to the matrix units. Four neighbours widen to two pairs:
// the first and the third, the second and the fourth. So every 16 columns of an operand, and of the results, have the
// even columns first, then the odd ones, and nobody puts them in order but whoever writes an output (`column_of`).
#pragma once
#include <cstdint>
#include <type_traits>

#include "traits.h"

namespace cutlass {
struct half_t;  // the memory probe is built without CUTLASS
}

namespace feather {

template <typename T>
using KvValue = std::conditional_t<kFp8, uint8_t, T>;
template <typename T>
using Operand = std::conditional_t<kFp8, cutlass::half_t, T>;

// Places of 16 bits that so many values take.
constexpr int kv_places(int values) { return values * kKvBytes / 2; }

// The column of the output that a column of the results is.
__device__ __forceinline__ int column_of(int column) {
  return kFp8 ? column / 16 * 16 + column % 8 * 2 + column / 8 % 2 : column;
}

// Four e4m3 as pairs of fp16: the first and the third, and the second and the fourth. NaN stays NaN.
__device__ __forceinline__ void widen(uint32_t values, uint32_t& even, uint32_t& odd) {
#if __CUDA_ARCH__ >= 890
  uint32_t const pairs = __byte_perm(values, 0, 0x3120);
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(even), "=r"(odd)
      : "r"(pairs));
#else
  // Sign, exponent and mantissa in their places, 2^8 too small; the carry of a NaN's magnitude makes fp16's.
  uint32_t const nan = (values & 0x7f7f7f7fu) + 0x01010101u;
  even = (values << 8 & 0x80008000u) | (values << 7 & 0x3f803f80u) | (nan << 7 & 0x40004000u);
  odd = (values & 0x80008000u) | (values >> 1 & 0x3f803f80u) | (nan >> 1 & 0x40004000u);
  constexpr uint32_t kScale = 0x5c005c00u;  // 2^8, twice
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(even) : "r"(kScale));
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(odd) : "r"(kScale));
#endif
}

}  // namespace feather
