// Partial results: deposit them, and merge a request's parts once they are all there (PAT 7).
//
// A part is a normalised fp32 result and its log-sum-exp. Parts are always combined in position order, so the
// result is the same bit for bit whoever arrives last.
#pragma once
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

__device__ __forceinline__ int load_relaxed(int const* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Merge one row of each lane group that has it complete; `own` is the part that has not left the registers.
template <typename T, int kHeadDim, class Layout>
__device__ __forceinline__ void merge_row(Params<T> const& params, float const (&own)[Layout::kCount], float own_lse,
                                          Row const& row) {
  constexpr int kAtOnce = Layout::kCount <= 16 ? 4 : 1;  // parts in flight
  float const* const lse = params.part_lse + int64_t(row.first_part) * params.q_heads + row.head;
  float const* const value = params.part_out + (int64_t(row.first_part) * params.q_heads + row.head) * kHeadDim;
  int const own_index = row.part - row.first_part;
  PartSum<Layout::kCount> total;
#pragma unroll 1
  for (int k = 0; k < row.n_parts; k += kAtOnce) {
    float part_lse[kAtOnce], part[kAtOnce][Layout::kCount];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (k + u < row.n_parts && k + u != own_index) {
        part_lse[u] = __ldcg(lse + int64_t(k + u) * params.q_heads);
        Layout::load(value + int64_t(k + u) * params.q_heads * kHeadDim, part[u]);
      } else {
        bool const is_own = k + u == own_index;
        part_lse[u] = is_own ? own_lse : -INFINITY;
#pragma unroll
        for (int j = 0; j < Layout::kCount; ++j) part[u][j] = is_own ? own[j] : 0.f;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (k + u < row.n_parts) total.add(part_lse[u], part[u]);
    }
  }
  float const inverse = total.inverse();
#pragma unroll
  for (int j = 0; j < Layout::kCount; ++j) total.sum[j] *= inverse;
  Layout::store(params.out + row.request * params.out_stride + row.head * kHeadDim, total.sum);
  if (params.lse && Layout::leads()) {
    params.lse[int64_t(row.request) * params.q_heads + row.head] = total.lse() * kLn2;
  }
}

// A warp has finished a work unit: write single results out, merge what is complete, deposit the rest.
template <typename T, int kHeadDim, class Layout, class Out>
__device__ __forceinline__ void finish(Params<T> const& params, Out const& out, float const (&lse)[2],
                                       Row const (&rows)[2]) {
  bool complete[2], deposits[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    deposits[i] = rows[i].request >= 0 && rows[i].part >= 0;
    // If all others are there, this part need not travel through memory.
    int* const arrived = params.arrived + int64_t(rows[i].request) * params.q_heads + rows[i].head;
    int const seen = params.fused_merge && Layout::leads() && deposits[i] ? load_relaxed(arrived) : -1;
    bool const others = __shfl_sync(~0u, seen, Layout::leader()) == rows[i].n_parts - 1;
    complete[i] = params.fused_merge && deposits[i] && others;
    deposits[i] &= !complete[i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float values[Layout::kCount];
#pragma unroll
    for (int j = 0; j < Layout::kCount; ++j) values[j] = Layout::value(out, i, j);
    if (rows[i].request >= 0 && rows[i].part < 0) {
      Layout::store(params.out + rows[i].request * params.out_stride + rows[i].head * kHeadDim, values);
      if (params.lse && Layout::leads()) {
        params.lse[int64_t(rows[i].request) * params.q_heads + rows[i].head] = lse[i] * kLn2;
      }
    } else if (deposits[i]) {
      int64_t const at = int64_t(rows[i].part) * params.q_heads + rows[i].head;
      Layout::deposit(params.part_out + at * kHeadDim, values);
      if (Layout::leads()) __stcg(params.part_lse + at, lse[i]);
    }
  }
  if (!params.fused_merge) return;

  if (__any_sync(~0u, deposits[0] || deposits[1])) {
    fence();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int* const arrived = params.arrived + int64_t(rows[i].request) * params.q_heads + rows[i].head;
      int const before = Layout::leads() && deposits[i] ? atomicAdd(arrived, 1) : -1;
      bool const last = __shfl_sync(~0u, before, Layout::leader()) == rows[i].n_parts - 1;
      complete[i] |= deposits[i] && last;
    }
  }
  if (!__any_sync(~0u, complete[0] || complete[1])) return;
  fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!complete[i]) continue;
    if (Layout::leads()) {  // as the next run expects it
      params.arrived[int64_t(rows[i].request) * params.q_heads + rows[i].head] = 0;
    }
    float own[Layout::kCount];
#pragma unroll
    for (int j = 0; j < Layout::kCount; ++j) own[j] = Layout::value(out, i, j);
    merge_row<T, kHeadDim, Layout>(params, own, lse[i], rows[i]);
  }
}

// The merge as a kernel of its own: a warp per (request, query head), kHeadDim / 32 columns a lane.
template <typename T, int kHeadDim>
__global__ void merge_kernel(Params<T> const params) {
  constexpr int kCount = kHeadDim / 32;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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
