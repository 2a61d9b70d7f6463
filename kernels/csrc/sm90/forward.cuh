// The Hopper path: warpgroups multiply 64 query rows each with wgmma, fed by copying warps; units of up to 16 rows go
// to single warps as on the portable path.
#pragma once
#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>

#include "common/tail_warp.cuh"
#include "heuristics.h"
#include "sm80/warp_team.cuh"
#include "sm90/warpgroup_team.cuh"

namespace feather {

// kGroups warpgroups that compute, and one that copies for them and lends two of them its registers. Queues, largest
// first: both warpgroups on one KV tile (with two), each on its own, single warps, and tails.
template <typename T, class Traits>
struct HopperForward {
  static constexpr int kHeadDim = Traits::kHeadDim, kGroups = Traits::kGroups, kRingTokens = Traits::kRingTokens;
  static constexpr int kThreads = Traits::kThreads, kComputing = Traits::kComputing;
  static constexpr bool kHasWide = kGroups == 2;
  using Wide = WarpgroupTeam<T, kHeadDim, kGroups, Traits::kTokens128, Traits::stages(Traits::kTokens128, kGroups)>;
  using Group = WarpgroupTeam<T, kHeadDim, 1, Traits::kTokens64, Traits::stages(Traits::kTokens64, 1)>;
  static constexpr int kTailWarps = Traits::kTailWarps, kFewTailWarps = few_tail_warps(kTailWarps);
  static constexpr int kTailBytes =
      std::max(TailStream<T, kHeadDim, 1>::kRingBytes, TailStream<T, kHeadDim, 2>::kRingBytes);
  // Stages of 8 bits are half as large, and there is room for as many as these.
  static constexpr int kFewStages = kFp8 ? 5 : kSmallStages;
  static constexpr int kSmallBytes =
      kFewStages * 2 * SwizzledRows<kv_places(kHeadDim), kWarpTokens>::kElements * int(sizeof(T));
  static constexpr int kGroupBytes =
      (std::max({Group::Pipeline::kBytes, 4 * kSmallBytes, kTailWarps * kTailBytes}) + 1023) / 1024 * 1024;
  using Small = WarpTeam<T, kHeadDim, 1, kWarpTokens, kSmallBytes>;
  struct SmallControl {  // of a warp
    StageInfo infos[Small::kStages];
    Source source;
    uint64_t barriers[2 * Small::kStages];
    int members[Small::kMemberWords];
  };
  // Named barriers, and who meets there. CUTLASS's NamedBarrier shifts the ids: the machine code differs.
  enum NamedBarriers { kDealt = 1, kWideRead, kWideDone, kGroupRead, kGroupDone = kGroupRead + kGroups };
  static __device__ void sync(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
  static __device__ void arrive(int id, int count) {  // arrive without waiting
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
  }

  // Read again where it is used: a value from before the registers are dealt out would wait in local memory.
  static __device__ int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }

  // The queues, and where this CTA's turn begins in each: units of a queue are dealt out from where the last one ended,
  // but those that a group asks for.
  //
  // Where single warps have few rounds of units, and for tails nothing else, all are dealt out: whoever pops has asked
  // for one unit more than it is at, so half of the warps would have two each, and those of a CTA ask together. Beside
  // larger tiles the warps that copied are first, and would have all tails beyond the first round: they are dealt out,
  // too, up to fewer rounds.
  struct Work {
    Queue wide, group, small, tails;
    int heads;       // KV heads of a tail's unit
    int tail_warps;  // of a group
    int group_turn;
    bool alone;                   // single warps have all the work
    int first_tail, tail_stride;  // warp i of this CTA starts with tail first_tail + i * tail_stride
    // How many tails are dealt out to begin with: one to every warp, as it takes longer that all ask the counter at
    // once than what that evens out. Only those that compute small units beside larger ones ask; their first is
    // negative.
    int fixed_tails;
    int small_step, tail_step;  // between a warp's units, where all are dealt out; 0: others are popped

