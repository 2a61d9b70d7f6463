// Partial results: deposit them, and merge a request's parts once they are all there.
#pragma once
#include <cutlass/numeric_conversion.h>

#include "params.cuh"

namespace feather {

// A warp's rows as the merge sees them; one lane in four (lane % 4 == 0) owns rows lane/4 and lane/4 + 8.
struct Row {
  int request = -1;  // -1: padding
  int head = 0;      // query head
  int part = -1;     // -1: the request's only part
  int first_part = 0, n_parts = 0;
};

// Merge up to 16 rows of one warp. Lane l works on row `l / lanes_per_row` of those in `mask` (a bit per lane and row:
// rows[0] of lanes 0, 4, ... in bits 0..7, rows[1] in bits 8..15). Parts are read in position order, so the result does
// not depend on who deposited last.
template <typename T, int kHeadDim>
__device__ void merge_rows(Params<T> const& params, Row const (&rows)[2], unsigned mask) {
  int const lane = threadIdx.x % 32;
  int const n_rows = __popc(mask);
  int lanes_per_row = 32;
  while (lanes_per_row * n_rows > 32) lanes_per_row /= 2;
  int const nth = lane / lanes_per_row;
  int const bit = nth < n_rows ? __fns(mask, 0, nth + 1) : 0;
  int const owner = bit % 8 * 4;
  auto const of_owner = [&](int first, int second) {
    int const a = __shfl_sync(~0u, first, owner), b = __shfl_sync(~0u, second, owner);
    return bit < 8 ? a : b;
  };
  int const request = of_owner(rows[0].request, rows[1].request);
  int const head = of_owner(rows[0].head, rows[1].head);
  int const first_part = of_owner(rows[0].first_part, rows[1].first_part);
  int const n_parts = of_owner(rows[0].n_parts, rows[1].n_parts);
  if (nth >= n_rows) return;

  float const* const lse = params.part_lse + int64_t(first_part) * params.q_heads + head;
  float const* const value = params.part_out + (int64_t(first_part) * params.q_heads + head) * kHeadDim;
  int64_t const part_stride = int64_t(params.q_heads) * kHeadDim;
  constexpr int kUnroll = 2, kChunks = 4;  // parts in flight, float4s of a part in flight
  int const step = 4 * lanes_per_row;
  for (int column = lane % lanes_per_row * 4; column < kHeadDim; column += kChunks * step) {
    float4 sum[kChunks] = {};
    float weight = 0.f, top = -INFINITY;
    for (int k = 0; k < n_parts; k += kUnroll) {
      float part_lse[kUnroll];
      float4 part[kUnroll][kChunks];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        part_lse[u] = k + u < n_parts ? __ldcg(lse + int64_t(k + u) * params.q_heads) : -INFINITY;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (k + u < n_parts && column + c * step < kHeadDim) {
            part[u][c] = __ldcg(reinterpret_cast<float4 const*>(value + (k + u) * part_stride + column + c * step));
          } else {
            part[u][c] = {};
          }
        }
      }
      float new_top = top;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) new_top = fmaxf(new_top, part_lse[u]);
      float const shift = new_top == -INFINITY ? 0.f : new_top;
      float const alpha = exp2f(top - shift);
      top = new_top;
      weight *= alpha;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        sum[c].x *= alpha, sum[c].y *= alpha, sum[c].z *= alpha, sum[c].w *= alpha;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float const w = exp2f(part_lse[u] - shift);
        weight += w;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          sum[c].x = fmaf(w, part[u][c].x, sum[c].x), sum[c].y = fmaf(w, part[u][c].y, sum[c].y);
          sum[c].z = fmaf(w, part[u][c].z, sum[c].z), sum[c].w = fmaf(w, part[u][c].w, sum[c].w);
        }
      }
    }
    float const inverse = weight > 0.f || weight != weight ? 1.f / weight : 0.f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (column + c * step < kHeadDim) {
        cutlass::NumericArrayConverter<T, float, 4> convert;
        cutlass::Array<float, 4> const in = {sum[c].x * inverse, sum[c].y * inverse, sum[c].z * inverse, sum[c].w * inverse};
        T* const to = params.out + request * params.out_stride + head * kHeadDim + column + c * step;
        *reinterpret_cast<cutlass::Array<T, 4>*>(to) = convert(in);
      }
    }
    if (params.lse && lane % lanes_per_row == 0 && column == 0) {
      params.lse[int64_t(request) * params.q_heads + head] =
          weight > 0.f ? (top + log2f(weight)) * 0.6931471805599453f : (weight == 0.f ? -INFINITY : weight);
    }
  }
}

