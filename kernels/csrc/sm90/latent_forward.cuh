// Latent attention on Hopper: two warpgroups multiply 64 query rows with wgmma, fed by a third that copies.
//
// Both read each stage of latents: the first computes the scores of all rows, and the left half of the results'
// columns; the second takes the probabilities from shared memory and computes the right half. To whoever merges a half
// is a row of its own: query head h has rows 2 h and 2 h + 1, of 256 columns.
#pragma once
#include <cutlass/arch/reg_reconfig.h>

#include "common/merge.cuh"
#include "sm90/latent_pipeline.cuh"
#include "sm90/latent_tile.cuh"

namespace feather {

template <typename T, class Traits>
struct LatentForward {
  static constexpr int kThreads = Traits::kThreads, kComputing = Traits::kComputing, kHalfDim = Traits::kHalfDim;
  static constexpr int kStages = Traits::kStages, kTokens = Traits::kTokens;
  using Pipeline = LatentPipeline<Traits>;
  using Control = typename Pipeline::Control;
  using Layout = ExchangedLayout<T, kHalfDim>;
  // In shared memory: queries, stages, probabilities.
  static constexpr int kTileBytes = Pipeline::kTile * int(sizeof(T));
  static constexpr int kRingAt = kTileBytes, kScoresAt = kRingAt + kStages * kTileBytes;
  static constexpr int kControlAt = kScoresAt + kWarpgroupRows * kTokens * int(sizeof(T));
  static constexpr int kSmem = kControlAt + int(sizeof(Control));
  static_assert(kSmem <= 227 * 1024);
  static constexpr int kMergedRows = 4;
  enum NamedBarriers { kDealt = 1, kDone, kVoted, kCleansed };
  static __device__ void sync(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
  static __device__ void arrive(int id, int count) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
  }
  static __device__ int thread() {  // read again where it is used, as in HopperForward
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }

