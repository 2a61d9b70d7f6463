// Cuts packs into row tiles (PAT 5.2), whole requests each, and says in which tile each runs: the smallest that holds its
// rows, but for long packs of few requests, few packs, and tails alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "plan.h"

namespace feather {

// Row tiles of a pack, or of so many of its members, whole requests each, none larger than `largest`, which holds
// `capacity` requests. Full tiles and a remainder pad no more rows than even tiles; even ones are taken when they pad as
// little.
inline void add_row_tiles(const Config& config, int32_t pack, int32_t first, int32_t count, int32_t largest,
                          int32_t capacity, std::vector<RowTile>& rows) {
  const auto [tiles, last_tile] = config.cut_rows(count, capacity);
  if (tiles == 1) {
    rows.push_back({pack, first, count, last_tile, 0, 0, 0});
    return;
  }
  const bool even = last_tile == largest;
  for (int32_t i = 0, begin = 0; i < tiles; ++i) {
    const int32_t end = even ? static_cast<int32_t>(int64_t{count} * (i + 1) / tiles) : std::min(count, begin + capacity);
    rows.push_back({pack, first + begin, end - begin, config.tile_for(end - begin), 0, 0, 0});
    begin = end;
  }
}

constexpr int32_t kNoTile = -1;

// KV heads to a unit of the tail tile's queue. Two fill more of its eight rows and share a unit's own cost: that is
// worth more than twice as many units, even where those would not keep every warp busy.
inline int32_t choose_head_pack(const Config& config) {
  const bool pairs = config.tile(config.tail_tile()).m == kThinRows && 2 * config[kGroupSize] <= kThinRows &&
                     config[kKvHeads] % 2 == 0;
  if (!pairs) return 1;
  if (config[kHeadPack]) return static_cast<int32_t>(config[kHeadPack]);
  return config[kHeadDim] <= 128 ? 2 : 1;  // beyond, a warp's ring would have one slot
}

// Where packs are gathered, whose units a tile's teams take in turn.
struct Gathered {
  int32_t tile = kNoTile;
  int64_t longest = 0;  // chunk, in tokens; 0: as long as those of others
};

// Packs of which none is shared.
struct Tails {
  int64_t count, tokens, longest;
  double mean() const { return static_cast<double>(tokens) / static_cast<double>(count); }
  bool unlike() const { return static_cast<double>(longest) > 2 * mean(); }
};

// Whether teams take tails, in so many rounds of a KV head each, better than single warps. In one round they are cut so
// that every team has a chunk. With unlike lengths in more rounds, no chunk longer than an eighth of a team's share,
// teams even out what they have, at little cost where tails are long; warps have a quarter as many rounds or less, and
// take long for a long one. With like lengths, long ones, it depends on how full the last round is.
inline bool suits_teams(const Config& config, const Tails& tails, double rounds) {
  constexpr double kUnlikeRounds = 4, kUnlikeMean = 500, kAlikeRounds = 8, kLastRound = 0.6, kAlikeMean = 1000;
  if (rounds <= 1) return true;
  if (tails.unlike()) return rounds >= kUnlikeRounds * choose_head_pack(config) && tails.mean() >= kUnlikeMean;
  return rounds <= kAlikeRounds && rounds - std::floor(rounds) >= kLastRound && tails.mean() >= kAlikeMean;
}

// Few packs go to the smallest tile of teams, all of them, in several row tiles where they need to: nothing waits there
// for anything but to be merged, and a team takes several times as many tokens at once. No tile is returned where they
// are more, or requests must not be closed apart. Beyond so many tokens for a team handing out units one by one to
// single warps is faster, and beyond so many rounds of units: the more of them, the more kinds of tiles would follow
// each other otherwise. With the split `rounds`, tails alone go there by a rule of their own, too.
inline Gathered gather(const Config& config, const Packing& packing, Schedule& out) {
  constexpr double kMostRounds = 3, kMostTokens = 3000, kShareChunks = 8;
  if (!config.balances() || config[kFanIn] == 0) return {};
  int32_t team = 0;
  while (config.tile(team).m <= kWarpRows) {
    if (++team == config.n_tiles()) return {};
  }
  const double teams = static_cast<double>(config.teams(team) * config[kProcessors]);
  const double kv_heads = static_cast<double>(config[kKvHeads]);
  const int32_t capacity = config.capacity(team);
  bool small = false, medium = false, large = false;
  int64_t count = 0, tokens = 0, longest = 0;
  for (const RowTile& row : out.rows) {
    small |= row.tile < team && row.tile != config.tail_tile();
    medium |= row.tile == team;
    large |= row.tile > team;
    const Pack& pack = packing.packs[row.pack];
    if (pack.chunk) return {};
    const int64_t tiles = (row.count + capacity - 1) / capacity;
    count += tiles, tokens += tiles * pack.length();
    longest = std::max<int64_t>(longest, pack.length());
  }
  const double rounds = static_cast<double>(count) * kv_heads / teams;
  double most_rounds = large ? 1 : 1.5;
  if (large && medium) most_rounds = 2;
  if (small && (large || medium)) most_rounds = kMostRounds;
  const bool few = rounds <= most_rounds && static_cast<double>(tokens) * kv_heads <= kMostTokens * teams;
  const Tails tails{count, tokens, longest};
  const bool alone = config[kSplit] == kSplitRounds && !small && !medium && !large;
  if (!few && !(alone && suits_teams(config, tails, rounds))) return {};
  out.larger.swap(out.rows);
  out.rows.clear();
  for (const RowTile& row : out.larger) {
    add_row_tiles(config, row.pack, row.first, row.count, team, capacity, out.rows);
  }
  for (RowTile& row : out.rows) row.tile = team;
  Gathered gathered{team};
  if (!few && rounds > 1 && tails.unlike()) {
    const double share = static_cast<double>(tokens) * kv_heads / teams;
    gathered.longest = static_cast<int64_t>(std::max(share / kShareChunks, tails.mean()));
  }
  return gathered;
}

// A few long packs in a tile of single warps would keep few warps busy for long: they go to the next larger tile, whose
// teams take several times as many tokens at once.
inline void promote_long(const Config& config, const Packing& packing, std::vector<RowTile>& rows) {
  constexpr int64_t kLong = 256;  // tokens
  auto length = [&](const RowTile& row) { return packing.packs[row.pack].length(); };
  auto shared = [&](const RowTile& row) { return row.count > 1 && config.tile(row.tile).m <= kWarpRows; };
  int64_t tokens = 0;
  for (const RowTile& row : rows) tokens += shared(row) ? length(row) : 0;
  for (RowTile& row : rows) {
    if (!shared(row) || row.tile + 1 == config.n_tiles()) continue;
    const int64_t share = tokens * config[kKvHeads] / (config.teams(row.tile) * config[kProcessors]);  // of a warp
    if (length(row) >= std::max(kLong, 4 * share)) ++row.tile;
  }
}

// The row tiles of all packs, each in its tile.
inline Gathered make_row_tiles(const Config& config, const Packing& packing, Schedule& out) {
  out.rows.clear();
  const int32_t largest = config.n_tiles() - 1, capacity = config.capacity(largest);
  for (size_t pack = 0; pack < packing.packs.size(); ++pack) {
    const Pack& whole = packing.packs[pack];
    add_row_tiles(config, static_cast<int32_t>(pack), whole.first, whole.count, largest, capacity, out.rows);
  }
  if (config.balances()) promote_long(config, packing, out.rows);
  return gather(config, packing, out);
}

}  // namespace feather
