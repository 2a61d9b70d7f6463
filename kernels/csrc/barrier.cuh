// mbarrier and asynchronous copies of single KV rows, on sm_80 (cp.async) and on sm_90 (bulk copies).
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

// How KV rows travel to shared memory. Both signal the stage's barrier when all rows have landed.
//   announce: by one lane, before the rows are requested; also publishes that lane's earlier shared-memory writes.
//   row: by any lane, one row of kBytes.
//   commit: by all 32 lanes, after the rows.

struct BulkCopy {  // cp.async.bulk (sm_90): one instruction a row, no registers, no threads
  static constexpr int kArrivals = 1;
  static __device__ __forceinline__ void announce(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                     smem_address(barrier)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  template <int kBytes>
  static __device__ __forceinline__ void row(void* to, void const* from, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(to)),
        "l"(from), "n"(kBytes), "r"(smem_address(barrier))
        : "memory");
#endif
  }
  static __device__ __forceinline__ void commit(uint64_t*) {}
};

struct AsyncCopy {  // cp.async (sm_80): 16 bytes a lane
  static constexpr int kArrivals = 33;
  static __device__ __forceinline__ void announce(uint64_t* barrier, int) { barrier_arrive(barrier); }
  static __device__ __forceinline__ void chunk(void* to, void const* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from) : "memory");
  }
  static __device__ __forceinline__ void commit(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
  }
};

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
