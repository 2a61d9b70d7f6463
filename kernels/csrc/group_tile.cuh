// One warpgroup's arithmetic: 64 query rows in registers against 64 KV tokens in shared memory (wgmma, sm_90a).
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "tile.cuh"

namespace feather {

template <typename T, int kHeadDim>
struct GroupTile : Softmax {
  static constexpr int kRows = 64, kTokens = 64;
  using Layout = WideLayout<T, kHeadDim>;
  using KLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, Shape<Int<kTokens>, Int<kHeadDim>>{}));
  // V as the (head_dim, tokens) operand: the same bytes as a K tile, tokens outermost within 64 columns.
  using VLayout = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{}, Shape<Int<kHeadDim>, Int<kTokens>>{},
                                         Step<_2, _1>{}));
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<T, T, float, Shape<Int<kRows>, Int<kTokens>, Int<kHeadDim>>>()));
  using OutMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<T, T, float, Shape<Int<kRows>, Int<kHeadDim>, Int<kTokens>>, GMMA::Major::K,
                           GMMA::Major::MN>()));
  using OutFragment = decltype(partition_fragment_C(OutMma{}, Shape<Int<kRows>, Int<kHeadDim>>{}));

  // A k16 step's operand is 8 values a lane.
  using QFragment = decltype(make_tensor<T>(cute::Layout<Shape<Shape<_2, _2, _2>, _1, Int<kHeadDim / 16>>>{}));

  QFragment q, next_q;
  bool ahead = false;  // next_q is that of the unit to come
  OutFragment out;

  // Read a unit's queries (see load_queries). May run ahead of the unit at hand.
  __device__ void fetch(T const* const (&rows)[2]) {
    load_queries<kHeadDim>(next_q, rows);
    ahead = true;
  }

  // Start the unit whose queries were fetched last.
  __device__ void begin() {
    ahead = false;
    copy(next_q, q);
    clear(out);
    Softmax::begin();
  }

  __device__ void end(float (&lse)[2]) { Softmax::end(out, lse); }

  // scores = Q K^T; returns once they are there.
  __device__ auto score(T const* k_tile, int thread) {
    ScoreMma mma;
    auto slice = mma.get_slice(thread);
    auto k = slice.partition_fragment_B(make_tensor(make_smem_ptr(k_tile), KLayout{}));
    auto scores = partition_fragment_C(mma, Shape<Int<kRows>, Int<kTokens>>{});
    warpgroup_fence_operand(scores);
    warpgroup_fence_operand(q);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int i = 0; i < size<2>(q); ++i) {
      gemm(mma, q(_, _, i), k(_, _, i), scores);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    return scores;
  }

  // out += P V; the rows of V behind the last token are zeros.
  template <class P>
  __device__ void accumulate(P& p, T const* v_tile, int thread) {
    OutMma mma;
    auto slice = mma.get_slice(thread);
    auto v = slice.partition_fragment_B(make_tensor(make_smem_ptr(v_tile), VLayout{}));
    // The accumulators of 16 tokens are, in order, the A operand of a k16 step.
    using PLayout =
        cute::Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTokens / 16>>, Stride<Stride<_1, _2, _4>, _0, _8>>;
    auto p_a = make_tensor(p.data(), PLayout{});
    warpgroup_fence_operand(out);
    warpgroup_fence_operand(p_a);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) gemm(mma, p_a(_, _, i), v(_, _, i), out);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(out);
  }

  __device__ void attend(T const* k_tile, T const* v_tile, int tokens, Params<T> const& params) {
    int const thread = threadIdx.x % 128;
    auto scores = score(k_tile, thread);
    soften(scores, prepare<kTokens>(scores, tokens, params), out);
    auto p = rounded<T>(scores);
    accumulate(p, v_tile, thread);
  }
};

}  // namespace feather
