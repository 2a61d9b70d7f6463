// What one launch needs: tensors, the plan in device memory, scratch. Passed by value.
#pragma once
#include <cstdint>

#include "common/kv_type.cuh"
#include "common/plan_buffer.h"

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

struct PartialStats;

template <typename T>
struct Params {
  T const* q;  // (requests, q_heads, head_dim)
  KvValue<T> const* k;  // (slots, kv_heads, head_dim)
  KvValue<T> const* v;
  T* out;                // (requests, q_heads, head_dim)
  float* lse;            // (requests, q_heads), natural logarithm, or null
  uint16_t* part_out;    // (parts, q_heads, head_dim): normalised, quantized; columns as part_chunk has them
  PartialStats* part_stats;  // (parts, q_heads): their log-sum-exp, base 2, and scale; between runs kNotPublished
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
#if FEATHER_KV_FP8
  float v_scale;  // what values of the cache stand for times; that of keys is in the scales above
#endif
#if FEATHER_SINKS
  void const* sinks;  // (q_heads): a logit a head, natural logarithm
  bool wide_sinks;    // as float32, not as T
#endif
#if FEATHER_LATENT
  // `q` has the columns that meet the values, (requests, query heads, 512), and this the others. `q_heads` are halves of
  // an output's row, two a query head (sm90/latent_forward.cuh).
  T const* q_rope;
  int64_t q_head_stride, q_rope_stride, q_rope_head_stride;  // elements
#endif
};

// A queue of the plan, as a launch sees it.
struct Queue {
  int index, first_item, n_work;
};

}  // namespace feather