    __device__ explicit Work(Params<T> const& params) {
      int const ctas = gridDim.x, cta = blockIdx.x;
      int index = 0;
      wide = kHasWide ? find_queue(params, index++) : Queue{};
      group = find_queue(params, index++);
      small = find_queue(params, index++);
      tails = find_tails(params, index, heads);
      bool const many = heads == 2 && tails.n_work >= kManyRounds * kTailWarps * kGroups * ctas;
      tail_warps = many ? kFewTailWarps : kTailWarps;
      int const after_wide = wide.n_work % ctas;
      group_turn = cta - after_wide + (cta < after_wide ? ctas : 0);
      int const busy = wide.n_work + group.n_work, after_group = busy % ctas;
      int const turn = cta - after_group + (cta < after_group ? ctas : 0);
      int const small_warps = 4 * kGroups * ctas, all_warps = tail_warps * kGroups * ctas;
      alone = busy == 0;
      fixed_tails = all_warps;
      bool deals = tails.n_work <= (alone ? kDealtRounds : kDealtBeside) * all_warps;
      if (!alone && !small.n_work) {  // not where some CTAs are done much later, nor for a few tails more than a round
        bool const even = after_wide == 0 || wide.n_work <= ctas || nearly_even(after_wide, ctas);
        deals &= even && exceeds_a_round(tails.n_work, all_warps);
      }
      // First to those that copy elsewhere, last to those that are dealt small units first.
      if (small.n_work && (alone || deals)) {
        first_tail = turn + all_warps - ctas, tail_stride = -ctas;
      } else if (small.n_work) {
        first_tail = turn - small_warps, tail_stride = ctas;
        fixed_tails = all_warps - small_warps;
      } else {  // first to those that have nothing else to do
        int const free = max(0, ctas - busy);
        tail_stride = turn < free ? free : ctas - free;
        first_tail = turn < free ? turn : tail_warps * kGroups * free + turn - free;
      }
      small_step = small.n_work <= kDealtRounds * small_warps ? small_warps : 0;
      tail_step = deals ? all_warps : 0;
    }

    // The first of the group queue's units that falls to a warpgroup.
    __device__ int first_of(int group_index) const { return group_index * int(gridDim.x) + group_turn; }
  };

  struct Control {
    typename Wide::Control wide;
    typename Group::Control groups[kGroups];
    SmallControl small[4 * kGroups];
    TailUnit tails[kTailWarps * kGroups][kTailUnits];
    Source sources[kTailWarps * kGroups];
    Work work;
  };
  static_assert(Wide::Pipeline::kBytes <= kGroups * kGroupBytes);
  static constexpr int kSmem = kGroups * kGroupBytes + int(sizeof(Control));
  static_assert(kSmem <= 227 * 1024);

