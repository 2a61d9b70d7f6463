// The forward kernels: persistent CTAs work through the plan's queues, one queue per tile shape, largest first.
#pragma once
#include <algorithm>

#include "merge.cuh"
#include "stream.cuh"
#include "tail.cuh"

namespace feather {

constexpr int kLeft = 8;  // params.popped[kLeft + first queue of a launch]: its CTAs that have left

template <typename T>
__device__ Queue find_queue(Params<T> const& params, int index) {
  int const* const begin = params.plan + kHeaderQueue + index;
  bool const served = params.queues >> index & 1;
  return {index, begin[0], served ? (begin[1] - begin[0]) * params.kv_heads : 0};
}

// The last CTA of a launch leaves the queues as the next run expects them.
template <typename T>
__device__ void leave(Params<T> const& params) {
  if (threadIdx.x != 0) return;
  __threadfence();
  unsigned const queues = opaque(params.queues);
  int* const left = params.popped + kLeft + __ffs(queues) - 1;
  if (atomicAdd(left, 1) != int(gridDim.x) - 1) return;
  for (int i = 0; i < kLeft; ++i) {
    if (queues >> i & 1) params.popped[i] = 0;
  }
  *left = 0;
}

// Closing items without tokens, which wait for whatever was in the queues: warp `index` of all of a launch takes its
// share of their rows.
template <int kHeadDim, typename T>
__device__ void run_merges(Params<T> const& params, int index, int warps) {
  int const items = params.plan[kHeaderMerges];
  if (items == 0) return;
  int const first = params.plan[kHeaderItems] - items;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int unit = index; unit < items * params.q_heads; unit += warps) {
    int const item = unit / params.q_heads, words = load_item(params, first + item);
    merge_row<kHeadDim, true>(params, item_word(words, kItemRequest), unit - item * params.q_heads,
                              item_word(words, kItemFirstPart), item_word(words, kItemParts));
  }
}

// The requests of a warp's rows, which are the unit's from first_row on, and how their results join others.
template <class Layout, typename T>
__device__ void find_rows(Params<T> const& params, StageInfo const& info, int const* members, int first_row,
                          Row (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const row = first_row + Layout::row(i);
    int const member = params.group_div.div(row);
    rows[i] = Row{};
    if (member >= info.n_members) continue;
    int2 const words = reinterpret_cast<int2 const*>(members)[member];
    rows[i].request = words.x;
    rows[i].part = words.y;
    rows[i].head = (info.edges >> kHeadShift) * params.group + row - member * params.group;
  }
}

// Where the queries of a unit's row are; null for padding.
template <typename T, int kHeadDim>
__device__ T const* find_query(Params<T> const& params, StageInfo const& info, int const* members, int row) {
  int const member = params.group_div.div(row);
  if (member >= info.n_members) return nullptr;
  int const head = (info.edges >> kHeadShift) * params.group + row - member * params.group;
  return params.q + members[kMemberSize * member] * params.q_stride + head * kHeadDim;
}

// The same for a lane's two rows of a 16-row fragment (see load_queries), which are the unit's from first_row on.
template <typename T, int kHeadDim>
__device__ void find_queries(Params<T> const& params, StageInfo const& info, int const* members, int first_row,
                             T const* (&queries)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    queries[i] = find_query<T, kHeadDim>(params, info, members, first_row + WideLayout<T, kHeadDim>::row(i));
  }
}

// A tile shape of the portable path: teams of kWarps warps share KV tiles of kTokens tokens, m = 16 kWarps.
template <typename T, int kHeadDim, int kWarps_, int kTokens_, int kRingBytesPerWarp>
struct WarpTeam {
  static constexpr int kWarps = kWarps_, kTokens = kTokens_, kBlock = 16;
  using Rows = SwizzledRows<kHeadDim, kTokens>;
  static constexpr int kRingBytes = kWarps * kRingBytesPerWarp;
  static constexpr int kStages = kRingBytes / (2 * Rows::kElements * int(sizeof(T)));
  static_assert(kStages >= 2, "a ring needs two stages");
  using Stream = KvStream<T, kHeadDim, kWarps, kTokens, kStages, kBlock>;
  static constexpr int kMemberWords = kStages * Stream::kMemberWords;  // of a team

