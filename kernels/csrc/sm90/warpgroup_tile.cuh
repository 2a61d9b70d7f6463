// One warpgroup's arithmetic: 64 query rows in registers against KV tokens in shared memory (wgmma, sm_90a).
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "common/copy.cuh"
#include "common/mma_fragment.cuh"
#include "common/softmax.cuh"

namespace feather {

template <typename T, int kHeadDim, int kTokens_>
struct WarpgroupTile : Softmax {
  static constexpr int kRows = kWarpgroupRows, kTokens = kTokens_;
  using Value = Operand<T>;
  using Layout = WideLayout<T, kHeadDim>;
  using KLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Value>{}, Shape<Int<kTokens>, Int<kHeadDim>>{}));
  // V as the (head_dim, tokens) operand: the same bytes as a K tile, tokens outermost within 64 columns.
  using VLayout = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Value>{}, Shape<Int<kHeadDim>, Int<kTokens>>{},
                                         Step<_2, _1>{}));
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Value, Value, float, Shape<Int<kRows>, Int<kTokens>, Int<kHeadDim>>>()));
  using OutMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Value, Value, float, Shape<Int<kRows>, Int<kHeadDim>, Int<kTokens>>, GMMA::Major::K,
                           GMMA::Major::MN>()));
  using OutFragment = decltype(partition_fragment_C(OutMma{}, Shape<Int<kRows>, Int<kHeadDim>>{}));

  using ScoreFragment = decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kRows>, Int<kTokens>>{}));
  // A k16 step's operand is 8 values a lane.
  using QFragment = decltype(make_tensor<Value>(cute::Layout<Shape<Shape<_2, _2, _2>, _1, Int<kHeadDim / 16>>>{}));
  using PFragment = decltype(make_tensor<Value>(cute::Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTokens / 16>>>{}));

  QFragment q;    // (64, head_dim) of the warpgroup
  bool ahead = false;  // q is that of the unit to come
  ScoreFragment scores;  // (64, tokens)
  PFragment p;           // (64, tokens), 16 bits
  OutFragment out;       // (64, head_dim), fp32

  // Read a unit's queries (see load_queries), once the last unit's scores are there.
  __device__ void fetch(T const* const (&rows)[2]) {
    load_queries<kHeadDim>(q, rows);
    ahead = true;
  }

  __device__ void begin() {
    ahead = false;
    clear(out);
    Softmax::begin();
  }

  __device__ void end(float (&lse)[2]) { Softmax::end(out, lse); }

  // Start scores = Q K^T.
  __device__ void score(Value const* k_tile) {
    ScoreMma mma;
    auto k = mma.get_slice(threadIdx.x % 128).partition_fragment_B(make_tensor(make_smem_ptr(k_tile), KLayout{}));
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
  }

  // Start out += P V; the rows of V behind the last token are zeros.
  __device__ void accumulate(Value const* v_tile) {
    OutMma mma;
    auto v = mma.get_slice(threadIdx.x % 128).partition_fragment_B(make_tensor(make_smem_ptr(v_tile), VLayout{}));
    warpgroup_fence_operand(out);
    warpgroup_fence_operand(p);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) gemm(mma, p(_, _, i), v(_, _, i), out);
    warpgroup_commit_batch();
  }

  // All but the last kLeft things that were started are done.
  template <int kLeft>
  __device__ void wait() {
    warpgroup_wait<kLeft>();
    warpgroup_fence_operand(scores);
    if constexpr (kLeft == 0) warpgroup_fence_operand(out);
  }

  // Scores become probabilities, of which the first `tokens` count: those of a unit's first tile ...
  __device__ void online_softmax_first(int tokens, Params<T> const& params) {
    float alpha[2];  // of nothing yet
    Softmax::online_softmax(scores, prepare<kTokens>(scores, tokens, params), alpha);
    compute_now(row_sum[0] + row_sum[1]);
  }
  // ... and those of a further one. No maximum is looked for: row_max stays as it is, unless the sum of a lane's
  // exponentials says that one of them may be too large for it. Then this is false, and they are to be computed anew.
  __device__ __forceinline__ bool online_softmax_next(int tokens, Params<T> const& params) {
    subtract_row_max(scores, softcap(scores, params));
    if (is_masked(tokens)) mask(scores, tokens);
    float sum[2];
    exp2_and_sum(scores, sum);
    compute_now(sum[0] + sum[1]);
    bool const fits = sum[0] + sum[1] <= kRescaleSum && row_max[0] > -INFINITY && row_max[1] > -INFINITY;
    if (!__all_sync(~0u, fits)) return false;
    row_sum[0] += sum[0], row_sum[1] += sum[1];
    return true;
  }
  // The exponentials belong before the wait that follows, while the matrix units work. The assembler would move them
  // behind it, but not past an instruction with an effect that needs their sum; no sum is negative.
  static __device__ void compute_now(float sum) {
    asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 0; }" ::"f"(sum) : "memory");
  }

