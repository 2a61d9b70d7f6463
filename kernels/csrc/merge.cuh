// Partial results: deposit them, and merge a request's parts once they are all there (PAT 7).
//
// A part is a normalised fp32 result and its log-sum-exp. Parts are always combined in position order, two at a time,
// so the result is the same bit for bit whoever arrives last.
#pragma once
#include <cutlass/numeric_conversion.h>

#include "params.cuh"

namespace feather {

constexpr float kLn2 = 0.6931471805599453f;

// One query row of a warp's tile.
struct Row {
  int request = -1;  // -1: padding
  int head = 0;      // query head
  int part = -1;     // -1: the request's only part
  int first_part = 0, n_parts = 0;
};

// The running sum of parts; kCount values of a row.
template <int kCount>
struct PartSum {
  float sum[kCount] = {};
  float weight = 0.f, top = -INFINITY;

  __device__ __forceinline__ void add(float lse0, float const (&part0)[kCount], float lse1,
                                      float const (&part1)[kCount]) {
    float const next = fmaxf(top, fmaxf(lse0, lse1));
    float const minus = next == -INFINITY ? 0.f : -next;
    float const alpha = exp2f(top + minus), w0 = exp2f(lse0 + minus), w1 = exp2f(lse1 + minus);
    top = next;
    weight = fmaf(weight, alpha, w0) + w1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = fmaf(w1, part1[i], fmaf(w0, part0[i], sum[i] * alpha));
  }
  __device__ __forceinline__ float inverse() const { return weight == 0.f ? 0.f : 1.f / weight; }  // NaN stays NaN
  __device__ __forceinline__ float lse() const { return weight == 0.f ? -INFINITY : top + log2f(weight); }
};

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  cutlass::NumericArrayConverter<T, float, 2> convert;
  *reinterpret_cast<cutlass::Array<T, 2>*>(to) = convert(cutlass::Array<float, 2>{x, y});
}

__device__ __forceinline__ int load_relaxed(int const* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Merge row i of each quad that has it complete; the warp's own part is still in `out`.
template <typename T, int kHeadDim, int i, class Out>
__device__ __forceinline__ void merge_row(Params<T> const& params, Out const& out, float own_lse, Row const& row) {
  constexpr int kColumns = 64;  // at a time, to save registers
  constexpr int kCount = kColumns / 4;                       // values a lane holds of them
  int const column = 2 * (threadIdx.x % 4);
  float const* const lse = params.part_lse + int64_t(row.first_part) * params.q_heads + row.head;
  float const* const value = params.part_out + (int64_t(row.first_part) * params.q_heads + row.head) * kHeadDim + column;
  T* const to = params.out + row.request * params.out_stride + row.head * kHeadDim + column;
  int const own = row.part - row.first_part;
#pragma unroll
  for (int base = 0; base < kHeadDim; base += kColumns) {
    PartSum<kCount> total;
    auto const load = [&](int k, float& part_lse, float(&part)[kCount]) {
      if (k < row.n_parts && k != own) {
        part_lse = __ldcg(lse + int64_t(k) * params.q_heads);
        float const* const from = value + int64_t(k) * params.q_heads * kHeadDim + base;
#pragma unroll
        for (int j = 0; j < kCount / 2; ++j) {
          float2 const pair = __ldcg(reinterpret_cast<float2 const*>(from + 8 * j));
          part[2 * j] = pair.x, part[2 * j + 1] = pair.y;
        }
      } else {
        part_lse = k == own ? own_lse : -INFINITY;
#pragma unroll
        for (int j = 0; j < kCount; ++j) part[j] = k == own ? out(base / 2 + 4 * (j / 2) + 2 * i + j % 2) : 0.f;
      }
    };
#pragma unroll 1
    for (int k = 0; k < row.n_parts; k += 2) {
      float lse0, lse1, part0[kCount], part1[kCount];
      load(k, lse0, part0);
      load(k + 1, lse1, part1);
      total.add(lse0, part0, lse1, part1);
    }
    float const inverse = total.inverse();
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) {
      store_pair(to + base + 8 * j, total.sum[2 * j] * inverse, total.sum[2 * j + 1] * inverse);
    }
    if (params.lse && base == 0 && threadIdx.x % 4 == 0) {
      params.lse[int64_t(row.request) * params.q_heads + row.head] = total.lse() * kLn2;
    }
  }
}

