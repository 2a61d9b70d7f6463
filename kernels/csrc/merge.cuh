// Partial results (PAT 7): a unit deposits them; the unit with a request's last part, a warp that takes a row of them
// behind the queues, or the merge kernel combines them.
//
// A part is a normalised result and its log-sum-exp. They are combined in fp32 and in a fixed order, so that the result
// is the same bit for bit in every run. On their way through memory the values of a row are 16-bit integers, in steps of
// 1 / 32767 of its largest: half the traffic, with an error far below that of an output in 16 bits.
#pragma once
#include "barrier.cuh"
#include "params.cuh"

namespace feather {

constexpr float kLn2 = 0.6931471805599453f;
constexpr int kOnly = -1;  // in place of a part: the request has no other
constexpr uint32_t kNothing = 0xffffffffu;  // a log-sum-exp, as bits, that nobody has deposited yet

// One query row of a warp's tile.
struct Row {
  int request = -1;  // -1: padding
  int head = 0;      // query head
  int part = kOnly;  // kOnly, kCloses, or where the part is deposited
};

// The values of a part lie so that a lane of either tile layout holds eight neighbours: here start the columns
// 64 block + 8 {0, ..., 7} + place of a row; of each block, even places come first.
constexpr int kPartChunk = 8;
__device__ __forceinline__ int part_chunk(int block, int place) {
  return 64 * block + kPartChunk * (place / 2 + 4 * (place % 2));
}

constexpr float kMostSteps = 32767.f;
constexpr float kLeastMost = 1e-30f;  // what a row's largest value counts as, at least: one over its step is finite
// A value in steps, plus this, is a float whose last 16 bits count steps from -32768 on.
constexpr float kStepsAsBits = 8388608.f + 32768.f;

// Two values of a row as a part has them; `inverse` is one over its step.
__device__ __forceinline__ uint32_t in_steps(float first, float second, float inverse) {
  uint32_t const low = __float_as_uint(fmaf(first, inverse, kStepsAsBits));
  return __byte_perm(low, __float_as_uint(fmaf(second, inverse, kStepsAsBits)), 0x5410);
}

// And back: N values of a part, not yet times the step.
template <int N>
__device__ __forceinline__ void from_steps(uint32_t const* words, float (&steps)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    steps[i] = __uint_as_float(__byte_perm(words[i / 2], 0x4b00, i % 2 ? 0x5432 : 0x5410)) - kStepsAsBits;
  }
}

// What is announced of a part's row: its log-sum-exp, and its step. Read and written as one.
struct PartNote {
  uint32_t lse, step;  // as bits; lse is kNothing until the part has been deposited

  __device__ __forceinline__ bool missing() const { return lse == kNothing; }
};

__device__ __forceinline__ PartNote load_relaxed(PartNote const* address) {
  uint64_t bits;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
  return {uint32_t(bits), uint32_t(bits >> 32)};
}
__device__ __forceinline__ void store(PartNote* address, PartNote note) {
  __stcg(reinterpret_cast<unsigned long long*>(address), (unsigned long long)(note.step) << 32 | note.lse);
}
__device__ __forceinline__ void forget(PartNote* address) { store(address, {kNothing, kNothing}); }  // a step of NaN

// The running sum of parts.
struct PartWeight {
  float top, weight;

  // Take a part in: the sum so far is to be scaled by alpha, the part by the result.
  __device__ __forceinline__ float add(float lse, float& alpha) {
    float const next = fmaxf(top, lse);
    alpha = exp2f(top + minus(next));
    float const w = exp2f(lse + minus(next));
    top = next;
    weight = fmaf(weight, alpha, w);
    return w;
  }
  // The same for as many as a warp has lanes, of which `highest` is the greatest log-sum-exp: the factor of the sum so
  // far ...
  __device__ __forceinline__ float follow(float highest) {
    float const next = fmaxf(top, highest), alpha = exp2f(top + minus(next));
    top = next;
    weight *= alpha;
    return alpha;
  }
  // ... and of this lane's part.
  __device__ __forceinline__ float weigh(float lse) {
    float const w = exp2f(lse + minus(top));
    weight += across<Sum, 1, 32>(w);
    return w;
  }
  static __device__ __forceinline__ float minus(float top) { return top == -INFINITY ? 0.f : -top; }
  __device__ __forceinline__ float inverse() const { return weight == 0.f ? 0.f : 1.f / weight; }  // NaN stays NaN
  __device__ __forceinline__ float lse() const { return weight == 0.f ? -INFINITY : top + log2f(weight); }
};

// A log-sum-exp that can be told from kNothing.
__device__ __forceinline__ uint32_t announced(float lse) {
  uint32_t const bits = __float_as_uint(lse);
  return bits == kNothing ? 0x7fffffffu : bits;
}

