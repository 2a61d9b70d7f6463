// Cuts packs into row tiles (PAT 5.2), whole requests each, and says in which tile each runs: the smallest that holds
// its rows, but for long packs of few requests, few packs, and tails alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "heuristics.h"
#include "planner/plan.h"

namespace feather {

// Row tiles of a pack, or of so many of its members, whole requests each, none larger than `largest`, which holds
// `capacity` requests. Full tiles and a remainder pad no more rows than even tiles; even ones are taken when they pad
// as little.
inline void add_row_tiles(const Config& config, int32_t pack, int32_t first, int32_t count, int32_t largest,
                          int32_t capacity, std::vector<RowTile>& rows) {
  const auto [tiles, last_tile] = config.cut_rows(count, capacity);
  if (tiles == 1) {
    rows.push_back({pack, first, count, last_tile});
    return;
  }
  const bool even = last_tile == largest;
  for (int32_t i = 0, begin = 0; i < tiles; ++i) {
    const int32_t share = static_cast<int32_t>(int64_t{count} * (i + 1) / tiles);
    const int32_t end = even ? share : std::min(count, begin + capacity);
    rows.push_back({pack, first + begin, end - begin, config.tile_for(end - begin)});
    begin = end;
  }
}

constexpr int32_t kNoTile = -1;

// KV heads to a unit of the tail tile's queue. Two fill more of its eight rows and share a unit's own cost: that is
// worth more than twice as many units, even where those would not keep every warp busy.
inline int32_t choose_head_pack(const Config& config) {
  const bool pairs = config.tile(config.tail_tile()).m == kThinRows && 2 * config.group_size <= kThinRows &&
                     config.num_kv_heads % 2 == 0;
  if (!pairs) return 1;
  if (config.head_pack) return static_cast<int32_t>(config.head_pack);
  return config.head_dim <= kHeadPackWidest ? 2 : 1;
}

// A tile whose teams take packs of other tiles, too: the smallest that teams run and a request's rows fit into.
inline int32_t team_tile(const Config& config) {
  const int64_t least = std::max<int64_t>(kWarpRows + 1, config.group_size);
  int32_t team = 0;
  while (team < config.n_tiles && config.tile(team).m < least) ++team;
  return team < config.n_tiles ? team : kNoTile;
}

// Rounds of so many packs for the teams of a tile, a KV head of a pack at a time.
inline double rounds_of(const Config& config, int32_t team, int64_t packs) {
  return static_cast<double>(packs * config.num_kv_heads) /
         static_cast<double>(config.teams(team) * config.n_sm);
}

// Few packs go to the smallest tile of teams, all of them, in several row tiles where they need to: nothing waits there
// for anything but to be merged, and a team takes several times as many tokens at once. Beyond so many tokens for a
// team handing out units one by one to single warps is faster, and beyond so many rounds of units: the more of them,
// the more kinds of tiles would follow each other otherwise. With the splits `rounds` and `groups`, tails alone go there in
// up to one round, however long they are.
inline bool merge_into_warpgroup_tile(const Config& config, const Packing& packing, int32_t team, Schedule& out) {
  const int32_t capacity = config.capacity(team);
  bool small = false, medium = false, large = false;
  int64_t count = 0, tokens = 0;
  for (const RowTile& row : out.rows) {
    small |= row.tile < team && row.tile != config.tail_tile();
    medium |= row.tile == team;
    large |= row.tile > team;
    const Pack& pack = packing.packs[row.pack];
    const int64_t tiles = (row.count + capacity - 1) / capacity;
    count += tiles, tokens += tiles * pack.length();
  }
  const double rounds = rounds_of(config, team, count);
  double most_rounds = large ? kFewRoundsLarge : kFewRounds;
  if (large && medium) most_rounds = kFewRoundsMedium;
  if (small && (large || medium)) most_rounds = kFewRoundsMixed;
  const bool few = rounds <= most_rounds && rounds_of(config, team, tokens) <= kFewTokens;
  const bool alone = config.gives_tails() && !small && !medium && !large;
  if (!few && !(alone && rounds <= 1)) return false;
  out.larger.swap(out.rows);
  out.rows.clear();
  for (const RowTile& row : out.larger) {
    add_row_tiles(config, row.pack, row.first, row.count, team, capacity, out.rows);
  }
  for (RowTile& row : out.rows) row.tile = team;
  return true;
}

// Tails go to the smallest tile of teams, where packs are not few, if that suits them. Teams ask for one unit after the
// other and so even out what unlike tails take, in chunks no longer than an even share; warps have a quarter as many
// rounds or less, and are long at a long one. Beside other packs, tails must not be short: each is a part more, and
// does not close its request. With like lengths, long ones and nothing else, the last round must be rather full, or one
// of many. Whether that tile has all packs then.
inline bool give_tails_to_teams(const Config& config, const Packing& packing, int32_t team, Schedule& out) {
  const auto is_tail = [&](const RowTile& row) { return row.count == 1 && row.tile == config.tail_tile(); };
  int64_t count = 0, tokens = 0, longest = 0;
  for (const RowTile& row : out.rows) {
    if (!is_tail(row)) continue;
    const int64_t length = packing.packs[row.pack].length();
    ++count, tokens += length, longest = std::max(longest, length);
  }
  const bool alone = count == static_cast<int64_t>(out.rows.size());
  const double rounds = rounds_of(config, team, count);
  const double mean = static_cast<double>(tokens) / static_cast<double>(std::max<int64_t>(1, count));
  const bool unlike = static_cast<double>(longest) > kUnlike * mean;
  const bool filled = rounds >= kManyTailRounds || rounds - std::floor(rounds) >= kLastTailRound;
  const bool suits = unlike ? alone || mean >= kTailTokensBeside : alone && filled && mean >= kTailTokensAlike;
  if (rounds <= 1 || !suits) return false;
  for (RowTile& row : out.rows) {
    if (is_tail(row)) row.tile = team, row.settled = unlike;
  }
  return alone;
}

// A few long packs in a tile of single warps would keep few warps busy for long: they go to the next larger tile, whose
// teams take several times as many tokens at once.
inline void promote_long(const Config& config, const Packing& packing, std::vector<RowTile>& rows) {
  auto length = [&](const RowTile& row) { return packing.packs[row.pack].length(); };
  auto shared = [&](const RowTile& row) { return row.count > 1 && config.tile(row.tile).m <= kWarpRows; };
  int64_t tokens = 0;
  for (const RowTile& row : rows) tokens += shared(row) ? length(row) : 0;
  for (RowTile& row : rows) {
    if (!shared(row) || row.tile + 1 == config.n_tiles) continue;
    const int64_t share = tokens * config.num_kv_heads / (config.teams(row.tile) * config.n_sm);  // of a warp
    if (length(row) >= std::max(kLongPack, kLongPackShares * share)) ++row.tile;
  }
}

// A tail of its own takes a unit, a part, and a merge. Where a pack's row tile reads up to it, that tile's last chunk
// may read the tails of all its requests, too, if they take no longer than a processor's even share of all work.
inline void fold_tails(const Config& config, const Packing& packing, Schedule& out) {
  out.folded.clear();
  if (!config.fold_tails) return;
  out.host.assign(out.parts.size(), kNoTail);
  out.tail.assign(out.parts.size(), kNoTail);
  const auto pack_of = [&](int32_t row) -> const Pack& { return packing.packs[out.rows[row].pack]; };
  const auto steps = [&](int64_t tokens, int32_t tile) {
    const int64_t n = config.tile(tile).n;
    return (tokens + n - 1) / n;
  };
  double all = 0;  // ns of all processors
  for (size_t i = 0; i < out.rows.size(); ++i) {
    const int32_t index = static_cast<int32_t>(i);
    const RowTile& row = out.rows[i];
    const Pack& pack = pack_of(index);
    const double steps_ns = config.step_ns[row.tile] * static_cast<double>(steps(pack.length(), row.tile));
    all += (config.unit_ns[row.tile] + steps_ns) * static_cast<double>(config.num_kv_heads);
    if (pack.chunk || pack.ragged || row.count > kMostFolded) continue;
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      if (pack.count == 1) {
        out.tail[r] = index;
      } else if (row.count > 1 && pack.length() && (out.host[r] == kNoTail || pack_of(out.host[r]).stop < pack.stop)) {
        out.host[r] = index;
      }
    }
  }
  const double share = all / static_cast<double>(config.n_sm);
  std::vector<char>& gone = out.gone;
  gone.assign(out.rows.size(), 0);
  for (size_t i = 0; i < out.rows.size(); ++i) {
    RowTile& row = out.rows[i];
    const auto hosted = [&](int32_t r) { return out.host[r] == static_cast<int32_t>(i) && out.tail[r] != kNoTail; };
    int64_t tokens = 0, count = 0;
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      if (hosted(r)) ++count, tokens += pack_of(out.tail[r]).length();
    }
    const double ns = config.step_ns[row.tile] * static_cast<double>(steps(tokens, row.tile));
    if (count < 2 || ns > kFoldedShares * share) continue;
    row.folded = static_cast<int32_t>(out.folded.size());
    row.folded_tokens = static_cast<int32_t>(tokens);
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      const bool mine = hosted(r);
      out.folded.push_back(mine ? out.rows[out.tail[r]].pack : kNoTail);
      if (mine) gone[out.tail[r]] = 1;
    }
  }
  size_t kept = 0;
  for (size_t i = 0; i < out.rows.size(); ++i) {
    if (!gone[i]) out.rows[kept++] = out.rows[i];
  }
  out.rows.resize(kept);
}

