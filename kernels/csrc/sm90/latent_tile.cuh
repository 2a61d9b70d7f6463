// Two warpgroups' arithmetic: 64 query rows in shared memory against latents there (wgmma, sm_90a).
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "common/copy.cuh"
#include "common/mma_fragment.cuh"
#include "common/softmax.cuh"

namespace feather {

// As its base, but four lanes exchange what they have of a row, so that each stores 16 bytes.
template <typename T, int kColumns>
struct ExchangedLayout : WideLayout<T, kColumns> {
  template <class Out>
  static __device__ __forceinline__ void store(Params<T> const& params, Out const& out, Row const (&rows)[2]) {
    int const lane = threadIdx.x % 4;
    bool const odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const stores = rows[i].request >= 0 && rows[i].part < 0;
      T* const to = params.out + rows[i].request * params.out_stride + rows[i].head * kColumns + 8 * lane;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {  // word k: columns 8 (j + k) + 2 lane; then: 8 (j + lane) + 2 k
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] = pack_pair<T>(out(4 * (j + k) + 2 * i), out(4 * (j + k) + 2 * i + 1));
        }
#pragma unroll
        for (int k = 0; k < 4; k += 2) exchange(words[k], words[k + 1], odd, 1);
#pragma unroll
        for (int k = 0; k < 2; ++k) exchange(words[k], words[k + 2], high, 2);
        if (stores) *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  // The second of one lane and the first of the other change places.
  static __device__ __forceinline__ void exchange(uint32_t& first, uint32_t& second, bool other, int distance) {
    uint32_t const got = __shfl_xor_sync(~0u, other ? first : second, distance);
    (other ? first : second) = got;
  }
};

// What a warpgroup has of the results: half of the columns.
template <typename T, class Traits>
struct LatentHalf {
  static constexpr int kRows = kWarpgroupRows, kTokens = Traits::kTokens, kHalfDim = Traits::kHalfDim;
  using Layout = ExchangedLayout<T, kHalfDim>;
  using PRows = SwizzledRows<kTokens, kRows>;  // the probabilities in shared memory
  using PLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, Shape<Int<kRows>, Int<kTokens>>{}));
  // The values as the (columns, tokens) operand: the same bytes as the keys, tokens outermost within 64 columns.
  using VLayout = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{}, Shape<Int<kHalfDim>, Int<kTokens>>{},
                                         Step<_2, _1>{}));
  using OutShape = Shape<Int<kRows>, Int<kHalfDim>, Int<kTokens>>;
  using OwnMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<T, T, float, OutShape, GMMA::Major::K, GMMA::Major::MN>()));
  using SharedMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<T, T, float, OutShape, GMMA::Major::K, GMMA::Major::MN>()));
  using OutFragment = decltype(partition_fragment_C(OwnMma{}, Shape<Int<kRows>, Int<kHalfDim>>{}));
  // A k16 step's operand is 8 values a lane.
  using PFragment = decltype(make_tensor<T>(cute::Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTokens / 16>>>{}));

  OutFragment out;  // (64, 256), fp32: sum of p * v

  // Of a stage, what the values of this half begin with.
  template <int kHalf>
  static __device__ __forceinline__ T const* values(T const* stage) { return stage + kHalf * (kHalfDim * kTokens); }

  // Start out += P V, of probabilities in registers ...
  __device__ __forceinline__ void accumulate(PFragment& p, T const* v_tile) {
    OwnMma mma;
    auto v = mma.get_slice(threadIdx.x % 128).partition_fragment_B(make_tensor(make_smem_ptr(v_tile), VLayout{}));
    warpgroup_fence_operand(out);
    warpgroup_fence_operand(p);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) gemm(mma, p(_, _, i), v(_, _, i), out);
    warpgroup_commit_batch();
  }
  // ... or in shared memory.
  __device__ __forceinline__ void accumulate(T const* p_tile, T const* v_tile) {
    SharedMma mma;
    auto slice = mma.get_slice(threadIdx.x % 128);
    auto p = slice.partition_fragment_A(make_tensor(make_smem_ptr(p_tile), PLayout{}));
    auto v = slice.partition_fragment_B(make_tensor(make_smem_ptr(v_tile), VLayout{}));
    warpgroup_fence_operand(out);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) gemm(mma, p(_, _, i), v(_, _, i), out);
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void wait_for_results() {
    warpgroup_wait<0>();
    warpgroup_fence_operand(out);
  }
};

