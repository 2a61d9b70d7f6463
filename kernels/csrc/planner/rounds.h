// How long the chunks of large tiles are, for processors that take them in turn: the split `rounds`.
//
// Units of equal length are dealt out to the processors; 160 of them keep 132 processors busy for two rounds, and most
// of those idle in the second, but for as many tails as their warps hold at once. So some cuts are tried, and the one
// of the least modelled time is taken. Teams that ask for units are modelled as if those were dealt to them.
#pragma once

#include <algorithm>

#include "heuristics.h"
#include "planner/plan.h"

namespace feather {

struct RoundsScratch {
  struct Run {
    double cost;
    int64_t units;
  };
  std::vector<double> load, tried;  // ns of each processor
  std::vector<Run> runs;            // units of equal cost
  std::vector<int32_t> rows;        // of the tile at hand
};

class Rounds {
 public:
  Rounds(const Config& config, const Packing& packing, Schedule& out, RoundsScratch& scratch)
      : config_(config), packing_(packing), out_(out), scratch_(scratch) {
    scratch_.load.assign(config.n_sm, 0);
    const int32_t tail = config.tail_tile();
    for (const RowTile& row : out.rows) {
      if (config.tile(row.tile).m > kWarpRows && !row.settled) continue;
      const int64_t units = config.num_kv_heads;
      const double ns = static_cast<double>(units) * chunk_ns(row.tile, packing.packs[row.pack].length());
      if (row.tile == tail) {
        tails_ += units, tails_ns_ += ns;
      } else {
        extra_ += ns;
      }
    }
    part_ns_ = static_cast<double>(config.num_kv_heads) *
               (config.part_ns + static_cast<double>(config.group_size) * config.part_row_ns);
  }

  // Settle the chunks of every tile of more than 16 rows, the largest first. `least`: the shortest chunk of a tile.
  template <class Least>
  void settle(Least least) {
    for (int32_t tile = config_.n_tiles - 1; tile >= 0 && config_.tile(tile).m > kWarpRows; --tile) {
      settle_tile(tile, round_up(least(tile), config_.tile(tile).n));
    }
  }

 private:
  double chunk_ns(int32_t tile, int64_t length) const {
    const int64_t n = config_.tile(tile).n;
    return config_.unit_ns[tile] + config_.step_ns[tile] * static_cast<double>((length + n - 1) / n);
  }

  // All of a tile's packs are cut into chunks of one length. Or, where a processor has several teams, the longest stay
  // whole, as many as make whole rounds of them, and the others, cut shorter, make a round or more of their own. (With
  // one team that was slower: whoever has less begins with tails.)
  void settle_tile(int32_t tile, int64_t least) {
    auto& rows = scratch_.rows;
    rows.clear();
    for (size_t i = 0; i < out_.rows.size(); ++i) {
      if (out_.rows[i].tile != tile || out_.rows[i].settled) continue;
      if (packing_.packs[out_.rows[i].pack].chunk) return;
      rows.push_back(static_cast<int32_t>(i));
    }
    if (rows.empty()) return;
    const auto longer = [&](int32_t a, int32_t b) { return length(a) > length(b); };
    if (!std::is_sorted(rows.begin(), rows.end(), longer)) std::stable_sort(rows.begin(), rows.end(), longer);
    const int64_t step = config_.tile(tile).n, heads = config_.num_kv_heads, n_rows = static_cast<int64_t>(rows.size());
    const int64_t teams = config_.teams(tile), round = teams * config_.n_sm;
    const int64_t most_units = kMostRounds * config_.n_sm;
    int64_t limit = out_.rows[rows[0]].longest, whole = 0;
    double best = deal(tile, limit, whole);
    const bool tries = units_ <= most_units;
    const auto try_behind = [&](int64_t first) {
      int64_t chunk = 0;
      for (int64_t pieces = 1; tries && chunk != least; ++pieces) {
        const int64_t even = (length(rows[first]) + pieces - 1) / pieces, next = std::max(least, round_up(even, step));
        if (next == chunk) continue;
        chunk = next;
        const double time = deal(tile, chunk, first);
        if (units_ > most_units) break;
        if (time < kRoundsGain * best) best = time, limit = chunk, whole = first;
      }
    };
    const int64_t in_rounds = (n_rows - 1) * heads / round * round / heads;
    if (teams > 1 && in_rounds) try_behind(in_rounds);
    try_behind(0);
    deal(tile, limit, whole);
    scratch_.load.swap(scratch_.tried);
    turn_ = next_turn_, extra_ += parts_;
    for (int64_t i = 0; i < n_rows; ++i) {
      out_.rows[rows[i]].longest = i < whole ? INT32_MAX : static_cast<int32_t>(std::min<int64_t>(limit, INT32_MAX));
    }
  }

