// The KV and the parts of a warp's tails, on their way through its ring of slots.
#pragma once
#include <algorithm>

#include "common/prefetch.cuh"
#include "common/queue.cuh"
#include "common/tail_tile.cuh"

namespace feather {

// What a warp must remember of a unit between asking for its KV and computing; in shared memory.
struct TailUnit {
  int tokens, head, request, part;
  int n_parts;  // to be taken in
};
// More than a ring has slots: as many as it can run ahead, and the one at hand.
constexpr int kTailUnits = kFp8 ? 13 : 8;

// What a warp's units need, on its way through a ring of slots: 16 tokens' K of one KV head or two, their V, and so on;
// then, if the unit closes its request, the parts to be taken in, as many a slot as fit in. Copies are counted by
// cp.async groups, one a slot, as nobody but the warp itself waits for them.
template <typename T, int kHeadDim, int kHeads>
struct TailStream {
  using Tile = TailTile<T, kHeadDim, kHeads>;
  using Rows = typename Tile::Rows;
  static constexpr int kHeadElements = Tile::kHeadElements;
  static constexpr int kPartElements = Tile::kPartElements, kParts = Tile::kParts * kHeads;  // to a slot
  // Behind them, in whole lines.
  static constexpr int kStatsElements = std::max<int>(kParts * 8 * sizeof(PartialStats), 128) / sizeof(T);
  static_assert(kStatsElements * sizeof(T) % 128 == 0 && 4 % kParts == 0);
  // A ring has one of two lengths: kSlots, or half as many more. Of 8 bits there are twice as many, but for want of room.
  static constexpr int kUsual = (kHeadDim <= 128 ? 4 : 2) / kHeads;
  static constexpr int kSlots = !kFp8 ? kUsual : kUsual == 4 ? 7 : 2 * kUsual, kMostSlots = kSlots * 3 / 2;
  static constexpr int kSlotElements = kHeads * kHeadElements + kStatsElements;
  static constexpr int kSlotBytes = kSlotElements * int(sizeof(T)), kRingBytes = kSlots * kSlotBytes;
  // Two heads' rows lie side by side: whole rows at once keep them together.
  static constexpr int kRowBytes = kHeadDim * kKvBytes;
  using Copy = RowCopy<kRowBytes, kRowBytes < 128 ? kRowBytes : kHeads == 1 || kRowBytes < 256 ? 128 : 256>;
  static_assert(kMostSlots < kTailUnits);

  Params<T> const& params;
  T* const ring;  // (slots, heads, 16 tokens, head_dim), swizzled; kParts stats behind each
  int const n_slots;
  TailUnit* const units;
  Source* const source;
  int const lane;
  int asked = 0, begun = 0, finished = 0;  // units
  int depositing = 0;                      // the last of those asked for that deposits, counted from 1
  int idle_slots = 0;                      // asked for behind it, for nothing
  int passed_over = 0;                     // those of them that come before any unit
  int slot = 0;  // the oldest; once it has been read, it takes what is asked for next

  // The unit that is being asked for.
  int pos = 0, stop = 0, block = 0, blocks = 0;
  char const* table_row = nullptr;
  int slots = 0, pages = 0;  // of the tokens from 32 (block / 2) on, a lane's; and the pages of the 32 behind those
  bool v_next = false;       // of this block only V is left
  int column = 0;            // in bytes
  int part = 0, n_parts = 0;
  int part_row = 0;  // of the first part, in part_stats
  PartialStats stats{};   // of part 4 (part / 4) + lane / 8, row lane % 8

  // The unit behind it.
  int next_work = 0, next_words = 0, next_stop = 0, next_pages = 0;
  bool next_real = false, looked_ahead = false;
  int popped = 0;

  __device__ TailStream(Params<T> const& params_, T* ring_, int n_slots_, TailUnit* units_, Source* source_)
      : params(params_), ring(ring_), n_slots(n_slots_), units(units_), source(source_), lane(threadIdx.x % kWarp) {}

