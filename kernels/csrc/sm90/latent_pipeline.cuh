// Latents and queries on their way to the warpgroups that compute (sm_90a).
#pragma once
#include <cutlass/arch/barrier.h>

#include "common/copy.cuh"
#include "common/queue.cuh"
#include "common/work_item.cuh"

namespace feather {

// A ring of (kStages, kTokens, 576 columns), swizzled for wgmma. What the two warpgroups are done with at different
// times has barriers of its own: the columns that are keys only, and the values of either.
template <class Traits>
struct LatentPipeline {
  static constexpr int kTokens = Traits::kTokens, kStages = Traits::kStages;
  using Rows = SwizzledRows<Traits::kKeyDim, kTokens>;
  static constexpr int kTile = Rows::kElements;
  enum Part { kRope, kLeft, kRight, kParts, kLast = kParts - 1 };  // in the order in which they become free
  // Of a part: its first block of 64 columns, and how many it has.
  static __device__ constexpr int first_block(int part) { return part == kRope ? 8 : part == kRight ? 4 : 0; }
  static __device__ constexpr int blocks(int part) { return part == kRope ? 1 : 4; }
  static constexpr int kUnits = 4;  // units that are kept for those who copy: they are fewer apart
  static_assert(kUnits > kStages + 1);
  static constexpr int kMostTails = kWarp;
  static __device__ __forceinline__ int whole_stages(int tokens) { return (tokens + kTokens - 1) / kTokens * kTokens; }
  static constexpr int kMemberWords = kMemberSize * kWarpgroupRows;  // a row needs no more than a member

  struct Control {
    uint64_t full[kStages][kParts], empty[kStages][kParts];
    uint64_t queries_full, queries_empty;
    uint64_t scores_full, scores_empty;  // a stage's probabilities
    uint64_t unit_known[kUnits];
    int units[kUnits];
    StageInfo infos[kStages];  // of a unit, with its first and last stages; tokens are the unit's
    int members[kStages][kMemberWords];
    // Of a unit with tails, with its first stage: how many of its tokens all rows see; and where each member's tail
    // ends, counted in its tokens. The first tail begins with a stage.
    int shared[kStages], tail_ends[kStages][kMostTails];
    // Of each row: what its results so far are multiplied with, if its warp says so; and with the last stage, what they
    // are multiplied with in the end, and the log-sum-exp.
    float alpha[kWarpgroupRows], inverse[kWarpgroupRows], lse[kWarpgroupRows];
    int rescales[4];
  };
  static __device__ void init(Control& control, int thread) {
    constexpr int kGroup = 4 * kWarp;  // every thread of a warpgroup speaks for itself
    if (thread < kStages * kParts) {
      int const stage = thread / kParts, part = thread % kParts;
      barrier_init(&control.full[stage][part], kGroup + (part == kLast));  // and who publishes the stage
      barrier_init(&control.empty[stage][part], kGroup);
    } else if (thread < kStages * kParts + kUnits) {
      barrier_init(control.unit_known + thread - kStages * kParts, 1);
    } else if (thread == kWarp - 1) {
      barrier_init(&control.queries_full, kGroup);
      barrier_init(&control.queries_empty, kGroup);
      barrier_init(&control.scores_full, kGroup);
      barrier_init(&control.scores_empty, kGroup);
    }
  }
};

// One of four copying warps: 16 of a stage's tokens, and 16 of a unit's query rows. All walk the same units, the CTA's
// own first and then what the queue hands out.
template <typename T, class Traits>
struct LatentProducer {
  using Pipeline = LatentPipeline<Traits>;
  using Control = typename Pipeline::Control;
  using Rows = typename Pipeline::Rows;
  static constexpr int kTokens = Pipeline::kTokens, kStages = Pipeline::kStages, kOwn = kTokens / 4;
  static constexpr int kBlockBytes = 64 * kTokens * int(sizeof(T));  // of 64 columns in a stage, or of the queries
  using Copy = RowCopy<Traits::kKeyDim * int(sizeof(T))>;            // 128 bytes of four rows at once
  static constexpr int kTurns = kOwn / Copy::kRowsAtOnce;
  static constexpr int kMemberLoads = Pipeline::kMemberWords / kWarp;
  static_assert(kTokens == kWarpgroupRows && Copy::kLanes == 8);

  Params<T> const& params;
  Queue const queue;
  int const lane, own_first;
  char const* const cache;  // this lane's columns
  uint32_t const to, queries_to;
  int const stride;
  int unit, words = 0;  // the next unit, and its item
  int asked = 0;

