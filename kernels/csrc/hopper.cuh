// The Hopper path: a producer warp feeds a warpgroup that multiplies 64 query rows with wgmma; units of up to 16 rows
// go to single warps as on the portable path.
#pragma once
#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>

#include "forward.cuh"
#include "group_tile.cuh"

namespace feather {

template <typename T, int kHeadDim, int kStages_>
struct GroupTeam {
  static constexpr int kStages = kStages_;
  using Tile = GroupTile<T, kHeadDim>;
  using Rows = SwizzledRows<kHeadDim, Tile::kTokens>;
  template <Copies kCopies>
  using StreamOf = KvStream<T, kHeadDim, 4, Tile::kTokens, kStages, 16, Rows, true, kCopies>;
  using Stream = StreamOf<Copies::kOnlyK>;
  static constexpr int kRingBytes = kStages * Stream::kStageElements * int(sizeof(T));

  // barriers: full and empty of each stage. Units are dealt out in turn, so that both producers walk the same ones.
  template <Copies kCopies>
  static __device__ void produce(Params<T> const& params, Queue const& queue, int group, int groups,
                                 unsigned char* smem, uint64_t* barriers, StageInfo* infos, Source* source,
                                 int* members) {
    StreamOf<kCopies> stream(params, reinterpret_cast<T*>(smem), barriers, barriers + kStages, infos, source, members);
    stream.open(queue, group * int(gridDim.x) + int(blockIdx.x), 0, groups * int(gridDim.x));
    stream.produce();
  }

  static __device__ void fetch(Params<T> const& params, Tile& tile, StageInfo const& info, int const* members,
                               int warp) {
    T const* queries[2];
    find_queries<T, kHeadDim>(params, info, members, 16 * warp, queries);
    tile.fetch(queries);
  }

  static __device__ void consume(Params<T> const& params, unsigned char* smem, uint64_t* barriers, StageInfo* infos,
                                 Source* source, int* members) {
    int const warp = threadIdx.x / 32 % 4;
    Stream stream(params, reinterpret_cast<T*>(smem), barriers, barriers + kStages, infos, source, members);
    Tile tile;
    while (true) {
      StageInfo const info = stream.wait();
      if (info.tokens < 0) break;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what cp.async wrote
      if (info.edges & kFirst) {
        if (!tile.ahead) fetch(params, tile, info, stream.members(), warp);
        tile.begin();
      }
      Row rows[2];
      bool const last = info.edges & kLast;
      if (last) {
        find_rows<typename Tile::Layout>(params, info, stream.members(), 16 * warp, rows);
        StageInfo const next = stream.peek();  // its queries, in time for them to be there
        if (next.tokens >= 0) fetch(params, tile, next, stream.peek_members(), warp);
      }
      tile.attend(stream.k_tile(), stream.v_tile(), info.tokens, params);
      stream.release();
      if (last) {
        float lse[2];
        tile.end(lse);
        finish<T, kHeadDim, typename Tile::Layout>(params, tile.out, lse, rows);
      }
    }
  }
};

// kGroups warpgroups that compute, each with a ring of its own, and one that copies for them and lends them its
// registers.
template <typename T, int kHeadDim, int kStages, int kGroups>
struct HopperForward {
  static constexpr int kThreads = 128 * (kGroups + 1);
  using Group = GroupTeam<T, kHeadDim, kStages>;
  // Single warps take what the groups leave, and more if there is more.
  static constexpr int kWarpBytes = 3 * 2 * PaddedRows<kHeadDim, 16>::kElements * int(sizeof(T));
  static constexpr int kGroupBytes = std::max(Group::kRingBytes, (4 * kWarpBytes + 1023) / 1024 * 1024);
  using Warps = WarpTeam<T, kHeadDim, 1, 16, kWarpBytes>;
  // Short thin units are a matter of latency: the two warps that copied for a group compute too. Long ones are a matter
  // of bytes in flight: fewer warps with deeper rings.
  static constexpr int kThinWarps = 6, kLongUnit = 256;
  using ThinWarps = WarpTeam<T, kHeadDim, 1, 16, kGroupBytes / kThinWarps / 128 * 128, true>;
  using DeepWarps = WarpTeam<T, kHeadDim, 1, 16, kWarpBytes, true>;
  static constexpr int kThinSlots = kStages + 4 * Warps::kStages;
  static constexpr int kDeepSlots = kThinSlots + kThinWarps * ThinWarps::kStages;
  static constexpr int kSlots = kDeepSlots + 4 * DeepWarps::kStages;  // of a group
  static constexpr int kMemberWords =
      std::max({kStages * Group::Stream::kMemberWords, 4 * Warps::kMemberWords, kThinWarps * ThinWarps::kMemberWords,
                4 * DeepWarps::kMemberWords});
  struct Control {  // of a group
    StageInfo infos[kSlots];
    Source sources[kThinWarps];
    uint64_t barriers[2 * kSlots];
    int members[kMemberWords];
  };
  static constexpr int kSmem = kGroups * (kGroupBytes + int(sizeof(Control)));

