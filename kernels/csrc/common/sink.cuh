// Attention sinks: a learned logit a query head that joins the sum of the softmax, and no value.
#pragma once
#include "common/params.cuh"

namespace feather {

// A row's result over all of its tokens takes the sink in: returns what it is multiplied with; `lse`, base 2, grows.
template <typename T>
__device__ __forceinline__ float apply_sink(Params<T> const& params, int head, float& lse) {
#if FEATHER_SINKS
  float const logit = params.wide_sinks ? static_cast<float const*>(params.sinks)[head]
                                        : float(static_cast<T const*>(params.sinks)[head]);
  float const sink = logit * 1.4426950408889634f, top = fmaxf(lse, sink);
  if (top == -INFINITY) return 0.f;  // neither tokens nor a sink
  float const tokens = exp2f(lse - top), sum = tokens + exp2f(sink - top);
  lse = top + log2f(sum);
  return __fdividef(tokens, sum);  // a NaN stays visible
#else
  return 1.f;
#endif
}

}  // namespace feather
