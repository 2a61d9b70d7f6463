// L2 prefetch of the KV that is asked for next (papers/l2_prefetch), behind `Params::prefetch`. It gains nothing on a
// Hopper GPU, where copies ask for the same many tiles ahead.
#pragma once
#include "common/work_item.cuh"

namespace feather {

template <int kBytes>
__device__ __forceinline__ void prefetch_row(void const* from) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(kBytes) : "memory");
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
#endif
}

// Of a `TailStream`: the rows of the 32 tokens from `pos` on.
template <int kHeads, class Stream>
__device__ void prefetch_tail(Stream const& s) {
  constexpr int kRowBytes = Stream::kRowBytes;
  if (s.pos + s.token() >= s.stop) return;
  uint64_t const slot = uint32_t(slot_of(s.params, s.pages, s.pos + s.token()));
  char const* const k_row = reinterpret_cast<char const*>(s.params.k) + slot * s.params.k_slot_bytes + s.column;
  char const* const v_row = reinterpret_cast<char const*>(s.params.v) + slot * s.params.v_slot_bytes + s.column;
  for (int head = 0; head < kHeads; ++head) {
    prefetch_row<kRowBytes>(k_row + head * kRowBytes);
    prefetch_row<kRowBytes>(v_row + head * kRowBytes);
  }
}

// Of a `KvStream`: the rows of the next stage, whose slots have just been looked up.
template <int kHeadDim, int kTokens, class Stream>
__device__ void prefetch_stage(Stream const& s) {
  using Copy = typename Stream::Copy;
  if (s.lane % Copy::kLanes >= kTokens / Copy::kRowsAtOnce) return;
#pragma unroll
  for (int j = 0; j < Stream::kPerLane; ++j) {
    uint64_t const slot = uint32_t(s.slot(j));
    prefetch_row<Stream::kRowBytes>(reinterpret_cast<char const*>(s.params.k + s.head * kHeadDim) +
                                    slot * s.params.k_slot_bytes);
    prefetch_row<Stream::kRowBytes>(reinterpret_cast<char const*>(s.params.v + s.head * kHeadDim) +
                                    slot * s.params.v_slot_bytes);
  }
}

// Of a `KvProducer`: its rows of the next stage, by their pages.
template <class Producer>
__device__ void prefetch_rows(Producer const& p, char const* from, int const* pages, int pos, int stop) {
  char const* const row = from - Producer::Copy::byte();
#pragma unroll
  for (int j = 0; j < Producer::kPerLane; ++j) {
    uint64_t const slot = uint32_t(slot_of(p.params, pages[j], min(pos + p.token(j), stop - 1)));
    prefetch_row<Producer::kHeadDim * kKvBytes>(row + slot * p.slot_bytes);
  }
}

}  // namespace feather
