// The plan's queues, one per tile shape, largest first; persistent CTAs work through them.
#pragma once
#include "common/warp.cuh"

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

// The tails' queue and how its units are cut.
template <typename T>
__device__ Queue find_tails(Params<T> const& params, int index, int& heads) {
  Queue queue = find_queue(params, index);
  heads = params.plan[kHeaderHeadPack];
  if (heads == 2) queue.n_work /= 2;
  return queue;
}

// Where a team's work units come from; in shared memory, as registers are dearer.
struct Source {
  int queue, first_item, n_work, first_popped;
  int step;  // between the units of a team, if all are dealt out in turn; 0: the queue pops all but the first
};

// The item of a unit of so many KV heads, counted within the queue.
template <typename T>
__device__ __forceinline__ int tail_item(Params<T> const& params, int heads, int unit) {
  return heads == 1 ? params.kv_heads_div.div(unit) : params.kv_pairs_div.div(unit);
}

}  // namespace feather
