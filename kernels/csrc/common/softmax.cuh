// The online softmax of a warp's 16 query rows.
#pragma once
#include <cute/tensor.hpp>

#include "common/warp.cuh"
#include "heuristics.h"

namespace feather {

constexpr float kRescaleSum = 1 << int(kRescaleThreshold);  // of a lane's exponentials: so none is beyond the threshold

// cap * tanh(score * scale / cap)
template <typename T>
__device__ __forceinline__ float apply_softcap(float score, Params<T> const& params) {
  float const e = exp2f(score * params.soft_cap_scale * 2.885390082f);
  return params.soft_cap_log2 * (1.f - __fdividef(2.f, e + 1.f));
}

// What a row's sum of p * v is multiplied with, and the log-sum-exp, base 2; a NaN in the cache stays visible.
__device__ __forceinline__ float normalizer(float sum, float row_max, float& lse) {
  lse = sum > 0.f ? row_max + log2f(sum) : (sum == 0.f ? -INFINITY : sum);
  return sum == 0.f ? 0.f : 1.f / sum;
}

// A row's maximum has become `top`: moves row_max there; returns what the row's results are multiplied with.
__device__ __forceinline__ float update_row_max(float top, float& row_max, float& row_sum) {
  float const next = fmaxf(row_max, top);
  float const alpha = next == -INFINITY ? 0.f : exp2f(row_max - next);
  row_max = next;
  row_sum *= alpha;
  return alpha;
}

// The running softmax of a warp's 16 rows, in the accumulator layout of mma.sync and wgmma alike: a lane holds rows
// lane/4 and lane/4 + 8, element i is column 8 (i / 4) + 2 (lane % 4) + i % 2 of row i / 2 % 2.
struct Softmax {
  float row_max[2], row_sum[2];  // of exp2(score - row_max), base 2

  __device__ void begin() {
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Soft-cap the scores; returns the scale of what they are then.
  template <class Scores, typename T>
  static __device__ __forceinline__ float softcap(Scores& scores, Params<T> const& params) {
#if FEATHER_SOFT_CAP
#pragma unroll
    for (int i = 0; i < size(scores); ++i) scores(i) = apply_softcap(scores(i), params);
    return 1.f;
#else
    return params.scale_log2;
#endif
  }

  // Of the scores the first `tokens` count.
  template <class Scores>
  static __device__ __forceinline__ void mask(Scores& scores, int tokens) {
    int const column = 2 * (threadIdx.x % 4);
    int again;
    do {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {
        if (8 * (i / 4) + column + i % 2 >= tokens) scores(i) = -INFINITY;
      }
      // Never. A loop stays behind its branch; else these would be predicated instructions in everybody's way.
      asm volatile("mov.u32 %0, %%tid.y;" : "=r"(again));
    } while (again);
  }

  // Both; kBlock tokens.
  template <int kBlock, class Scores, typename T>
  static __device__ __forceinline__ float prepare(Scores& scores, int tokens, Params<T> const& params) {
    float const scale = softcap(scores, params);
    if (tokens < kBlock) mask(scores, tokens);
    return scale;
  }

  // Scores become exp2(scale * score - row_max). If that returns true, results so far are to be multiplied with alpha.
  template <class Scores>
  __device__ __forceinline__ bool online_softmax(Scores& scores, float scale, float (&alpha)[2]) {
    float top[2];
    bool grown = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float m = scores(2 * row);
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) {
        m = fmaxf(m, fmaxf(scores(4 * i + 2 * row), scores(4 * i + 2 * row + 1)));
      }
      top[row] = allreduce<Max, 1, 4>(m) * scale;
      grown |= top[row] > row_max[row] + kRescaleThreshold;
    }
    bool const rescales = __any_sync(~0u, grown);
    if (rescales) {
      asm volatile("");  // a branch, not predicated instructions in everybody's way
#pragma unroll
      for (int row = 0; row < 2; ++row) alpha[row] = update_row_max(top[row], row_max[row], row_sum[row]);
    }
    float sum[2];
    subtract_row_max(scores, scale);
    exp2_and_sum(scores, sum);
    row_sum[0] += sum[0], row_sum[1] += sum[1];
    return rescales;
  }

  // Scores become scale * score - row_max ...
  template <class Scores>
  __device__ __forceinline__ void subtract_row_max(Scores& scores, float scale) const {
    float minus[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) minus[row] = row_max[row] == -INFINITY ? 0.f : -row_max[row];
#pragma unroll
    for (int i = 0; i < size(scores); ++i) scores(i) = fmaf(scores(i), scale, minus[i / 2 % 2]);
  }

  // ... and then powers of two; `sum` of a lane's.
  template <class Scores>
  static __device__ __forceinline__ void exp2_and_sum(Scores& scores, float (&sum)[2]) {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int i = 0; i < size(scores); ++i) {
      scores(i) = exp2f(scores(i));
      sum[i / 2 % 2] += scores(i);
    }
  }

  template <class Out>
  __device__ static void rescale(Out& out, float const (&alpha)[2]) {
    asm volatile("");  // a branch, as above
#pragma unroll
    for (int i = 0; i < size(out); ++i) out(i) *= alpha[i / 2 % 2];
  }

  // End a work unit: out becomes the normalised result; returns each row's log-sum-exp, base 2.
  template <class Out>
  __device__ void end(Out& out, float (&lse)[2]) {
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      inverse[row] = normalizer(allreduce<Sum, 1, 4>(row_sum[row]), row_max[row], lse[row]);
    }
#pragma unroll
    for (int i = 0; i < size(out); ++i) out(i) *= inverse[i / 2 % 2];
  }
};

}  // namespace feather
