// A warp works through the queue of tails.
#pragma once
#include "common/merge.cuh"
#include "common/tail_stream.cuh"

namespace feather {

template <typename T, int kHeadDim, int kHeads>
struct TailWarp {
  using Stream = TailStream<T, kHeadDim, kHeads>;
  using Tile = typename Stream::Tile;
  using Layout = typename Tile::Layout;

  static __device__ void fetch(Params<T> const& params, Tile& tile, TailUnit const& unit, int rows) {
    int const row = threadIdx.x % 32 / 4;
    T const* const first = params.q + unit.request * params.q_stride + unit.head * params.group * kHeadDim;
    tile.fetch(row < rows ? first + row * kHeadDim : nullptr);
  }

  static __device__ void run(Params<T> const& params, Stream& stream) {
    int const rows = kHeads * params.group;
    Tile tile;
    TailUnit unit;
    int slots = 0, tokens = 0, part = 0;  // left of the unit; the next to be taken in
    bool k_turn = false, fetched = false;
    // The first turns only fill the ring. They share the code of the others, so that all instructions are there when
    // the first slot is.
#pragma unroll 1
    for (int turn = -stream.n_slots;; ++turn) {
      if (turn >= 0) {
        if (slots == 0 && stream.passed_over == 0) {
          if (stream.begun == stream.asked) break;
          unit = stream.units[stream.begun++ % kTailUnits];
          if (!fetched) fetch(params, tile, unit, rows);
          fetched = false;
          tile.begin();
          tokens = unit.tokens;
          part = 0;
          k_turn = tokens > 0;
          // A unit with nothing to attend to has a slot all the same.
          slots = max(1, (max(tokens, 0) + 15) / 16 * 2 + (unit.n_parts + Stream::kParts - 1) / Stream::kParts);
        }
        T* const slot = stream.wait();
        if (k_turn) {
          tile.score(slot, params.group);
        } else if (tokens > 0) {
          tile.accumulate(slot, params.group);
          tokens -= 16;
        } else if (slots > 0) {
#pragma unroll 1
          for (int i = 0; i < Stream::kParts && part < unit.n_parts; ++i, ++part) {
            uint16_t const* const values = reinterpret_cast<uint16_t const*>(slot + i * Stream::kPartElements);
            tile.combine(values, Stream::stats_of(slot, i), rows);
          }
        }
        __syncwarp();  // the slot has been read
      }
      stream.ask();
      if (opaque(turn) < 0) continue;
      if (slots == 0) {
        --stream.passed_over;
        continue;
      }
      bool const scored = k_turn ? tokens <= 16 : tokens <= 0;  // all of this unit
      if (scored && !fetched && stream.begun < stream.asked) {  // the next one's queries, in time to be there
        fetch(params, tile, stream.units[stream.begun % kTailUnits], rows);
        fetched = true;
      }
      if (k_turn) tile.online_softmax(tokens, params);
      k_turn = !k_turn && tokens > 0;
      if (--slots > 0) continue;
      float lse[2];
      tile.end(lse);
      Row result[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const row = Layout::row(i);
        if (row < rows) result[i] = {unit.request, unit.head * params.group + row, max(unit.part, kOnly)};
      }
      epilogue<kHeadDim, Layout, false>(params, tile.out, lse, result).publish(params);
      stream.finish_unit();
    }
  }
};

}  // namespace feather
