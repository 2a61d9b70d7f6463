// Rows of the cache on their way into shared memory: 16 bytes a lane, into a swizzled tile.
#pragma once
#include "common/barrier.cuh"
#include "common/kv_type.cuh"
#include "common/warp.cuh"

namespace feather {

// 16 bytes from global to shared memory. Hopper's bulk copy of a whole row takes its addresses from uniform registers:
// rows scattered over slots would be issued one by one, which measured slower than 16 bytes a lane. CuTe's copy atom
// takes pointers: here addresses in shared memory are worked out in 32 bits, by steps from row to row.
__device__ __forceinline__ void cp_async(uint32_t to, void const* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, or 16 zero bytes without reading anything.
__device__ __forceinline__ void cp_async_zfill(uint32_t to, void const* from, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0) : "memory");
}

// Where a row's elements lie in a tile: the 128-byte swizzle that wgmma reads, which keeps ldmatrix free of bank
// conflicts too. Blocks of 64 columns, 16-byte chunks permuted in each row. Rows padded apart instead would straddle
// the lines that memory delivers, and cp.async would write each line in two. It is cute::Swizzle<3, 3, 3> of the
// element in its block; written so, the machine code differs. Elements have 16 bits; two values of 8 bits are one.
template <int kColumns, int kRows>
struct SwizzledRows {
  static constexpr int kElements = kRows * kColumns;
  static __device__ __forceinline__ int at(int row, int column) {
    return column / 64 * (kRows * 64) + row * 64 + ((column % 64) ^ (row % 8 * 8));
  }
  // In shared memory, in bytes, where the tile begins with a line: from at(row, column), column < 16, to
  // at(row, column + 16 k) ...
  static __device__ __forceinline__ uint32_t right(uint32_t address, int k) {
    return (address ^ (k % 4 * 32)) + k / 4 * (kRows * 128);
  }
  // ... and from at(row, column) to at(row + rows, column), where row is below a power of two that divides `rows`.
  static __device__ __forceinline__ uint32_t down(uint32_t address, int rows) {
    return (address ^ (rows % 8 * 16)) + rows * 128;
  }
};

// Rows of 64 bytes, two to a line.
template <int kRows>
struct SwizzledRows<32, kRows> {
  static constexpr int kElements = kRows * 32;
  static __device__ __forceinline__ int at(int row, int column) { return row * 32 + (column ^ (row / 2 % 4 * 8)); }
  static __device__ __forceinline__ uint32_t right(uint32_t address, int k) { return address ^ (k * 32); }
  static __device__ __forceinline__ uint32_t down(uint32_t address, int rows) {
    return (address ^ (rows / 2 % 4 * 16)) + rows * 64;
  }
};

// How a warp copies rows of the cache, 16 bytes a lane: kWidth bytes of several rows at once, then the next of the same
// rows, so that a row's address serves for all of them. The lanes that share a row know the slots of those they copy.
template <int kRowBytes, int kWidth = kRowBytes < 128 ? kRowBytes : 128>
struct RowCopy {
  static constexpr int kLanes = kWidth / 16, kRowsAtOnce = kWarp / kLanes, kTimes = kRowBytes / kWidth;
  static_assert(kRowBytes % kWidth == 0 && (kWidth % 128 == 0 || kWidth == 64), "as SwizzledRows has them");

  // Of up to kWarp rows, the one whose slot this lane knows. Lanes that share a row copy in turn those that they know.
  template <int kRows>
  static __device__ __forceinline__ int row_known() {
    static_assert(kRows % kRowsAtOnce == 0);
    constexpr int kCopied = kRows < kWarp ? kRows / kRowsAtOnce : kLanes;
    return int(threadIdx.x) % kCopied * kRowsAtOnce + row();
  }
  static __device__ __forceinline__ int row() { return int(threadIdx.x) % kWarp / kLanes; }  // of the first rows
  static __device__ __forceinline__ int byte() { return int(threadIdx.x) % kLanes * 16; }    // in every kWidth
  // Where this lane's bytes are of the row that it copies as number `i`; `from`: of slot 0.
  static __device__ __forceinline__ char const* find(char const* from, int slot, int i, int slot_bytes) {
    return from + wide_product(__shfl_sync(~0u, slot, i, kLanes), slot_bytes);
  }
  // Copy them to a tile of kRows rows; the first go to `to`.
  template <int kRows>
  static __device__ __forceinline__ void copy(uint32_t to, char const* from) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) cp_async(to + i * (kRows * kWidth), from + i * kWidth);
  }
  template <int kRows>
  static __device__ __forceinline__ void cp_async_zfill(uint32_t to, char const* from, bool copies) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) feather::cp_async_zfill(to + i * (kRows * kWidth), from + i * kWidth, copies);
  }
};

}  // namespace feather
