// Who combines a request's parts: the unit of its last one, warps behind the queues, or the merge kernel (PAT 7).
#pragma once
#include "common/barrier.cuh"
#include "common/partial.cuh"
#include "common/sink.cuh"

namespace feather {

// What a row's result over all of its tokens is multiplied with in the end; its log-sum-exp, base 2, takes a sink in.
template <typename T>
__device__ __forceinline__ float final_scale(Params<T> const& params, int head, float& lse) {
  float const share = apply_sink(params, head, lse);
#if FEATHER_KV_FP8
  return share * params.v_scale;
#else
  return share;
#endif
}

// A warp's rows are one request's last part: wait for its other parts and take them in; out and lse become the
// request's. Stats are read by nobody else and left as the next run expects them.
template <int kHeadDim, class Layout, typename T, class Out>
__device__ __forceinline__ void combine(Params<T> const& params, Out& out, float (&lse)[2], Row const (&rows)[2]) {
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
  PartialStats* const stats_at = params.part_stats + int64_t(first) * params.q_heads + first_head + row;
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
    PartialStats stats{};
    for (int tries = 0;; ++tries) {
      if (asks && (tries == 0 || stats.missing())) stats = load_relaxed(stats_at + int64_t(k) * params.q_heads);
      if (!__any_sync(~0u, asks && stats.missing())) break;
      if (tries > kPatience) __trap();  // a plan whose parts are not all deposited: an error rather than a hang
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (asks) reset(stats_at + int64_t(k) * params.q_heads);
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
        float const w = total[i].add(__uint_as_float(__shfl_sync(~0u, stats.lse, from)), alpha) *
                        __uint_as_float(__shfl_sync(~0u, stats.scale, from));
#pragma unroll
        for (int c = 0; c < Layout::kChunks; ++c) {
          float quantized[kPartChunk];
          dequantize(&part[i][c].x, quantized);
#pragma unroll
          for (int e = 0; e < kPartChunk; ++e) {
            float& sum = Layout::value(out, i, c, e);
            sum = fmaf(w, quantized[e], sum * alpha);
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

// The stats that tell others of a warp's parts, to be published behind the parts' values: with the next unit's first
// stage between, there is little left to wait for.
struct PendingPublish {
  int at[2] = {-1, -1};  // in part_stats
  float lse[2], scale[2];

  template <typename T>
  __device__ __forceinline__ void publish(Params<T> const& params) {
    if (!__any_sync(~0u, max(at[0], at[1]) >= 0)) return;
    asm volatile("fence.acq_rel.gpu;" ::: "memory");  // whoever sees a row's stats sees its values
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at[i] >= 0) store(params.part_stats + at[i], {publishable(lse[i]), __float_as_uint(scale[i])});
      at[i] = -1;
    }
  }
};

// A warp has finished a work unit: parts are deposited, the results of other rows are final. What is to be published of
// the parts comes back.
template <int kHeadDim, class Layout, bool kMayClose, typename T, class Out>
__device__ __forceinline__ PendingPublish epilogue(Params<T> const& params, Out& out, float (&lse)[2],
                                               Row const (&rows)[2]) {
  if constexpr (kMayClose) {
    bool const closes = rows[0].part == kCloses || rows[1].part == kCloses;
    if (__any_sync(~0u, closes)) combine<kHeadDim, Layout>(params, out, lse, rows);
  }
  PendingPublish pending;
  if (__any_sync(~0u, max(rows[0].part, rows[1].part) >= 0)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = kMinAbsMax;
#pragma unroll
      for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < kPartChunk; ++e) most = Larger()(most, Layout::value(out, i, c, e));
      }
      pending.scale[i] = allreduce<Larger, Layout::kNear, Layout::kFar>(most) / kQuantMax;
    }
  }
  bool final[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    final[i] = rows[i].request >= 0 && rows[i].part < 0;
    if (rows[i].request < 0 || rows[i].part < 0) continue;
    int const at = rows[i].part * params.q_heads + rows[i].head;
    uint16_t* const row = params.part_out + int64_t(at) * kHeadDim;
    float const inverse = 1.f / pending.scale[i];
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      uint32_t words[kPartChunk / 2];
#pragma unroll
      for (int e = 0; e < kPartChunk; e += 2) {
        words[e / 2] = quantize(Layout::value(out, i, c, e), Layout::value(out, i, c, e + 1), inverse);
      }
      __stcg(reinterpret_cast<uint4*>(row + Layout::chunk(c)), make_uint4(words[0], words[1], words[2], words[3]));
    }
    if (Layout::leads()) pending.at[i] = at;
    pending.lse[i] = lse[i];
  }
