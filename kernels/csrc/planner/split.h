// Cuts row tiles into chunks of long KV (PAT 6).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "heuristics.h"
#include "planner/plan.h"
#include "planner/rounds.h"
#include "planner/row_tiles.h"

namespace feather {

// The shortest chunk that a tile's packs are cut into.
inline int64_t least_chunk(const Config& config, int32_t tile) {
  return std::max<int64_t>(config.min_chunk, kMinSteps * config.tile(tile).n);
}

// The longest chunk of each tile, in tokens, before any widening. Balanced: a share of what the tile has in all, so
// that every team has a chunk; but a chunk is not so short that its part costs as much as it does. Groups: a share of
// what a group holds, whatever there is in all (PackInfer 3.1).
template <class Least>
void chunk_limits(const Config& config, const Packing& packing, const std::vector<RowTile>& rows, Least least,
                  int64_t* limit) {
  int64_t tokens[kMaxTiles] = {}, all = 0;
  for (const RowTile& row : rows) {
    const int64_t length = packing.packs[row.pack].length();
    tokens[row.tile] += length;
    all += length;
  }
  for (int32_t t = 0; t < config.n_tiles; ++t) {
    if (config.split == kSplitNone) limit[t] = INT32_MAX;
    if (config.split == kSplitMean) limit[t] = std::max<int64_t>(1, all / std::max<int64_t>(1, rows.size()));
    if (config.balances()) {
      const double share = config.split == kSplitGroups
                               ? config.alpha[t] * static_cast<double>(config.group_capacity)
                               : config.alpha[t] * static_cast<double>(tokens[t] * config.num_kv_heads) / config.n_sm;
      const double chunk = std::min<double>(std::max(share, static_cast<double>(least(t))), INT32_MAX / 2);
      limit[t] = round_up(static_cast<int64_t>(std::ceil(chunk)), config.tile(t).n);
    }
  }
}

// Who takes a tile's units, where single warps do.
struct Warps {
  int64_t count;
  int64_t busy;     // that have a chunk where packs make no whole round
  int64_t units;    // to an item
  int64_t least;    // chunk
  // Of chunks may follow the whole ones: units are dealt out, so that no warp has one more than others.
  bool two_rounds;
};

// Cuts the last packs of a tile whose units single warps take, and only them. They take them longest first: as many of
// the longest as make whole rounds of the warps stay whole, unless much longer than a warp's even share of all tokens.
// The rest is cut as short as gives every warp one chunk more, or less, but not shorter than the tile's least (even
// pieces of a pack may be); where there is no whole round, as short as gives the busy ones one. If one chunk for each
// makes some much longer than an even share, as packs of unlike length in nearly as many units as there are warps do,
// all others would wait for those: they are cut to the share, and some warps have two. Where a third of the warps would
// have none, two rounds of chunks that are shorter than half as long take less time, if they are not so short that what
// a unit costs by itself decides.
inline void balance_warps(const Config& config, const Packing& packing, int32_t tile, const Warps& warps,
                          Schedule& out) {
  const int32_t step = config.tile(tile).n;
  auto length = [](uint64_t key) { return static_cast<int64_t>(key >> 32); };
  auto row = [&](uint64_t key) -> RowTile& { return out.rows[UINT32_MAX - static_cast<uint32_t>(key)]; };
  int64_t left = 0, with_tokens = 0;
  auto& queue = out.queue;
  queue.clear();
  for (size_t i = 0; i < out.rows.size(); ++i) {
    const Pack& pack = packing.packs[out.rows[i].pack];
    if (out.rows[i].tile != tile || pack.chunk) continue;
    const int64_t tokens = pack.length();
    queue.push_back(static_cast<uint64_t>(tokens) << 32 | (UINT32_MAX - static_cast<uint32_t>(i)));
    left += tokens;
    with_tokens += tokens > 0;
  }
  const size_t first =  // in whole rounds
      static_cast<size_t>(with_tokens * warps.units / warps.count * warps.count / warps.units);
  if (first > 0) {
    const int64_t even = round_up(std::max(warps.least, left * warps.units / warps.count * 5 / 4), step);
    if (first < queue.size()) std::nth_element(queue.begin(), queue.begin() + first, queue.end(), std::greater<>());
    for (size_t i = 0; i < first; ++i) {
      row(queue[i]).longest = static_cast<int32_t>(std::min<int64_t>(even, INT32_MAX));
      left -= length(queue[i]);
      with_tokens -= length(queue[i]) > 0;
    }
  }
  auto chunks_of = [&](int64_t chunk, int64_t most) {  // counted no further than beyond `most`
    int64_t chunks = with_tokens > most ? with_tokens : 0;
    for (size_t i = first; i < queue.size() && chunks <= most; ++i) {
      chunks += (length(queue[i]) + chunk - 1) / chunk;
    }
    return chunks;
  };
  // From the share of so many warps on, the first of some longer and longer chunks that makes no more than `most`.
  auto chunk_for = [&](int64_t sharing, int64_t most) {
    int64_t chunk = round_up(std::max(warps.least, left * warps.units / sharing), step);
    for (int tries = 0; tries < 8 && chunks_of(chunk, most) > most; ++tries) chunk = round_up(chunk + chunk / 4, step);
    return chunk;
  };
  const int64_t round = warps.count / warps.units;
  int64_t chunk = chunk_for(first > 0 ? warps.count : warps.busy, round);
  const int64_t share = round_up(std::max(warps.least, left * warps.units / warps.count), step);
  if (first == 0 && static_cast<double>(chunk) > kMostShares * static_cast<double>(share)) chunk = share;
  if (warps.two_rounds && 3 * chunks_of(chunk, round) <= 2 * round) {
    const int64_t shorter = chunk_for(2 * warps.count, 2 * round);
    if (2 * shorter < chunk && shorter >= kTwoRoundsSteps * step) chunk = shorter;
  }
  for (size_t i = first; i < queue.size(); ++i) {
    row(queue[i]).longest = static_cast<int32_t>(std::min<int64_t>(chunk, INT32_MAX));
  }
}

// Single warps take the units of the smallest tiles: tails, and what a few requests share. Where they have all the
// work, nothing hides how long a chunk takes, so it may be shorter; and tails that are no whole round are cut for two
// warps of three: chunks that much longer are as fast, and there are fewer parts.
inline void balance_single_warps(const Config& config, const Packing& packing, Schedule& out) {
  const int32_t tail = config.tail_tile();
  const bool alone = std::all_of(out.rows.begin(), out.rows.end(),
                                 [&](const RowTile& row) { return config.tile(row.tile).m <= kWarpRows; });
  for (int32_t tile = 0; tile < config.n_tiles && config.tile(tile).m <= kWarpRows; ++tile) {
    const bool tails = tile == tail;
    Warps warps{};
    warps.count = config.n_sm * (tails ? config.tail_warps : config.teams(tile));
    warps.busy = alone && tails ? std::max<int64_t>(1, warps.count * 2 / 3) : warps.count;
    warps.units = config.num_kv_heads / (tails ? out.head_pack : 1);
    warps.least = alone ? config.min_chunk : least_chunk(config, tile);
    warps.two_rounds = !tails && config.split == kSplitRounds;
    balance_warps(config, packing, tile, warps, out);
  }
}

// Counts what a cut makes in all, with the items that have no tokens.
inline void count_all(const Config& config, Schedule& out) {
  out.n_items = out.n_cut + static_cast<int64_t>(out.folded.size());
  out.n_parts = out.n_closing = 0;
  for (const Parts parts : out.parts) {
    out.n_parts += config.deposits(parts);
    out.n_closing += config.fused() && parts.count > 1;
    out.n_items += config.closed_apart(parts);
  }
  out.n_members += out.n_items - out.n_cut - static_cast<int64_t>(out.folded.size());
}

// Cuts every row tile into even chunks, none longer than widen times what it may be, and counts what that makes.
inline void cut(const Config& config, const Packing& packing, double widen, Schedule& out) {
  const int32_t tail = config.tail_tile();
  std::fill(out.parts.begin(), out.parts.end(), Parts{});
  out.n_cut = out.n_members = 0;
  for (RowTile& row : out.rows) {
    const Pack& pack = packing.packs[row.pack];
    const int64_t length = pack.length();
    const double widest = static_cast<double>(row.longest) * widen;
    const int64_t longest = static_cast<int64_t>(std::min<double>(widest, INT32_MAX));
    row.n_chunks = 1;
    row.chunk = pack.length();
    if (length > longest) {
      const int64_t pieces = (length + longest - 1) / longest;
      int64_t chunk = pack.chunk ? longest : (length + pieces - 1) / pieces;
      if (config.balances() && !pack.chunk) chunk = round_up(chunk, config.tile(row.tile).n);
      row.chunk = static_cast<int32_t>(chunk);
      row.n_chunks = static_cast<int32_t>((length + chunk - 1) / chunk);
    }
    out.n_cut += row.n_chunks;
    out.n_members += int64_t{row.n_chunks} * row.count;
    const int32_t chunks = row.n_chunks, count = row.count;
    const bool in_tail = count == 1 && row.tile == tail;
    for (int32_t i = 0; i < count; ++i) out.parts[packing.members[row.first + i]].add(chunks, in_tail);
  }
  count_all(config, out);
}

// The whole split. Where items, members or parts exceed their capacity, chunks are widened until all fit.
inline void schedule(const Config& config, const Forest& forest, const Packing& packing, RoundsScratch& scratch,
                     Schedule& out) {
  out.parts.resize(forest.n_requests);
  const int32_t shared = make_row_tiles(config, packing, out);
  fold_tails(config, packing, out);
  auto least = [&](int32_t tile) { return tile == shared ? config.min_chunk : least_chunk(config, tile); };
  int64_t limit[kMaxTiles];
  chunk_limits(config, packing, out.rows, least, limit);
  for (RowTile& row : out.rows) {
    const int32_t fixed = packing.packs[row.pack].chunk;
    row.longest = static_cast<int32_t>(fixed ? fixed : std::min<int64_t>(limit[row.tile], INT32_MAX));
  }
  out.head_pack = choose_head_pack(config);
  if (config.split == kSplitRounds) Rounds(config, packing, out, scratch).settle(least);
  if (config.balances() && config.split != kSplitGroups) balance_single_warps(config, packing, out);
  out.widened = 0;
  for (double widen = 1;; widen *= kWiden) {
    cut(config, packing, widen, out);
    if (out.n_items <= config.max_items && out.n_members <= config.max_members && out.n_parts <= config.max_parts) {
      return;
    }
    const bool cut_up = out.n_cut > static_cast<int64_t>(out.rows.size());
    FEATHER_REQUIRE(cut_up, "a plan of " << out.n_items << " items, " << out.n_members << " members and " << out.n_parts
                                         << " partial rows exceeds the planner's " << config.max_items << ", "
                                         << config.max_members << " and " << config.max_parts
                                         << ": raise max_items, max_members or max_parts");
    out.widened = 1;
  }
}

}  // namespace feather
