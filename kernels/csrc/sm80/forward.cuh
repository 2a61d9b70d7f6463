// The portable path (sm_80 and later): four warps a CTA, regrouped into teams from queue to queue.
#pragma once
#include <algorithm>

#include "common/tail_warp.cuh"
#include "sm80/warp_team.cuh"

namespace feather {

template <typename T, class Traits, class... Teams>
struct PortableForward {
  static constexpr int kHeadDim = Traits::kHeadDim, kWarps = Traits::kWarps, kThreads = Traits::kThreads;
  static constexpr int kRings = kWarps * Traits::kRingBytes;
  template <class Team>
  static constexpr int slots() {
    return Team::teams(kWarps) * Team::kStages;
  }
  static constexpr int kSlots = (slots<Teams>() + ...);
  static constexpr int kMemberWords = std::max({Teams::teams(kWarps) * Teams::kMemberWords...});
  static_assert(((Teams::teams(kWarps) > 0) && ...), "the rings are too small");
  struct Control {
    StageInfo infos[kSlots];
    Source sources[kWarps];
    uint64_t barriers[2 * kSlots];
    int members[kMemberWords];
    TailUnit tails[kWarps][kTailUnits];
    Source tail_sources[kWarps];
  };
  static constexpr int kSmem = kRings + int(sizeof(Control));
  static_assert(Traits::kMinCtas * (kSmem + 1024) <= Traits::kShared * 1024, "too much shared memory");  // 1 KB: CUDA's

  static __device__ void run(Params<T> const& params) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Control& control = *reinterpret_cast<Control*>(smem + kRings);
    uint64_t* const barriers = control.barriers;
    int first = 0;
    (
        [&] {
          constexpr int kCount = 2 * slots<Teams>();
          for (int i = threadIdx.x; i < kCount; i += kThreads) {
            barrier_init(barriers + first + i, Teams::Stream::arrivals(i % (2 * Teams::kStages)));
          }
          first += kCount;
        }(),
        ...);
    __syncthreads();
    wait_on_dependent_grids();
    launch_dependent_grids();
    // The first queue with work starts on fixed units, without a round trip to the counter; later ones are popped only,
    // so that a CTA still busy with large tiles holds nothing back.
    int index = 0, slot = 0;
    bool fixed_start = true;
    (
        [&] {
          Queue const queue = find_queue(params, index++);
          constexpr int kTeams = Teams::teams(kWarps);
          int const team = threadIdx.x / (32 * Teams::kWarps);
          if (queue.n_work) {
            if (kTeams == kWarps / Teams::kWarps || team < kTeams) {
              Teams::run(params, queue, fixed_start, team, kTeams, smem + team * Teams::kRingBytes,
                         barriers + 2 * (slot + team * Teams::kStages), control.infos + slot + team * Teams::kStages,
                         control.sources + team, control.members + team * Teams::kMemberWords);
            }
            fixed_start = false;
            __syncthreads();
          }
          slot += slots<Teams>();
        }(),
        ...);
    int heads;
    Queue const tails = find_tails(params, sizeof...(Teams), heads);
    if (tails.n_work) {
      if (heads == 1) {
        run_tails<1>(params, tails, smem, control);
      } else {
        run_tails<2>(params, tails, smem, control);
      }
    }
    run_merges<kHeadDim>(params, threadIdx.x / 32 * int(gridDim.x) + int(blockIdx.x), kWarps * int(gridDim.x));
    __syncthreads();
    leave(params);
  }

  template <int kHeads>
  static __device__ void run_tails(Params<T> const& params, Queue const& queue, unsigned char* smem,
                                   Control& control) {
    using Tails = TailWarp<T, kHeadDim, kHeads>;
    static_assert(Tails::Stream::kRingBytes <= Traits::kRingBytes);
    int const warp = threadIdx.x / 32;
    typename Tails::Stream stream(params, reinterpret_cast<T*>(smem + warp * Traits::kRingBytes), Tails::Stream::kSlots,
                                  control.tails[warp], control.tail_sources + warp);
    stream.open(queue, warp * int(gridDim.x) + int(blockIdx.x), kWarps * int(gridDim.x));
    Tails::run(params, stream);
  }
};

}  // namespace feather
