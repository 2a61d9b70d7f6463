// The KV that one request reads alone, its private tail above all: a warp per unit, which copies for itself.
//
// A unit is a work item for one KV head, or for two neighbours where the group is small: then the query heads of both
// share one tile of 8 rows, and the softmax, the look-ups and the unit's own cost are paid once for both.
#pragma once
#include "common/copy.cuh"
#include "common/mma_fragment.cuh"
#include "common/softmax.cuh"

namespace feather {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// One warp's arithmetic with the operands swapped: 8 query rows as columns, 16 KV tokens as rows (mma.sync). The rows
// are consecutive query heads of one request: those of one KV head, or of two.
template <typename T, int kHeadDim, int kHeads>
struct TailTile {
  using Value = Operand<T>;
  using Op = typename MmaOp<Value>::type;
  using Rows = SwizzledRows<kv_places(kHeadDim), 16>;
  static constexpr int kHeadElements = Rows::kElements, kHeadBytes = kHeadElements * int(sizeof(T));  // in a slot
  // Two parts take a head's place, or one where values have 8 bits.
  static constexpr int kPartElements = 8 * kHeadDim, kParts = kHeadElements / kPartElements;
  static_assert(sizeof(T) == sizeof(uint16_t) && kParts * kPartElements == kHeadElements);

  // Where a part's value is in its place: rows side by side, chunks permuted against bank conflicts.
  static __device__ __forceinline__ int part_at(int row, int column) {
    return row * kHeadDim + (column ^ (row / 2 * kPartChunk));
  }

