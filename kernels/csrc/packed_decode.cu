// Host side: check what the caller hands over, fill the parameters, launch. One library per dtype and head dimension.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "common/merge.cuh"
#include "traits.h"
#if FEATHER_LATENT
#include "sm90/latent_forward.cuh"
#else
#include "sm80/forward.cuh"
#if FEATHER_HOPPER
#include "sm90/forward.cuh"
#endif
#endif

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

#if defined(FEATHER_DTYPE_HALF)
using T = cutlass::half_t;
#else
using T = cutlass::bfloat16_t;
#endif
[[maybe_unused]] constexpr int kHeadDim = FEATHER_HEAD_DIM;

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

#if FEATHER_LATENT
using LatentShape = feather::LatentTraits;
using Latent = feather::LatentForward<T, LatentShape>;
constexpr int kMergedDim = LatentShape::kHalfDim;
#else
constexpr int kMergedDim = kHeadDim;
using PortableShape = feather::PortableTraits<kHeadDim>;
template <int kWarps, int kTokens>
using Team = feather::WarpTeam<T, kHeadDim, kWarps, kTokens, PortableShape::kRingBytes>;
using Portable = feather::PortableForward<T, PortableShape, Team<4, PortableShape::kTokens64>,
                                          Team<2, PortableShape::kTokens32>, Team<1, feather::kWarpTokens>>;
#if FEATHER_HOPPER
using HopperShape = feather::HopperTraits<kHeadDim>;
using Hopper = feather::HopperForward<T, HopperShape>;
#endif
#endif

template <class Forward, int kMinCtas>
__global__ void __launch_bounds__(Forward::kThreads, kMinCtas)
    forward_kernel(__grid_constant__ feather::Params<T> const params) {
  Forward::run(params);
}

// Launch so that the kernel may begin while the one before it in the stream ends (sm_90; it waits for its results).
template <class Kernel>
void start(Kernel kernel, int ctas, int threads, int smem, feather::Params<T> const& params, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = FEATHER_HOPPER ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

constexpr int kMaxDevices = 64;

int multiprocessors(int device) {
  static std::array<std::atomic<int>, kMaxDevices> counts{};
  int count = counts[device].load();
  if (count == 0) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "device");
    counts[device].store(count);
  }
  return count;
}

template <class Forward, int kMinCtas>
void launch(feather::Params<T> const& params, int device, cudaStream_t stream) {
  auto const kernel = forward_kernel<Forward, kMinCtas>;
  static std::array<std::atomic<int>, kMaxDevices> fitting{};  // CTAs on one multiprocessor of each device
  int ctas = fitting[device].load();
  if (ctas == 0) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Forward::kSmem), "shared memory");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, Forward::kThreads, Forward::kSmem), "occupancy");
    if (ctas == 0) TVM_FFI_THROW(RuntimeError) << "the forward kernel does not fit on this GPU";
    ctas = std::min(ctas, kMinCtas);  // as plans are made for
    fitting[device].store(ctas);
  }
  start(kernel, multiprocessors(device) * ctas, Forward::kThreads, Forward::kSmem, params, stream);
}