  static __device__ void run(Params<T> const& params) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Control& control = *reinterpret_cast<Control*>(smem + kControlAt);
    T* const queries = reinterpret_cast<T*>(smem);
    T* const ring = reinterpret_cast<T*>(smem + kRingAt);
    T* const p_tile = reinterpret_cast<T*>(smem + kScoresAt);
    if (threadIdx.x < kWarp) Pipeline::init(control, threadIdx.x);
    __syncthreads();
    launch_dependent_grids();
    if (threadIdx.x >= kComputing) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
      LatentProducer<T, Traits> producer(params, find_queue(params, 0), ring, queries, thread() / kWarp % 4);
      wait_on_dependent_grids();
      producer.run(control);
      sync(kDealt, kThreads);  // taken back before the others have theirs, they would wait for ever
      cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kComputeRegisters>();
      arrive(kDealt, kThreads);
      int const warp = uniform(thread() / kWarp);
      wait_on_dependent_grids();
      if (warp < 4) {
        run_left(params, control, queries, ring, p_tile, warp);
      } else {
        run_right(params, control, ring, p_tile, warp - 4);
      }
      sync(kDone, kComputing);  // registers may change again only after a warpgroup's warps have met
      cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters>();
    }
    constexpr int kWarps = kThreads / kWarp;
    int const warps = kWarps * int(gridDim.x);
    int const index = (kWarps - 1 - thread() / kWarp) * int(gridDim.x) + int(blockIdx.x);
    if (params.plan[kHeaderMerges] * params.q_heads <= warps || params.q_heads % kMergedRows) {
      run_merges<kHalfDim, Traits::kMergedAtOnce>(params, index, warps);
    } else {
      run_row_merges<kHalfDim, kMergedRows>(params, index, warps);
    }
    __syncthreads();
    leave(params);
  }

  // The stages in turn, as one of the warpgroups goes through them.
  struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  };
  // wgmma may read what cp.async wrote.
  static __device__ __forceinline__ void wait_for(Control& control, Turn const& turn, int part) {
    barrier_wait(&control.full[turn.stage][part], turn.parity);
    cutlass::arch::fence_view_async_shared();
  }
  static __device__ __forceinline__ T const* tile_of(T const* ring, int stage) {
    return ring + uniform(stage) * Pipeline::kTile;
  }

  // A warp's rows of a unit, as those who merge count them.
  static __device__ __forceinline__ void find_half_rows(Params<T> const& params, StageInfo const& info,
                                                        int const* members, int warp, int half, Row (&rows)[2]) {
    find_rows<Layout>(params, info, members, 16 * warp, rows);
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i].head = 2 * rows[i].head + half;
  }

  // The values of a stage are multiplied before the scores of the next one, so that its place is free early.
  static __device__ __forceinline__ void run_left(Params<T> const& params, Control& control, T const* queries,
                                                  T const* ring, T* p_tile, int warp) {
    LatentScores<T, Traits> tile;
    Turn turn;
    int queries_parity = 0, empty_parity = 1;
    PendingPublish pending;
    while (true) {
      wait_for(control, turn, Pipeline::kLast);
      StageInfo const info = control.infos[turn.stage];
      if (info.tokens < 0) break;
      barrier_wait(&control.queries_full, queries_parity);
      queries_parity ^= 1;
      tile.begin();
      float lse[2], inverse[2];
      Row rows[2];
#pragma unroll 1
      for (int left = info.tokens;; left -= kTokens) {
        bool const last = left <= kTokens;
        int const stage = turn.stage;
        tile.score(queries, tile_of(ring, stage), [&](int part) { wait_for(control, turn, part); });
        if (left == info.tokens) tile.find_ends(params, control, stage, info, 16 * warp);
        pending.publish(params);  // of the unit before: its values have been written meanwhile
        tile.wait_for_scores();
        barrier_arrive(&control.empty[stage][Pipeline::kRope]);
        if (last) barrier_arrive(&control.queries_empty);
        float alpha[2];
        bool rescales = false;
        int const at = info.tokens - left;
        bool const tails = tile.has_tails(at);
        bool const spoilt = tails && !tile.all_finite();
        // Rows of padding alone spoil nobody, and may have anything.
        if (16 * warp < info.n_members * params.group) rescales = tile.online_softmax(at, tails, params, alpha);
        if (tails && any_of_warpgroup(spoilt)) cleanse(tile_of(ring, stage));
        if (rescales) Softmax::rescale(tile.out, alpha);
        if (last) tile.normalize(inverse, lse);
        barrier_wait(&control.scores_empty, empty_parity);
        empty_parity ^= 1;
        tile.store_probabilities(p_tile, warp);
        tile.accumulate(tile.p, tile.template values<0>(tile_of(ring, stage)));
        pass_on(control, warp, last, rescales, alpha, inverse, lse);
        if (last) find_half_rows(params, control.infos[stage], control.members[stage], warp, 0, rows);
        tile.wait_for_results();
        barrier_arrive(&control.empty[stage][Pipeline::kLeft]);
        turn.next();
        if (last) break;
      }
#pragma unroll
      for (int i = 0; i < size(tile.out); ++i) tile.out(i) *= inverse[i / 2 % 2];
      pending = epilogue<kHalfDim, Layout, false>(params, tile.out, lse, rows);
    }
    pending.publish(params);
  }

  // Whether any thread of the first warpgroup says so.
  static __device__ __forceinline__ bool any_of_warpgroup(bool said) {
    int any;
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.s32 p, %1, 0;\n barrier.cta.red.or.pred p, %2, 128, p;\n"
        " selp.s32 %0, 1, 0, p;\n}"
        : "=r"(any) : "r"(int(said)), "n"(int(kVoted)) : "memory");
    return any;
  }
  // Zeros for a stage's values that are NaN or infinite: they are one request's, and other rows, whose probabilities
  // there are zero, would become NaN by them. That request's rows do all the same, by their scores.
  static __device__ __forceinline__ void cleanse(T const* stage) {
    constexpr int kBytes = Traits::kHalfDim * 2 * kTokens * int(sizeof(T));
    constexpr uint32_t kHigh = 0x7f800000u, kLow = 0x7f80u;
    uint32_t const to = smem_address(stage) + thread() % 128 * 4;
#pragma unroll 1
    for (int at = 0; at < kBytes; at += 128 * 4) {
      uint32_t word;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(to + at) : "memory");
      if ((word & kHigh) == kHigh) word &= 0xffffu;
      if ((word & kLow) == kLow) word &= 0xffff0000u;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + at), "r"(word) : "memory");
    }
    cutlass::arch::fence_view_async_shared();
    sync(kCleansed, 128);
  }

  // Hand a stage's probabilities, which are stored, to the other warpgroup; with the last stage, what the results are
  // multiplied with in the end.
  static __device__ __forceinline__ void pass_on(Control& control, int warp, bool last, bool rescales,
                                                 float const (&alpha)[2], float const (&inverse)[2],
                                                 float const (&lse)[2]) {
    if (threadIdx.x % kWarp == 0) control.rescales[warp] = rescales;
    if (Layout::leads()) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const row = 16 * warp + Layout::row(i);
        if (rescales) control.alpha[row] = alpha[i];
        if (last) control.inverse[row] = inverse[i], control.lse[row] = lse[i];
      }
    }
    cutlass::arch::fence_view_async_shared();
    barrier_arrive(&control.scores_full);
  }

  static __device__ __forceinline__ void run_right(Params<T> const& params, Control& control, T const* ring,
                                                   T const* p_tile, int warp) {
    LatentHalf<T, Traits> tile;
    Turn turn;
    int full_parity = 0;
    PendingPublish pending;
    while (true) {
      wait_for(control, turn, Pipeline::kLast);
      StageInfo const info = control.infos[turn.stage];
      if (info.tokens < 0) break;
      int left = info.tokens;
      clear(tile.out);
      Row rows[2];
      float inverse[2], lse[2];
      do {
        bool const last = left <= kTokens;
        int const stage = turn.stage;
        wait_for(control, turn, Pipeline::kRight);
        barrier_wait(&control.scores_full, full_parity);
        full_parity ^= 1;
        if (last) find_half_rows(params, control.infos[stage], control.members[stage], warp, 1, rows);
        if (uniform(control.rescales[warp])) {
          float alpha[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) alpha[i] = control.alpha[16 * warp + Layout::row(i)];
          Softmax::rescale(tile.out, alpha);
        }
        cutlass::arch::fence_view_async_shared();
        tile.accumulate(p_tile, tile.template values<1>(tile_of(ring, stage)));
        if (last) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            int const row = 16 * warp + Layout::row(i);
            inverse[i] = control.inverse[row], lse[i] = control.lse[row];
          }
        }
        pending.publish(params);  // of the unit before: its values have been written meanwhile
        tile.wait_for_results();
        barrier_arrive(&control.scores_empty);
        barrier_arrive(&control.empty[stage][Pipeline::kRight]);
        turn.next();
      } while ((left -= kTokens) > 0);
#pragma unroll
      for (int i = 0; i < size(tile.out); ++i) tile.out(i) *= inverse[i / 2 % 2];
      pending = epilogue<kHalfDim, Layout, false>(params, tile.out, lse, rows);
    }
    pending.publish(params);
  }
};

}  // namespace feather
