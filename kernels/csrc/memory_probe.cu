// How long a copy from global to shared memory takes, by size (PAT 5.2, figure 7a).
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "common/copy.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr int kThreads = 256;

// One block copies `bytes` at a time, each copy once the last one has landed, along the whole buffer. What was read is
// part of the next address (the buffer is all zeros), so that no copy can start early.
__global__ void __launch_bounds__(kThreads) copy_in_turn(char const* buffer, int64_t stride, int bytes, int copies) {
  extern __shared__ __align__(16) unsigned char smem[];
  int64_t at = 0;
  for (int i = 0; i < copies; ++i) {
    for (int byte = threadIdx.x * 16; byte < bytes; byte += kThreads * 16) {
      feather::cp_async(feather::smem_address(smem + byte), buffer + at + byte);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    at += stride + *reinterpret_cast<int volatile*>(smem);
  }
}

// `copies` copies of `bytes` bytes, spread evenly over `buffer`.
void probe(TensorView buffer, int64_t bytes, int64_t copies) {
  int64_t const stride = buffer.size(0) / copies / 16 * 16;
  if (bytes < 16 || bytes % 16 || bytes > stride) TVM_FFI_THROW(ValueError) << "bytes must be 16 k, at most " << stride;
  DLDevice const device = buffer.device();
  auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  cudaFuncSetAttribute(copy_in_turn, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  copy_in_turn<<<1, kThreads, bytes, stream>>>(static_cast<char const*>(buffer.data_ptr()), stride,
                                               static_cast<int>(bytes), static_cast<int>(copies));
  cudaError_t const error = cudaGetLastError();
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "memory probe: " << cudaGetErrorString(error);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe, probe);

}  // namespace