// A warp's rows are one request's last part: wait for its other parts and take them in; out and lse become the
// request's. A note is read by nobody else and left as the next run expects it.
template <int kHeadDim, class Layout, typename T, class Out>
__device__ __forceinline__ void close(Params<T> const& params, Out& out, float (&lse)[2], Row const (&rows)[2]) {
  constexpr int kRows = Layout::kRows, kAtOnce = 32 / kRows;  // parts asked for at once
  int const lane = threadIdx.x % 32;
  int const request = __reduce_max_sync(~0u, max(rows[0].request, rows[1].request));
  int const first_head = __reduce_min_sync(~0u, rows[0].request < 0 ? INT_MAX : rows[0].head);
  int const last_head =
      __reduce_max_sync(~0u, max(rows[0].request < 0 ? 0 : rows[0].head, rows[1].request < 0 ? 0 : rows[1].head));
  int const n_rows = last_head - first_head + 1;
  int const* const part_begin = params.plan + params.plan[kHeaderPartBegin] + request;
  int const first = part_begin[0], n_parts = part_begin[1] - first;
  int const row = lane % kRows;
  PartNote* const note_at = params.part_notes + int64_t(first) * params.q_heads + first_head + row;
  uint16_t const* part_at[2];
  PartWeight total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = {lse[i], lse[i] == -INFINITY ? 0.f : 1.f};
    part_at[i] = params.part_out + (int64_t(first) * params.q_heads + rows[i].head) * kHeadDim;
  }
  for (int k0 = 0; k0 < n_parts; k0 += kAtOnce) {
    int const k = k0 + lane / kRows;
    bool const asks = k < n_parts && row < n_rows;
    PartNote note{};
    for (int tries = 0;; ++tries) {
      if (asks && (tries == 0 || note.missing())) note = load_relaxed(note_at + int64_t(k) * params.q_heads);
      if (!__any_sync(~0u, asks && note.missing())) break;
      if (tries > kPatience) __trap();  // a plan whose parts are not all deposited: an error rather than a hang
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (asks) forget(note_at + int64_t(k) * params.q_heads);
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < kAtOnce && k0 + j < n_parts; ++j) {
      int64_t const at = int64_t(k0 + j) * params.q_heads * kHeadDim;
      uint4 part[2][Layout::kChunks];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < Layout::kChunks; ++c) {
          uint4 const* const from = reinterpret_cast<uint4 const*>(part_at[i] + at + Layout::chunk(c));
          part[i][c] = rows[i].request < 0 ? make_uint4(0, 0, 0, 0) : __ldcg(from);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const from = j * kRows + Layout::row(i);
        float alpha;
        float const w = total[i].add(__uint_as_float(__shfl_sync(~0u, note.lse, from)), alpha) *
                        __uint_as_float(__shfl_sync(~0u, note.step, from));
#pragma unroll
        for (int c = 0; c < Layout::kChunks; ++c) {
          float steps[kPartChunk];
          from_steps(&part[i][c].x, steps);
#pragma unroll
          for (int e = 0; e < kPartChunk; ++e) {
            float& sum = Layout::value(out, i, c, e);
            sum = fmaf(w, steps[e], sum * alpha);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const inverse = total[i].inverse();
    lse[i] = total[i].lse();
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kPartChunk; ++e) Layout::value(out, i, c, e) *= inverse;
    }
  }
}

// The notes that tell others of a warp's parts. They follow the parts' values; with the next unit's first stage
// between, there is little left to wait for.
struct Announcement {
  int at[2] = {-1, -1};  // in part_notes
  float lse[2], step[2];

  template <typename T>
  __device__ __forceinline__ void make(Params<T> const& params) {
    if (!__any_sync(~0u, max(at[0], at[1]) >= 0)) return;
    asm volatile("fence.acq_rel.gpu;" ::: "memory");  // whoever sees a row's note sees its values
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at[i] >= 0) store(params.part_notes + at[i], {announced(lse[i]), __float_as_uint(step[i])});
      at[i] = -1;
    }
  }
};

// A warp has finished a work unit: parts are deposited, the results of other rows are final. What is to be announced of
// the parts comes back.
template <int kHeadDim, class Layout, bool kMayClose, typename T, class Out>
__device__ __forceinline__ Announcement finish(Params<T> const& params, Out& out, float (&lse)[2],
                                               Row const (&rows)[2]) {
  if constexpr (kMayClose) {
    bool const closes = rows[0].part == kCloses || rows[1].part == kCloses;
    if (__any_sync(~0u, closes)) close<kHeadDim, Layout>(params, out, lse, rows);
  }
  Announcement told;
  if (__any_sync(~0u, max(rows[0].part, rows[1].part) >= 0)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = kLeastMost;
#pragma unroll
      for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < kPartChunk; ++e) most = Larger()(most, Layout::value(out, i, c, e));
      }
      told.step[i] = across<Larger, Layout::kNear, Layout::kFar>(most) / kMostSteps;
    }
  }
  bool final[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    final[i] = rows[i].request >= 0 && rows[i].part < 0;
    if (rows[i].request < 0 || rows[i].part < 0) continue;
    int const at = rows[i].part * params.q_heads + rows[i].head;
    uint16_t* const row = params.part_out + int64_t(at) * kHeadDim;
    float const inverse = 1.f / told.step[i];
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      uint32_t words[kPartChunk / 2];
#pragma unroll
      for (int e = 0; e < kPartChunk; e += 2) {
        words[e / 2] = in_steps(Layout::value(out, i, c, e), Layout::value(out, i, c, e + 1), inverse);
      }
      __stcg(reinterpret_cast<uint4*>(row + Layout::chunk(c)), make_uint4(words[0], words[1], words[2], words[3]));
    }
    if (Layout::leads()) told.at[i] = at;
    told.lse[i] = lse[i];
  }
  __syncwarp();
  if (__any_sync(~0u, final[0] || final[1])) Layout::store(params, out, rows);
  float* const lse_to = opaque(params.lse);
  if (lse_to != nullptr && Layout::leads()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (final[i]) lse_to[int64_t(rows[i].request) * params.q_heads + rows[i].head] = lse[i] * kLn2;
    }
  }
  return told;
}