  // Read again where it is used: a value from before the registers are dealt out would wait in local memory.
  static __device__ int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }
  static __device__ Control& control_of(unsigned char* smem, int group) {
    return reinterpret_cast<Control*>(smem + kGroups * kGroupBytes)[group];
  }

  static __device__ void run(Params<T> const& params) {
    extern __shared__ __align__(1024) unsigned char smem[];
    static_assert(2 * kSlots <= 128);
    int const index = threadIdx.x % 128;
    if (threadIdx.x < 128 * kGroups && index < 2 * kSlots) {
      int const small = index - 2 * kStages, thin = index - 2 * kThinSlots, deep = index - 2 * kDeepSlots;
      barrier_init(control_of(smem, threadIdx.x / 128).barriers + index,
                   small < 0   ? Group::Stream::arrivals(index)
                   : thin < 0  ? Warps::Stream::arrivals(small % (2 * Warps::kStages))
                   : deep < 0  ? ThinWarps::Stream::arrivals(thin % (2 * ThinWarps::kStages))
                               : DeepWarps::Stream::arrivals(deep % (2 * DeepWarps::kStages)));
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (threadIdx.x >= 128 * kGroups) {
      cutlass::arch::warpgroup_reg_dealloc<kCopyRegisters>();
      int const group = thread() / 64 % 2, role = thread() / 32 % 2;
      if (group < kGroups) {
        copy(params, smem, group, role);
        hand_over<true>(group);
      }
      cutlass::arch::warpgroup_reg_alloc<168>();
      if (group < kGroups) run_thin(params, smem, group, 4 + role);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kComputeRegisters>();
      int const warp = thread() / 32 % 4, group = thread() / 128;
      compute(params, smem, group, warp);
      hand_over<false>(group);
      cutlass::arch::warpgroup_reg_dealloc<168>();
      run_thin(params, smem, group, warp);
    }
    __syncthreads();
    leave(params);
  }

  // 168 registers a thread at launch: as many as the copying warps give up, the computing ones get.
  static constexpr int kCopyRegisters = 56, kComputeRegisters = kGroups == 2 ? 224 : 240;

  // The group's ring is free for the copying warps; the computing ones need not wait for them.
  template <bool kWaits>
  static __device__ void hand_over(int group) {
    constexpr int kCount = 128 + 64;
    if constexpr (kWaits) {
      asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(kCount) : "memory");
    } else {
      asm volatile("bar.arrive %0, %1;" ::"r"(2 + group), "n"(kCount) : "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory");
    }
  }

  static __device__ void copy(Params<T> const& params, unsigned char* smem, int group, int role) {
    Queue const large = find_queue(params, 0);
    if (large.n_work == 0) return;
    Control& control = control_of(smem, group);
    unsigned char* const ring = smem + group * kGroupBytes;
    if (role == 0) {
      Group::template produce<Copies::kOnlyK>(params, large, group, kGroups, ring, control.barriers, control.infos,
                                              control.sources, control.members);
    } else {
      Group::template produce<Copies::kOnlyV>(params, large, group, kGroups, ring, control.barriers, control.infos,
                                              control.sources + 1, control.members);
    }
  }

  static __device__ void compute(Params<T> const& params, unsigned char* smem, int group, int warp) {
    Control& control = control_of(smem, group);
    unsigned char* const ring = smem + group * kGroupBytes;
    Queue const large = find_queue(params, 0), small = find_queue(params, 1);
    if (large.n_work) {
      Group::consume(params, ring, control.barriers, control.infos, control.sources, control.members);
      asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory");
    }
    if (small.n_work) {
      Warps::run(params, small, large.n_work == 0, 4 * group + warp, 4 * kGroups, ring + warp * kWarpBytes,
                 control.barriers + 2 * (kStages + warp * Warps::kStages),
                 control.infos + kStages + warp * Warps::kStages, control.sources + warp,
                 control.members + warp * Warps::kMemberWords);
    }
  }

  static __device__ void run_thin(Params<T> const& params, unsigned char* smem, int group, int warp) {
    Queue const thin = find_queue(params, 2);
    if (thin.n_work == 0) return;
    bool const first = find_queue(params, 0).n_work + find_queue(params, 1).n_work == 0;
    // Units come longest first.
    int const* const item = params.plan + params.plan[kHeaderItemsBegin] + kItemSize * thin.first_item;
    Control& control = control_of(smem, group);
    unsigned char* const ring = smem + group * kGroupBytes;
    auto const run = [&](auto warps, int warps_per_group, int first_slot) {
      using Team = decltype(warps);
      int const slot = first_slot + warp * Team::kStages;
      Team::run(params, thin, first, warps_per_group * group + warp, warps_per_group * kGroups,
                ring + warp * Team::kRingBytes, control.barriers + 2 * slot, control.infos + slot,
                control.sources + warp, control.members + warp * Team::kMemberWords);
    };
    if (item[kItemStop] - item[kItemStart] <= kLongUnit) {
      run(ThinWarps{}, kThinWarps, kThinSlots);
    } else if (warp < 4) {
      run(DeepWarps{}, 4, kDeepSlots);
    }
  }
};

}  // namespace feather
