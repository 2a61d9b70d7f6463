// The KV stream of one team of warps: work units popped from a queue, their KV rows flowing through a ring of stages.
//
// A team is W warps that share each KV tile (16 query rows a warp, m = 16 W). Its first warp is also the producer: it
// runs ahead of the arithmetic across work units, so that the next unit's rows travel while the last one is written.
#pragma once
#include "common/copy.cuh"
#include "common/prefetch.cuh"
#include "common/queue.cuh"
#include "common/work_item.cuh"

namespace feather {

// kWarps consumers; kBlock: tokens a consumer touches at once.
template <typename T, int kHeadDim, int kWarps, int kTokens, int kStages, int kBlock>
struct KvStream {
  using Rows = SwizzledRows<kv_places(kHeadDim), kTokens>;
  static constexpr int kMemberWords = kMemberSize * 16 * kWarps;  // a row needs no more than a member
  static constexpr int kTile = Rows::kElements;
  static constexpr int kStageElements = 2 * kTile;  // K, then V
  static constexpr int kRowBytes = kHeadDim * kKvBytes;
  using Copy = RowCopy<kRowBytes>;
  static constexpr int kPerLane = kTokens > kWarp ? kTokens / kWarp : 1;  // tokens whose slot a lane knows

  Params<T> const& params;
  T* ring;          // (kStages, K and V, kTokens, head_dim), swizzled; two values of 8 bits are one of T
  uint64_t* full;   // kStages
  uint64_t* empty;  // kStages
  StageInfo* info;  // kStages
  int const lane;
  Source* const source;
  int* const member_table;  // kStages * kMemberWords: request and part of each member, with first and last stages
  int issued = 0, consumed = 0;
  bool done = false;

  // The current unit, and the one behind it.
  int words = 0, next_words = 0;
  int head = 0, next_work = 0;
  bool real = false, next_real = false;  // not past the queue's end
  char const* table_row = nullptr;
  int pos = 0, stop = 0, next_stop = 0;
  bool next_stop_known = false;
  int popped = 0;           // lane 0: the answer of the last atomicAdd
  int pages[kPerLane];      // of the tokens at pos, as the table holds them
  int member_words[kMemberWords / kWarp];  // of the current unit

  __device__ KvStream(Params<T> const& params_, T* ring_, uint64_t* full_, uint64_t* empty_, StageInfo* info_,
                      Source* source_, int* member_table_)
      : params(params_),
        ring(ring_),
        full(full_),
        empty(empty_),
        info(info_),
        lane(threadIdx.x % kWarp),
        source(source_),
        member_table(member_table_) {}

  // Barriers of a team: kStages full, then kStages empty; how many arrivals complete barrier `index`.
  static constexpr int arrivals(int index) {
    return index < kStages ? kWarp + 1 : kWarps;
  }

  // Producer: start on a queue, either with unit `fixed` (then what the queue pops, counted from `fixed_total`, or,
  // with a step, every so many-th), or, if that is negative, with what the queue pops.
  __device__ void open(Queue const& queue, int fixed, int fixed_total, int step) {
    if (lane == 0) *source = {queue.index, queue.first_item, queue.n_work, fixed >= 0 ? fixed_total : 0, step};
    __syncwarp();
    wait_on_dependent_grids();
    int first = fixed;
    if (fixed < 0) {
      pop();
      first = take();
    }
    fetch(first);
    if (next_real) pop();  // every pop is waited for: none may land after the last CTA has reset the counter
    advance();
  }

  __device__ void pop() {
    if (lane == 0 && source->step == 0) popped = atomicAdd(params.popped + source->queue, 1);
  }
  __device__ int take() const {  // the unit behind `next`
    if (source->step) return next_work + source->step;
    return source->first_popped + __shfl_sync(~0u, popped, 0);
  }

  __device__ void fetch(int unit) {  // into next
    next_work = unit;
    next_stop_known = false;
    next_real = unit < source->n_work;
    if (!next_real) return;
    next_words = load_item(params, source->first_item + params.kv_heads_div.div(unit));
  }

  // Ask for the next unit's end: the item's own, or the sequence length as it is now.
  __device__ void learn_stop() {
    if (next_stop_known || !next_real) return;
    int const grows = item_word(next_words, kItemGrows);
    int const* const own = params.plan + params.plan[kHeaderItemsBegin] +
                           kItemSize * (source->first_item + params.kv_heads_div.div(next_work)) + kItemStop;
    next_stop = __ldg(grows >= 0 ? params.seq_lens + grows : own);
    next_stop_known = true;
  }