  static __device__ void run(Params<T> const& params) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Control& control = *reinterpret_cast<Control*>(smem + kGroups * kGroupBytes);
    // A warp initialises one barrier after the other, so every warp has its share.
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 4 * kGroups) {
      if (lane < 2 * Small::kStages) {
        barrier_init(control.small[warp].barriers + lane, Small::Stream::arrivals(lane));
      }
    } else if (warp < 5 * kGroups) {
      Group::Pipeline::init(control.groups[warp - 4 * kGroups], lane);
    } else if (kHasWide && warp == 5 * kGroups) {
      Wide::Pipeline::init(control.wide, lane);
    } else if (warp == kThreads / 32 - 1) {  // one for all: after other kernels the code costs more than the wait
      Work const work(params);
      if (lane == 0) control.work = work;
    }
    __syncthreads();
    launch_dependent_grids();
    if (threadIdx.x >= kComputing) {
      if constexpr (Traits::kLends) cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
      copy(params, smem, control);
      if constexpr (Traits::kLends) {
        sync(kDealt, kThreads);  // taken back before the others have theirs, they would wait for ever
        cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
      }
    } else {
      if constexpr (Traits::kLends) {
        cutlass::arch::warpgroup_reg_alloc<Traits::kComputeRegisters>();
        arrive(kDealt, kThreads);
      }
      compute(params, smem, control);
      if constexpr (Traits::kLends) cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters>();
    }
    run_tails(params, smem, control);
    // First to those that copied: they are done before those that compute.
    constexpr int kWarps = kThreads / 32;
    run_merges<kHeadDim>(params, (kWarps - 1 - thread() / 32) * int(gridDim.x) + int(blockIdx.x),
                         kWarps * int(gridDim.x));
    __syncthreads();
    leave(params);
  }

  static __device__ void copy(Params<T> const& params, unsigned char* smem, Control& control) {
    if constexpr (kHasWide) copy_wide(params, smem, control);
    Work const& work = control.work;
    Queue const queue = uniform(work.group);
    int const index = thread() / 32 % 4, group = index / 2;
    if (group >= kGroups || queue.n_work == 0) return;
    Group::produce(params, queue, work.first_of(group), kGroups * int(gridDim.x), smem + group * kGroupBytes,
                   control.groups[group], index % 2);
  }

  static __device__ void copy_wide(Params<T> const& params, unsigned char* smem, Control& control) {
    Queue const wide = uniform(control.work.wide);
    if (wide.n_work == 0) return;
    Wide::produce(params, wide, blockIdx.x, gridDim.x, smem, control.wide, thread() / 32 % 4);
    sync(kWideRead, kThreads);  // the ring has been read
  }

  static __device__ void compute(Params<T> const& params, unsigned char* smem, Control& control) {
    Work const& work = control.work;
    int const warp = uniform(thread() / 32), group = warp / 4;
    wait_on_dependent_grids();
    // The queues from the plan, not from shared memory: the compiler must see that all threads branch alike, or wgmma's
    // descriptors leave the uniform registers.
    if constexpr (kHasWide) {
      Queue const wide = find_queue(params, 0);
      if (wide.n_work) {
        Wide::consume(params, wide, blockIdx.x, smem, control.wide, warp);
        arrive(kWideRead, kThreads);
        sync(kWideDone, kComputing);
      }
    }
    unsigned char* const ring = smem + group * kGroupBytes;
    Queue const groups = find_queue(params, kHasWide);
    if (groups.n_work) {
      Group::consume(params, groups, work.first_of(group), ring, control.groups[group], warp % 4);
      sync(kGroupDone + group, 128);
    }
    if (work.small.n_work) {
      SmallControl& own = control.small[warp];
      bool const starts_dealt = work.alone || work.small_step;
      Small::run(params, work.small, starts_dealt, warp % 4 * kGroups + group, 4 * kGroups,
                 ring + warp % 4 * kSmallBytes, own.barriers, own.infos, &own.source, own.members, work.small_step);
    }
    sync(kGroupDone + group, 128);  // a warpgroup may change its registers again only after its warps have met
  }

  // The warps of a group, and those that copied for it.
  static __device__ void run_tails(Params<T> const& params, unsigned char* smem, Control& control) {
    Work const& work = control.work;
    if (work.tails.n_work == 0) return;
    int const all = thread() / 32, copying = all - 4 * kGroups;
    int const group = copying < 0 ? all / 4 : copying / (4 / kGroups);
    int const warp = copying < 0 ? all % 4 : 4 + copying % (4 / kGroups);
    if (warp >= work.tail_warps) return;
    unsigned char* const rings = smem + group * kGroupBytes;
    if (work.heads == 1) {
      run_tails<1>(params, work, control, rings, group, warp);
    } else {
      run_tails<2>(params, work, control, rings, group, warp);
    }
  }

  template <int kHeads>
  static __device__ void run_tails(Params<T> const& params, Work const& work, Control& control, unsigned char* rings,
                                   int group, int warp) {
    using Tails = TailWarp<T, kHeadDim, kHeads>;
    using Stream = typename Tails::Stream;
    static_assert(kHeads == 1 || kFewTailWarps * Stream::kMostSlots <= kTailWarps * Stream::kSlots);
    int const index = warp * kGroups + group;
    int const n_slots = kHeads == 2 && work.tail_warps < kTailWarps ? Stream::kMostSlots : Stream::kSlots;
    Stream stream(params, reinterpret_cast<T*>(rings + warp * n_slots * Stream::kSlotBytes), n_slots,
                  control.tails[index], control.sources + index);
    stream.open(work.tails, work.first_tail + index * work.tail_stride, work.fixed_tails, work.tail_step);
    sync(kGroupRead + group, 32 * work.tail_warps);  // whatever was in the ring before has been read
    Tails::run(params, stream);
  }
};

}  // namespace feather
