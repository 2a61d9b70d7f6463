// Work items as whoever copies reads them, and what is told of a stage of KV.
#pragma once
#include <climits>

#include "common/warp.cuh"

namespace feather {

// What the consumers must know of a stage.
struct alignas(16) StageInfo {
  int tokens;  // valid KV tokens; -1: the queue is empty
  int edges;   // kFirst | kLast, and the KV head above them
  int n_members;
#if FEATHER_CAUSAL || FEATHER_LATENT
#define FEATHER_ENDS_AT(stop) , stop
  int stop;  // of the item's tokens; its rows may end before
#else
#define FEATHER_ENDS_AT(stop)
#endif
};
constexpr int kFirst = 1, kLast = 2, kHeadShift = 2;

// The plan and the table, as whoever copies reads them. The twelve words of a work item lie one in a lane, to save
// registers.
template <typename T>
__device__ __forceinline__ int load_item(Params<T> const& params, int item) {
  int const lane = threadIdx.x % kWarp;
  return __ldg(params.plan + params.plan[kHeaderItemsBegin] + kItemSize * item + (lane < kItemSize ? lane : 0));
}
__device__ __forceinline__ int item_word(int words, int index) { return __shfl_sync(~0u, words, index); }
// Where the table has an item's row; the page of a token there, and the token's slot in it.
template <typename T>
__device__ __forceinline__ char const* item_row(Params<T> const& params, int words) {
  int64_t const offset =
      int64_t(uint32_t(item_word(words, kItemOffsetLow))) | (int64_t(item_word(words, kItemOffsetHigh)) << 32);
  return static_cast<char const*>(params.table) + offset * params.entry_bytes;
}
template <typename T>
__device__ __forceinline__ int load_page(Params<T> const& params, char const* row, int token) {
  // The low half of a 64-bit page id comes first, and no id needs the other.
  return __ldg(reinterpret_cast<int const*>(row + wide_product(token >> params.page_bits, params.entry_bytes)));
}
template <typename T>
__device__ __forceinline__ int slot_of(Params<T> const& params, int page, int token) {
  return (page << params.page_bits) | (token & ((1 << params.page_bits) - 1));
}

}  // namespace feather
