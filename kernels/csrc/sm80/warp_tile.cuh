// One warp's arithmetic: 16 query rows against KV tokens in shared memory (mma.sync).
#pragma once
#include "common/copy.cuh"
#include "common/mma_fragment.cuh"
#include "common/softmax.cuh"

namespace feather {

// One warp, 16 query rows in registers.
template <typename T, int kHeadDim, class Rows>
struct WarpTile : Softmax {
  using Value = Operand<T>;
  using Op = typename MmaOp<Value>::type;
  using Mma = TiledMMA<MMA_Atom<Op>, cute::Layout<Shape<_1, _1, _1>>, Tile<_16, _16, _16>>;
  using OutFragment = decltype(partition_fragment_C(Mma{}, Shape<_16, Int<kHeadDim>>{}));
  using QFragment = decltype(Mma{}.get_slice(0).partition_fragment_A(
      make_tensor(static_cast<Value*>(nullptr), cute::Layout<Shape<_16, Int<kHeadDim>>, Stride<Int<kHeadDim>, _1>>{})));

  using Layout = WideLayout<T, kHeadDim>;

  QFragment q;      // (16, head_dim)
  OutFragment out;  // (16, head_dim), fp32: sum of p * v, not yet divided by row_sum
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
    if constexpr (kFp8) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 32; ++k) {
        uint32_t x[4], b[2][4];  // 32 columns as two k16 steps
        ldmatrix_x4<false>(Rows::right(k_row, k), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) widen(x[i], b[i % 2][i / 2 * 2], b[i % 2][i / 2 * 2 + 1]);
        mma_16x16x16<Value>(scores, 0, recast<uint32_t>(q), 8 * k, b[0]);
        mma_16x16x16<Value>(scores, 0, recast<uint32_t>(q), 8 * k + 4, b[1]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        uint32_t b[4];  // of tokens 0 to 7, and of 8 to 15
        ldmatrix_x4<false>(Rows::right(k_row, k), b);
        mma_16x16x16<Value>(scores, 0, recast<uint32_t>(q), 4 * k, b);
      }
    }
    float alpha[2];
    if (online_softmax(scores, prepare<kBlock>(scores, tokens, params), alpha)) rescale(out, alpha);

    // The accumulators of 16 tokens are, in order, the A operand of a k16 step.
    auto const p = convert_type<Value>(scores);
    uint32_t const v_row = smem_address(v_tile + Rows::at(lane % 16, lane / 16 * 8));
    if constexpr (kFp8) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 32; ++d) {
        uint32_t x[4], b[2][4];  // the first 16 of 32 columns, and the others; even ones first
        ldmatrix_x4<true>(Rows::right(v_row, d), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) widen(x[i], b[i / 2][i % 2], b[i / 2][i % 2 + 2]);
        mma_16x16x16<Value>(out, 16 * d, recast<uint32_t>(p), 0, b[0]);
        mma_16x16x16<Value>(out, 16 * d + 8, recast<uint32_t>(p), 0, b[1]);
      }
    } else {
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        uint32_t b[4];  // of columns 16 d to 16 d + 7, and of those behind
        ldmatrix_x4<true>(Rows::right(v_row, d), b);
        mma_16x16x16<Value>(out, 8 * d, recast<uint32_t>(p), 0, b);
      }
    }
  }
};

}  // namespace feather