// The row tiles of all packs, each in its tile. Returns that which all packs share, in chunks that may be short, or
// kNoTile.
inline int32_t make_row_tiles(const Config& config, const Packing& packing, Schedule& out) {
  out.rows.clear();
  const int32_t largest = config.n_tiles - 1, capacity = config.capacity(largest);
  const int32_t team = team_tile(config), tail = config.tail_tile();
  bool fixed = false;
  for (size_t pack = 0; pack < packing.packs.size(); ++pack) {
    const Pack& whole = packing.packs[pack];
    const int32_t index = static_cast<int32_t>(pack);
    fixed |= whole.chunk != 0;
    if (whole.count == 1) {  // most are tails
      out.rows.push_back({index, whole.first, 1, tail});
    } else {
      const size_t first = out.rows.size();
      add_row_tiles(config, index, whole.first, whole.count, largest, capacity, out.rows);
      if (!whole.ragged) continue;
      FEATHER_REQUIRE(team != kNoTile, "causal_tails needs a tile of more than " << kWarpRows << " rows");
      for (size_t i = first; i < out.rows.size(); ++i) out.rows[i].tile = std::max(out.rows[i].tile, team);
    }
  }
  if (!config.balances()) return kNoTile;
  promote_long(config, packing, out.rows);
  if (config.fan_in == 0 || team == kNoTile || fixed) return kNoTile;
  if (merge_into_warpgroup_tile(config, packing, team, out)) return team;
  // "What does an fp8 cache bring?": 256 tails of 4,096 tokens in 8 bits took teams 875 us for 491.
  if (!config.gives_tails() || team == tail || config.kv_value_bytes == 1) return kNoTile;
  return give_tails_to_teams(config, packing, team, out) ? team : kNoTile;
}

}  // namespace feather