  __device__ void advance() {  // the next unit becomes the current one, and the pipeline behind it moves up
    learn_stop();
    words = next_words;
    real = next_real;
    head = next_work - params.kv_heads_div.div(next_work) * params.kv_heads;
    stop = next_stop;
    pos = item_word(words, kItemStart);
    table_row = item_row(params, words);
    if (real) {
      int const* const list =
          params.plan + params.plan[kHeaderMembersBegin] + kMemberSize * item_word(words, kItemFirstMember);
      int const count = kMemberSize * item_word(words, kItemMembers);
#pragma unroll
      for (int j = 0; j < kMemberWords / kWarp; ++j) {
        int const index = min(lane + j * kWarp, count - 1);
        member_words[j] = __ldg(list + index);
      }
      fetch(take());
      if (next_real) pop();
    }
    look_up();
  }

  // The pages of the tokens at pos, clamped to the unit's last token. Nobody waits here for what the table answers: the
  // next issue() does.
  __device__ void look_up() {
    if (!real || pos >= stop) return;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) pages[j] = load_page(params, table_row, token(j));
  }
  __device__ int token(int j) const { return min(pos + Copy::template row_known<kTokens>() + j * kWarp, stop - 1); }
  __device__ int slot(int j) const { return slot_of(params, pages[j], token(j)); }

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
    if (!real) {
      done = true;
      if (lane == 0) info[stage] = {-1, 0, 0};
      int const none[kPerLane] = {};
      publish(stage, 0, 0, none);
      return;
    }
    int const tokens = max(0, min(kTokens, stop - pos));
    int const rows = (tokens + kBlock - 1) / kBlock * kBlock;
    bool const last = pos + kTokens >= stop;
    int const edges = (pos == item_word(words, kItemStart) ? kFirst : 0) | (last ? kLast : 0) | (head << kHeadShift);
    int const n_members = item_word(words, kItemMembers);
    if (lane == 0) info[stage] = {tokens, edges, n_members};
    if (edges & (kFirst | kLast)) {
#pragma unroll
      for (int j = 0; j < kMemberWords / kWarp; ++j) {
        member_table[stage * kMemberWords + lane + j * kWarp] = member_words[j];
      }
    }
    int slots[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) slots[j] = slot(j);
    int const this_head = head;
    // Ask the table for the stage behind this one before this one's rows are requested.
    pos += kTokens;
    if (last) {
      advance();
    } else {
      learn_stop();
      look_up();
    }
    publish(stage, rows, this_head, slots);
    if (params.prefetch && !last) prefetch_stage<kHeadDim, kTokens>(*this);
  }

  // Request the stage's rows, 16 bytes a lane; its barrier completes once they are there.
  __device__ void publish(int stage, int rows, int head, int const (&slots)[kPerLane]) {
    char const* const k_base = reinterpret_cast<char const*>(params.k + head * kHeadDim) + Copy::byte();
    char const* const v_base = reinterpret_cast<char const*>(params.v + head * kHeadDim) + Copy::byte();
    uint32_t const to =
        smem_address(ring + stage * kStageElements + Rows::at(Copy::row(), Copy::byte() / int(sizeof(T))));
#pragma unroll
    for (int base = 0; base < kTokens; base += Copy::kRowsAtOnce) {
      if (base % 16 == 0 && base >= rows) break;
      int const i = base % kWarp / Copy::kRowsAtOnce, slot = slots[base / kWarp];
      uint32_t const at = Rows::down(to, base);
      Copy::template copy<kTokens>(at, Copy::find(k_base, slot, i, params.k_slot_bytes));
      Copy::template copy<kTokens>(at + kTile * int(sizeof(T)), Copy::find(v_base, slot, i, params.v_slot_bytes));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(full + stage);  // publishes the stage's info and members
    cp_async_barrier_arrive_noinc(full + stage);
  }

  // Consumers: the next stage, once it is there; then hand it back.
  __device__ StageInfo wait() {
    int const stage = consumed % kStages;
    barrier_wait(full + stage, (consumed / kStages) & 1);
    return info[stage];
  }
  __device__ int const* members() const { return member_table + consumed % kStages * kMemberWords; }
  __device__ T const* k_tile() const { return ring + (consumed % kStages) * kStageElements; }
  __device__ T const* v_tile() const { return k_tile() + kTile; }
  __device__ void release() {
    __syncwarp();
    if (kWarps > 1 && lane == 0) barrier_arrive(empty + consumed % kStages);
    ++consumed;
  }
};

}  // namespace feather
