// What one launch needs: tensors, the plan in device memory, scratch. Passed by value.
#pragma once
#include <climits>
#include <cstdint>

#include "plan_buffer.h"

namespace feather {

// Division by a number that is fixed for a launch; exact for dividends below 2^24 and divisors up to 256, and
// below 2^20 for those up to 4096.
struct FastDivide {
  uint32_t multiplier = 0;
  int divisor = 1;
  FastDivide() = default;
  explicit FastDivide(int d) : multiplier(uint32_t(((uint64_t(1) << 32) + d - 1) / d)), divisor(d) {}
  __device__ __forceinline__ int div(int x) const {
    return divisor == 1 ? x : int(__umulhi(uint32_t(x), multiplier));
  }
};

struct PartNote;

template <typename T>
struct Params {
  T const* q;  // (requests, q_heads, head_dim)
  T const* k;  // (slots, kv_heads, head_dim)
  T const* v;
  T* out;                // (requests, q_heads, head_dim)
  float* lse;            // (requests, q_heads), natural logarithm, or null
  uint16_t* part_out;    // (parts, q_heads, head_dim): normalised partial results in steps, columns as part_chunk has them
  PartNote* part_notes;  // (parts, q_heads): their log-sum-exp, base 2, and step; between runs kNothing
  int* popped;           // per tile: work units taken from its queue; zero between runs
  int const* plan;       // header, items, members, part_begin
  int const* seq_lens;
  void const* table;  // slot ids or page ids, int32 or int64
  int64_t q_stride, out_stride;  // elements
  uint32_t k_slot_bytes, v_slot_bytes;
  int q_heads, kv_heads, group;
  FastDivide kv_heads_div, kv_pairs_div, group_div;
  int page_bits;
  int entry_bytes;  // of the table
  unsigned queues;  // a bit per queue that this launch serves
  bool prefetch;
  float scale_log2;       // softmax scale times log2(e)
  float soft_cap_log2;    // logit soft cap times log2(e); 0 = none
  float soft_cap_scale;   // softmax scale over the cap
};

constexpr int kPatience = 1 << 24;  // looks at a part that does not come before the kernel gives up

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
__device__ __forceinline__ float across(float x) {
#pragma unroll
  for (int distance = kNear; distance < kFar; distance *= 2) x = Op()(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// A queue of the plan, as a launch sees it.
struct Queue {
  int index, first_item, n_work;
};
__device__ __forceinline__ Queue uniform(Queue const& queue) {
  return {uniform(queue.index), uniform(queue.first_item), uniform(queue.n_work)};
}

}  // namespace feather
