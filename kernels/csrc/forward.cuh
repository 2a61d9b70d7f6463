// The forward kernel: persistent CTAs whose warps, in teams, work through the plan's queues, one queue per tile shape.
#pragma once
#include "merge.cuh"
#include "stream.cuh"
#include "tile.cuh"

namespace feather {

#ifndef FEATHER_WARPS
#define FEATHER_WARPS 4
#endif
constexpr int kWarpsPerCta = FEATHER_WARPS;
constexpr int kLeft = 8;  // params.popped[kLeft + first queue of a launch]: its CTAs that have left

// A tile shape: m = 16 * kWarps query rows, n = kTokens KV tokens a stage; arithmetic in blocks of kBlock tokens.
template <int kWarps_, int kTokens_, int kBlock_>
struct Shape2 {
  static constexpr int kWarps = kWarps_, kTokens = kTokens_, kBlock = kBlock_;
};

template <typename T, int kHeadDim, int kRingBytesPerWarp, class S>
struct TeamLayout {
  static constexpr int kStageBytes = 2 * S::kTokens * (kHeadDim + 8) * int(sizeof(T));
  static constexpr int kStages = S::kWarps * kRingBytesPerWarp / kStageBytes;
  static_assert(kStages >= 2, "a ring needs two stages");
  static constexpr int kTeams = kWarpsPerCta / S::kWarps;
};

// The requests of a warp's rows, and how their results join others.
template <typename T>
__device__ void find_rows(Params<T> const& params, StageInfo const& info, int warp_in_team, Row (&rows)[2]) {
  int const* const members = params.plan + params.plan[header::kMembersBegin] + 2 * info.first_member;
  int const* const part_begin = params.plan + params.plan[header::kPartBeginBegin];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const row = warp_in_team * 16 + threadIdx.x % 32 / 4 + 8 * i;
    int const member = row / params.group;
    rows[i] = Row{};
    if (member >= info.n_members) continue;
    rows[i].request = __ldg(members + 2 * member);
    rows[i].part = __ldg(members + 2 * member + 1);
    rows[i].head = (info.edges >> kHeadShift) * params.group + row % params.group;
    rows[i].first_part = __ldg(part_begin + rows[i].request);
    rows[i].n_parts = __ldg(part_begin + rows[i].request + 1) - rows[i].first_part;
  }
}

// Work through one queue with teams of S::kWarps warps.
template <typename T, int kHeadDim, int kRingBytesPerWarp, class Copy, class S>
__device__ void run_queue(Params<T> const& params, int queue, bool fixed_start, unsigned char* smem,
                          uint64_t* barriers, StageInfo* infos) {
  using Layout = TeamLayout<T, kHeadDim, kRingBytesPerWarp, S>;
  int const* const begin = params.plan + header::kQueueBegin + queue;
  int const first_item = begin[0], n_work = (begin[1] - begin[0]) * params.kv_heads;

  int const warp = threadIdx.x / 32;
  int const team = warp / S::kWarps, warp_in_team = warp % S::kWarps;
  using Stream = KvStream<T, kHeadDim, S::kWarps, S::kTokens, Layout::kStages, S::kBlock, Copy>;
  Stream stream(params, reinterpret_cast<T*>(smem + team * S::kWarps * kRingBytesPerWarp),
                barriers + team * 2 * Layout::kStages, barriers + team * 2 * Layout::kStages + Layout::kStages,
                infos + team * Layout::kStages);
  WarpTile<T, kHeadDim, Stream::kPitch> tile;

  if (warp_in_team == 0) {
    stream.open(queue, first_item, n_work, fixed_start ? team * int(gridDim.x) + int(blockIdx.x) : -1,
                Layout::kTeams * int(gridDim.x));
  }
  while (true) {
    if (warp_in_team == 0) stream.fill();
    StageInfo const info = stream.wait();
    if (info.tokens < 0) break;
    if (info.edges & kFirst) {
      Row rows[2];
      find_rows(params, info, warp_in_team, rows);
      T const* queries[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bool const real = rows[i].request >= 0;
        queries[i] = real ? params.q + rows[i].request * params.q_stride + rows[i].head * kHeadDim : nullptr;
      }
      tile.begin(queries);
    }
    if (warp_in_team * 16 < info.n_members * params.group) {
#pragma unroll 1
      for (int token = 0; token < info.tokens; token += S::kBlock) {
        tile.template attend<S::kBlock>(stream.k_tile() + token * Stream::kPitch,
                                        stream.v_tile() + token * Stream::kPitch, info.tokens - token, params);
      }
    }
    stream.release();
    if (info.edges & kLast) {
      if (warp_in_team == 0) stream.fill();  // the next unit's rows travel while this one is merged
      float lse[2];
      tile.end(params, lse);
      Row rows[2];
      find_rows(params, info, warp_in_team, rows);
      finish<T, kHeadDim>(params, tile.out, lse, rows);
    }
  }
}

