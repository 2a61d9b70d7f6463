// One warp's arithmetic: 16 query rows against a tile of KV tokens in shared memory (mma.sync, online softmax).
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include "params.cuh"

namespace feather {

using namespace cute;

template <typename T>
struct MmaOp;
template <>
struct MmaOp<cutlass::half_t> {
  using type = SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct MmaOp<cutlass::bfloat16_t> {
  using type = SM80_16x8x16_F32BF16BF16F32_TN;
};

// The values of four lanes that share an accumulator row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Rows lane/4 and lane/4 + 8 of the warp's 16; out columns 8 j + 2 (lane % 4) + {0, 1}.
template <typename T, int kHeadDim, int kPitch>
struct WarpTile {
  using Mma = TiledMMA<MMA_Atom<typename MmaOp<T>::type>, Layout<Shape<_1, _1, _1>>, Tile<_16, _16, _16>>;
  using OutFragment = decltype(partition_fragment_C(Mma{}, Shape<_16, Int<kHeadDim>>{}));
  using QFragment = decltype(Mma{}.get_slice(0).partition_fragment_A(
      make_tensor(static_cast<T*>(nullptr), Layout<Shape<_16, Int<kHeadDim>>, Stride<Int<kHeadDim>, _1>>{})));

  QFragment q;
  OutFragment out;  // sum of p * v, not yet divided by sum
  float row_max[2], row_sum[2];
  int const lane;

  __device__ WarpTile() : lane(threadIdx.x % 32) {}

  // Start a work unit: rows[i] points at the query row (or is null: the row is padding).
  __device__ void begin(T const* const (&rows)[2]) {
    auto words = recast<uint32_t>(q);
    int const column = 2 * (lane % 4);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // (row + 8 (i % 2), k + 8 (i / 2))
        T const* const row = rows[i % 2];
        words(k * 4 + i) =
            row ? *reinterpret_cast<uint32_t const*>(row + k * 16 + 8 * (i / 2) + column) : 0u;
      }
    }
    clear(out);
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Attend to kBlock tokens, of which the first `tokens` count.
  template <int kBlock>
  __device__ void attend(T const* k_tile, T const* v_tile, int tokens, Params<T> const& params) {
    Mma mma;
    auto thread_mma = mma.get_slice(lane);
    auto s_k = make_tensor(make_smem_ptr(k_tile), Layout<Shape<Int<kBlock>, Int<kHeadDim>>, Stride<Int<kPitch>, _1>>{});
    auto s_v = make_tensor(make_smem_ptr(v_tile), Layout<Shape<Int<kHeadDim>, Int<kBlock>>, Stride<_1, Int<kPitch>>>{});

    auto k_copy = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, mma);
    auto k_thread = k_copy.get_slice(lane);
    auto k_source = k_thread.partition_S(s_k);
    auto k_fragment = thread_mma.partition_fragment_B(s_k);
    auto k_target = k_thread.retile_D(k_fragment);

    auto scores = partition_fragment_C(mma, Shape<_16, Int<kBlock>>{});
    clear(scores);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      copy(k_copy, k_source(_, _, k), k_target(_, _, k));
      gemm(mma, q(_, _, k), k_fragment(_, _, k), scores);
    }
    float scale = params.scale_log2;
    if (params.soft_cap_log2 > 0.f) {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {  // cap * tanh(x), x = score * scale / cap
        float const e = exp2f(scores(i) * params.soft_cap_scale * 2.885390082f);
        scores(i) = params.soft_cap_log2 * (1.f - __fdividef(2.f, e + 1.f));
      }
      scale = 1.f;
    }
    if (tokens < kBlock) {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {  // i = column parity + 2 * row + 4 * (column / 8)
        if (8 * (i / 4) + 2 * (lane % 4) + i % 2 >= tokens) scores(i) = -INFINITY;
      }
    }
    soften(scores, scale);

    auto p = make_fragment_like<T>(scores);
    {
      cutlass::NumericArrayConverter<T, float, decltype(size(scores))::value> convert;
      auto const in = *reinterpret_cast<cutlass::Array<float, decltype(size(scores))::value> const*>(scores.data());
      *reinterpret_cast<cutlass::Array<T, decltype(size(scores))::value>*>(p.data()) = convert(in);
    }
    // The accumulators of 16 tokens are, in order, the A operand of a k16 step.
    auto p_a = make_tensor(p.data(), Layout<Shape<_8, _1, Int<kBlock / 16>>, Stride<_1, _0, _8>>{});

    auto v_copy = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, T>{}, mma);
    auto v_thread = v_copy.get_slice(lane);
    auto v_source = v_thread.partition_S(s_v);
    auto v_fragment = thread_mma.partition_fragment_B(s_v);
    auto v_target = v_thread.retile_D(v_fragment);
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k) {
      copy(v_copy, v_source(_, _, k), v_target(_, _, k));
      gemm(mma, p_a(_, _, k), v_fragment(_, _, k), out);
    }
  }

  // Online softmax: scores become exp2(scale * score - max), out and row_sum move to the new maximum.
  template <class Scores>
  __device__ void soften(Scores& scores, float scale) {
    float old_scaled[2], alpha[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float m = row_max[row];
      old_scaled[row] = m;
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) m = fmaxf(m, fmaxf(scores(4 * i + 2 * row), scores(4 * i + 2 * row + 1)));
      row_max[row] = m = quad_max(m);
      float const shift = m == -INFINITY ? 0.f : m * scale;
      alpha[row] = exp2f(old_scaled[row] * scale - shift);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = scores(4 * i + 2 * row + c);
          x = exp2f(fmaf(x, scale, -shift));
          sum += x;
        }
      }
      row_sum[row] = row_sum[row] * alpha[row] + sum;
    }
    if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < size(out); ++i) out(i) *= alpha[i / 2 % 2];
    }
  }

  // End a work unit: out becomes the normalised result; returns each row's log-sum-exp, base 2.
  __device__ void end(Params<T> const& params, float (&lse)[2]) {
    float const scale = params.soft_cap_log2 > 0.f ? 1.f : params.scale_log2;
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float const sum = quad_sum(row_sum[row]);
      inverse[row] = sum > 0.f ? 1.f / sum : 0.f;
      lse[row] = sum > 0.f ? row_max[row] * scale + log2f(sum) : -INFINITY;
      if (sum != sum) inverse[row] = lse[row] = sum;  // a NaN in the cache stays visible
    }
#pragma unroll
    for (int i = 0; i < size(out); ++i) out(i) *= inverse[i / 2 % 2];
  }
};

}  // namespace feather
