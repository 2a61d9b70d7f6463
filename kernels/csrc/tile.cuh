// The online softmax, and one warp's arithmetic: 16 query rows against KV tokens in shared memory (mma.sync).
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include "merge.cuh"

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

// Two neighbours in the operands' type.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  cutlass::NumericArrayConverter<T, float, 2> convert;
  cutlass::Array<T, 2> const pair = convert(cutlass::Array<float, 2>{low, high});
  return reinterpret_cast<uint32_t const&>(pair);
}

// The scores' probabilities in the operands' type.
template <typename T, class Scores>
__device__ __forceinline__ auto rounded(Scores const& scores) {
  constexpr int kSize = decltype(size(scores))::value;
  auto p = make_fragment_like<T>(scores);
  cutlass::NumericArrayConverter<T, float, kSize> convert;
  *reinterpret_cast<cutlass::Array<T, kSize>*>(p.data()) =
      convert(*reinterpret_cast<cutlass::Array<float, kSize> const*>(scores.data()));
  return p;
}

// The shift of an online softmax follows the maximum only when that has grown by more than 2^8: the sums stay well
// inside fp16 and fp32, and results are rescaled rarely.
constexpr float kSlack = 8.f;

template <typename T>
__device__ __forceinline__ float soft_capped(float score, Params<T> const& params) {  // cap * tanh(score * scale / cap)
  float const e = exp2f(score * params.soft_cap_scale * 2.885390082f);
  return params.soft_cap_log2 * (1.f - __fdividef(2.f, e + 1.f));
}

// What a row's sum of p * v is multiplied with, and the log-sum-exp, base 2; a NaN in the cache stays visible.
__device__ __forceinline__ float normaliser(float sum, float shift, float& lse) {
  lse = sum > 0.f ? shift + log2f(sum) : (sum == 0.f ? -INFINITY : sum);
  return sum == 0.f ? 0.f : 1.f / sum;
}

// A row's maximum has become `top`: moves the shift there; returns what the row's results are multiplied with.
__device__ __forceinline__ float follow(float top, float& shift, float& row_sum) {
  float const next = fmaxf(shift, top);
  float const alpha = next == -INFINITY ? 0.f : exp2f(shift - next);
  shift = next;
  row_sum *= alpha;
  return alpha;
}

// How a lane holds the results of 16 rows, in the accumulators of mma.sync and wgmma alike: rows lane / 4 + {0, 8}, of
// each the columns 8 j + 2 (lane % 4) + {0, 1}.
template <typename T, int kHeadDim>
struct WideLayout {
  static constexpr int kRows = 16, kChunks = kHeadDim / 16;  // chunks of four neighbours in a part's row
  static __device__ int row(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
  static __device__ bool leads() { return threadIdx.x % 4 == 0; }
  static __device__ int chunk(int c) { return part_chunk(c / 2, 2 * (threadIdx.x % 4) + c % 2); }
  template <class Out>
  static __device__ float& value(Out& out, int i, int c, int e) { return out(4 * (4 * (c / 2) + e) + 2 * i + c % 2); }
  template <class Out>
  static __device__ void store(Params<T> const& params, Out const& out, Row const (&rows)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (rows[i].request < 0 || rows[i].part >= 0) continue;
      T* const to = params.out + rows[i].request * params.out_stride + rows[i].head * kHeadDim + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(to + 8 * j) = pack_pair<T>(out(4 * j + 2 * i), out(4 * j + 2 * i + 1));
      }
    }
  }
};

// The running softmax of a warp's 16 rows, in the accumulator layout of mma.sync and wgmma alike: a lane holds rows
// lane/4 and lane/4 + 8, element i is column 8 (i / 4) + 2 (lane % 4) + i % 2 of row i / 2 % 2.
struct Softmax {
  float shift[2], row_sum[2];  // of exp2(score - shift), base 2