// Shared memory of a CTA: rings, then per shape and team the barriers and the stage infos.
template <typename T, int kHeadDim, int kRingBytesPerWarp, class... Shapes>
struct SharedLayout {
  static constexpr int kRings = kWarpsPerCta * kRingBytesPerWarp;
  template <class S>
  static constexpr int slots() {
    using L = TeamLayout<T, kHeadDim, kRingBytesPerWarp, S>;
    return L::kTeams * L::kStages;
  }
  static constexpr int kSlots = (slots<Shapes>() + ...);
  static constexpr int kBytes = kRings + kSlots * int(2 * sizeof(uint64_t) + sizeof(StageInfo));
};

template <typename T, int kHeadDim, int kRingBytesPerWarp, int kMinCtas, class Copy, class... Shapes>
__global__ void __launch_bounds__(kWarpsPerCta * 32, kMinCtas)
    forward_kernel(__grid_constant__ Params<T> const params) {
  using Shared = SharedLayout<T, kHeadDim, kRingBytesPerWarp, Shapes...>;
  extern __shared__ __align__(128) unsigned char smem[];
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(smem + Shared::kRings);
  StageInfo* const infos = reinterpret_cast<StageInfo*>(barriers + 2 * Shared::kSlots);

  if (threadIdx.x == 0) {
    uint64_t* next = barriers;
    (
        [&] {
          using L = TeamLayout<T, kHeadDim, kRingBytesPerWarp, Shapes>;
          using Stream =
              KvStream<T, kHeadDim, Shapes::kWarps, Shapes::kTokens, L::kStages, Shapes::kBlock, Copy>;
          for (int team = 0; team < L::kTeams; ++team, next += 2 * L::kStages) Stream::init(next, next + L::kStages);
        }(),
        ...);
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();

  // The first queue with work starts on fixed units, without a round trip to the counter; later ones are popped only,
  // so that a CTA still busy with large tiles holds nothing back.
  int queue = 0, slot = 0;
  bool fixed_start = true;
  (
      [&] {
        bool const work = (params.queues >> queue & 1) &&
                          params.plan[header::kQueueBegin + queue + 1] > params.plan[header::kQueueBegin + queue];
        if (work) {
          run_queue<T, kHeadDim, kRingBytesPerWarp, Copy, Shapes>(params, queue, fixed_start, smem,
                                                                  barriers + 2 * slot, infos + slot);
          fixed_start = false;
          __syncthreads();
        }
        slot += Shared::template slots<Shapes>();
        ++queue;
      }(),
      ...);

  if (threadIdx.x == 0) {  // the last CTA leaves the queues as the next run expects them
    __threadfence();
    int* const left = params.popped + kLeft + __ffs(params.queues) - 1;
    if (atomicAdd(left, 1) == int(gridDim.x) - 1) {
      for (int i = 0; i < kLeft; ++i) {
        if (params.queues >> i & 1) params.popped[i] = 0;
      }
      *left = 0;
    }
  }
}

}  // namespace feather