// The warpgroup that computes the scores of all rows, and has the first half of the columns.
template <typename T, class Traits>
struct LatentScores : LatentHalf<T, Traits>, Softmax {
  using Half = LatentHalf<T, Traits>;
  static constexpr int kRows = Half::kRows, kTokens = Half::kTokens, kKeyDim = Traits::kKeyDim;
  using Pipeline = LatentPipeline<Traits>;
  using Layout = typename Half::Layout;
  using QLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, Shape<Int<kRows>, Int<kKeyDim>>{}));
  using KLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, Shape<Int<kTokens>, Int<kKeyDim>>{}));
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<T, T, float, Shape<Int<kRows>, Int<kTokens>, Int<kKeyDim>>>()));
  using ScoreFragment = decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kRows>, Int<kTokens>>{}));

  ScoreFragment scores;              // (64, tokens)
  typename Half::PFragment p;        // (64, tokens), 16 bits
  // Of this lane's rows, in a unit's tokens: where what they see of what is shared ends, and their tails.
  int shared_end[2], tail_begin[2], tail_end[2];
  int behind;  // where tails begin

  __device__ __forceinline__ void begin() {
    clear(this->out);
    Softmax::begin();
  }

  // Start scores = Q K^T, part by part as they come; `there` waits for a part. The queries' descriptors are worked out
  // again each time, or they would wait in local memory.
  template <class There>
  __device__ __forceinline__ void score(T const* queries, T const* k_tile, There const& there) {
    ScoreMma mma;
    queries += uniform(opaque(0));
    auto slice = mma.get_slice(threadIdx.x % 128);
    auto q = slice.partition_fragment_A(make_tensor(make_smem_ptr(queries), QLayout{}));
    auto k = slice.partition_fragment_B(make_tensor(make_smem_ptr(k_tile), KLayout{}));
    mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int part = 0; part < Pipeline::kParts; ++part) {
      there(part);
      warpgroup_fence_operand(scores);
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 4 * Pipeline::blocks(part); ++i) {
        int const at = 4 * Pipeline::first_block(part) + i;
        gemm(mma, q(_, _, at), k(_, _, at), scores);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void wait_for_scores() {
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
  }

  // What the rows of a unit see, whose item ends at `stop`: drafts of one request may end before. That of padding does
  // not matter.
  template <class Control>
  __device__ __forceinline__ void find_ends(Params<T> const& params, Control const& control, int stage,
                                            StageInfo const& info, int first_row) {
    int const shared = control.shared[stage];
    behind = Pipeline::whole_stages(shared);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const member = params.group_div.div(first_row + Layout::row(i));
      shared_end[i] = shared, tail_begin[i] = tail_end[i] = 0;
      if (member >= info.n_members) continue;
      if (info.tokens > behind) {
        tail_begin[i] = member ? control.tail_ends[stage][member - 1] : behind;
        tail_end[i] = control.tail_ends[stage][member];
      } else {
        shared_end[i] -= max(0, info.stop - __ldg(params.seq_lens + control.members[stage][kMemberSize * member]));
      }
    }
  }

  // Whether the stage that begins with a unit's token `at` has tails.
  __device__ __forceinline__ bool has_tails(int at) const { return at >= behind && at > 0; }
  // Whether no score is NaN or infinite; large ones may look as if.
  __device__ __forceinline__ bool all_finite() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < size(scores); ++i) sum += scores(i);
    return fabsf(sum) < INFINITY;
  }

  // Probabilities from the scores of the stage that begins with a unit's token `at`; true: results so far are to be
  // multiplied with alpha. Behind the first stage no maximum is looked for unless the sum of a lane's exponentials says
  // that one of them may be too large for the one that there is.
  __device__ __forceinline__ bool online_softmax(int at, bool tails, Params<T> const& params, float (&alpha)[2]) {
    int first[2], last[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = tails ? tail_begin[i] - at : 0;
      last[i] = (tails ? tail_end[i] : shared_end[i]) - at;
    }
    if (__any_sync(~0u, tails || last[0] < kTokens || last[1] < kTokens)) mask(first, last);
    float const scale = params.scale_log2;
    float sum[2];
    if (at > 0) {
      exponentiate(scale, sum);
      bool const fits = sum[0] + sum[1] <= kRescaleSum && row_max[0] > -INFINITY && row_max[1] > -INFINITY;
      if (__all_sync(~0u, fits)) {
        row_sum[0] += sum[0], row_sum[1] += sum[1];
        return false;
      }
      asm volatile("");  // a branch, not predicated instructions in everybody's way
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = scores(2 * row);
#pragma unroll
      for (int i = 0; i < size(scores) / 4; ++i) {
        top = fmaxf(top, fmaxf(scores(4 * i + 2 * row), scores(4 * i + 2 * row + 1)));
      }
      alpha[row] = update_row_max(allreduce<Max, 1, 4>(top) * scale, row_max[row], row_sum[row]);
    }
    exponentiate(scale, sum);
    row_sum[0] += sum[0], row_sum[1] += sum[1];
    return at > 0;
  }
  // Probabilities from the scores, which stay, as an operand: a lane's accumulators of 16 tokens are, in order, those
  // of a k16 step.
  __device__ __forceinline__ void exponentiate(float scale, float (&sum)[2]) {
    auto words = recast<uint32_t>(p);
    float minus[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      minus[row] = row_max[row] == -INFINITY ? 0.f : -row_max[row];
      sum[row] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < size(words); ++i) {
      float const low = exp2f(fmaf(scores(2 * i), scale, minus[i % 2]));
      float const high = exp2f(fmaf(scores(2 * i + 1), scale, minus[i % 2]));
      sum[i % 2] += low + high;
      words(i) = pack_pair<T>(low, high);
    }
  }
  // Of each row's scores those from `first` on and before `last` count.
  __device__ __forceinline__ void mask(int const (&first)[2], int const (&last)[2]) {
    int const column = 2 * (threadIdx.x % 4);
    int again;
    do {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {
        int const token = 8 * (i / 4) + column + i % 2, row = i / 2 % 2;
        if (token < first[row] || token >= last[row]) scores(i) = -INFINITY;
      }
      asm volatile("mov.u32 %0, %%tid.y;" : "=r"(again));  // never, as in Softmax
    } while (again);
  }

  // What the results are multiplied with after the last scores, and the log-sum-exp.
  __device__ __forceinline__ void normalize(float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) inverse[i] = normalizer(allreduce<Sum, 1, 4>(row_sum[i]), row_max[i], lse[i]);
  }

  // The probabilities in shared memory, as the other warpgroup reads them.
  __device__ __forceinline__ void store_probabilities(T* p_tile, int warp) const {
    int const lane = threadIdx.x % kWarp;
    auto const words = recast<uint32_t>(p);
    uint32_t const row = smem_address(p_tile) + (16 * warp + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < size(words); ++i) {  // columns 8 (i / 2), rows lane / 4 + 8 (i % 2)
      uint32_t const at = (row + i % 2 * (8 * 128)) + ((16 * (i / 2)) ^ (lane / 4 * 16));
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(words(i)) : "memory");
    }
  }
};

}  // namespace feather
