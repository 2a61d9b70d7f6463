// Partial results (PAT 7): a unit deposits them; the unit with a request's last part, a warp that takes a row of them
// behind the queues, or the merge kernel combines them.
//
// A part is a normalised result and its log-sum-exp. They are combined in fp32 and in a fixed order, so that the result
// is the same bit for bit in every run. On their way through memory the values of a row are quantized to
// 16-bit integers, in steps of 1 / 32767 of its largest: half the traffic, with an error far below that of
// an output in 16 bits.
#pragma once
#include "common/work_item.cuh"

namespace feather {

constexpr float kLn2 = 0.6931471805599453f;
constexpr int kOnly = -1;  // in place of a part: the request has no other
constexpr uint32_t kNotPublished = 0xffffffffu;  // a log-sum-exp, as bits, that nobody has deposited yet

// One query row of a warp's tile.
struct Row {
  int request = -1;  // -1: padding
  int head = 0;      // query head
  int part = kOnly;  // kOnly, kCloses, or where the part is deposited
};

// The values of a part lie so that a lane of either tile layout holds eight neighbours: here start the columns
// 64 block + 8 {0, ..., 7} + place of a row; of each block, even places come first.
__device__ __forceinline__ int part_chunk(int block, int place) {
  return 64 * block + kPartChunk * (place / 2 + 4 * (place % 2));
}

constexpr float kQuantMax = 32767.f;
constexpr float kMinAbsMax = 1e-30f;  // what a row's largest value counts as, at least: one over its scale is finite
// A value in steps, plus this, is a float whose last 16 bits count steps from -32768 on.
constexpr float kQuantBits = 8388608.f + 32768.f;

// Two values of a row as a part has them; `inverse` is one over its scale.
__device__ __forceinline__ uint32_t quantize(float first, float second, float inverse) {
  uint32_t const low = __float_as_uint(fmaf(first, inverse, kQuantBits));
  return __byte_perm(low, __float_as_uint(fmaf(second, inverse, kQuantBits)), 0x5410);
}

// And back: N values of a part, not yet times the scale.
template <int N>
__device__ __forceinline__ void dequantize(uint32_t const* words, float (&quantized)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    quantized[i] = __uint_as_float(__byte_perm(words[i / 2], 0x4b00, i % 2 ? 0x5432 : 0x5410)) - kQuantBits;
  }
}

// What is published of a part's row: its log-sum-exp, and the scale of its values. Read and written as one.
struct PartialStats {
  uint32_t lse, scale;  // as bits; lse is kNotPublished until the part has been deposited

  __device__ __forceinline__ bool missing() const { return lse == kNotPublished; }
};

__device__ __forceinline__ PartialStats load_relaxed(PartialStats const* address) {
  uint64_t bits;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
  return {uint32_t(bits), uint32_t(bits >> 32)};
}
__device__ __forceinline__ void store(PartialStats* address, PartialStats stats) {
  __stcg(reinterpret_cast<unsigned long long*>(address), (unsigned long long)(stats.scale) << 32 | stats.lse);
}
__device__ __forceinline__ void reset(PartialStats* address) {
  store(address, {kNotPublished, kNotPublished});  // a scale of NaN
}

// The running sum of parts.
struct PartWeight {
  float top, weight;

  // Take a part in: the sum so far is to be scaled by alpha, the part by the result.
  __device__ __forceinline__ float add(float lse, float& alpha) {
    float const next = fmaxf(top, lse);
    alpha = exp2f(top + minus(next));
    float const w = exp2f(lse + minus(next));
    top = next;
    weight = fmaf(weight, alpha, w);
    return w;
  }
  // The same for as many as a warp has lanes, of which `highest` is the greatest log-sum-exp: the factor of the sum so
  // far ...
  __device__ __forceinline__ float update_row_max(float highest) {
    float const next = fmaxf(top, highest), alpha = exp2f(top + minus(next));
    top = next;
    weight *= alpha;
    return alpha;
  }
  // ... and of this lane's part.
  __device__ __forceinline__ float weigh(float lse) {
    float const w = exp2f(lse + minus(top));
    weight += allreduce<Sum, 1, 32>(w);
    return w;
  }
  static __device__ __forceinline__ float minus(float top) { return top == -INFINITY ? 0.f : -top; }
  __device__ __forceinline__ float inverse() const { return weight == 0.f ? 0.f : 1.f / weight; }  // NaN stays NaN
  __device__ __forceinline__ float lse() const { return weight == 0.f ? -INFINITY : top + log2f(weight); }
};

// A log-sum-exp that can be told from kNotPublished.
__device__ __forceinline__ uint32_t publishable(float lse) {
  uint32_t const bits = __float_as_uint(lse);
  return bits == kNotPublished ? 0x7fffffffu : bits;
}

// The requests of a warp's rows, which are the unit's from first_row on, and how their results join others.
template <class Layout, typename T>
__device__ void find_rows(Params<T> const& params, StageInfo const& info, int const* members, int first_row,
                          Row (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const row = first_row + Layout::row(i);
    int const member = params.group_div.div(row);
    rows[i] = Row{};
    if (member >= info.n_members) continue;
    int2 const words = reinterpret_cast<int2 const*>(members)[member];
    rows[i].request = words.x;
    rows[i].part = words.y;
    rows[i].head = (info.edges >> kHeadShift) * params.group + row - member * params.group;
  }
}

}  // namespace feather