// A warp has finished a work unit: write single results out, merge what is complete, deposit the rest.
template <typename T, int kHeadDim, class Out>
__device__ __forceinline__ void finish(Params<T> const& params, Out const& out, float const (&lse)[2],
                                       Row const (&rows)[2]) {
  int const lane = threadIdx.x % 32;
  bool const leader = lane % 4 == 0;
  int const column = 2 * (lane % 4);
  bool complete[2], deposits[2];
  int* arrived[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Row const& row = rows[i];
    deposits[i] = row.request >= 0 && row.part >= 0;
    arrived[i] = params.arrived + int64_t(row.request) * params.q_heads + row.head;
    // If all others are there, this part need not travel through memory.
    int const seen = params.fused_merge && leader && deposits[i] ? load_relaxed(arrived[i]) : -1;
    bool const others = __shfl_sync(~0u, seen, lane & ~3) == row.n_parts - 1;
    complete[i] = deposits[i] && others;
    deposits[i] &= !complete[i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Row const& row = rows[i];
    if (row.request >= 0 && row.part < 0) {
      T* const to = params.out + row.request * params.out_stride + row.head * kHeadDim + column;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) store_pair(to + 8 * j, out(4 * j + 2 * i), out(4 * j + 2 * i + 1));
      if (params.lse && leader) params.lse[int64_t(row.request) * params.q_heads + row.head] = lse[i] * kLn2;
    } else if (deposits[i]) {
      int64_t const at = int64_t(row.part) * params.q_heads + row.head;
      float* const to = params.part_out + at * kHeadDim + column;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        __stcg(reinterpret_cast<float2*>(to + 8 * j), make_float2(out(4 * j + 2 * i), out(4 * j + 2 * i + 1)));
      }
      if (leader) __stcg(params.part_lse + at, lse[i]);
    }
  }
  if (!params.fused_merge) return;

  if (__any_sync(~0u, deposits[0] || deposits[1])) {
    fence();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const before = leader && deposits[i] ? atomicAdd(arrived[i], 1) : -1;
      bool const last = __shfl_sync(~0u, before, lane & ~3) == rows[i].n_parts - 1;
      complete[i] |= deposits[i] && last;
    }
  }
  if (!__any_sync(~0u, complete[0] || complete[1])) return;
  fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (complete[i] && leader) *arrived[i] = 0;  // as the next run expects it
  }
  if (complete[0]) merge_row<T, kHeadDim, 0>(params, out, lse[0], rows[0]);
  if (complete[1]) merge_row<T, kHeadDim, 1>(params, out, lse[1], rows[1]);
}

// The merge as a kernel of its own: a warp per (request, query head), kHeadDim / 32 columns a lane.
template <typename T, int kHeadDim>
__global__ void merge_kernel(Params<T> const params) {
  constexpr int kCount = kHeadDim / 32;
  int const n_requests = params.plan[header::kRequests];
  int const* const part_begin = params.plan + params.plan[header::kPartBeginBegin];
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
  int const column = threadIdx.x % 32 * kCount;
  for (int index = warp; index < n_requests * params.q_heads; index += warps) {
    int const request = index / params.q_heads, head = index % params.q_heads;
    int const first_part = part_begin[request], n_parts = part_begin[request + 1] - first_part;
    if (n_parts == 0) continue;
    float const* const lse = params.part_lse + int64_t(first_part) * params.q_heads + head;
    float const* const value = params.part_out + (int64_t(first_part) * params.q_heads + head) * kHeadDim + column;
    PartSum<kCount> total;
    auto const load = [&](int k, float& part_lse, float(&part)[kCount]) {
      bool const real = k < n_parts;
      part_lse = real ? lse[int64_t(k) * params.q_heads] : -INFINITY;
#pragma unroll
      for (int j = 0; j < kCount; ++j) part[j] = real ? value[int64_t(k) * params.q_heads * kHeadDim + j] : 0.f;
    };
#pragma unroll 4
    for (int k = 0; k < n_parts; k += 2) {
      float lse0, lse1, part0[kCount], part1[kCount];
      load(k, lse0, part0);
      load(k + 1, lse1, part1);
      total.add(lse0, part0, lse1, part1);
    }
    float const inverse = total.inverse();
    T* const to = params.out + request * params.out_stride + head * kHeadDim + column;
#pragma unroll
    for (int j = 0; j < kCount; j += 2) store_pair(to + j, total.sum[j] * inverse, total.sum[j + 1] * inverse);
    if (params.lse && column == 0) params.lse[int64_t(request) * params.q_heads + head] = total.lse() * kLn2;
  }
}

}  // namespace feather
