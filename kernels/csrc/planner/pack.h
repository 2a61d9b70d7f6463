// Pack strategies: one engine that decides per edge whether a parent's carried range is merged into the child.
//
// Every request is a leaf below its node (its private tail). A node carries the positions [from, end): its own, and
// those of the ancestors it was merged with. Merging a child moves its requests, and a second load of the carried
// range, into the child's pack and saves each of them a part (PAT 5.1, scheme 2); splitting leaves them in the node's
// pack. A request's last part costs nothing with the fused merge if its pack has no other member, as a tail's; without
// that merge, only if it is the only one.
#pragma once

#include <numeric>

#include "heuristics.h"
#include "planner/plan.h"

namespace feather {

enum Choice : char { kNoPack, kEndedOnly, kCheaperSides, kAllSplit };
constexpr char kMergedSide = 4;    // besides a choice
constexpr char kMergedBeyond = 8;  // the same for the one of the parent's states that a node lacks
constexpr int64_t kNoEntries = -1;

struct PackScratch {
  struct Lists {
    std::vector<int32_t> from;       // of each node: where its carried range starts
    std::vector<char> split;         // of each node: its requests are in its parent's pack
    std::vector<int32_t> leaf_from;  // of each request
    std::vector<char> leaf_split;
    std::vector<int32_t> place, cursor, order, pack_of, left;
  } lists;
  struct Table {
    std::vector<int64_t> offset;         // of each node: its first state, of the highest ancestor that it has one for
    std::vector<char> choice;            // of each state; with what is cheaper for the node's parent
    std::vector<int32_t> depth;          // of each node
    std::vector<int32_t> leaves, ended;  // of each node: requests with a tail, and requests that end there
    std::vector<int64_t> state;          // of each node: as decided
    std::vector<double> split;           // of each node: of its children, all split
    std::vector<int32_t> order, below;   // nodes, each before those below it; and how many those are, with itself
    // Of the node at hand: the ancestor in each depth, where the range starts that is carried from there, and its cost.
    std::vector<int32_t> path, start;
    std::vector<double> cost;
    // Of nodes between the roots and the one at hand, some of whose children are done, by where the range starts: these
    // children on their cheaper sides; all merged; and the requests of those for which to split is cheaper.
    std::vector<int64_t> row;  // of each node: its first entry there, or kNoEntries
    std::vector<double> best, merged;
    std::vector<int32_t> stay;
  } table;
};

// One edge as a strategy sees it.
struct Edge {
  int32_t parent;   // node
  int32_t size;     // requests below the child
  int32_t length;   // tokens of the child
  int32_t from;     // where the parent's carried range starts
  int32_t carried;  // tokens in it
  int32_t leaf;     // the request whose tail the child is, or -1

