// The KV stream of one team of warps: work units popped from a queue, their KV rows flowing through a ring of stages.
//
// A team is W warps that share each KV tile (16 query rows a warp, m = 16 W). Its first warp is also the producer: it
// runs ahead of the arithmetic across work units, so that a new unit's rows are in flight while the last one is merged.
#pragma once
#include "barrier.cuh"
#include "params.cuh"

namespace feather {

constexpr int kWarp = 32;

// What the consumers must know of a stage.
struct alignas(16) StageInfo {
  int tokens;  // valid KV tokens; -1: the queue is empty
  int edges;   // kFirst | kLast, and the KV head above them
  int first_member;
  int n_members;
};
constexpr int kFirst = 1, kLast = 2, kHeadShift = 2;

template <typename T, int kHeadDim, int kWarps, int kTokens, int kStages, int kBlock, class Copy>
struct KvStream {
  static constexpr int kPitch = kHeadDim + 8;  // elements; the 16 spare bytes keep ldmatrix free of bank conflicts
  static constexpr int kTile = kTokens * kPitch;
  static constexpr int kStageElements = 2 * kTile;  // K, then V
  static constexpr int kRowBytes = kHeadDim * int(sizeof(T));
  static constexpr int kPerLane = kTokens > kWarp ? kTokens / kWarp : 1;  // tokens whose slot a lane knows

  Params<T> const& params;
  T* ring;          // kStages * kStageElements
  uint64_t* full;   // kStages
  uint64_t* empty;  // kStages
  StageInfo* info;  // kStages
  int const lane;
  int queue, first_item, n_work, pop_base;
  int issued = 0, consumed = 0;
  bool done = false;

  // The current unit, and the one behind it. The eight words of a work item lie one in a lane, to save registers.
  int words = 0, next_words = 0;
  int work = 0, head = 0, next_work = 0;
  int64_t offset = 0;
  int pos = 0, stop = 0, next_stop = 0;
  bool next_stop_known = false;
  int popped = 0;           // lane 0: the answer of the last atomicAdd
  int slots[kPerLane];      // of the tokens at pos

  __device__ KvStream(Params<T> const& params_, T* ring_, uint64_t* full_, uint64_t* empty_, StageInfo* info_)
      : params(params_), ring(ring_), full(full_), empty(empty_), info(info_), lane(threadIdx.x % kWarp) {}