// A warp combines a request's parts, `n_parts` from `first` on, for one query head. kWaits: until they are there, and
// leaves their notes, which nobody else reads, as the next run expects them.
template <int kHeadDim, bool kWaits, typename T>
__device__ __forceinline__ void merge_row(Params<T> const& params, int request, int head, int first, int n_parts) {
  constexpr int kOwn = 4;                               // neighbouring values of a lane
  constexpr int kChunks = (kHeadDim / kOwn + 31) / 32;  // such, of a lane
  constexpr int kAtOnce = 8 / kChunks;                  // parts asked for at once
  int const lane = threadIdx.x % 32;
  bool const has_columns = kOwn * lane < kHeadDim;
  int64_t const row = int64_t(first) * params.q_heads + head;
  PartNote* const note_at = params.part_notes + row;
  uint16_t const* const value_at = params.part_out + row * kHeadDim + kOwn * lane;
  PartWeight total{-INFINITY, 0.f};
  float sum[kChunks][kOwn] = {};
#pragma unroll 1
  for (int begin = 0; begin < n_parts; begin += 32) {  // one a lane
    int const count = min(32, n_parts - begin);
    PartNote* const mine = note_at + int64_t(begin + lane) * params.q_heads;
    PartNote note{kNothing, 0};
    for (int tries = 0;; ++tries) {
      if (lane < count && note.missing()) note = load_relaxed(mine);
      if (!kWaits || !__any_sync(~0u, lane < count && note.missing())) break;
      if (tries > kPatience) __trap();  // a plan whose parts are not all deposited: an error rather than a hang
    }
    if (kWaits) {
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      if (lane < count) forget(mine);
    }
    float const lse = lane < count ? __uint_as_float(note.lse) : -INFINITY;
    float const alpha = total.follow(across<Max, 1, 32>(lse));
    float weight = total.weigh(lse);
    if (lane < count) weight *= __uint_as_float(note.step);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sum[c][e] *= alpha;
    }
#pragma unroll 1
    for (int k = 0; k < count; k += kAtOnce) {
      uint2 part[kAtOnce][kChunks];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          bool const there = has_columns && k + j < count;
          uint16_t const* const from = value_at + int64_t(begin + k + j) * params.q_heads * kHeadDim + 32 * kOwn * c;
          part[j][c] = there ? __ldcg(reinterpret_cast<uint2 const*>(from)) : make_uint2(0, 0);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float const w = __shfl_sync(~0u, weight, (k + j) % 32);  // 0 where there is no part
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          float steps[kOwn];
          from_steps(&part[j][c].x, steps);
#pragma unroll
          for (int e = 0; e < kOwn; ++e) sum[c][e] = fmaf(w, steps[e], sum[c][e]);
        }
      }
    }
  }
  float const inverse = total.inverse();
  T* const to = params.out + request * params.out_stride + head * kHeadDim;
  int const chunk = lane / 2 % 8, place = 2 * (chunk % 4) + chunk / 4;  // part_chunk, backwards
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!has_columns) continue;
    int const first_column = 64 * (lane / 16 + 2 * c) + 32 * (lane % 2) + place;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) to[first_column + 8 * e] = T(sum[c][e] * inverse);
  }
  if (params.lse && lane == 0) params.lse[int64_t(request) * params.q_heads + head] = total.lse() * kLn2;
}

// A warp per (request, query head): combines all parts where no unit closes (merge="kernel").
template <typename T, int kHeadDim>
__global__ void merge_kernel(Params<T> const params) {
  wait_for_previous_kernel();
  int const n_requests = params.plan[kHeaderRequests];
  int const* const part_begin = params.plan + params.plan[kHeaderPartBegin];
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
  for (int index = warp; index < n_requests * params.q_heads; index += warps) {
    int const request = index / params.q_heads, first = part_begin[request];
    int const n_parts = part_begin[request + 1] - first;
    if (n_parts) merge_row<kHeadDim, false>(params, request, index % params.q_heads, first, n_parts);
  }
}

}  // namespace feather
