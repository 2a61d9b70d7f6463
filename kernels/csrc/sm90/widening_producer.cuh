// A copying warp that widens: 8 bits travel, 16 are multiplied (sm_90a).
#pragma once
#include "sm90/kv_pipeline.cuh"

namespace feather {

// As its base, but wgmma wants 16 bits: what this warp has asked for, a block of rows at a time, it widens kDepth stages
// later, once it is there, into the ring, and asks for other rows in its place. A lane widens the very bytes that it
// copied, so nobody else waits for them.
template <typename T, class Pipeline>
struct WideningProducer : KvProducer<T, Pipeline> {
  using Base = KvProducer<T, Pipeline>;
  using Copy = typename Base::Copy;
  static constexpr int kHeadDim = Pipeline::kHeadDim, kTokens = Pipeline::kTokens, kStages = Pipeline::kStages;
  static constexpr int kOwn = Base::kOwn, kAtOnce = Base::kAtOnce, kPerLane = Base::kPerLane;
  static constexpr int kDepth = kWideningDepth<kHeadDim>, kPlaces = Pipeline::kRounds * kStages;
  static constexpr int kRowBytes = kHeadDim, kOwnBytes = kOwn * kRowBytes;
  static constexpr int kBlock = kOwn < 2048 / kHeadDim ? kOwn : 2048 / kHeadDim;  // 4 loads of 16 bytes a lane
  static constexpr int kBlocks = kOwn / kBlock, kTurns = kBlock / Copy::kRowsAtOnce, kWidth = 16 * Copy::kLanes;
  // When K of a stage is released, all of the stage before it is. A place is told of once K is that lay kDepth stages
  // before in the round before.
  static_assert(kDepth + 1 <= (Pipeline::kRounds - 1) * kStages);

  uint32_t const staged;   // where this lane's first bytes lie of the first stage in 8 bits
  int place = 0;           // of the stage that is asked for next
  int asked_stages = 0;    // up to kDepth
  int slot = 0;            // in 8 bits: where the next stage goes, and the oldest lies
  int stage = 0, parity = 1;  // the oldest's in the ring, and of `empty`, as if a round had gone before

  // Eight lanes that share a row store to the banks of four: half of them begin with the odd columns.
  static constexpr bool kShares = kRowBytes >= 128;
  static __device__ bool odd_first() {
    int index;  // read again, as every register counts
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return kShares && index / 4 % 2;
  }

  __device__ WideningProducer(Params<T> const& params, Queue const& queue, typename Pipeline::Value* ring, bool keys,
                              int copier, int first, int stride)
      : Base(params, queue, ring, keys, copier, first, stride),
        staged(smem_address(ring) + Pipeline::kRingBytes +
               ((keys ? 0 : Pipeline::kGroups) + copier) * (kDepth * kOwnBytes) + Copy::row() * kRowBytes +
               Copy::byte()) {}

  __device__ void run(typename Pipeline::Control& control) {
    auto const& params = this->params;
    auto const& queue = this->queue;
    int const lane = this->lane;
    bool const publishes = this->keys && this->own_first == 0;
    int pages[kPerLane] = {};
    if (this->unit < queue.n_work) look_up_next(pages);
    while (this->unit < queue.n_work) {
      int const words = this->words, unit = this->unit;
      int const grows = item_word(words, kItemGrows), n_members = item_word(words, kItemMembers);
      char const* const listed = item_row(params, words);
      int pos = item_word(words, kItemStart), stop = item_word(words, kItemStop);
      if (grows >= 0) {  // a tail in a large tile: it may have grown since it was planned
        stop = __ldg(params.seq_lens + grows);
        this->look_up(listed, pos, stop, pages);
      }
      int members[Base::kMemberLoads];
      if (publishes) {
        int const* const list =
            params.plan + params.plan[kHeaderMembersBegin] + kMemberSize * item_word(words, kItemFirstMember);
#pragma unroll
        for (int j = 0; j < Base::kMemberLoads; ++j) {
          members[j] = __ldg(list + min(lane + j * kWarp, kMemberSize * n_members - 1));
        }
      }
      int const head = unit - params.kv_heads_div.div(unit) * params.kv_heads;
      char const* const from = this->cache + head * kRowBytes;
      if (!Pipeline::kAsks) this->advance(control, publishes);
      StageInfo const info{max(0, stop - pos), head << kHeadShift, n_members FEATHER_ENDS_AT(stop)};
      bool first = true;
      while (true) {
        bool const last = pos + kTokens >= stop;
        // As late as there is time for it: who asks early holds a unit that others could begin.
        bool const two_left = pos + 2 * kTokens >= stop && (first || !last);
        if (Pipeline::kAsks && two_left) this->advance(control, publishes);
        int const n_rows = (min(kTokens, max(0, stop - pos)) + Base::kBlock - 1) / Base::kBlock * Base::kBlock;
        int slots[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          slots[j] = slot_of(params, pages[j], min(pos + this->token(j), stop - 1));
        }
        pos += kTokens;
        if (!last) {
          this->look_up(listed, pos, stop, pages);
        } else if (this->unit < queue.n_work) {
          look_up_next(pages);
        }
        bool const widens = asked_stages == kDepth;
        if (widens) barrier_wait(control.empty + barrier(), parity);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          if (widens) {
            asm volatile("cp.async.wait_group %0;" ::"n"(kDepth * kBlocks - 1) : "memory");
            widen_block(block);
          }
          ask_for_block(block, from, slots, n_rows);
        }
        if (publishes && (first || last)) {
          if (lane == 0) control.infos[place] = info;
#pragma unroll
          for (int j = 0; j < Base::kMemberLoads; ++j) control.members[place][lane + j * kWarp] = members[j];
        }
        __syncwarp();
        if (widens) {
          pass_on(control);
        } else {
          ++asked_stages;
        }
        if (++place == kPlaces) place = 0;
        if (++slot == kDepth) slot = 0;
        if (params.prefetch && !last) prefetch_rows(static_cast<Base const&>(*this), from, pages, pos, stop);
        first = false;
        if (last) break;
      }
    }
    finish(control, publishes);
  }