  static __device__ void init(uint64_t* full, uint64_t* empty) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, Copy::kArrivals);
      barrier_init(empty + i, kWarps);
    }
  }

  // Producer: start on a queue. fixed >= 0 gives the first unit without asking the queue.
  __device__ void open(int queue_, int first_item_, int n_work_, int fixed, int fixed_total) {
    queue = queue_;
    first_item = first_item_;
    n_work = n_work_;
    pop_base = fixed >= 0 ? fixed_total : 0;
    if (fixed < 0) pop();
    int const first = fixed >= 0 ? fixed : __shfl_sync(~0u, popped, 0);
    pop();
    fetch(first);
    advance();
  }

  __device__ void pop() {
    if (lane == 0) popped = pop_base + atomicAdd(params.popped + queue, 1);
  }

  static constexpr int kOffsetLow = 0, kOffsetHigh = 1, kStart = 2, kStop = 3, kGrows = 4, kMember = 5, kMembers = 6;
  static __device__ int word(int words, int index) { return __shfl_sync(~0u, words, index); }

  __device__ void fetch(int unit) {  // into next
    next_work = unit;
    next_stop_known = false;
    if (unit >= n_work) return;
    int const item = first_item + unit / params.kv_heads;
    next_words = __ldg(params.plan + params.plan[header::kItemsBegin] + 8 * item + lane % 8);
  }

  __device__ void learn_stop() {
    if (next_stop_known || next_work >= n_work) return;
    int const grows = word(next_words, kGrows);
    next_stop = grows >= 0 ? __ldg(params.seq_lens + grows) : word(next_words, kStop);
    next_stop_known = true;
  }

  __device__ void advance() {  // the next unit becomes the current one, and the pipeline behind it moves up
    learn_stop();
    words = next_words;
    work = next_work;
    head = work % params.kv_heads;
    stop = next_stop;
    pos = word(words, kStart);
    offset = int64_t(uint32_t(word(words, kOffsetLow))) | (int64_t(word(words, kOffsetHigh)) << 32);
    if (work < n_work) {
      fetch(__shfl_sync(~0u, popped, 0));
      if (next_work < n_work) pop();
    }
    look_up();
  }

  __device__ void look_up() {  // the slots of the tokens at pos, clamped to the unit's last token
    if (work >= n_work || pos >= stop) return;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) slots[j] = slot_of(min(pos + lane % kTokens + j * kWarp, stop - 1));
  }

  __device__ int slot_of(int token) const {
    int64_t const entry = offset + (token >> params.page_bits);
    int const page = params.table_is_64 ? int(__ldg(static_cast<int64_t const*>(params.table) + entry))
                                        : __ldg(static_cast<int const*>(params.table) + entry);
    return (page << params.page_bits) | (token & ((1 << params.page_bits) - 1));
  }

  __device__ T const* k_row(int slot) const {
    return params.k + slot * params.k_slot_stride + head * params.k_head_stride;
  }
  __device__ T const* v_row(int slot) const {
    return params.v + slot * params.v_slot_stride + head * params.v_head_stride;
  }

  // Producer: fill every free stage; blocks only if nothing at all is in flight.
  __device__ void fill() {
    while (!done && issued - consumed < kStages) {
      int const stage = issued % kStages;
      if (kWarps > 1 && issued >= kStages) {
        int const parity = (issued / kStages - 1) & 1;
        if (!__shfl_sync(~0u, int(barrier_ready(empty + stage, parity)), 0)) {
          if (issued > consumed) return;
          barrier_wait(empty + stage, parity);
        }
      }
      __syncwarp();
      issue(stage);
      ++issued;
    }
  }

  __device__ void issue(int stage) {
    if (work >= n_work) {
      done = true;
      if (lane == 0) info[stage] = {-1, 0, 0, 0};
      publish(stage, 0);
      return;
    }
    int const tokens = max(0, min(kTokens, stop - pos));
    int const rows = (tokens + kBlock - 1) / kBlock * kBlock;
    bool const last = pos + kTokens >= stop;
    int const edges = (pos == word(words, kStart) ? kFirst : 0) | (last ? kLast : 0) | (head << kHeadShift);
    int const first_member = word(words, kMember), n_members = word(words, kMembers);
    if (lane == 0) info[stage] = {tokens, edges, first_member, n_members};
    publish(stage, rows);
    pos += kTokens;
    if (last) {
      advance();
    } else {
      learn_stop();
      look_up();
      if (params.prefetch) prefetch();
    }
  }

  // Request the stage's rows and let its barrier complete once they are there.
  __device__ void publish(int stage, int rows) {
    uint64_t* const barrier = full + stage;
    T* const k_tile = ring + stage * kStageElements;
    T* const v_tile = k_tile + kTile;
    if constexpr (Copy::kArrivals == 1) {
      if (lane == 0) {
        if (rows) Copy::announce(barrier, 2 * rows * kRowBytes);
        else barrier_arrive(barrier);
      }
      __syncwarp();
      if constexpr (kTokens == 16) {  // lanes 0..15 fetch K, lanes 16..31 V
        if (rows) {
          bool const is_v = lane >= 16;
          Copy::template row<kRowBytes>((is_v ? v_tile : k_tile) + (lane % 16) * kPitch,
                                        is_v ? v_row(slots[0]) : k_row(slots[0]), barrier);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          int const row = lane + j * kWarp;
          if (row < rows) {
            Copy::template row<kRowBytes>(k_tile + row * kPitch, k_row(slots[j]), barrier);
            Copy::template row<kRowBytes>(v_tile + row * kPitch, v_row(slots[j]), barrier);
          }
        }
      }
    } else {  // 16 bytes a lane: consecutive lanes take one row
      constexpr int kLanes = kRowBytes / 16 < kWarp ? kRowBytes / 16 : kWarp;
      constexpr int kRowsAtOnce = kWarp / kLanes;
      for (int base = 0; base < rows; base += kRowsAtOnce) {
        int const row = base + lane / kLanes;
        int slot = 0;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          int const candidate = __shfl_sync(~0u, slots[j], row % kWarp);
          if (row / kWarp == j) slot = candidate;
        }
#pragma unroll
        for (int c = lane % kLanes * 8; c < kHeadDim; c += kLanes * 8) {
          Copy::chunk(k_tile + row * kPitch + c, k_row(slot) + c);
          Copy::chunk(v_tile + row * kPitch + c, v_row(slot) + c);
        }
      }
      if (lane == 0) Copy::announce(barrier, 0);
      Copy::commit(barrier);
    }
  }

  __device__ void prefetch() const {  // the rows of the next stage, whose slots have just been looked up
    if (lane < kTokens) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        prefetch_row<kRowBytes>(k_row(slots[j]));
        prefetch_row<kRowBytes>(v_row(slots[j]));
      }
    }
  }

  // Consumers: the next stage, once it is there; then hand it back.
  __device__ StageInfo wait() {
    int const stage = consumed % kStages;
    barrier_wait(full + stage, (consumed / kStages) & 1);
    return info[stage];
  }
  __device__ T const* k_tile() const { return ring + (consumed % kStages) * kStageElements; }
  __device__ T const* v_tile() const { return k_tile() + kTile; }
  __device__ void release() {
    __syncwarp();
    if (kWarps > 1 && lane == 0) barrier_arrive(empty + consumed % kStages);
    ++consumed;
  }
};

}  // namespace feather