#if FEATHER_CAUSAL
  // How many tokens before the unit's end this lane's rows end, and any of the warp's at most.
  int before_end[2], most_before_end;

  // Read how far a unit's rows reach, whose item ends at `stop`: that of padding does not matter.
  __device__ void find_ends(Params<T> const& params, int const* members, int n_members, int first_row, int stop) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const member = params.group_div.div(first_row + Layout::row(i));
      before_end[i] = 0;
      if (member < n_members) before_end[i] = max(0, stop - __ldg(params.seq_lens + members[kMemberSize * member]));
    }
    most_before_end = __reduce_max_sync(~0u, max(before_end[0], before_end[1]));
  }

  // Of a tile's scores those count that are among the unit's `tokens` from there on, and that their row sees. In place
  // of those of Softmax.
  __device__ __forceinline__ void mask(ScoreFragment& scores, int tokens) const {
    int const column = 2 * (threadIdx.x % 4);
    int again;
    do {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {
        if (8 * (i / 4) + column + i % 2 >= tokens - before_end[i / 2 % 2]) scores(i) = -INFINITY;
      }
      asm volatile("mov.u32 %0, %%tid.y;" : "=r"(again));  // never, as there
    } while (again);
  }
  template <int kBlock>
  __device__ __forceinline__ float prepare(ScoreFragment& scores, int tokens, Params<T> const& params) const {
    float const scale = softcap(scores, params);
    if (is_masked(tokens)) mask(scores, tokens);
    return scale;
  }
  __device__ bool is_masked(int tokens) const { return tokens - most_before_end < kTokens; }
#else
  static __device__ __forceinline__ bool is_masked(int tokens) { return tokens < kTokens; }
#endif

  // From this warp's scores of a tile, which have been overwritten, once more. Nothing is in the making.
  __device__ __forceinline__ void online_softmax_redo(Value const* k_tile, int tokens, Params<T> const& params) {
    score_alone(k_tile);
    float alpha[2];
    if (Softmax::online_softmax(scores, prepare<kTokens>(scores, tokens, params), alpha)) rescale(out, alpha);
  }
  __device__ __forceinline__ void score_alone(Value const* k_tile) {  // by mma.sync: wgmma would need the other warps
    using Rows = SwizzledRows<kHeadDim, kTokens>;
    int const lane = threadIdx.x % 32;
    uint32_t const k_row = smem_address(k_tile + Rows::at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
    clear(scores);
#pragma unroll
    for (int t = 0; t < kTokens / 16; ++t) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        uint32_t b[4];
        ldmatrix_x4<false>(Rows::down(Rows::right(k_row, k), 16 * t), b);
        mma_16x16x16<Value>(scores, 8 * t, recast<uint32_t>(q), 4 * k, b);
      }
      __syncwarp();  // keeps registers of one block of tokens from those of the next
    }
  }

  // The probabilities as an operand: a lane's accumulators of 16 tokens are, in order, those of a k16 step.
  __device__ void round_probabilities() {
    auto const values = convert_type<Value>(scores);
#pragma unroll
    for (int i = 0; i < size(values); ++i) p(i) = values(i);
  }
};

}  // namespace feather