#if FEATHER_SINKS || FEATHER_KV_FP8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!final[i]) continue;
    float const scale = final_scale(params, rows[i].head, lse[i]);
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kPartChunk; ++e) Layout::value(out, i, c, e) *= scale;
    }
  }
#endif
  __syncwarp();
  if (__any_sync(~0u, final[0] || final[1])) Layout::store(params, out, rows);
  float* const lse_to = opaque(params.lse);
  if (lse_to != nullptr && Layout::leads()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (final[i]) lse_to[int64_t(rows[i].request) * params.q_heads + rows[i].head] = lse[i] * kLn2;
    }
  }
  return pending;
}

// A warp combines a request's parts, `n_parts` from `first` on, for one query head. kWaits: until they are there, and
// leaves their stats, which nobody else reads, as the next run expects them.
template <int kHeadDim, bool kWaits, int kMost = 8, typename T>
__device__ __forceinline__ void merge_row(Params<T> const& params, int request, int head, int first, int n_parts) {
  constexpr int kOwn = 4;                               // neighbouring values of a lane
  constexpr int kChunks = (kHeadDim / kOwn + 31) / 32;  // such, of a lane
  constexpr int kAtOnce = kMost / kChunks;              // parts asked for at once
  int const lane = threadIdx.x % 32;
  bool const has_columns = kOwn * lane < kHeadDim;
  int64_t const row = int64_t(first) * params.q_heads + head;
  PartialStats* const stats_at = params.part_stats + row;
  uint16_t const* const value_at = params.part_out + row * kHeadDim + kOwn * lane;
  PartWeight total{-INFINITY, 0.f};
  float sum[kChunks][kOwn] = {};
#pragma unroll 1
  for (int begin = 0; begin < n_parts; begin += 32) {  // one a lane
    int const count = min(32, n_parts - begin);
    PartialStats* const mine = stats_at + int64_t(begin + lane) * params.q_heads;
    PartialStats stats{kNotPublished, 0};
    for (int tries = 0;; ++tries) {
      if (lane < count && stats.missing()) stats = load_relaxed(mine);
      if (!kWaits || !__any_sync(~0u, lane < count && stats.missing())) break;
      if (tries > kPatience) __trap();  // a plan whose parts are not all deposited: an error rather than a hang
    }
    if (kWaits) {
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      if (lane < count) reset(mine);
    }
    float const lse = lane < count ? __uint_as_float(stats.lse) : -INFINITY;
    float const alpha = total.update_row_max(allreduce<Max, 1, 32>(lse));
    float weight = total.weigh(lse);
    if (lane < count) weight *= __uint_as_float(stats.scale);
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
          float quantized[kOwn];
          dequantize(&part[j][c].x, quantized);
#pragma unroll
          for (int e = 0; e < kOwn; ++e) sum[c][e] = fmaf(w, quantized[e], sum[c][e]);
        }
      }
    }
  }
#if FEATHER_SINKS || FEATHER_KV_FP8
  float lse = total.lse();
  float const inverse = total.inverse() * final_scale(params, head, lse);
#else
  float const inverse = total.inverse();
#endif
  T* const to = params.out + request * params.out_stride + head * kHeadDim;
  int const chunk = lane / 2 % 8, place = 2 * (chunk % 4) + chunk / 4;  // part_chunk, backwards
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!has_columns) continue;
    int const first_column = 64 * (lane / 16 + 2 * c) + 32 * (lane % 2) + place;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) to[column_of(first_column + 8 * e)] = T(sum[c][e] * inverse);
  }
#if FEATHER_SINKS || FEATHER_KV_FP8
  if (params.lse && lane == 0) params.lse[int64_t(request) * params.q_heads + head] = lse * kLn2;
#else
  if (params.lse && lane == 0) params.lse[int64_t(request) * params.q_heads + head] = total.lse() * kLn2;
#endif
}

// Closing items without tokens, which wait for whatever was in the queues: warp `index` of all of a launch takes its
// share of their rows.
template <int kHeadDim, int kMost = 8, typename T>
__device__ void run_merges(Params<T> const& params, int index, int warps) {
  int const items = params.plan[kHeaderMerges];
  if (items == 0) return;
  int const first = params.plan[kHeaderItems] - items;
  wait_on_dependent_grids();
#pragma unroll 1
  for (int unit = index; unit < items * params.q_heads; unit += warps) {
    int const item = unit / params.q_heads, words = load_item(params, first + item);
    merge_row<kHeadDim, true, kMost>(params, item_word(words, kItemRequest), unit - item * params.q_heads,
                              item_word(words, kItemFirstPart), item_word(words, kItemParts));
  }
}

