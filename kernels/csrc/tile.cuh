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

// Four 8x8 matrices of 16-bit values from shared memory, a row an address; transposed or not.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&a)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
  }
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
constexpr float kMostSum = 1 << int(kSlack);  // of a lane's exponentials: so none is beyond the slack

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
  static constexpr int kRows = 16, kChunks = kHeadDim / 4 / kPartChunk;  // of a part's row
  static constexpr int kNear = 1, kFar = 4;                              // lanes that share a row (`across`)
  static __device__ int row(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
  static __device__ bool leads() { return threadIdx.x % 4 == 0; }
  static __device__ int chunk(int c) { return part_chunk(c / 2, 2 * (threadIdx.x % 4) + c % 2); }
  template <class Out>
  static __device__ float& value(Out& out, int i, int c, int e) { return out(4 * (8 * (c / 2) + e) + 2 * i + c % 2); }
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

  // Soft-cap the scores; returns the scale of what they are then.
  template <class Scores, typename T>
  static __device__ __forceinline__ float cap(Scores& scores, Params<T> const& params) {
#if FEATHER_SOFT_CAP
#pragma unroll
    for (int i = 0; i < size(scores); ++i) scores(i) = soft_capped(scores(i), params);
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
    float const scale = cap(scores, params);
    if (tokens < kBlock) mask(scores, tokens);
    return scale;
  }

  // Scores become exp2(scale * score - shift). If that returns true, results so far are to be multiplied with alpha.
  template <class Scores>
  __device__ __forceinline__ bool soften(Scores& scores, float scale, float (&alpha)[2]) {
    float top[2];
    bool grown = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float m = scores(2 * row);
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) {
        m = fmaxf(m, fmaxf(scores(4 * i + 2 * row), scores(4 * i + 2 * row + 1)));
      }
      top[row] = across<Max, 1, 4>(m) * scale;
      grown |= top[row] > shift[row] + kSlack;
    }
    bool const rescales = __any_sync(~0u, grown);
    if (rescales) {
      asm volatile("");  // a branch, not predicated instructions in everybody's way
#pragma unroll
      for (int row = 0; row < 2; ++row) alpha[row] = follow(top[row], shift[row], row_sum[row]);
    }
    float sum[2];
    shift_scores(scores, scale);
    exponentials(scores, sum);
    row_sum[0] += sum[0], row_sum[1] += sum[1];
    return rescales;
  }

  // Scores become scale * score - shift ...
  template <class Scores>
  __device__ __forceinline__ void shift_scores(Scores& scores, float scale) const {
    float minus[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) minus[row] = shift[row] == -INFINITY ? 0.f : -shift[row];
#pragma unroll
    for (int i = 0; i < size(scores); ++i) scores(i) = fmaf(scores(i), scale, minus[i / 2 % 2]);
  }

  // ... and then powers of two; `sum` of a lane's.
  template <class Scores>
  static __device__ __forceinline__ void exponentials(Scores& scores, float (&sum)[2]) {
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
      inverse[row] = normaliser(across<Sum, 1, 4>(row_sum[row]), shift[row], lse[row]);
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

// c (16 x 16, elements `c_first` on) += a (words `a_first` on) times b.
template <typename T, class C, class A>
__device__ __forceinline__ void multiply(C& c, int c_first, A const& a, int a_first, uint32_t const (&b)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const at = c_first + 4 * half;
    MmaOp<T>::type::fma(c(at), c(at + 1), c(at + 2), c(at + 3), a(a_first), a(a_first + 1), a(a_first + 2),
                        a(a_first + 3), b[2 * half], b[2 * half + 1], c(at), c(at + 1), c(at + 2), c(at + 3));
  }
}

// One warp, 16 query rows in registers.
template <typename T, int kHeadDim, class Rows>
struct WarpTile : Softmax {
  using Op = typename MmaOp<T>::type;
  using Mma = TiledMMA<MMA_Atom<Op>, cute::Layout<Shape<_1, _1, _1>>, Tile<_16, _16, _16>>;
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

  // Attend to the 16 tokens whose rows start at k_tile and v_tile, of which the first `tokens` count.
  __device__ void attend(T const* k_tile, T const* v_tile, int tokens, Params<T> const& params) {
    constexpr int kBlock = 16;
    Mma mma;
    auto scores = partition_fragment_C(mma, Shape<_16, Int<kBlock>>{});
    clear(scores);
    uint32_t const k_row = smem_address(k_tile + Rows::at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t b[4];  // of tokens 0 to 7, and of 8 to 15
      load_matrices<false>(Rows::right(k_row, k), b);
      multiply<T>(scores, 0, recast<uint32_t>(q), 4 * k, b);
    }
    float alpha[2];
    if (soften(scores, prepare<kBlock>(scores, tokens, params), alpha)) rescale(out, alpha);

    // The accumulators of 16 tokens are, in order, the A operand of a k16 step.
    auto const p = rounded<T>(scores);
    uint32_t const v_row = smem_address(v_tile + Rows::at(lane % 16, lane / 16 * 8));
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];  // of columns 16 d to 16 d + 7, and of those behind
      load_matrices<true>(Rows::right(v_row, d), b);
      multiply<T>(out, 8 * d, recast<uint32_t>(p), 0, b);
    }
  }
};

}  // namespace feather