  // How a lane holds results: rows 2 (lane % 4) + {0, 1}, of each the columns 8 j + lane / 4.
  struct Layout {
    static constexpr int kRows = 8, kChunks = kHeadDim / 8 / kPartChunk;
    static constexpr int kNear = 4, kFar = 32;  // lanes that share a row (`allreduce`)
    static __device__ int row(int i) { return 2 * (threadIdx.x % 4) + i; }
    static __device__ bool leads() { return threadIdx.x % 32 < 4; }
    static __device__ int chunk(int c) { return part_chunk(c, threadIdx.x % 32 / 4); }
    static __device__ float& value(float (&out)[kHeadDim / 4], int i, int c, int e) {
      return out[2 * (kPartChunk * c + e) + i];
    }
    // Rows are neighbours, so that after a transposition a lane holds pairs of columns of row lane / 4.
    static __device__ void store(Params<T> const& params, float const (&out)[kHeadDim / 4], Row const (&rows)[2]) {
      int const lane = threadIdx.x % 32;
      int const request = __shfl_sync(~0u, rows[0].request, 0), first_head = __shfl_sync(~0u, rows[0].head, 0);
      unsigned const even = __ballot_sync(~0u, rows[0].request >= 0), odd = __ballot_sync(~0u, rows[1].request >= 0);
      int const row = lane / 4;
      bool const real = ((row % 2 ? odd : even) >> (row / 2)) & 1;
      T* const row_to = params.out + request * params.out_stride + (first_head + row) * kHeadDim;
      if constexpr (kFp8) {
        T* const to = row_to + 4 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; j += 2) {
          uint32_t const even_columns = transpose_8x8(pack_pair<T>(out[2 * j], out[2 * j + 1]));
          uint32_t const odd_columns = transpose_8x8(pack_pair<T>(out[2 * j + 2], out[2 * j + 3]));
          if (real) store_interleaved(to + 8 * j, even_columns, odd_columns);
        }
      } else {
        T* const to = row_to + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
          uint32_t const pair = transpose_8x8(pack_pair<T>(out[2 * j], out[2 * j + 1]));
          if (real) *reinterpret_cast<uint32_t*>(to + 8 * j) = pair;
        }
      }
    }
  };

  uint32_t q[kHeadDim / 16][2];  // (8, head_dim) as the B operand
  float out[kHeadDim / 4];  // (8, head_dim): sum of p * v, not yet divided; [2 (column / 8) + row % 2]
  float row_max[2], row_sum[2];
  float s[4];     // (16 tokens, 8 rows): (token lane / 4 + 8 (i / 2), row i % 2)
  uint32_t p[2];  // the same as an operand

  // Read a unit's queries, once the last unit's scores are there; `row` points at query row lane / 4 (null: padding).
  __device__ void fetch(T const* row) {
    if constexpr (kFp8) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        q[k][0] = q[k][1] = 0u;
        if (row) load_interleaved(row + 16 * k + 4 * (threadIdx.x % 4), q[k][0], q[k][1]);
      }
      return;
    }
    int const column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q[k][i] = row ? *reinterpret_cast<uint32_t const*>(row + 16 * k + 8 * i + column) : 0u;
      }
    }
  }

  __device__ void begin() {
#pragma unroll
    for (float& x : out) x = 0.f;
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Scores of 16 tokens. A row takes those of its own head.
  __device__ void score(T const* k_slot, int group) {
    int const lane = threadIdx.x % 32;
    uint32_t const k_row = smem_address(k_slot + Rows::at(lane % 16, lane / 16 * 8));
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float even[4] = {}, odd[4] = {};  // two chains, so that the latencies overlap
      if constexpr (kFp8) {
#pragma unroll
        for (int k = 0; k < kHeadDim / 32; ++k) {
          uint32_t x[4], a[2][4];  // 32 columns as two k16 steps
          ldmatrix_x4<false>(Rows::right(k_row, k) + head * kHeadBytes, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) widen(x[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
          multiply(even, a[0], q[2 * k]);
          multiply(odd, a[1], q[2 * k + 1]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
          uint32_t a[4];
          ldmatrix_x4<false>(Rows::right(k_row, k) + head * kHeadBytes, a);
          float(&c)[4] = k % 2 ? odd : even;
          multiply(c, a, q[k]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (head == 0 || Layout::row(i % 2) >= head * group) s[i] = even[i] + odd[i];
      }
    }
  }

  // Scores become probabilities; the first `tokens` count.
  __device__ void online_softmax(int tokens, Params<T> const& params) {
    int const lane = threadIdx.x % 32;
#if FEATHER_SOFT_CAP
#pragma unroll
    for (float& x : s) x = apply_softcap(x, params);
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
      top[i] = allreduce<Max, Layout::kNear, Layout::kFar>(fmaxf(s[i], s[i + 2])) * scale;
      grown |= top[i] > row_max[i] + kRescaleThreshold;
    }
    if (__any_sync(~0u, grown)) rescale(top);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const minus = row_max[i % 2] == -INFINITY ? 0.f : -row_max[i % 2];
      s[i] = exp2f(fmaf(s[i], scale, minus));
      row_sum[i % 2] += s[i];
    }
    p[0] = transpose_8x8(pack_pair<Value>(s[0], s[1])), p[1] = transpose_8x8(pack_pair<Value>(s[2], s[3]));
  }

  // out += probabilities * V.
  __device__ void accumulate(T const* v_slot, int group) {
    int const lane = threadIdx.x % 32;
    uint32_t const v_row = smem_address(v_slot + Rows::at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
    int const own = kHeads == 1 ? 0 : lane / 4 >= group;  // the head of operand column lane / 4
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      bool const mine = head == own;
      uint32_t const b[2] = {mine ? p[0] : 0u, mine ? p[1] : 0u};
      if constexpr (kFp8) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 32; ++d) {
          uint32_t x[4], a[2][4];  // the first 16 of 32 columns, and the others; even ones first
          ldmatrix_x4<true>(Rows::right(v_row, d) + head * kHeadBytes, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) widen(x[i], a[i % 2][i / 2 * 2], a[i % 2][i / 2 * 2 + 1]);
          multiply(out + 8 * d, a[0], b);
          multiply(out + 8 * d + 4, a[1], b);
        }
      } else {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d) {
          uint32_t a[4];
          ldmatrix_x4<true>(Rows::right(v_row, d) + head * kHeadBytes, a);
          multiply(out + 4 * d, a, b);
        }
      }
    }
  }

  // c (16 x 8) += a times b.
  static __device__ __forceinline__ void multiply(float* c, uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    Op::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]);
  }

  // Combine with a part of the same request: its n_rows rows (see part_at), and their stats. What lies in other rows'
  // places must not decide when results are rescaled.
  __device__ void combine(uint16_t const* rows, PartialStats const* stats, int n_rows) {
    float part_lse[2], scale[2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      PartialStats const own = stats[Layout::row(i)];
      part_lse[i] = Layout::row(i) < n_rows ? __uint_as_float(own.lse) : -INFINITY;
      scale[i] = __uint_as_float(own.scale);
      grown |= part_lse[i] > row_max[i] + kRescaleThreshold;
    }
    if (__any_sync(~0u, grown)) rescale(part_lse);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const w = exp2f(part_lse[i] - (row_max[i] == -INFINITY ? 0.f : row_max[i]));
      if (Layout::leads()) row_sum[i] += w;  // a row's sum is spread over lanes
      float const weight = w * scale[i];
#pragma unroll
      for (int c = 0; c < Layout::kChunks; ++c) {
        uint4 const part = *reinterpret_cast<uint4 const*>(rows + part_at(Layout::row(i), Layout::chunk(c)));
        float quantized[kPartChunk];
        dequantize(&part.x, quantized);
#pragma unroll
        for (int e = 0; e < kPartChunk; ++e) {
          float& sum = Layout::value(out, i, c, e);
          sum = fmaf(weight, quantized[e], sum);
        }
      }
    }
  }

  // Some row's maximum has grown to `top`.
  __device__ void rescale(float const (&top)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const alpha = update_row_max(top[i], row_max[i], row_sum[i]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) out[2 * j + i] *= alpha;
    }
  }

  // End a work unit: out becomes the normalised result; returns each row's log-sum-exp, base 2.
  __device__ void end(float (&lse)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const inverse = normalizer(allreduce<Sum, Layout::kNear, Layout::kFar>(row_sum[i]), row_max[i], lse[i]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) out[2 * j + i] *= inverse;
    }
  }
};

}  // namespace feather
