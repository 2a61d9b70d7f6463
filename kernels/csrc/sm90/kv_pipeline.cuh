// The ring between copying warps and the warpgroups that compute (sm_90a).
#pragma once
#include <cutlass/arch/barrier.h>

#include "common/copy.cuh"
#include "common/prefetch.cuh"
#include "common/queue.cuh"
#include "common/work_item.cuh"

namespace feather {

// A ring of (kStages, K and V, kTokens, head_dim) in 16 bits, swizzled for wgmma. kGroups warpgroups read it.
template <typename T, int kHeadDim_, int kTokens_, int kGroups_, int kStages_>
struct KvPipeline {
  static constexpr int kHeadDim = kHeadDim_, kTokens = kTokens_, kGroups = kGroups_, kStages = kStages_;
  using Rows = SwizzledRows<kHeadDim, kTokens>;
  using Value = Operand<T>;
  static constexpr int kTile = Rows::kElements;
  static constexpr int kStageElements = 2 * kTile;  // K, then V
  // Behind it, values of 8 bits: (kDepth, kTokens, head_dim) of K, and of V (sm90/widening_producer.cuh).
  static constexpr int kRingBytes = kStages * kStageElements * int(sizeof(T));
  static constexpr int kBytes = kRingBytes + (kFp8 ? kWideningDepth<kHeadDim> * kStageElements : 0);
  static constexpr int kMemberWords = kMemberSize * kWarpgroupRows * kGroups;  // a row needs no more than a member
  // One warpgroup alone asks its queue for units beyond the first. One of its two copying warps does, and tells the
  // other, which is fewer units behind than are kept.
  static constexpr bool kAsks = kGroups == 1;
  static constexpr int kUnits = kStages < 7 ? 8 : 16;
  static_assert(!kAsks || kUnits > kStages + 1);

  // Whoever widens tells of a stage before it is free: while so many rounds through the ring are told apart, nobody
  // reads there any more. So a place is a stage and a round.
  static constexpr int kRounds = !kFp8 ? 1 : kStages > kWideningDepth<kHeadDim> ? 2 : 3;
  static __device__ __forceinline__ int stage_of(int place) { return kRounds == 1 ? place : place % kStages; }
  // There are few stages where values are widened into them: so that this is done while others are multiplied, V of a
  // stage has barriers of its own, behind those of K.
  static constexpr int kBarriers = kFp8 ? 2 * kStages : kStages;

  struct Control {
    uint64_t full[kBarriers], empty[kBarriers], unit_known[kUnits];
    int units[kUnits];
    StageInfo infos[kRounds * kStages];  // of a unit, with its first and last stages; tokens are the unit's
    int members[kRounds * kStages][kMemberWords];  // request and part of each, with them
  };
  static __device__ void init(Control& control, int thread) {
    if (kAsks && thread < kUnits) barrier_init(control.unit_known + thread, 1);
    // Full: every copying thread, once its copies have landed, and who publishes the stage. Empty: all that compute.
    constexpr int kArrivals = kFp8 ? kGroups * kWarp : 2 * kGroups * kWarp + 1;
    for (int i = thread; i < 2 * kBarriers; i += kWarp) {
      barrier_init(i < kBarriers ? control.full + i : control.empty + i - kBarriers,
                   i < kBarriers ? kArrivals : 4 * kGroups * kWarp);
    }
  }
};

// One copying warp, of K or of V. Both are there once for each warpgroup that shares the ring; all walk the same units:
// `first`, and then `first` + `stride`, ..., or what the queue hands out beyond the first `stride`.
template <typename T, class Pipeline>
struct KvProducer {
  static constexpr int kHeadDim = Pipeline::kHeadDim, kTokens = Pipeline::kTokens, kStages = Pipeline::kStages;
  static constexpr int kOwn = kTokens / Pipeline::kGroups;  // tokens of a stage that this warp copies
  static constexpr int kBlock = 16;  // tokens behind the last one that are copied too, or cleared
  static constexpr int kAtOnce = kOwn < kWarp ? kOwn : kWarp;  // tokens whose slots the warp looks up together
  static constexpr int kPerLane = kOwn / kAtOnce;              // tokens whose slot a lane knows
  static_assert(kOwn % kAtOnce == 0 && kAtOnce % kBlock == 0);
  using Copy = RowCopy<kHeadDim * kKvBytes>;
  // So many rows' addresses are worked out before a stage is free, and then those rows copied: with both in turn, each
  // copy would wait for its own address.
  static constexpr int kBatch = kAtOnce / Copy::kRowsAtOnce;
  static constexpr int kMemberLoads = Pipeline::kMemberWords / kWarp;

  Params<T> const& params;
  Queue const queue;
  bool const keys;
  int const lane, own_first;
  char const* const cache;            // this lane's columns
  int const slot_bytes;               // between slots of the cache
  uint32_t const to;                  // where this lane's first row lies in a stage
  int const stride;
  int unit, words = 0;                // the next unit, and its item
  int asked = 0;                      // how often

