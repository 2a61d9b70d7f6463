// Partial results: the forward kernel deposits them, the merge kernel combines each request's (PAT 7).
//
// A part is a normalised fp32 result and its log-sum-exp. Parts are combined in position order, so the result is
// the same bit for bit in every run.
#pragma once
#include "barrier.cuh"
#include "params.cuh"

namespace feather {

constexpr float kLn2 = 0.6931471805599453f;

// One query row of a warp's tile.
struct Row {
  int request = -1;  // -1: padding
  int head = 0;      // query head
  int part = -1;     // -1: the request's only part
};

// The running sum of parts; kCount values of a row.
template <int kCount>
struct PartSum {
  float sum[kCount] = {};
  float weight = 0.f, top = -INFINITY;

  __device__ __forceinline__ void add(float lse, float const (&part)[kCount]) {
    float const next = fmaxf(top, lse);
    float const minus = next == -INFINITY ? 0.f : -next;
    float const alpha = exp2f(top + minus), w = exp2f(lse + minus);
    top = next;
    weight = fmaf(weight, alpha, w);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = fmaf(w, part[i], sum[i] * alpha);
  }
  __device__ __forceinline__ float inverse() const { return weight == 0.f ? 0.f : 1.f / weight; }  // NaN stays NaN
  __device__ __forceinline__ float lse() const { return weight == 0.f ? -INFINITY : top + log2f(weight); }
};

// A warp has finished a work unit: results of requests with one part only are final, the others are parts.
template <typename T, int kHeadDim, class Layout, class Out>
__device__ __forceinline__ void finish(Params<T> const& params, Out const& out, float const (&lse)[2],
                                       Row const (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (rows[i].request < 0) continue;
    float values[Layout::kCount];
#pragma unroll
    for (int j = 0; j < Layout::kCount; ++j) values[j] = Layout::value(out, i, j);
    if (rows[i].part < 0) {
      Layout::store(params.out + rows[i].request * params.out_stride + rows[i].head * kHeadDim, values);
      if (params.lse && Layout::leads()) {
        params.lse[int64_t(rows[i].request) * params.q_heads + rows[i].head] = lse[i] * kLn2;
      }
    } else {
      int64_t const at = int64_t(rows[i].part) * params.q_heads + rows[i].head;
      Layout::deposit(params.part_out + at * kHeadDim, values);
      if (Layout::leads()) __stcg(params.part_lse + at, lse[i]);
    }
  }
}

// A warp per (request, query head), kHeadDim / 32 columns a lane.
template <typename T, int kHeadDim>
__global__ void merge_kernel(Params<T> const params) {
  constexpr int kCount = kHeadDim / 32;
  wait_for_previous_kernel();
  int const n_requests = params.plan[kHeaderRequests];
  int const* const part_begin = params.plan + params.plan[kHeaderPartBegin];
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
  int const column = threadIdx.x % 32 * kCount;
  for (int index = warp; index < n_requests * params.q_heads; index += warps) {
    int const request = index / params.q_heads, head = index % params.q_heads;
    int const first_part = part_begin[request], n_parts = part_begin[request + 1] - first_part;
    if (n_parts == 0) continue;
    float const* const lse = params.part_lse + int64_t(first_part) * params.q_heads + head;
    float const* const value = params.part_out + (int64_t(first_part) * params.q_heads + head) * kHeadDim + column;
    PartSum<kCount> total;
#pragma unroll 4
    for (int k = 0; k < n_parts; ++k) {
      float part[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) part[j] = value[int64_t(k) * params.q_heads * kHeadDim + j];
      total.add(lse[int64_t(k) * params.q_heads], part);
    }
    float const inverse = total.inverse();
    T* const to = params.out + request * params.out_stride + head * kHeadDim + column;
#pragma unroll
    for (int j = 0; j < kCount; ++j) to[j] = T(total.sum[j] * inverse);
    if (params.lse && column == 0) params.lse[int64_t(request) * params.q_heads + head] = total.lse() * kLn2;
  }
}

}  // namespace feather
