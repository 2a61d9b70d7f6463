// A team of warps works through the queue of its tile shape.
#pragma once
#include <algorithm>

#include "common/merge.cuh"
#include "sm80/kv_stream.cuh"
#include "sm80/warp_tile.cuh"

namespace feather {

// A tile shape of the portable path: teams of kWarps warps share KV tiles of kTokens tokens, m = 16 kWarps.
template <typename T, int kHeadDim, int kWarps_, int kTokens_, int kRingBytesPerWarp>
struct WarpTeam {
  static constexpr int kWarps = kWarps_, kTokens = kTokens_, kBlock = 16;
  using Rows = SwizzledRows<kv_places(kHeadDim), kTokens>;
  static constexpr int kStageBytes = 2 * Rows::kElements * int(sizeof(T));
  // A ring needs two stages: where a team's share of the rings is less, fewer teams have them.
  static constexpr int kRingBytes = std::max(kWarps * kRingBytesPerWarp, 2 * kStageBytes);
  static constexpr int kStages = kRingBytes / kStageBytes;
  // Teams of a CTA of so many warps.
  static constexpr int teams(int warps) { return std::min(warps / kWarps, warps * kRingBytesPerWarp / kRingBytes); }
  using Stream = KvStream<T, kHeadDim, kWarps, kTokens, kStages, kBlock>;
  static constexpr int kMemberWords = kStages * Stream::kMemberWords;  // of a team

  // Work through a queue. `team` counts within the CTA, of `teams`; smem, barriers and infos are the team's. With a
  // step between its units, they are dealt out in turn; without, popped.
  static __device__ void run(Params<T> const& params, Queue const& queue, bool fixed_start, int team, int teams,
                             unsigned char* smem, uint64_t* barriers, StageInfo* infos, Source* source, int* members,
                             int step = 0) {
    int const warp = threadIdx.x / 32 % kWarps;
    Stream stream(params, reinterpret_cast<T*>(smem), barriers, barriers + kStages, infos, source, members);
    WarpTile<T, kHeadDim, Rows> tile;
    using Layout = typename decltype(tile)::Layout;
    if (warp == 0) {
      stream.open(queue, fixed_start ? team * int(gridDim.x) + int(blockIdx.x) : -1, teams * int(gridDim.x), step);
    }
    bool last = false;
    Row rows[2];
    // The first turn only fills the ring: there is one copy of that code.
#pragma unroll 1
    for (bool filled = false;; filled = true) {
      if (filled) {
        StageInfo const info = stream.wait();
        if (info.tokens < 0) break;
        if (info.edges & kFirst) {
          T const* queries[2];
          find_queries<T, kHeadDim>(params, info, stream.members(), 16 * warp, queries);
          tile.begin(queries);
        }
        last = info.edges & kLast;
        if (last) find_rows<Layout>(params, info, stream.members(), 16 * warp, rows);
        if (16 * warp < info.n_members * params.group) {
#pragma unroll 1
          for (int token = 0; token < info.tokens; token += kBlock) {
            tile.attend(stream.k_tile() + Rows::at(token, 0), stream.v_tile() + Rows::at(token, 0),
                        info.tokens - token, params);
          }
        }
        stream.release();
      }
      if (warp == 0) stream.fill();  // the next unit's rows travel while this one is written
      if (!last) continue;
      float lse[2];
      tile.end(lse);
      epilogue<kHeadDim, Layout, kWarps == 1>(params, tile.out, lse, rows).publish(params);
      last = false;
    }
  }
};

}  // namespace feather