feather::Params<T> make_params(TensorView q, TensorView k, TensorView v, TensorView out, Optional<TensorView> lse,
                               TensorView part_out, TensorView part_stats, TensorView counters, TensorView plan,
                               TensorView seq_lens, TensorView table, int64_t page_bits, double sm_scale,
                               double soft_cap, Optional<TensorView> sinks, double v_scale,
                               Optional<TensorView> q_rope, int64_t flags) {
  feather::Params<T> params{};
  params.q = static_cast<T const*>(q.data_ptr());
  params.k = static_cast<feather::KvValue<T> const*>(k.data_ptr());
  params.v = static_cast<feather::KvValue<T> const*>(v.data_ptr());
  params.out = static_cast<T*>(out.data_ptr());
  params.lse = lse.has_value() ? static_cast<float*>(lse.value().data_ptr()) : nullptr;
  params.part_out = static_cast<uint16_t*>(part_out.data_ptr());
  params.part_stats = static_cast<feather::PartialStats*>(part_stats.data_ptr());
  params.popped = static_cast<int*>(counters.data_ptr());
  params.plan = static_cast<int const*>(plan.data_ptr());
  params.seq_lens = static_cast<int const*>(seq_lens.data_ptr());
  params.table = table.data_ptr();
  params.entry_bytes = table.dtype().bits / 8;
  params.q_stride = q.stride(0);
  params.out_stride = out.stride(0);
  params.k_slot_bytes = k.stride(0) * feather::kKvBytes;
  params.v_slot_bytes = v.stride(0) * feather::kKvBytes;
  params.q_heads = q.size(1);
  params.kv_heads = k.size(1);
  params.group = params.q_heads / params.kv_heads;
  params.kv_heads_div = feather::FastDivide(params.kv_heads);
  params.kv_pairs_div = feather::FastDivide(std::max(params.kv_heads / 2, 1));
  params.group_div = feather::FastDivide(params.group);
  params.page_bits = page_bits;
  params.prefetch = flags & 1;
  double const log2e = 1.4426950408889634;
  params.scale_log2 = sm_scale * log2e;
  params.soft_cap_log2 = soft_cap * log2e;
  params.soft_cap_scale = soft_cap > 0 ? sm_scale / soft_cap : 0;
#if FEATHER_KV_FP8
  params.v_scale = v_scale;
#endif
#if FEATHER_SINKS
  params.sinks = sinks.value().data_ptr();
  params.wide_sinks = sinks.value().dtype().bits == 32;
#endif
#if FEATHER_LATENT
  TensorView const rope = q_rope.value();
  params.q_rope = static_cast<T const*>(rope.data_ptr());
  params.q_head_stride = q.stride(1);
  params.q_rope_stride = rope.stride(0);
  params.q_rope_head_stride = rope.stride(1);
  params.q_heads *= LatentShape::kValueDim / LatentShape::kHalfDim;
#endif
  return params;
}

cudaStream_t stream_of(TensorView tensor) {
  DLDevice const device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// flags: 1 = L2 prefetch, 2 = portable path; queues: a bit per tile shape; q_rope: of latent attention, whose `q` is
// what meets the values, and `k` the latents, once for every 64 query heads or less.
void forward(TensorView q, TensorView k, TensorView v, TensorView out, Optional<TensorView> lse, TensorView part_out,
             TensorView part_stats, TensorView counters, TensorView plan, TensorView seq_lens, TensorView table,
             int64_t page_bits, double sm_scale, double soft_cap, Optional<TensorView> sinks, double v_scale,
             Optional<TensorView> q_rope, int64_t flags, int64_t queues) {
  auto params = make_params(q, k, v, out, lse, part_out, part_stats, counters, plan, seq_lens, table, page_bits,
                            sm_scale, soft_cap, sinks, v_scale, q_rope, flags);
  params.queues = queues;
  int const device = q.device().device_id;
#if FEATHER_LATENT
  launch<Latent, LatentShape::kMinCtas>(params, device, stream_of(q));
#else
#if FEATHER_HOPPER
  if (!(flags & 2)) return launch<Hopper, HopperShape::kMinCtas>(params, device, stream_of(q));
#endif
  launch<Portable, PortableShape::kMinCtas>(params, device, stream_of(q));
#endif
}

void merge(TensorView q, TensorView k, TensorView v, TensorView out, Optional<TensorView> lse, TensorView part_out,
           TensorView part_stats, TensorView counters, TensorView plan, TensorView seq_lens, TensorView table,
           int64_t page_bits, double sm_scale, double soft_cap, Optional<TensorView> sinks, double v_scale,
           Optional<TensorView> q_rope, int64_t flags) {
  auto const params = make_params(q, k, v, out, lse, part_out, part_stats, counters, plan, seq_lens, table, page_bits,
                                  sm_scale, soft_cap, sinks, v_scale, q_rope, flags);
  int64_t const rows = q.size(0) * params.q_heads;
  int const sms = multiprocessors(q.device().device_id);
  int const ctas = std::max<int64_t>(1, std::min<int64_t>((rows + 3) / 4, 16 * sms));
  start(feather::merge_kernel<T, kMergedDim>, ctas, 128, 0, params, stream_of(q));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, merge);

}  // namespace
