// Cuts packs into what one thread block runs: row tiles (PAT 5.2) and chunks of long KV (PAT 6).
#pragma once

#include <cmath>

#include "plan.h"

namespace feather {

// Row tiles of a pack, whole requests each: one tile where the largest holds all rows, else as few as that one can.
// Full tiles and a remainder pad no more rows than even tiles; even ones are taken when they pad as little.
inline void add_row_tiles(const Config& config, const Packing& packing, int32_t pack, std::vector<RowTile>& rows) {
  const Pack& p = packing.packs[pack];
  const int64_t group = config[kGroupSize];
  const int32_t largest = config.n_tiles() - 1;
  const int32_t capacity = static_cast<int32_t>(config.tile(largest).m / group);
  if (p.count <= capacity) {
    rows.push_back({pack, p.first, p.count, config.tile_for(p.count * group), 0, 0});
    return;
  }
  const int32_t tiles = (p.count + capacity - 1) / capacity;
  const int32_t remainder = p.count - (tiles - 1) * capacity;
  const bool even = config.tile_for(remainder * group) == largest;
  for (int32_t i = 0, first = 0; i < tiles; ++i) {
    const int32_t last = even ? static_cast<int32_t>(int64_t{p.count} * (i + 1) / tiles)
                              : std::min(p.count, first + capacity);
    rows.push_back({pack, p.first + first, last - first, config.tile_for((last - first) * group), 0, 0});
    first = last;
  }
}

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// The longest chunk of each tile, in tokens, before any widening.
inline void chunk_limits(const Config& config, const Packing& packing, const std::vector<RowTile>& rows,
                         int64_t* limit) {
  int64_t tokens = 0;
  for (const RowTile& row : rows) tokens += packing.packs[row.pack].stop - packing.packs[row.pack].start;
  for (int32_t t = 0; t < config.n_tiles(); ++t) {
    if (config[kSplit] == kSplitNone) limit[t] = INT32_MAX;
    if (config[kSplit] == kSplitMean) limit[t] = std::max<int64_t>(1, tokens / std::max<int64_t>(1, rows.size()));
    if (config[kSplit] == kSplitBalanced) {
      const double share = config.alpha(t) * static_cast<double>(tokens * config[kKvHeads]) / config[kProcessors];
      const double chunk = std::min<double>(std::max<double>(share, config[kMinChunk]), INT32_MAX / 2);
      limit[t] = round_up(static_cast<int64_t>(std::ceil(chunk)), config.tile(t).n);
    }
  }
}

// Cuts every row tile into even chunks, none longer than widen * its tile's limit, and counts what that makes.
inline void cut(const Config& config, const Packing& packing, const int64_t* limit, double widen, Schedule& out) {
  std::fill(out.parts.begin(), out.parts.end(), 0);
  out.n_items = out.n_members = out.n_parts = 0;
  for (RowTile& row : out.rows) {
    const Pack& pack = packing.packs[row.pack];
    const int64_t length = pack.stop - pack.start;
    const double widest = static_cast<double>(pack.chunk ? pack.chunk : limit[row.tile]) * widen;
    const int64_t longest = static_cast<int64_t>(std::min<double>(widest, INT32_MAX));
    row.n_chunks = 1;
    row.chunk = pack.stop - pack.start;
    if (length > longest) {
      const int64_t pieces = (length + longest - 1) / longest;
      int64_t chunk = pack.chunk ? longest : (length + pieces - 1) / pieces;
      if (config[kSplit] == kSplitBalanced && !pack.chunk) chunk = round_up(chunk, config.tile(row.tile).n);
      row.chunk = static_cast<int32_t>(chunk);
      row.n_chunks = static_cast<int32_t>((length + chunk - 1) / chunk);
    }
    out.n_items += row.n_chunks;
    out.n_members += int64_t{row.n_chunks} * row.count;
    for (int32_t i = 0; i < row.count; ++i) out.parts[packing.members[row.first + i]] += row.n_chunks;
  }
  for (const int32_t parts : out.parts) out.n_parts += parts > 1 ? parts : 0;
}

// The whole split. Where items, members or parts exceed their capacity, chunks are widened until all fit.
inline void schedule(const Config& config, const Forest& forest, const Packing& packing, Schedule& out) {
  out.rows.clear();
  out.parts.resize(forest.n_requests);
  for (size_t pack = 0; pack < packing.packs.size(); ++pack) {
    add_row_tiles(config, packing, static_cast<int32_t>(pack), out.rows);
  }
  int64_t limit[kMaxTiles];
  chunk_limits(config, packing, out.rows, limit);
  out.widened = 0;
  for (double widen = 1;; widen *= 1.25) {
    cut(config, packing, limit, widen, out);
    if (out.n_items <= config[kMaxItems] && out.n_members <= config[kMaxMembers] && out.n_parts <= config[kMaxParts]) {
      return;
    }
    const bool cut_up = out.n_items > static_cast<int64_t>(out.rows.size());
    FEATHER_REQUIRE(cut_up, "a plan of " << out.n_items << " items, " << out.n_members << " members and " << out.n_parts
                                         << " partial rows exceeds the planner's " << config[kMaxItems] << ", "
                                         << config[kMaxMembers] << " and " << config[kMaxParts]
                                         << ": raise max_items, max_members or max_parts");
    out.widened = 1;
  }
}

}  // namespace feather