  // Start with unit `fixed`, without a round trip to the counter, or if that is negative with what the queue pops;
  // others are popped, counted from `fixed_total`, or dealt out in turn if there is a step between them.
  __device__ void open(Queue const& queue, int fixed, int fixed_total, int step = 0) {
    if (lane == 0) *source = {queue.index, queue.first_item, queue.n_work, step ? queue.n_work : fixed_total, step};
    __syncwarp();
    if (fixed >= 0) fetch(fixed);
    wait_on_dependent_grids();
    if (fixed < 0) {
      next_real = true;
      pop();
      fetch(take());
    }
    pop();
  }
  __device__ void pop() {  // only where the answer will be looked at: none may land after the counter is reset
    if (next_real && source->n_work > source->first_popped && lane == 0) {
      popped = atomicAdd(params.popped + source->queue, 1);
    }
  }
  __device__ int take() const {
    int const n_work = source->n_work, first = source->first_popped, step = source->step;
    if (step) return next_work + step;
    return n_work > first ? first + __shfl_sync(~0u, popped, 0) : n_work;
  }
  __device__ void fetch(int unit) {
    next_work = unit;
    looked_ahead = false;
    next_real = unit < source->n_work;
    if (!next_real) return;
    next_words = load_item(params, source->first_item + tail_item(params, kHeads, unit));
  }
  __device__ int word(int index) const { return item_word(next_words, index); }

  // Ask for what the words of the unit behind tell where to find.
  __device__ void look_ahead() {
    if (!next_real || looked_ahead) return;
    looked_ahead = true;
    int const grows = word(kItemGrows), planned_stop = word(kItemStop);
    next_stop = grows >= 0 ? __ldg(params.seq_lens + grows) : planned_stop;
    next_pages = look_up(item_row(params, next_words), word(kItemStart), planned_stop);
  }

  // The pages of the tokens from `first` on, one a lane, clamped to the last before `end`.
  __device__ int look_up(char const* row, int first, int end) const {
    return first < end ? load_page(params, row, min(first + token(), end - 1)) : 0;
  }
  __device__ int token() const { return Copy::template row_known<kWarp>(); }  // this lane's of 32

  // The unit behind becomes the current one.
  __device__ void advance() {
    look_ahead();
    int const planned_stop = word(kItemStop);
    table_row = item_row(params, next_words);
    pos = word(kItemStart);
    stop = next_stop;
    // The tail has grown since it was planned, within the tokens that were looked up.
    pages = min(pos + kWarp, stop) > planned_stop ? look_up(table_row, pos, stop) : next_pages;
    block = 0;
    blocks = (stop - pos + 15) / 16;
    int const head = next_work * kHeads - tail_item(params, kHeads, next_work) * params.kv_heads;
    column = head * kRowBytes;
    part = 0;
    n_parts = word(kItemParts);
    part_row = word(kItemFirstPart) * params.q_heads + head * params.group;
    if (n_parts) poll_stats();
    int const request = word(kItemRequest), part_entry = word(kItemPart);
    if (lane == 0) units[asked % kTailUnits] = {stop - pos, head, request, part_entry, n_parts};
    __syncwarp();
    ++asked;
    if (part_entry >= 0) depositing = asked;
    fetch(take());
    pop();
  }

  // Fill the next slot: always one cp.async group. Nobody may wait for parts while it owes some itself, so a unit that
  // takes parts in is asked for only after those before it have deposited theirs.
  __device__ void ask() {
    if (block >= blocks && part >= n_parts && next_real) {
      if (finished < depositing && word(kItemParts) > 0) {
        ++idle_slots;
      } else {
        advance();
      }
    }
    if (block < blocks) {
      ask_for_tokens();
    } else if (part < n_parts) {
      ask_for_parts();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    slot = slot + 1 == n_slots ? 0 : slot + 1;
  }

  // 16 rows of K or V of each head, 16 bytes a lane. Rows behind the unit's last token repeat that.
  __device__ void ask_for_tokens() {
    if (!v_next && block % 2 == 0) {
      slots = slot_of(params, pages, min(pos + token(), stop - 1));
      pages = look_up(table_row, pos + kWarp, stop);
    }
    char const* const from = reinterpret_cast<char const*>(v_next ? params.v : params.k) + column + Copy::byte();
    int const slot_bytes = v_next ? params.v_slot_bytes : params.k_slot_bytes;
    uint32_t const to = slot_address() + Rows::at(Copy::row(), Copy::byte() / int(sizeof(T))) * int(sizeof(T));
    // Addresses first, so that no copy waits for its own.
    constexpr int kRounds = 16 / Copy::kRowsAtOnce, kBatch = kRounds < 4 ? kRounds : 4;
#pragma unroll
    for (int first = 0; first < kRounds; first += kBatch) {
      char const* rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        rows[i] = Copy::find(from, slots, block % 2 * kRounds + first + i, slot_bytes);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        uint32_t const at = Rows::down(to, (first + i) * Copy::kRowsAtOnce);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          Copy::template copy<16>(at + head * Tile::kHeadBytes, rows[i] + head * kRowBytes);
        }
      }
    }
    if (v_next || block) look_ahead();
    if (v_next && block++ % 2) {
      pos += kWarp;
      if (params.prefetch) prefetch_tail<kHeads>(*this);
    }
    v_next = !v_next;
  }