  __device__ void begin() {
    shift[0] = shift[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Soft-cap and mask the scores of up to kBlock tokens, of which the first `tokens` count; returns their scale.
  template <int kBlock, class Scores, typename T>
  __device__ float prepare(Scores& scores, int tokens, Params<T> const& params) {
#if FEATHER_SOFT_CAP
#pragma unroll
    for (int i = 0; i < size(scores); ++i) scores(i) = soft_capped(scores(i), params);
    float const scale = 1.f;
#else
    float const scale = params.scale_log2;
#endif
    if (tokens < kBlock) {
      asm volatile("");  // a branch, not predicated instructions in everybody's way
      int const column = 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {
        if (8 * (i / 4) + column + i % 2 >= tokens) scores(i) = -INFINITY;
      }
    }
    return scale;
  }

  // Scores become exp2(scale * score - shift). If that returns true, results so far are to be multiplied with alpha.
  template <class Scores>
  __device__ bool soften(Scores& scores, float scale, float (&alpha)[2]) {
    float top[2];
    bool grown = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float m = scores(2 * row);
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) {
        m = fmaxf(m, fmaxf(scores(4 * i + 2 * row), scores(4 * i + 2 * row + 1)));
      }
      top[row] = quad_max(m) * scale;
      grown |= top[row] > shift[row] + kSlack;
    }
    bool const rescales = __any_sync(~0u, grown);
    if (rescales) {
      asm volatile("");  // a branch, as above
#pragma unroll
      for (int row = 0; row < 2; ++row) alpha[row] = follow(top[row], shift[row], row_sum[row]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float const minus = shift[row] == -INFINITY ? 0.f : -shift[row];
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = scores(4 * i + 2 * row + c);
          x = exp2f(fmaf(x, scale, minus));
          sum += x;
        }
      }
      row_sum[row] += sum;
    }
    return rescales;
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
      inverse[row] = normaliser(quad_sum(row_sum[row]), shift[row], lse[row]);
    }
#pragma unroll
    for (int i = 0; i < size(out); ++i) out(i) *= inverse[i / 2 % 2];
  }
};

// A warp's 16 query rows as the A operand of mma.sync and wgmma; rows[i] points at row lane/4 + 8 i (null: padding).
template <int kHeadDim, typename T, class Fragment>
__device__ __forceinline__ void load_queries(Fragment& q, T const* const (&rows)[2]) {
  auto words = recast<uint32_t>(q);
  int const column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // (row + 8 (i % 2), k + 8 (i / 2))
      T const* const row = rows[i % 2];
      words(k * 4 + i) = row ? *reinterpret_cast<uint32_t const*>(row + k * 16 + 8 * (i / 2) + column) : 0u;
    }
  }
}

// One warp, 16 query rows in registers.
template <typename T, int kHeadDim, int kPitch>
struct WarpTile : Softmax {
  using Mma = TiledMMA<MMA_Atom<typename MmaOp<T>::type>, cute::Layout<Shape<_1, _1, _1>>, Tile<_16, _16, _16>>;
  using OutFragment = decltype(partition_fragment_C(Mma{}, Shape<_16, Int<kHeadDim>>{}));
  using QFragment = decltype(Mma{}.get_slice(0).partition_fragment_A(
      make_tensor(static_cast<T*>(nullptr), cute::Layout<Shape<_16, Int<kHeadDim>>, Stride<Int<kHeadDim>, _1>>{})));

  using Layout = WideLayout<T, kHeadDim>;

  QFragment q;
  OutFragment out;  // sum of p * v, not yet divided by sum
  int const lane;

  __device__ WarpTile() : lane(threadIdx.x % 32) {}

  __device__ void begin(T const* const (&rows)[2]) {
    load_queries<kHeadDim>(q, rows);
    clear(out);
    Softmax::begin();
  }

  __device__ void end(float (&lse)[2]) { Softmax::end(out, lse); }

  // Attend to 16 tokens, of which the first `tokens` count.
  __device__ void attend(T const* k_tile, T const* v_tile, int tokens, Params<T> const& params) {
    constexpr int kBlock = 16;
    Mma mma;
    auto thread_mma = mma.get_slice(lane);
    using KLayout = cute::Layout<Shape<Int<kBlock>, Int<kHeadDim>>, Stride<Int<kPitch>, _1>>;
    using VLayout = cute::Layout<Shape<Int<kHeadDim>, Int<kBlock>>, Stride<_1, Int<kPitch>>>;
    auto s_k = make_tensor(make_smem_ptr(k_tile), KLayout{});
    auto s_v = make_tensor(make_smem_ptr(v_tile), VLayout{});

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
    float alpha[2];
    if (soften(scores, prepare<kBlock>(scores, tokens, params), alpha)) rescale(out, alpha);

    auto p = rounded<T>(scores);
    // The accumulators of 16 tokens are, in order, the A operand of a k16 step.
    auto p_a = make_tensor(p.data(), cute::Layout<Shape<_8, _1, Int<kBlock / 16>>, Stride<_1, _0, _8>>{});

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
};

}  // namespace feather