  bool ends(bool grow) const { return leaf >= 0 && length == 0 && !grow; }  // a request without a tail
};

// Walks the edges from roots to leaves, a node's shared children before its requests, each in order of index.
template <typename Rule>
void decide(const Forest& forest, const Tree& tree, PackScratch& scratch, Rule merge) {
  const int32_t n = tree.n_nodes();
  auto& lists = scratch.lists;
  lists.from.resize(n);
  lists.split.resize(n);
  lists.leaf_from.resize(forest.n_requests);
  lists.leaf_split.resize(forest.n_requests);
  for (int32_t u = 0; u < n; ++u) {
    const int32_t p = tree.parent[u];
    lists.split[u] = 0;
    lists.from[u] = 0;
    if (p < 0) continue;
    const Edge edge{p, tree.size[u], tree.end[u] - tree.begin[u], lists.from[p], tree.end[p] - lists.from[p], -1};
    const bool merged = merge(edge, u);
    lists.split[u] = !merged;
    lists.from[u] = merged ? edge.from : tree.begin[u];
  }
  for (int32_t r = 0; r < forest.n_requests; ++r) {
    const int32_t p = tree.node[r];
    lists.leaf_split[r] = 0;
    lists.leaf_from[r] = 0;
    if (p < 0) continue;
    const Edge edge{p, 1, forest.seq_len[r] - tree.end[p], lists.from[p], tree.end[p] - lists.from[p], r};
    const bool merged = merge(edge, -1);
    lists.leaf_split[r] = !merged;
    lists.leaf_from[r] = merged ? edge.from : tree.end[p];
  }
}

// The parts that merging a child saves: one for each of its requests. Without the fused merge, a tail merged up to
// position 0 saves its own too. A request that ends at the node saves one with the fused merge only, by closing itself.
inline int64_t parts_saved(const Config& config, const Edge& edge) {
  if (edge.ends(config.grow)) return config.fused() && edge.from > 0;
  return edge.leaf >= 0 && edge.from == 0 && !config.fused() ? 2 : edge.size;
}

// PAT's Algorithm 1. With the byte model, a merge is taken when the parts that it saves weigh at least the carried
// range that it loads again.
inline void decide_profit(const Config& config, const Forest& forest, const Tree& tree, PackScratch& scratch) {
  const double factor = config.profit_factor;
  const bool grow = config.grow;
  decide(forest, tree, scratch, [&](const Edge& edge, int32_t) {
    if (factor > 0) return !edge.ends(grow) && factor * edge.size >= edge.carried;
    return config.part_bytes() * parts_saved(config, edge) >= config.token_bytes() * edge.carried;
  });
}

// FastTree's Algorithm 1 (feather 2.9.5), which minds padding. Costs in row-tokens: a query row times a KV token.
// Split KV: the parent's range stays with all its requests, and each of the child's has one more part. Split Q: the
// child's requests read the parent's range themselves, in a tile that they may not fill.
inline void decide_compute(const Config& config, const Forest& forest, const Tree& tree, PackScratch& scratch) {
  const bool grow = config.grow;
  const int64_t group = config.group_size;
  const double part_cost = config.compute_split_cost * group;
  auto padded = [&](int64_t requests, int64_t length) -> double {  // row-tokens that the tiles run for nothing
    const int64_t rows = requests * group;
    const Tile tile = config.tile(config.tile_for(requests));
    const int64_t whole = (rows + tile.m - 1) / tile.m * tile.m * ((length + tile.n - 1) / tile.n * tile.n);
    return static_cast<double>(whole - rows * length);
  };
  auto& left = scratch.lists.left;
  left = tree.size;
  decide(forest, tree, scratch, [&](const Edge& edge, int32_t) {
    if (edge.ends(grow)) return false;
    const int64_t n = left[edge.parent], c = edge.size;
    const double split_kv = padded(n, edge.carried) + padded(c, edge.length) + part_cost * c;
    const double split_q = padded(n - c, edge.carried) + padded(c, edge.carried + edge.length);
    if (split_kv < split_q) return false;
    left[edge.parent] -= edge.size;
    return true;
  });
}

// What `optimal` minimises: bytes, and item_overhead for each pack. Exact, while all of them stay below 2^53.
struct TrafficCosts {
  double token, overhead, part;

  explicit TrafficCosts(const Config& config)
      : token(config.token_bytes()), overhead(config.item_overhead), part(config.part_bytes()) {}

  bool grow_with_range() const { return true; }
  int pack_of(int32_t) const { return 0; }  // however many requests
  double pack(int, int32_t length) const { return token * length + overhead; }
  double tail(int32_t length) const { return token * length; }  // merged into a tail
  double alone(int32_t length) const { return token * length + overhead; }  // a request's that ends at its node
};

// What `time` minimises: ns of a processor for one KV head. Every row tile of a pack is a work unit of its own. A tail
// is a unit in any plan, and whether a merged range begins a step more depends on the tail: it pays for tokens only.
struct TimeCosts {
  const Config& config;
  int32_t capacity;
  double tail_unit, tail_token, part;

  explicit TimeCosts(const Config& c) : config(c), capacity(c.capacity(c.n_tiles - 1)) {
    const int32_t tail = c.tail_tile();
    tail_unit = c.unit_ns[tail];
    tail_token = c.step_ns[tail] / c.tile(tail).n;
    part = c.part_ns + static_cast<double>(c.group_size) * c.part_row_ns;
  }