  // Whether parts have been deposited is asked early and looked at late.
  __device__ bool asks_about(int k) const { return k < n_parts && lane % 8 < kHeads * params.group; }
  __device__ PartialStats* stats_at(int k) const {
    return params.part_stats + part_row + k * params.q_heads + lane % 8;
  }
  __device__ void poll_stats() {
    int const k = (part & ~3) + lane / 8;
    if (asks_about(k)) stats = load_relaxed(stats_at(k));
  }

  // Up to kParts parts, once they have been deposited: their rows lie side by side. Stats are read by nobody else,
  // and left as the next run expects them. No acquire is needed: what is copied bypasses L1, and is asked for only
  // after the answer that it is there.
  __device__ void ask_for_parts() {
    int const rows = kHeads * params.group, k = (part & ~3) + lane / 8, place = k - part;
    bool const mine = asks_about(k) && place >= 0 && place < kParts;
    for (int tries = 0; __any_sync(~0u, mine && stats.missing()); ++tries) {
      if (asks_about(k) && stats.missing()) stats = load_relaxed(stats_at(k));  // of the parts behind these, too
      if (tries > kPatience) __trap();  // a plan whose parts are not all deposited: an error rather than a hang
    }
    if (mine) {
      reset(stats_at(k));
      stats_of(ring + slot * kSlotElements, place)[lane % 8] = stats;
    }
    // Lane by lane through a part's rows, which lie side by side.
    constexpr int kLanes = kHeadDim / kPartChunk, kAtOnce = kWarp / kLanes;  // of 16 bytes, in a row; rows at once
    int const row = lane / kLanes, column = lane % kLanes * kPartChunk;
    uint16_t const* values =
        params.part_out + int64_t(part_row + part * params.q_heads + row) * kHeadDim + column;
    uint32_t to = slot_address();
#pragma unroll 1
    for (int i = 0; i < kParts && part < n_parts; ++i, ++part) {
#pragma unroll
      for (int first = 0; first < 8; first += kAtOnce) {
        if (first + row < rows) {
          uint32_t const at = to + Tile::part_at(first + row, column) * int(sizeof(uint16_t));
          cp_async(at, values + first * kHeadDim);
        }
      }
      values += params.q_heads * kHeadDim;
      to += kPartElements * int(sizeof(T));
    }
    if (part % 4 == 0) poll_stats();
    look_ahead();
  }

  // The stats of a part in a slot.
  static __device__ PartialStats* stats_of(T* slot, int place) {
    return reinterpret_cast<PartialStats*>(slot + kHeads * kHeadElements) + 8 * place;
  }
  __device__ uint32_t slot_address() const { return smem_address(ring + slot * kSlotElements); }

  // The oldest slot is there. CuTe's cp_async_wait has no memory clobber: reads of the slot could move ahead of it.
  __device__ T* wait() const {
    if (n_slots == kSlots) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kSlots - 1) : "memory");
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(kMostSlots - 1) : "memory");
    }
    __syncwarp();
    return ring + slot * kSlotElements;
  }

  // A unit has been written. Nothing holds back those behind it any more, if it was the last that deposits: the slots
  // that were asked for nothing come now.
  __device__ void finish_unit() {
    if (++finished < depositing) return;
    passed_over = idle_slots;
    idle_slots = 0;
  }
};

}  // namespace feather