  int64_t length(int32_t row) const { return packing_.packs[out_.rows[row].pack].length(); }

  // The modelled time with chunks no longer than `limit`, but for the first rows, which stay whole. Sets units_,
  // parts_, next_turn_ and tried.
  double deal(int32_t tile, int64_t limit, int64_t whole) {
    auto& [load, tried, runs, rows] = scratch_;
    const int64_t heads = config_.num_kv_heads, processors = config_.n_sm;
    tried = load;
    runs.clear();
    units_ = 0, parts_ = 0;
    int64_t tokens = -1, pieces = 1;
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t before = tokens;
      tokens = length(rows[i]);
      if (tokens != before || static_cast<int64_t>(i) == whole) {
        pieces = static_cast<int64_t>(i) < whole ? 1 : std::max<int64_t>(1, (tokens + limit - 1) / limit);
        const double cost = chunk_ns(tile, (tokens + pieces - 1) / pieces);
        if (runs.empty() || runs.back().cost != cost) runs.push_back({cost, 0});
      }
      runs.back().units += pieces * heads;
      units_ += pieces * heads;
      parts_ += part_ns_ * static_cast<double>((pieces - 1) * out_.rows[rows[i]].count);
    }
    const auto longer = [](const auto& a, const auto& b) { return a.cost > b.cost; };
    if (!std::is_sorted(runs.begin(), runs.end(), longer)) std::sort(runs.begin(), runs.end(), longer);
    // A processor's teams take a unit each before one takes a second.
    const int64_t teams = config_.teams(tile), round = teams * processors;
    const double first = teams > 1 ? kUnitAlone : 1;
    const double other = (static_cast<double>(teams) - first) / std::max(1., static_cast<double>(teams) - 1);
    int64_t at = turn_, dealt = 0, team = 0;
    for (const auto& [cost, units] : runs) {
      const int64_t whole = units / round;
      if (whole) {
        for (double& ns : tried) ns += cost * static_cast<double>(whole * teams);
      }
      for (int64_t left = units - whole * round; left > 0;) {
        const int64_t count = std::min({left, processors - at, processors - dealt});
        const double ns = cost * (team == 0 ? first : other);
        for (int64_t i = at; i < at + count; ++i) tried[i] += ns;
        left -= count;
        at = at + count == processors ? 0 : at + count;
        dealt += count;
        if (dealt == processors) dealt = 0, team = team + 1 == teams ? 0 : team + 1;
      }
    }
    next_turn_ = at;
    // Who has less than others begins with tails. Those close requests: with the fused merge their warps wait until all
    // parts are there, so no more than one round of them overlaps.
    const double top = *std::max_element(tried.begin(), tried.end());
    const double taken = tails_ ? tails_ns_ / static_cast<double>(tails_) * round_of_tails() : 0;
    double overlapped = 0;
    for (const double ns : tried) overlapped += config_.fused() ? std::min(top - ns, taken) : top - ns;
    const double left = std::max(0., tails_ns_ - overlapped) + extra_ + parts_;
    return top + left / static_cast<double>(processors);
  }

  // KV heads of tails that a processor's warps take at once.
  double round_of_tails() const { return static_cast<double>(config_.tail_warps * out_.head_pack); }

  const Config& config_;
  const Packing& packing_;
  Schedule& out_;
  RoundsScratch& scratch_;
  // ns of all processors: of tails; of a part of all KV heads; of other single warps and settled parts; of parts of the
  // tile at hand
  double tails_ns_ = 0, part_ns_ = 0, extra_ = 0, parts_ = 0;
  int64_t tails_ = 0, units_ = 0, turn_ = 0, next_turn_ = 0;
};

}  // namespace feather
