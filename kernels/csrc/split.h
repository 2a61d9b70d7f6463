// Cuts packs into what one thread block runs: row tiles (PAT 5.2) and chunks of long KV (PAT 6).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "plan.h"
#include "rounds.h"

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

constexpr int64_t kMinSteps = 8;    // a chunk is at least so many steps of its tile
constexpr int64_t kRoundSteps = 16;  // one of two rounds

// The shortest chunk that a tile's packs are cut into.
inline int64_t least_chunk(const Config& config, int32_t tile) {
  return std::max<int64_t>(config[kMinChunk], kMinSteps * config.tile(tile).n);
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

// The longest chunk of each tile, in tokens, before any widening. Balanced: a share of what the tile has in all, so
// that every team has a chunk; but a chunk is not so short that its part costs as much as it does.
template <class Least>
void chunk_limits(const Config& config, const Packing& packing, const std::vector<RowTile>& rows, Least least,
                  int64_t* limit) {
  int64_t tokens[kMaxTiles] = {}, all = 0;
  for (const RowTile& row : rows) {
    const int64_t length = packing.packs[row.pack].length();
    tokens[row.tile] += length;
    all += length;
  }
  for (int32_t t = 0; t < config.n_tiles(); ++t) {
    if (config[kSplit] == kSplitNone) limit[t] = INT32_MAX;
    if (config[kSplit] == kSplitMean) limit[t] = std::max<int64_t>(1, all / std::max<int64_t>(1, rows.size()));
    if (config.balances()) {
      const double share = config.alpha(t) * static_cast<double>(tokens[t] * config[kKvHeads]) / config[kProcessors];
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
  bool two_rounds;  // of chunks may follow the whole ones: units are dealt out, so that no warp has one more than others
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
  constexpr double kMostShares = 2.5;
  const int64_t share = round_up(std::max(warps.least, left * warps.units / warps.count), step);
  if (first == 0 && static_cast<double>(chunk) > kMostShares * static_cast<double>(share)) chunk = share;
  if (warps.two_rounds && 3 * chunks_of(chunk, round) <= 2 * round) {
    const int64_t shorter = chunk_for(2 * warps.count, 2 * round);
    if (2 * shorter < chunk && shorter >= kRoundSteps * step) chunk = shorter;
  }
  for (size_t i = first; i < queue.size(); ++i) {
    row(queue[i]).longest = static_cast<int32_t>(std::min<int64_t>(chunk, INT32_MAX));
  }
}

// Single warps take the units of the smallest tiles: tails, and what a few requests share. Where they have all the work,
// nothing hides how long a chunk takes, so it may be shorter; and tails that are no whole round are cut for two warps of
// three: chunks that much longer are as fast, and there are fewer parts.
inline void balance_single_warps(const Config& config, const Packing& packing, Schedule& out) {
  const int32_t tail = config.tail_tile();
  const bool alone = std::all_of(out.rows.begin(), out.rows.end(),
                                 [&](const RowTile& row) { return config.tile(row.tile).m <= kWarpRows; });
  for (int32_t tile = 0; tile < config.n_tiles() && config.tile(tile).m <= kWarpRows; ++tile) {
    const bool tails = tile == tail;
    Warps warps{};
    warps.count = config[kProcessors] * (tails ? config[kTailWarps] : config.teams(tile));
    warps.busy = alone && tails ? std::max<int64_t>(1, warps.count * 2 / 3) : warps.count;
    warps.units = config[kKvHeads] / (tails ? out.head_pack : 1);
    warps.least = alone ? config[kMinChunk] : least_chunk(config, tile);
    warps.two_rounds = !tails && config[kSplit] == kSplitRounds;
    balance_warps(config, packing, tile, warps, out);
  }
}

// Counts what a cut makes in all, with the items that have no tokens.
inline void count_all(const Config& config, Schedule& out) {
  out.n_items = out.n_cut;
  out.n_parts = out.n_closing = 0;
  for (const Parts parts : out.parts) {
    out.n_parts += config.deposits(parts);
    out.n_closing += config.fused() && parts.count > 1;
    out.n_items += config.closed_apart(parts);
  }
  out.n_members += out.n_items - out.n_cut;
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
  out.rows.clear();
  out.parts.resize(forest.n_requests);
  const int32_t largest = config.n_tiles() - 1, capacity = config.capacity(largest);
  for (size_t pack = 0; pack < packing.packs.size(); ++pack) {
    const Pack& whole = packing.packs[pack];
    add_row_tiles(config, static_cast<int32_t>(pack), whole.first, whole.count, largest, capacity, out.rows);
  }
  if (config.balances()) promote_long(config, packing, out.rows);
  const Gathered gathered = gather(config, packing, out);
  auto least = [&](int32_t tile) { return tile == gathered.tile ? config[kMinChunk] : least_chunk(config, tile); };
  int64_t limit[kMaxTiles];
  chunk_limits(config, packing, out.rows, least, limit);
  if (gathered.longest) {
    int64_t& most = limit[gathered.tile];
    most = std::min(most, round_up(gathered.longest, config.tile(gathered.tile).n));
  }
  for (RowTile& row : out.rows) {
    const int32_t fixed = packing.packs[row.pack].chunk;
    row.longest = static_cast<int32_t>(fixed ? fixed : std::min<int64_t>(limit[row.tile], INT32_MAX));
  }
  out.head_pack = choose_head_pack(config);
  if (config[kSplit] == kSplitRounds && !gathered.longest) Rounds(config, packing, out, scratch).settle(least);
  if (config.balances()) balance_single_warps(config, packing, out);
  out.widened = 0;
  for (double widen = 1;; widen *= 1.25) {
    cut(config, packing, widen, out);
    if (out.n_items <= config[kMaxItems] && out.n_members <= config[kMaxMembers] && out.n_parts <= config[kMaxParts]) {
      return;
    }
    const bool cut_up = out.n_cut > static_cast<int64_t>(out.rows.size());
    FEATHER_REQUIRE(cut_up, "a plan of " << out.n_items << " items, " << out.n_members << " members and " << out.n_parts
                                         << " partial rows exceeds the planner's " << config[kMaxItems] << ", "
                                         << config[kMaxMembers] << " and " << config[kMaxParts]
                                         << ": raise max_items, max_members or max_parts");
    out.widened = 1;
  }
}

}  // namespace feather