  __device__ KvProducer(Params<T> const& params_, Queue const& queue_, typename Pipeline::Value* ring, bool keys_, int copier, int first,
                       int stride_)
      : params(params_),
        queue(queue_),
        keys(keys_),
        lane(threadIdx.x % kWarp),
        own_first(copier * kOwn),
        cache(reinterpret_cast<char const*>(keys ? params_.k : params_.v) + Copy::byte()),
        slot_bytes(keys ? params_.k_slot_bytes : params_.v_slot_bytes),
        to(smem_address(ring + (keys ? 0 : Pipeline::kTile)) +
           Pipeline::Rows::at(own_first + Copy::row(), Copy::byte() / kKvBytes) * int(sizeof(T))),
        stride(stride_),
        unit(first) {
    fetch();
  }

  // Of a stage's tokens, those whose slots this lane knows.
  __device__ int token(int j) const { return own_first + j * kAtOnce + Copy::template row_known<kAtOnce>(); }

  __device__ void fetch() {
    if (unit < queue.n_work) words = load_item(params, queue.first_item + params.kv_heads_div.div(unit));
  }

  // Go on to the unit behind. Asking evens out what some processors get of the memory's bandwidth more than others.
  __device__ void advance(typename Pipeline::Control& control, bool publishes) {
    if (Pipeline::kAsks && queue.n_work > stride) {
      int const at = asked % Pipeline::kUnits, parity = asked / Pipeline::kUnits % 2;
      if (publishes && lane == 0) {
        control.units[at] = stride + atomicAdd(params.popped + queue.index, 1);
        barrier_arrive(control.unit_known + at);
      }
      __syncwarp();
      barrier_wait(control.unit_known + at, parity);
      unit = control.units[at];
      ++asked;
    } else {
      unit += stride;
    }
    fetch();
  }

  // The pages of this lane's tokens of the stage at `pos`, clamped to the last before `end`.
  __device__ void look_up(char const* row, int pos, int end, int (&pages)[kPerLane]) const {
    if (pos >= end) return;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) pages[j] = load_page(params, row, min(pos + token(j), end - 1));
  }

  __device__ void run(typename Pipeline::Control& control) {
    int stage = 0, parity = 1;  // of `empty`, as if a round had gone before
    bool const publishes = keys && own_first == 0;
    int pages[kPerLane] = {};
    if (unit < queue.n_work) {
      look_up(item_row(params, words), item_word(words, kItemStart), item_word(words, kItemStop), pages);
    }
    while (unit < queue.n_work) {
      int const grows = item_word(words, kItemGrows), n_members = item_word(words, kItemMembers);
      char const* const listed = item_row(params, words);
      int pos = item_word(words, kItemStart), stop = item_word(words, kItemStop);
      if (grows >= 0) {  // a tail in a large tile: it may have grown since it was planned
        stop = __ldg(params.seq_lens + grows);
        look_up(listed, pos, stop, pages);
      }
      int members[kMemberLoads];
      if (publishes) {
        int const* const list =
            params.plan + params.plan[kHeaderMembersBegin] + kMemberSize * item_word(words, kItemFirstMember);
#pragma unroll
        for (int j = 0; j < kMemberLoads; ++j) {
          members[j] = __ldg(list + min(lane + j * kWarp, kMemberSize * n_members - 1));
        }
      }
      int const head = unit - params.kv_heads_div.div(unit) * params.kv_heads;
      char const* const from = cache + head * kHeadDim * kKvBytes;
      if (!Pipeline::kAsks) advance(control, publishes);
      StageInfo const info{max(0, stop - pos), head << kHeadShift, n_members FEATHER_ENDS_AT(stop)};
      bool first = true;
      while (true) {
        // Not a minimum: ptxas 13.0 takes "is it kTokens?" from its predicate, false of all stages but the last.
        bool const whole = opaque(stop) - pos >= kTokens;
        bool const last = pos + kTokens >= stop;
        // As late as there is time for it: who asks early holds a unit that others could begin.
        bool const two_left = pos + 2 * kTokens >= stop && (first || !last);
        if (Pipeline::kAsks && two_left) advance(control, publishes);
        int const n_rows = (min(kTokens, max(0, stop - pos)) + kBlock - 1) / kBlock * kBlock;
        int slots[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          slots[j] = slot_of(params, pages[j], min(pos + token(j), stop - 1));
        }
        pos += kTokens;
        if (!last) {
          look_up(listed, pos, stop, pages);
        } else if (unit < queue.n_work) {
          look_up(item_row(params, words), item_word(words, kItemStart), item_word(words, kItemStop), pages);
        }
        char const* rows[kBatch];
        find(opaque(from), slots[0], rows);
        barrier_wait(control.empty + stage, parity);
        uint32_t const down = stage * (Pipeline::kStageElements * int(sizeof(T)));
        if (whole) {
          copy<true>(from, slots, rows, down, kTokens);
        } else {
          copy<false>(from, slots, rows, down, n_rows);
        }
        if (publishes) {
          if (first || last) {
            if (lane == 0) control.infos[stage] = info;
#pragma unroll
            for (int j = 0; j < kMemberLoads; ++j) control.members[stage][lane + j * kWarp] = members[j];
            __syncwarp();
          }
          if (lane == 0) barrier_arrive(control.full + stage);
        }
        // The address goes in a uniform register: else the assembler has every lane ask whether it is the others', too.
        cp_async_barrier_arrive_noinc(control.full + uniform(stage));
        if (params.prefetch && !last) prefetch_rows(*this, from, pages, pos, stop);
        if (++stage == kStages) stage = 0, parity ^= 1;
        first = false;
        if (last) break;
      }
    }
    barrier_wait(control.empty + stage, parity);  // the end of the queue
    if (publishes) {
      if (lane == 0) control.infos[stage] = {-1, 0, 0};
      __syncwarp();
      if (lane == 0) barrier_arrive(control.full + stage);
    }
    cp_async_barrier_arrive_noinc(control.full + stage);
  }

