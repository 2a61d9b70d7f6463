// mbarriers, and the order of kernels (sm_80 and later).
#pragma once
#include <cstdint>

namespace feather {

// Ours, as the memory probe is built without CUTLASS.
__device__ __forceinline__ uint32_t smem_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// CUTLASS's ClusterBarrier traps below sm_90, where the portable path has these too; its wait may
// also suspend.
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
// CUTLASS's have no memory clobber: loads could move ahead of them.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may start; it waits as above.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Arrive once all of this thread's asynchronous copies so far have landed.
__device__ __forceinline__ void cp_async_barrier_arrive_noinc(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

}  // namespace feather
