// One warp's arithmetic with the operands swapped: 8 query rows as columns, KV tokens as rows (mma.sync). Half the
// instructions and registers of a 16-row tile for the private tail of a request, which has no more rows than its group.
#pragma once
#include "tile.cuh"

namespace feather {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  cutlass::NumericArrayConverter<T, float, 2> convert;
  cutlass::Array<T, 2> const pair = convert(cutlass::Array<float, 2>{low, high});
  return reinterpret_cast<uint32_t const&>(pair);
}

// The maximum and the sum over the eight lanes that share lane % 4.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

template <typename T, int kHeadDim, int kPitch>
struct ThinTile {
  using Op = typename MmaOp<T>::type;

  // How a lane holds results: rows 2 (lane % 4) + {0, 1}, of each the columns 8 j + lane / 4.
  struct Layout {
    static constexpr int kCount = kHeadDim / 8;
    static __device__ int row(int i) { return 2 * (threadIdx.x % 4) + i; }
    static __device__ bool leads() { return threadIdx.x % 32 < 4; }
    template <class Out>
    static __device__ float value(Out const& out, int i, int j) { return out[2 * j + i]; }
    static __device__ void deposit(float* row, float const (&values)[kCount]) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) __stcg(row + 8 * j + threadIdx.x % 32 / 4, values[j]);
    }
    static __device__ void store(T* row, float const (&values)[kCount]) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) row[8 * j + threadIdx.x % 32 / 4] = T(values[j]);
    }
  };

  uint32_t q[kHeadDim / 16][2], next_q[kHeadDim / 16][2];
  bool ahead = false;       // next_q is that of the unit to come
  float out[kHeadDim / 4];  // sum of p * v, not yet divided; [4 (column / 16) + 2 (column / 8 % 2) + row % 2]
  float shift[2], row_sum[2];

  // Read a unit's queries; `row` points at query row lane / 4 (null: padding). May run ahead of the unit at hand.
  __device__ void fetch(T const* row) {
    int const column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        next_q[k][i] = row ? *reinterpret_cast<uint32_t const*>(row + 16 * k + 8 * i + column) : 0u;
      }
    }
    ahead = true;
  }

  // Start the unit whose queries were fetched last.
  __device__ void begin() {
    ahead = false;
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) q[k][0] = next_q[k][0], q[k][1] = next_q[k][1];
#pragma unroll
    for (float& x : out) x = 0.f;
    shift[0] = shift[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Attend to 16 tokens, of which the first `tokens` count.
  __device__ void attend(T const* k_tile, T const* v_tile, int tokens, Params<T> const& params) {
    int const lane = threadIdx.x % 32;
    T const* const k_at = k_tile + lane % 16 * kPitch + lane / 16 * 8;
    float even[4] = {}, odd[4] = {};  // two chains, so that the latencies overlap
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(k_at + 16 * k), a[0], a[1], a[2], a[3]);
      float(&c)[4] = k % 2 ? odd : even;
      Op::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], q[k][0], q[k][1], c[0], c[1], c[2], c[3]);
    }
    float s[4];  // (token lane / 4 + 8 (i / 2), row i % 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = even[i] + odd[i];
#if FEATHER_SOFT_CAP
#pragma unroll
    for (float& x : s) x = soft_capped(x, params);
    float const scale = 1.f;
#else
    float const scale = params.scale_log2;
#endif
    if (tokens < 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (lane / 4 + 8 * (i / 2) >= tokens) s[i] = -INFINITY;
      }
    }
    float top[2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = column_max(fmaxf(s[i], s[i + 2])) * scale;
      grown |= top[i] > shift[i] + kSlack;
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const alpha = follow(top[i], shift[i], row_sum[i]);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) out[2 * j + i] *= alpha;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const minus = shift[i % 2] == -INFINITY ? 0.f : -shift[i % 2];
      s[i] = exp2f(fmaf(s[i], scale, minus));
      row_sum[i % 2] += s[i];
    }
    uint32_t const p0 = transpose_8x8(pack_pair<T>(s[0], s[1])), p1 = transpose_8x8(pack_pair<T>(s[2], s[3]));
    T const* const v_at = v_tile + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t a[4];
      SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(v_at + 16 * d), a[0], a[1], a[2], a[3]);
      float* const c = out + 4 * d;
      Op::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], p0, p1, c[0], c[1], c[2], c[3]);
    }
  }

  // End a work unit: out becomes the normalised result; returns each row's log-sum-exp, base 2.
  __device__ void end(float (&lse)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const inverse = normaliser(column_sum(row_sum[i]), shift[i], lse[i]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) out[2 * j + i] *= inverse;
    }
  }
};

}  // namespace feather
