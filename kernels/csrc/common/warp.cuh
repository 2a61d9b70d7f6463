// What the lanes of a warp do together, and what the compiler must not know.
#pragma once
#include <cstdint>

#include "common/params.cuh"
#include "traits.h"

namespace feather {

// The same value, of which the compiler knows nothing. It would work out conditions like `lse != nullptr` once for the
// whole kernel, run out of predicates, and keep them in local memory, whose first touch takes a microsecond.
template <typename V>
__device__ __forceinline__ V opaque(V value) {
  if constexpr (sizeof(V) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// The first lane's value, which is every lane's: the compiler may then work with it in uniform registers, where wgmma
// wants its descriptors.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

struct Sum {
  __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};
struct Max {
  __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
};
// The larger magnitude; NaN if one is NaN.
struct Larger {
  __device__ __forceinline__ float operator()(float x, float y) const {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(x)), "f"(fabsf(y)));
    return result;
  }
};

// The values of all lanes that are kNear, 2 kNear, 4 kNear, ... apart, below kFar.
template <class Op, int kNear, int kFar>
__device__ __forceinline__ float allreduce(float x) {
#pragma unroll
  for (int distance = kNear; distance < kFar; distance *= 2) x = Op()(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

__device__ __forceinline__ Queue uniform(Queue const& queue) {
  return {uniform(queue.index), uniform(queue.first_item), uniform(queue.n_work)};
}

// Of 32-bit factors; in C++ they would be extended first, and multiplied as such.
__device__ __forceinline__ int64_t wide_product(int x, int y) {
  int64_t product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}

}  // namespace feather
