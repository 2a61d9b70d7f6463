// mbarriers, the order of kernels, and asynchronous copies into shared memory (sm_80 and later).
#pragma once
#include <cstdint>

namespace feather {

__device__ __forceinline__ uint32_t smem_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ bool barrier_ready(uint64_t* barrier, int parity) {
  uint32_t ready;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(ready)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return ready != 0;
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t ready = 0;
  while (!ready) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ready)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
  }
#else
  while (!barrier_ready(barrier, parity)) {
  }
#endif
}

// With programmatic dependent launch (sm_90) a kernel may start while the one before it in the stream still runs, whose
// results are there after this. Before it, a thread reads the plan only, which no kernel writes. Again costs nothing.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may start; it waits as above.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes from global to shared memory. Hopper's bulk copy of a whole row takes its addresses from uniform registers:
// rows scattered over slots would be issued one by one, which measured slower than 16 bytes a lane.
__device__ __forceinline__ void copy_async(uint32_t to, void const* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, or 16 zero bytes without reading anything.
__device__ __forceinline__ void copy_or_clear(uint32_t to, void const* from, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0) : "memory");
}

// Arrive once all of this thread's asynchronous copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// L2 prefetch of one row (papers/l2_prefetch: the next iteration's KV block).
template <int kBytes>
__device__ __forceinline__ void prefetch_row(void const* from) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(kBytes) : "memory");
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
#endif
}

}  // namespace feather