// As merge_row, for kRows neighbouring rows of a request: where there are more rows than warps, each would wait for one
// answer after the other.
template <int kHeadDim, int kRows, typename T>
__device__ __forceinline__ void merge_rows(Params<T> const& params, int request, int head, int first, int n_parts) {
  constexpr int kOwn = 4, kChunks = kHeadDim / kOwn / 32, kParts = 32 / kRows;  // a part of a row in a lane
  static_assert(kHeadDim % (32 * kOwn) == 0);
  int const lane = threadIdx.x % 32, own_row = lane / kParts, own_part = lane % kParts;
  int64_t const row = int64_t(first) * params.q_heads + head;
  uint16_t const* const value_at = params.part_out + row * kHeadDim + kOwn * lane;
  PartWeight total{-INFINITY, 0.f};  // of this lane's row
  float sum[kRows][kChunks][kOwn] = {};
#pragma unroll 1
  for (int begin = 0; begin < n_parts; begin += kParts) {
    int const count = min(kParts, n_parts - begin);
    PartialStats* const mine = params.part_stats + row + int64_t(begin + own_part) * params.q_heads + own_row;
    PartialStats stats{kNotPublished, 0};
    for (int tries = 0;; ++tries) {
      if (own_part < count && stats.missing()) stats = load_relaxed(mine);
      if (!__any_sync(~0u, own_part < count && stats.missing())) break;
      if (tries > kPatience) __trap();  // a plan whose parts are not all deposited: an error rather than a hang
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (own_part < count) reset(mine);
    float const lse = own_part < count ? __uint_as_float(stats.lse) : -INFINITY;
    float const alpha = total.update_row_max(allreduce<Max, 1, kParts>(lse));
    float weight = exp2f(lse + PartWeight::minus(total.top));
    total.weight += allreduce<Sum, 1, kParts>(weight);
    if (own_part < count) weight *= __uint_as_float(stats.scale);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float const factor = __shfl_sync(~0u, alpha, r * kParts);
#pragma unroll
      for (int i = 0; i < kChunks * kOwn; ++i) sum[r][i / kOwn][i % kOwn] *= factor;
    }
#pragma unroll 2
    for (int k = 0; k < count; ++k) {
      uint2 part[kRows][kChunks];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          uint16_t const* const from =
              value_at + (int64_t(begin + k) * params.q_heads + r) * kHeadDim + 32 * kOwn * c;
          part[r][c] = __ldcg(reinterpret_cast<uint2 const*>(from));
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float const w = __shfl_sync(~0u, weight, r * kParts + k);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          float quantized[kOwn];
          dequantize(&part[r][c].x, quantized);
#pragma unroll
          for (int e = 0; e < kOwn; ++e) sum[r][c][e] = fmaf(w, quantized[e], sum[r][c][e]);
        }
      }
    }
  }
  int const chunk = lane / 2 % 8, place = 2 * (chunk % 4) + chunk / 4;  // part_chunk, backwards
  float const inverse = total.inverse(), lse = total.lse() * kLn2;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float const scale = __shfl_sync(~0u, inverse, r * kParts);
    T* const to = params.out + request * params.out_stride + (head + r) * kHeadDim;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      int const first_column = 64 * (lane / 16 + 2 * c) + 32 * (lane % 2) + place;
#pragma unroll
      for (int e = 0; e < kOwn; ++e) to[first_column + 8 * e] = T(sum[r][c][e] * scale);
    }
  }
  if (params.lse && own_part == 0) params.lse[int64_t(request) * params.q_heads + head + own_row] = lse;
}

// As run_merges, kRows rows at once; q_heads is a multiple of them.
template <int kHeadDim, int kRows, typename T>
__device__ void run_row_merges(Params<T> const& params, int index, int warps) {
  int const items = params.plan[kHeaderMerges], groups = params.q_heads / kRows;
  int const first = params.plan[kHeaderItems] - items;
  wait_on_dependent_grids();
#pragma unroll 1
  for (int unit = index; unit < items * groups; unit += warps) {
    int const item = unit / groups, words = load_item(params, first + item);
    merge_rows<kHeadDim, kRows>(params, item_word(words, kItemRequest), kRows * (unit - item * groups),
                                item_word(words, kItemFirstPart), item_word(words, kItemParts));
  }
}

// A warp per (request, query head): combines all parts where no unit closes (merge="kernel").
template <typename T, int kHeadDim>
__global__ void merge_kernel(Params<T> const params) {
  wait_on_dependent_grids();
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