  // Whether to carry a longer range, or a range to more requests, never costs less: a larger tile is not the cheaper one.
  bool grow_with_range() const {
    for (int32_t t = 1; t < config.n_tiles; ++t) {
      const int64_t steps = config.tile_n[t] / config.tile_n[t - 1];
      if (config.tile_n[t] % config.tile_n[t - 1] || config.unit_ns[t] < config.unit_ns[t - 1]) return false;
      if (config.step_ns[t] < static_cast<double>(steps) * config.step_ns[t - 1]) return false;
    }
    return true;
  }

  double row_tile(int32_t t, int32_t length) const {
    const uint32_t n = static_cast<uint32_t>(config.tile(t).n);
    return config.unit_ns[t] + config.step_ns[t] * ((static_cast<uint32_t>(length) + n - 1) / n);
  }
  RowCut pack_of(int32_t count) const { return config.cut_rows(count, capacity); }
  double pack(RowCut cut, int32_t length) const {
    const double last = row_tile(cut.last, length);
    return cut.tiles == 1 ? last : last + (cut.tiles - 1) * row_tile(config.n_tiles - 1, length);
  }
  double tail(int32_t length) const { return tail_token * length; }
  double alone(int32_t length) const { return tail_unit + tail_token * length; }
};

constexpr int64_t kMostStates = int64_t{1} << 25;
constexpr int32_t kAllLevels = INT32_MAX;

// A state is a node and where its carried range starts: at itself, the last of its states, or at one of its nearest
// ancestors, so many levels in all.
inline void list_states(const Forest& forest, const Tree& tree, bool grow, const char* strategy, int32_t levels,
                        PackScratch::Table& table) {
  const int32_t n = tree.n_nodes();
  auto& [offset, choice, depth, leaves, ended, state, split, order, below, path, start, cost, row, best, merged, stay] =
      table;
  offset.resize(n + 1);
  depth.resize(n);
  state.resize(n);
  offset[0] = 0;
  int32_t deepest = 0;
  for (int32_t u = 0; u < n; ++u) {
    depth[u] = tree.parent[u] < 0 ? 0 : depth[tree.parent[u]] + 1;
    deepest = std::max(deepest, depth[u]);
    offset[u + 1] = offset[u] + std::min(depth[u] + 1, levels);
    state[u] = offset[u + 1] - 1;
  }
  const int64_t states = offset[n];
  FEATHER_REQUIRE(states <= kMostStates, "strategy " << strategy << " needs " << states
                                                << " states for this forest of " << n << " nodes: use profit");
  leaves.assign(n, 0);
  ended.assign(n, 0);
  for (int32_t r = 0; r < forest.n_requests; ++r) {
    const int32_t u = tree.node[r];
    if (u >= 0) ++(grow || forest.seq_len[r] > tree.end[u] ? leaves : ended)[u];
  }
  below.assign(n, 1);
  for (int32_t u = n - 1; u >= 0; --u) {
    if (tree.parent[u] >= 0) below[tree.parent[u]] += below[u];
  }
  order.resize(n);
  path.resize(n);  // of each node: the place of its next child, first
  int32_t root = 0;
  for (int32_t u = 0; u < n; ++u) {
    int32_t& slot = tree.parent[u] < 0 ? root : path[tree.parent[u]];
    order[slot] = u;
    path[u] = slot + 1;
    slot += below[u];
  }
  path.assign(deepest + 1, -1);
  start.resize(deepest + 1);
  cost.resize(std::min(deepest + 1, levels));
  choice.resize(states);
  row.assign(n, kNoEntries);
  split.assign(n, 0);
  best.clear(), merged.clear(), stay.clear();
}

// Dynamic programming over a node u and the ancestor a at which its carried range starts; O(nodes * levels).
// cost(u, a) is the least of
//
//   no pack at u:   sum over children of cost(c, a)
//   cheaper sides:  sum over children of min(cost(c, a), cost(c, c) + its requests' parts at u)
//                   + a pack of a..u with the requests of those that split
//   all split:      sum over children of cost(c, c) + their parts, + a pack of a..u with all requests
//   ended only:     sum over children of cost(c, a), + a pack of a..u with the requests that end at u
//
// Where a pack costs the same however many requests it has, as in the traffic model, the first two have the exact
// minimum. Else a child's cheaper side depends on its siblings', and a choice that is not listed may be cheaper still.
// `all split` wins only where a pack of more requests is the cheaper one, being in a larger tile.
//
// All tails of a node decide alike: their lengths cancel. Requests that end there are in the node's pack if it has one,
// else each has its own. In the traffic model only the fused merge makes that cheaper, and where it does, merging all
// else pays as well.
//
// A range that would be carried over more levels is taken to cost what it does over as many as there are, or less: no
// cost is then more than with all levels. Where no such range is chosen, the choices are those with all levels; returns
// whether that is so.
template <typename Costs>
bool decide_within(const Config& config, const Forest& forest, const Tree& tree, PackScratch& scratch,
                   const Costs& costs, const char* strategy, int32_t levels) {
  const bool grow = config.grow, fused = config.fused();
  list_states(forest, tree, grow, strategy, levels, scratch.table);
  auto& [offset, choice, depth, leaves, ended, state, split, order, below, path, start, cost, row, best, merged, stay] =
      scratch.table;
  const double part = costs.part, tail_split = fused ? part : 2 * part;
  auto closes = [&](int32_t from) { return fused || from == 0 ? 0 : part; };  // of a request's own pack
  auto tail_merged = [&](int32_t carried, int32_t from) { return costs.tail(carried) + closes(from); };
  auto beyond = [&](int32_t u) { return depth[u] >= levels; };  // the first of the parent's states is none of its own
  bool settled = true;
  // The first entry of a node. A node's children come in turn, so who has entries last is the first to be done.
  auto entries_of = [&](int32_t u) {
    if (row[u] == kNoEntries) {
      row[u] = static_cast<int64_t>(best.size());
      const size_t size = best.size() + (offset[u + 1] - offset[u]);
      best.resize(size), merged.resize(size), stay.resize(size);
    }
    return row[u];
  };
  for (int32_t i = tree.n_nodes() - 1; i >= 0; --i) {  // nodes below one before it, the last child first
    const int32_t u = order[i], p = tree.parent[u], size = tree.size[u];
    const int32_t last = static_cast<int32_t>(offset[u + 1] - offset[u]) - 1, highest = depth[u] - last;
    for (int32_t v = u; v >= 0 && path[depth[v]] != v; v = tree.parent[v]) {
      path[depth[v]] = v;
      start[depth[v]] = tree.begin[v];
    }
    const int64_t own = entries_of(u);
    const double *const own_best = best.data() + own, *const own_merged = merged.data() + own;
    const int32_t* const own_stay = stay.data() + own;
    char* const choices = choice.data() + offset[u];
    split[u] += leaves[u] * tail_split;
    const auto of_all = costs.pack_of(size), of_ended = costs.pack_of(std::max(1, ended[u]));
    auto of_staying = of_all;
    int32_t counted = size;  // in it
    for (int32_t j = 0; j <= last; ++j) {
      const int32_t from = start[highest + j], carried = tree.end[u] - from;
      const double tail = tail_merged(carried, from), ends = ended[u] * (from == 0 ? 0 : part);
      const int32_t staying = own_stay[j] + ended[u] + (tail_split < tail ? leaves[u] : 0);
      const double all_merged = own_merged[j] + leaves[u] * tail;
      Choice taken = kNoPack;
      double least = all_merged;
      if (ended[u] > 0) least += ended[u] * (costs.alone(carried) + closes(from));
      auto consider = [&](Choice chosen, double other) {
        // At equal costs merged; but requests that end here save no part on their own without the fused merge.
        const bool at_equal = taken == kNoPack && !fused && ended[u] > 0;
        if (other > least || (other == least && !at_equal)) return;
        taken = chosen;
        least = other;
      };
      const double whole = costs.pack(of_all, carried) + ends;
      if (staying > 0) {
        if (staying != counted) of_staying = costs.pack_of(counted = staying);
        const double pack = staying == size ? whole : costs.pack(of_staying, carried) + ends;
        consider(kCheaperSides, own_best[j] + leaves[u] * std::min(tail, tail_split) + pack);
      }
      if (staying < size) consider(kAllSplit, split[u] + whole);
      if (ended[u] > 0) consider(kEndedOnly, all_merged + costs.pack(of_ended, carried) + ends);
      choices[j] = taken;
      cost[j] = least;
    }
    best.resize(own), merged.resize(own), stay.resize(own);
    if (p < 0) continue;
    const double apart = cost[last] + size * part;
    split[p] += apart;
    int64_t above = entries_of(p);
    auto offer = [&](double within, char& chosen, char side) {
      best[above] += std::min(within, apart);
      stay[above] += apart < within ? size : 0;
      merged[above++] += within;
      if (within <= apart) chosen |= side;
    };
    // From position 0 on, each request may save a part.
    if (beyond(u)) offer(cost[0] - (highest == 1 ? size * part : 0), choices[0], kMergedBeyond);
    for (int32_t j = 0; j < last; ++j) offer(cost[j], choices[j], kMergedSide);
  }
  decide(forest, tree, scratch, [&](const Edge& edge, int32_t u) {
    const int32_t p = edge.parent;
    const char chosen = choice[state[p]] & ~(kMergedSide | kMergedBeyond);
    if (edge.ends(grow)) return chosen == kNoPack;
    if (edge.leaf >= 0 && chosen == kCheaperSides) return tail_merged(edge.carried, edge.from) <= tail_split;
    if (edge.leaf >= 0) return chosen != kAllSplit;
    const bool lacks = beyond(u) && state[p] == offset[p];
    const int64_t within = lacks ? offset[u] : offset[u] + (state[p] - offset[p]) - beyond(u);
    bool merged_here = chosen != kAllSplit;
    if (chosen == kCheaperSides) merged_here = choice[within] & (lacks ? kMergedBeyond : kMergedSide);
    if (merged_here) state[u] = within;
    settled &= !(merged_here && lacks);
    return merged_here;
  });
  return settled;
}

// As in a deep forest ranges are carried over few of its levels, not all states are looked at, unless they have to be.
template <typename Costs>
void decide_cheapest(const Config& config, const Forest& forest, const Tree& tree, PackScratch& scratch,
                     const Costs& costs, const char* strategy) {
  int32_t levels = costs.grow_with_range() ? kFirstLevels : kAllLevels;
  while (!decide_within(config, forest, tree, scratch, costs, strategy, levels)) levels *= kMoreLevels;
}

inline void decide_by_strategy(const Config& config, const Forest& forest, const Tree& tree, PackScratch& scratch) {
  switch (config.strategy) {
    case kQuery:
      return decide(forest, tree, scratch, [](const Edge&, int32_t) { return true; });
    case kRelay:  // the first level is a pack, and nothing below it
      return decide(forest, tree, scratch, [&](const Edge& edge, int32_t) { return tree.parent[edge.parent] >= 0; });
    case kCompute:
      return decide_compute(config, forest, tree, scratch);
    case kProfit:
      return decide_profit(config, forest, tree, scratch);
    case kOptimal:
      return decide_cheapest(config, forest, tree, scratch, TrafficCosts(config), "optimal");
    case kTime:
      return decide_cheapest(config, forest, tree, scratch, TimeCosts(config), "time");
    default:  // naive, two-phase
      return decide(forest, tree, scratch, [](const Edge&, int32_t) { return false; });
  }
}

// Behind the requests from place `i` of the order on that are a causal block: of one row of slots, each a token longer
// than the one before, with tails that begin alike.
inline size_t end_of_block(const Forest& forest, const Tree& tree, const PackScratch::Lists& lists, size_t i) {
  const auto& order = lists.order;
  const int32_t first = order[i];
  size_t end = i + 1;
  for (; end < order.size(); ++end) {
    const int32_t r = order[end], before = order[end - 1];
    if (tree.node[r] != tree.node[first] || forest.row_offset[r] != forest.row_offset[first] ||
        forest.seq_len[r] != forest.seq_len[before] + 1 || lists.leaf_from[r] != lists.leaf_from[first] ||
        lists.leaf_split[r] != lists.leaf_split[first]) {
      break;
    }
  }
  return end;
}

// The packs that the decisions make: nodes first, in order, then tails; so a request's packs come in order of position.
inline void make_packs(const Config& config, const Forest& forest, const Tree& tree, PackScratch& scratch,
                       Packing& out) {
  const int32_t n = tree.n_nodes();
  const bool grow = config.grow;
  const int32_t shared_chunk = config.strategy == kTwoPhase ? static_cast<int32_t>(config.shared_chunk) : 0;
  auto& [from, split, leaf_from, leaf_split, place, cursor, order, pack_of, left] = scratch.lists;
  place.resize(n);  // requests in depth-first order: those below a node are adjacent, from place[u] on
  cursor.resize(n);
  pack_of.assign(n, 0);  // number of members first
  order.resize(forest.n_requests);
  int32_t next = 0;
  for (int32_t u = 0; u < n; ++u) {
    const int32_t p = tree.parent[u];
    int32_t& slot = p < 0 ? next : cursor[p];
    place[u] = cursor[u] = slot;
    slot += tree.size[u];
    if (split[u]) pack_of[p] += tree.size[u];
  }
  for (int32_t r = 0; r < forest.n_requests; ++r) {
    const int32_t p = tree.node[r];
    order[(p < 0 ? next : cursor[p])++] = r;
    if (leaf_split[r]) ++pack_of[p];
  }
  const int64_t most = std::accumulate(pack_of.begin(), pack_of.end(), int64_t{forest.n_requests});
  FEATHER_REQUIRE(most <= INT32_MAX, "packs of up to " << most << " members are too many: use another strategy");
  const int64_t at_least = most - forest.n_requests;  // so many that their plan is refused: not to be listed first
  FEATHER_REQUIRE(at_least <= config.max_members, "a plan of more than " << at_least << " members exceeds the planner's "
                                                      << config.max_members << ": raise max_members");
  out.packs.clear();
  int32_t members = 0;
  for (int32_t u = 0; u < n; ++u) {
    const int32_t count = pack_of[u];
    pack_of[u] = static_cast<int32_t>(out.packs.size());  // from now on which one it is
    if (count == 0) continue;
    cursor[u] = members;
    out.packs.push_back({from[u], tree.end[u], members, count, -1, shared_chunk});
    members += count;
  }
  out.members.resize(most);
  for (int32_t u = 0; u < n; ++u) {
    if (!split[u]) continue;
    int32_t& fill = cursor[tree.parent[u]];
    std::copy_n(order.begin() + place[u], tree.size[u], out.members.begin() + fill);
    fill += tree.size[u];
  }
  for (const int32_t r : order) {
    if (leaf_split[r]) out.members[cursor[tree.node[r]]++] = r;
  }
  for (size_t i = 0, end; i < order.size(); i = end) {
    const int32_t r = order[i], node = tree.node[r];
    end = i + 1;
    if (config.causal_tails) end = end_of_block(forest, tree, scratch.lists, i);
    const int32_t count = static_cast<int32_t>(end - i), stop = forest.seq_len[order[end - 1]];
    if (leaf_split[r] && !grow && leaf_from[r] == stop) continue;  // ends at its node
    if (count > 1 && leaf_split[r] && tree.size[node] == count) {  // nobody else has their node: its pack goes on
      Pack& whole = out.packs[pack_of[node]];
      whole.stop = stop, whole.ragged = true;
      continue;
    }
    out.packs.push_back({leaf_from[r], stop, members, count, grow ? r : -1, 0, count > 1});
    std::copy_n(order.begin() + i, count, out.members.begin() + members);
    members += count;
  }
  out.members.resize(members);
}

}  // namespace feather