  // Work through a queue. `team` counts within the CTA, of `teams`; smem, barriers and infos are the team's. With a step
  // between its units, they are dealt out in turn; without, popped.
  static __device__ void run(Params<T> const& params, Queue const& queue, bool fixed_start, int team, int teams,
                             unsigned char* smem, uint64_t* barriers, StageInfo* infos, Source* source, int* members,
                             int step = 0) {
    int const warp = threadIdx.x / 32 % kWarps;
    Stream stream(params, reinterpret_cast<T*>(smem), barriers, barriers + kStages, infos, source, members);
    WarpTile<T, kHeadDim, Rows> tile;
    using Layout = typename decltype(tile)::Layout;
    if (warp == 0) {
      stream.open(queue, fixed_start ? team * int(gridDim.x) + int(blockIdx.x) : -1, teams * int(gridDim.x), step);
    }
    bool last = false;
    Row rows[2];
    // The first turn only fills the ring: there is one copy of that code.
#pragma unroll 1
    for (bool filled = false;; filled = true) {
      if (filled) {
        StageInfo const info = stream.wait();
        if (info.tokens < 0) break;
        if (info.edges & kFirst) {
          T const* queries[2];
          find_queries<T, kHeadDim>(params, info, stream.members(), 16 * warp, queries);
          tile.begin(queries);
        }
        last = info.edges & kLast;
        if (last) find_rows<Layout>(params, info, stream.members(), 16 * warp, rows);
        if (16 * warp < info.n_members * params.group) {
#pragma unroll 1
          for (int token = 0; token < info.tokens; token += kBlock) {
            tile.attend(stream.k_tile() + Rows::at(token, 0), stream.v_tile() + Rows::at(token, 0),
                        info.tokens - token, params);
          }
        }
        stream.release();
      }
      if (warp == 0) stream.fill();  // the next unit's rows travel while this one is written
      if (!last) continue;
      float lse[2];
      tile.end(lse);
      finish<kHeadDim, Layout, kWarps == 1>(params, tile.out, lse, rows).make(params);
      last = false;
    }
  }
};

// The tails' queue and how its units are cut.
template <typename T>
__device__ Queue find_tails(Params<T> const& params, int index, int& heads) {
  Queue queue = find_queue(params, index);
  heads = params.plan[kHeaderHeadPack];
  if (heads == 2) queue.n_work /= 2;
  return queue;
}

// The portable path (sm_80 and later): four warps a CTA, regrouped into teams from queue to queue.
template <typename T, int kHeadDim, int kRingBytesPerWarp, class... Teams>
struct PortableForward {
  static constexpr int kThreads = 128;
  static constexpr int kRings = 4 * kRingBytesPerWarp;
  template <class Team>
  static constexpr int slots() {
    return 4 / Team::kWarps * Team::kStages;
  }
  static constexpr int kSlots = (slots<Teams>() + ...);
  static constexpr int kMemberWords = std::max({4 / Teams::kWarps * Teams::kMemberWords...});
  struct Control {
    StageInfo infos[kSlots];
    Source sources[4];
    uint64_t barriers[2 * kSlots];
    int members[kMemberWords];
    TailUnit tails[4][kTailUnits];
    Source tail_sources[4];
  };
  static constexpr int kSmem = kRings + int(sizeof(Control));

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
    wait_for_previous_kernel();
    let_next_kernel_start();
    // The first queue with work starts on fixed units, without a round trip to the counter; later ones are popped only,
    // so that a CTA still busy with large tiles holds nothing back.
    int index = 0, slot = 0;
    bool fixed_start = true;
    (
        [&] {
          Queue const queue = find_queue(params, index++);
          int const team = threadIdx.x / (32 * Teams::kWarps);
          if (queue.n_work) {
            Teams::run(params, queue, fixed_start, team, 4 / Teams::kWarps, smem + team * Teams::kRingBytes,
                       barriers + 2 * (slot + team * Teams::kStages), control.infos + slot + team * Teams::kStages,
                       control.sources + team, control.members + team * Teams::kMemberWords);
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
    run_merges<kHeadDim>(params, threadIdx.x / 32 * int(gridDim.x) + int(blockIdx.x), 4 * int(gridDim.x));
    __syncthreads();
    leave(params);
  }

  template <int kHeads>
  static __device__ void run_tails(Params<T> const& params, Queue const& queue, unsigned char* smem,
                                   Control& control) {
    using Tails = TailWarp<T, kHeadDim, kHeads>;
    static_assert(Tails::Stream::kRingBytes <= kRingBytesPerWarp);
    int const warp = threadIdx.x / 32;
    typename Tails::Stream stream(params, reinterpret_cast<T*>(smem + warp * kRingBytesPerWarp), Tails::Stream::kSlots,
                                  control.tails[warp], control.tail_sources + warp);
    stream.open(queue, warp * int(gridDim.x) + int(blockIdx.x), 4 * int(gridDim.x));
    Tails::run(params, stream);
  }
};

template <class Forward, typename T, int kMinCtas>
__global__ void __launch_bounds__(Forward::kThreads, kMinCtas)
    forward_kernel(__grid_constant__ Params<T> const params) {
  Forward::run(params);
}

}  // namespace feather