  // Where the rows are that this lane copies, of kAtOnce tokens whose slots the warp knows.
  __device__ void find(char const* from, int slot, char const* (&rows)[kBatch]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      rows[i] = Copy::find(from, slot, i, slot_bytes);
    }
  }

  // Request this warp's rows of a stage, 16 bytes a lane; those of the first block have been found. `n_rows` of the
  // stage are there; V has zeros behind them.
  template <bool kWhole>
  __device__ void copy(char const* from, int const (&slots)[kPerLane], char const* (&rows)[kBatch], uint32_t down,
                       int n_rows) {
#pragma unroll
    for (int block = 0; block < kPerLane; ++block) {
      if (!kWhole && keys && own_first + block * kAtOnce >= n_rows) break;
      if (block) find(from, slots[block], rows);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const row = block * kAtOnce + i * Copy::kRowsAtOnce;
        uint32_t const at = Pipeline::Rows::down(to + down, row);
        if (kWhole) {
          Copy::template copy<kTokens>(at, rows[i]);
        } else {
          Copy::template cp_async_zfill<kTokens>(at, rows[i], own_first + Copy::row() + row < n_rows);
        }
      }
    }
  }
};

// A warp that computes: the stages in turn, each by its place.
template <typename T, class Pipeline>
struct KvConsumer {
  using Value = typename Pipeline::Value;
  typename Pipeline::Control& control;
  Value* const ring;
  int stage = 0, parity = 0;
  int v_stage = 0, v_parity = 0;  // the next whose V is waited for, where that has barriers of its own

  __device__ KvConsumer(typename Pipeline::Control& control_, Value* ring_) : control(control_), ring(ring_) {}

  // The next stage, once it is there. wgmma may read what cp.async wrote.
  __device__ void wait() const {
    barrier_wait(control.full + Pipeline::stage_of(stage), parity);
    if (!kFp8) cutlass::arch::fence_view_async_shared();
  }
  // Its V, once for every stage, in order.
  __device__ void wait_for_values() {
    if constexpr (kFp8) {
      barrier_wait(control.full + Pipeline::kStages + v_stage, v_parity);
      if (++v_stage == Pipeline::kStages) v_stage = 0, v_parity ^= 1;
    }
  }
  // The next unit's first stage; tokens = -1 if there is none.
  __device__ StageInfo open() const {
    wait();
    return control.infos[stage];
  }
  // The same, or tokens = -1 if it is not there yet.
  __device__ StageInfo peek() const {
    bool const there = barrier_ready(control.full + Pipeline::stage_of(stage), parity);
    return __all_sync(~0u, there) ? control.infos[stage] : StageInfo{-1, 0, 0};
  }
  // That of a unit's last stage, which has been waited for.
  __device__ StageInfo info(int stage) const { return control.infos[stage]; }
  // Go on to the stage behind; the one at hand is kept until it is released.
  __device__ int take() {
    int const taken = stage;
    if constexpr (Pipeline::kRounds == 1) {
      if (++stage == Pipeline::kStages) stage = 0, parity ^= 1;
    } else {
      if (++stage == Pipeline::kRounds * Pipeline::kStages) stage = 0;
      if (Pipeline::stage_of(stage) == 0) parity ^= 1;
    }
    return taken;
  }
  // Go past a unit.
  __device__ void skip(int tokens) {
    do {
      wait();
      wait_for_values();
      int const taken = take();
      release_keys(taken);
      release(taken);
      tokens -= Pipeline::kTokens;
    } while (tokens > 0);
  }
  __device__ int const* members(int stage) const { return control.members[stage]; }
  __device__ Value const* k_tile(int stage) const {
    return ring + uniform(Pipeline::stage_of(stage)) * Pipeline::kStageElements;
  }
  __device__ Value const* v_tile(int stage) const { return k_tile(stage) + Pipeline::kTile; }
  // Every lane says so for itself: racecheck does not see that one which speaks for its warp has heard the others.
  __device__ void release(int stage) {
    barrier_arrive(control.empty + Pipeline::stage_of(stage) + Pipeline::kBarriers - Pipeline::kStages);
  }
  // K alone, before its V, where that can be.
  __device__ void release_keys(int stage) {
    if constexpr (kFp8) barrier_arrive(control.empty + Pipeline::stage_of(stage));
  }
};

}  // namespace feather