  __device__ void look_up_next(int (&pages)[kPerLane]) const {
    this->look_up(item_row(this->params, this->words), item_word(this->words, kItemStart),
                  item_word(this->words, kItemStop), pages);
  }

  // This warp's, of the oldest stage.
  __device__ int barrier() const { return stage + (this->keys ? 0 : kStages); }

  // Widen what is still on its way, and tell of the end of the queue: who waits for it waits for K.
  __device__ void finish(typename Pipeline::Control& control, bool publishes) {
    slot = slot < asked_stages ? slot - asked_stages + kDepth : slot - asked_stages;  // the oldest's
#pragma unroll 1
    for (; asked_stages > 0; --asked_stages) {
      if (asked_stages > 1) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kBlocks) : "memory");
      } else {
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
      barrier_wait(control.empty + barrier(), parity);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) widen_block(block);
      pass_on(control);
      if (++slot == kDepth) slot = 0;
    }
    if (!this->keys) return;
    barrier_wait(control.empty + stage, parity);
    if (publishes && this->lane == 0) control.infos[place] = {-1, 0, 0};
    __syncwarp();
    barrier_arrive(control.full + stage);
  }

  // The oldest stage has been widened. wgmma may read what this lane has stored.
  __device__ void pass_on(typename Pipeline::Control& control) {
    cutlass::arch::fence_view_async_shared();
    barrier_arrive(control.full + barrier());
    if (++stage == kStages) stage = 0, parity ^= 1;
  }

  // Request a block of a stage's rows, 16 bytes a lane: always one cp.async group. `n_rows` of the stage are there; V has
  // zeros behind them.
  __device__ void ask_for_block(int block, char const* from, int const (&slots)[kPerLane], int n_rows) {
    if (this->own_first + block * kBlock < n_rows || !this->keys) {
      char const* rows[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        int const row = block * kBlock + i * Copy::kRowsAtOnce;
        rows[i] = Copy::find(from, slots[row / kAtOnce], row % kAtOnce / Copy::kRowsAtOnce, this->slot_bytes);
      }
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        bool const there = this->own_first + block * kBlock + i * Copy::kRowsAtOnce < n_rows;
#pragma unroll
        for (int part = 0; part < Copy::kTimes; ++part) {
          cp_async_zfill(bytes_of(block, i, part), rows[i] + part * kWidth, there);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // This lane's bytes of a block's rows `i` times kRowsAtOnce on, of the oldest stage and of the one in its place.
  __device__ uint32_t bytes_of(int block, int i, int part) const {
    return staged + slot * kOwnBytes + (block * kBlock + i * Copy::kRowsAtOnce) * kRowBytes + part * kWidth;
  }

  // Widen this lane's share of a block of the oldest stage.
  __device__ void widen_block(int block) const {
    uint32_t const down = stage * (Pipeline::kStageElements * int(sizeof(T)));
    bool const odd = odd_first();
    uint32_t const to = this->to ^ (odd ? 16 : 0), pairs = odd ? 0x2031 : 0x3120;
    uint4 values[kTurns][Copy::kTimes];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
#pragma unroll
      for (int part = 0; part < Copy::kTimes; ++part) values[i][part] = load(bytes_of(block, i, part));
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      uint32_t const row = Pipeline::Rows::down(to + down, block * kBlock + i * Copy::kRowsAtOnce);
#pragma unroll
      for (int part = 0; part < Copy::kTimes; ++part) {
        uint4 first, second;
        widen_pairs(values[i][part].x, pairs, first.x, second.x);
        widen_pairs(values[i][part].y, pairs, first.y, second.y);
        widen_pairs(values[i][part].z, pairs, first.z, second.z);
        widen_pairs(values[i][part].w, pairs, first.w, second.w);
        uint32_t const at = row + part * (kTokens * kWidth * 2);
        store(at, first);
        store(at ^ 16, second);
      }
    }
  }

  // Four values as two pairs, the one first that is stored first.
  static __device__ __forceinline__ void widen_pairs(uint32_t values, uint32_t pairs, uint32_t& first,
                                                     uint32_t& second) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(__byte_perm(values, 0, pairs)));
  }

  static __device__ __forceinline__ uint4 load(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
  }
  static __device__ __forceinline__ void store(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
};

}  // namespace feather