  __device__ LatentProducer(Params<T> const& params_, Queue const& queue_, T* ring, T* queries, int copier)
      : params(params_),
        queue(queue_),
        lane(threadIdx.x % kWarp),
        own_first(copier * kOwn),
        cache(reinterpret_cast<char const*>(params_.k) + Copy::byte()),
        to(smem_address(ring + Rows::at(own_first + Copy::row(), Copy::byte() / int(sizeof(T))))),
        queries_to(smem_address(queries + Rows::at(own_first + Copy::row(), Copy::byte() / int(sizeof(T))))),
        stride(gridDim.x),
        unit(blockIdx.x) {
    fetch();
  }

  __device__ int token() const { return own_first + Copy::template row_known<kOwn>(); }
  __device__ void fetch() {
    if (unit < queue.n_work) words = load_item(params, queue.first_item + params.kv_heads_div.div(unit));
  }
  // Where this lane's token of a stage is: its position in a row of the table, and the page that the table has there.
  struct Place {
    int position, page;
  };
  __device__ Place look_up(char const* row, int pos, int end) const {
    int const position = min(pos + token(), end - 1);
    return {position, pos < end ? load_page(params, row, position) : 0};
  }
  __device__ Place look_up_next() const {
    if (unit >= queue.n_work) return {0, 0};
    return look_up(item_row(params, words), item_word(words, kItemStart), item_word(words, kItemStop));
  }

