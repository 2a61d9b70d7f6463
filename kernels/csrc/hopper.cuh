// The Hopper path: a producer warp feeds a warpgroup that multiplies 64 query rows with wgmma; units of up to 16 rows
// go to single warps as on the portable path.
#pragma once
#include "forward.cuh"
#include "group_tile.cuh"

#include <cutlass/arch/reg_reconfig.h>

namespace feather {

template <typename T, int kHeadDim, int kStages_>
struct GroupTeam {
  static constexpr int kStages = kStages_;
  using Tile = GroupTile<T, kHeadDim>;
  using Rows = SwizzledRows<kHeadDim, Tile::kTokens>;
  using Stream = KvStream<T, kHeadDim, 4, Tile::kTokens, kStages, 16, Rows, true>;
  static constexpr int kQueryBytes = Tile::kRows * kHeadDim * int(sizeof(T));
  static constexpr int kRingBytes = kStages * Stream::kStageElements * int(sizeof(T));

  // smem: the query buffer, then the ring. barriers: full and empty of each stage, then the query buffer's.
  static __device__ Stream stream(Params<T> const& params, unsigned char* smem, uint64_t* barriers, StageInfo* infos) {
    return Stream(params, reinterpret_cast<T*>(smem + kQueryBytes), barriers, barriers + kStages, infos);
  }

  static __device__ void produce(Params<T> const& params, Queue const& queue, unsigned char* smem, uint64_t* barriers,
                                 StageInfo* infos) {
    Stream stream = GroupTeam::stream(params, smem, barriers, infos);
    stream.queries = reinterpret_cast<T*>(smem);
    stream.queries_free = barriers + 2 * kStages;
    stream.open(queue.index, queue.first_item, queue.n_work, int(blockIdx.x), int(gridDim.x));
    stream.produce();
  }

  static __device__ void consume(Params<T> const& params, unsigned char* smem, uint64_t* barriers, StageInfo* infos) {
    int const warp = threadIdx.x / 32;
    T const* const queries = reinterpret_cast<T const*>(smem);
    uint64_t* const queries_free = barriers + 2 * kStages;
    Stream stream = GroupTeam::stream(params, smem, barriers, infos);
    Tile tile;
    Row rows[2];
    while (true) {
      StageInfo const info = stream.wait();
      if (info.tokens < 0) break;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what cp.async wrote
      if (info.edges & kFirst) {
        find_rows(params, info, 16 * warp, rows);
        tile.begin();
      }
      if (info.tokens > 0) tile.attend(queries, stream.k_tile(), stream.v_tile(), info.tokens, params);
      stream.release();
      if (info.edges & kLast) {
        if (threadIdx.x % 32 == 0) barrier_arrive(queries_free);
        float lse[2];
        tile.end(tile.out, lse);
        finish<T, kHeadDim>(params, tile.out, lse, rows);
      }
    }
  }
};

template <typename T, int kHeadDim, int kStages, int kMinCtas>
struct HopperForward {
  static constexpr int kThreads = 256;  // a warpgroup that computes, and one that copies and lends it its registers
  using Group = GroupTeam<T, kHeadDim, kStages>;
  static constexpr int kRings = Group::kQueryBytes + Group::kRingBytes;
  using Warps = WarpTeam<T, kHeadDim, 1, 16, kRings / 4 / 128 * 128>;
  static constexpr int kSlots = Group::kStages + 4 * Warps::kStages;
  static constexpr int kSmem = kRings + kSlots * int(sizeof(StageInfo)) + (2 * kSlots + 1) * int(sizeof(uint64_t));

  static __device__ void run(Params<T> const& params) {
    extern __shared__ __align__(1024) unsigned char smem[];
    StageInfo* const infos = reinterpret_cast<StageInfo*>(smem + kRings);
    uint64_t* const group_barriers = reinterpret_cast<uint64_t*>(infos + kSlots);
    uint64_t* const warp_barriers = group_barriers + 2 * Group::kStages + 1;
    int const warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      Group::Stream::init(group_barriers, group_barriers + Group::kStages);
      barrier_init(group_barriers + 2 * Group::kStages, 4);
      for (int i = 0; i < 4; ++i) {
        uint64_t* const own = warp_barriers + 2 * i * Warps::kStages;
        Warps::Stream::init(own, own + Warps::kStages);
      }
    }
    __syncthreads();
    Queue const large = find_queue(params, 0), small = find_queue(params, 1);
    if (threadIdx.x >= 128) {
      cutlass::arch::warpgroup_reg_dealloc<40>();
      if (warp == 4 && large.n_work) Group::produce(params, large, smem, group_barriers, infos);
    } else {
      cutlass::arch::warpgroup_reg_alloc<216>();
      if (large.n_work) {
        Group::consume(params, smem, group_barriers, infos);
        warpgroup_sync();
      }
      if (small.n_work) {
        Warps::run(params, small, large.n_work == 0, warp, 4, smem + warp * Warps::kRingBytes,
                   warp_barriers + 2 * warp * Warps::kStages, infos + Group::kStages + warp * Warps::kStages);
      }
      warpgroup_sync();
      leave(params);
    }
  }

  static __device__ void warpgroup_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
};

}  // namespace feather