// A warp has finished a work unit: write single results out, deposit the others, merge what is complete.
template <typename T, int kHeadDim, class Out>
__device__ void finish(Params<T> const& params, Out const& out, float const (&lse)[2], Row const (&rows)[2]) {
  int const lane = threadIdx.x % 32;
  bool const leader = lane % 4 == 0;
  int const column = 2 * (lane % 4);
  bool deposits[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Row const& row = rows[i];
    deposits[i] = row.request >= 0 && row.part >= 0;
    if (row.request < 0) continue;
    if (row.part < 0) {
      T* const to = params.out + row.request * params.out_stride + row.head * kHeadDim + column;
      cutlass::NumericArrayConverter<T, float, 2> convert;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        cutlass::Array<float, 2> const pair = {out(4 * j + 2 * i), out(4 * j + 2 * i + 1)};
        *reinterpret_cast<cutlass::Array<T, 2>*>(to + 8 * j) = convert(pair);
      }
      if (params.lse && leader) {
        params.lse[int64_t(row.request) * params.q_heads + row.head] = lse[i] * 0.6931471805599453f;
      }
    } else {
      int64_t const at = int64_t(row.part) * params.q_heads + row.head;
      float* const to = params.part_out + at * kHeadDim + column;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        __stcg(reinterpret_cast<float2*>(to + 8 * j), make_float2(out(4 * j + 2 * i), out(4 * j + 2 * i + 1)));
      }
      if (leader) __stcg(params.part_lse + at, lse[i]);
    }
  }
  if (!params.fused_merge || !__any_sync(~0u, deposits[0] || deposits[1])) return;

  __threadfence();
  __syncwarp();
  bool complete[2] = {false, false};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (leader && deposits[i]) {
      int* const arrived = params.arrived + int64_t(rows[i].request) * params.q_heads + rows[i].head;
      complete[i] = atomicAdd(arrived, 1) == rows[i].n_parts - 1;
      if (complete[i]) *arrived = 0;  // the last to arrive leaves it as the next run expects it
    }
  }
  unsigned mask = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned const ballot = __ballot_sync(~0u, complete[i]);  // bits 0, 4, ..., 28
#pragma unroll
    for (int quad = 0; quad < 8; ++quad) mask |= (ballot >> (4 * quad) & 1u) << (quad + 8 * i);
  }
  if (mask == 0) return;
  __threadfence();
  merge_rows<T, kHeadDim>(params, rows, mask);
}

// The merge as a kernel of its own: one warp for two rows (request, query head).
template <typename T, int kHeadDim>
__global__ void merge_kernel(Params<T> const params) {
  int const n_requests = params.plan[3];
  int const* const part_begin = params.plan + params.plan[header::kPartBeginBegin];
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  int const warps = gridDim.x * blockDim.x / 32;
  for (int64_t index = warp; index < int64_t(n_requests) * params.q_heads; index += warps) {
    int const request = index / params.q_heads;
    Row rows[2];
    rows[0].request = request;
    rows[0].head = index % params.q_heads;
    rows[0].first_part = part_begin[request];
    rows[0].n_parts = part_begin[request + 1] - rows[0].first_part;
    if (rows[0].n_parts) merge_rows<T, kHeadDim>(params, rows, 1u);
  }
}

}  // namespace feather