  // The tails of a unit's members that it reads behind what they share, a member in a lane.
  struct Tails {
    int count = 0;
    int begin = 0, end = 0;  // in the unit's tokens
    int start = 0;           // in its row of the table
    char const* row = nullptr;
  };
  __device__ Tails find_tails_of(int first, int count, int behind) const {
    Tails tails;
    tails.count = count;
    if (count == 0) return tails;
    int length = 0;
    if (lane < count) {
      int const* const item = params.plan + params.plan[kHeaderItemsBegin] + kItemSize * (first + lane);
      int const grows = __ldg(item + kItemGrows);
      int64_t const offset =
          int64_t(uint32_t(__ldg(item + kItemOffsetLow))) | int64_t(__ldg(item + kItemOffsetHigh)) << 32;
      tails.start = __ldg(item + kItemStart);
      tails.row = static_cast<char const*>(params.table) + offset * params.entry_bytes;
      length = max(0, (grows >= 0 ? __ldg(params.seq_lens + grows) : __ldg(item + kItemStop)) - tails.start);
    }
    tails.end = length;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      int const before = __shfl_up_sync(~0u, tails.end, distance);
      if (lane >= distance) tails.end += before;
    }
    tails.end += behind;
    tails.begin = tails.end - length;
    return tails;
  }
  // The place of this lane's token of the stage that begins with a unit's token `at`, of `total`.
  __device__ Place look_up(Tails const& tails, int at, int total) const {
    int const mine = min(at + token(), total - 1);
    int member = 0;
#pragma unroll 1
    for (int i = 1; i < tails.count; ++i) {
      if (mine >= __shfl_sync(~0u, tails.begin, i)) member = i;
    }
    int const position = __shfl_sync(~0u, tails.start, member) + mine - __shfl_sync(~0u, tails.begin, member);
    auto const row = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(tails.row), member);
    return {position, load_page(params, reinterpret_cast<char const*>(row), position)};
  }

  // Go on to the unit behind.
  __device__ void advance(Control& control, bool publishes) {
    if (queue.n_work > stride) {
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

  __device__ void run(Control& control) {
    int stage = 0, parity = 1, queries_parity = 1;  // of what is empty, as if a round had gone before
    bool const publishes = own_first == 0;
    Place place = look_up_next();
    while (unit < queue.n_work) {
      int const grows = item_word(words, kItemGrows), n_members = item_word(words, kItemMembers);
      char const* const listed = item_row(params, words);
      int const start = item_word(words, kItemStart);
      int stop = item_word(words, kItemStop);
      if (grows >= 0) {  // it may have grown since it was planned
        stop = __ldg(params.seq_lens + grows);
        place = look_up(listed, start, stop);
      }
      int const shared = max(0, stop - start), behind = Pipeline::whole_stages(shared);
      Tails const tails = find_tails_of(item_word(words, kItemFirstPart), item_word(words, kItemParts), behind);
      int const total = tails.count ? __shfl_sync(~0u, tails.end, kWarp - 1) : shared;
      int const* const list =
          params.plan + params.plan[kHeaderMembersBegin] + kMemberSize * item_word(words, kItemFirstMember);
      int members[kMemberLoads];
      if (publishes) {
#pragma unroll
        for (int j = 0; j < kMemberLoads; ++j) {
          members[j] = __ldg(list + min(lane + j * kWarp, kMemberSize * n_members - 1));
        }
      }
      int const head = unit - params.kv_heads_div.div(unit) * params.kv_heads;
      int requests[kTurns], heads[kTurns];  // of this lane's query rows
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        int const row = own_first + i * Copy::kRowsAtOnce + Copy::row(), member = params.group_div.div(row);
        requests[i] = member < n_members ? __ldg(list + kMemberSize * member) : -1;
        heads[i] = head * params.group + row - member * params.group;
      }
      StageInfo const info{total, head << kHeadShift, n_members FEATHER_ENDS_AT(stop)};
      for (int at = 0;; at += kTokens) {
        bool const first = at == 0, last = at + kTokens >= total;
        // As late as there is time for it: who asks early holds a unit that others could begin.
        bool const two_left = at + 2 * kTokens >= total && (first || !last);
        if (two_left) advance(control, publishes);
        int const n_rows = min(kTokens, (at < behind ? shared : total) - at);
        int const slot = slot_of(params, place.page, place.position);
        int const next = at + kTokens;
        if (last) {
          place = look_up_next();
        } else {
          place = next < behind ? look_up(listed, start + next, stop) : look_up(tails, next, total);
        }
        char const* rows[kTurns];
#pragma unroll
        for (int i = 0; i < kTurns; ++i) rows[i] = Copy::find(cache, slot, i, params.k_slot_bytes);
        uint32_t const stage_to = to + stage * (Pipeline::kTile * int(sizeof(T)));
#pragma unroll
        for (int part = 0; part < Pipeline::kParts; ++part) {
          barrier_wait(&control.empty[stage][part], parity);
          if (n_rows == kTokens) {
            copy<true>(stage_to, rows, part, n_rows);
          } else {
            copy<false>(stage_to, rows, part, n_rows);
          }
          if (part == Pipeline::kLast && publishes) {
            if (first || last) {
              if (lane == 0) control.infos[stage] = info;
#pragma unroll
              for (int j = 0; j < kMemberLoads; ++j) control.members[stage][lane + j * kWarp] = members[j];
              if (lane == 0) control.shared[stage] = shared;
              control.tail_ends[stage][lane] = tails.end;
              __syncwarp();
            }
            if (lane == 0) barrier_arrive(&control.full[stage][part]);
          }
          cp_async_barrier_arrive_noinc(&control.full[stage][part]);
        }
        if (first) {
          barrier_wait(&control.queries_empty, queries_parity);
          queries_parity ^= 1;
          copy_queries(requests, heads);
          cp_async_barrier_arrive_noinc(&control.queries_full);
        }
        if (++stage == kStages) stage = 0, parity ^= 1;
        if (last) break;
      }
    }
#pragma unroll
    for (int part = 0; part < Pipeline::kParts; ++part) {  // the end of the queue
      barrier_wait(&control.empty[stage][part], parity);
      if (part == Pipeline::kLast && publishes) {
        if (lane == 0) control.infos[stage].tokens = -1;
        __syncwarp();
        if (lane == 0) barrier_arrive(&control.full[stage][part]);
      }
      cp_async_barrier_arrive_noinc(&control.full[stage][part]);
    }
  }

  // A part of this warp's rows of a stage, 16 bytes a lane, with zeros behind the `n_rows` that are there.
  template <bool kWhole>
  __device__ void copy(uint32_t at, char const* const (&rows)[kTurns], int part, int n_rows) const {
    int const first = Pipeline::first_block(part);
#pragma unroll
    for (int block = 0; block < Pipeline::blocks(part); ++block) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        uint32_t const row = Rows::down(at, i * Copy::kRowsAtOnce) + (first + block) * kBlockBytes;
        char const* const from = rows[i] + (first + block) * 128;
        if (kWhole) {
          cp_async(row, from);
        } else {
          cp_async_zfill(row, from, own_first + i * Copy::kRowsAtOnce + Copy::row() < n_rows);
        }
      }
    }
  }

  // This warp's rows of a unit's queries. Rows of padding are zeros beside others, as a warp's rows are rescaled
  // together; where there are no others, they keep what they have.
  __device__ void copy_queries(int const (&requests)[kTurns], int const (&heads)[kTurns]) const {
    if (!__any_sync(~0u, requests[0] >= 0)) return;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      bool const there = requests[i] >= 0;
      uint32_t const row = Rows::down(queries_to, i * Copy::kRowsAtOnce);
      int const request = there ? requests[i] : 0, head = there ? heads[i] : 0;
      T const* const values = params.q + request * params.q_stride + head * params.q_head_stride;
      T const* const rope = params.q_rope + request * params.q_rope_stride + head * params.q_rope_head_stride;
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        cp_async_zfill(row + block * kBlockBytes, reinterpret_cast<char const*>(values) + Copy::byte() + block * 128,
                       there);
      }
      cp_async_zfill(row + 8 * kBlockBytes, reinterpret_cast<char const*>(rope) + Copy::byte(), there);
    }
  }
};

}  // namespace feather
