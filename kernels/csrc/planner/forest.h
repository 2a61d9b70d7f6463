// Forests: from radix nodes, from a block table, and folded down to the nodes that are really shared.
#pragma once

#include <cstring>
#include <numeric>
#include <utility>

#include "planner/plan.h"

namespace feather {

struct FoldScratch {
  std::vector<int32_t> size, kept, index;
  std::vector<int64_t> end;
  std::vector<char> chain;
};

// Checks a forest and folds away nodes with fewer than two requests, without tokens, or with the same requests as one
// of their children.
inline void fold(const Forest& forest, FoldScratch& scratch, Tree& tree) {
  const int32_t n = forest.n_nodes;
  auto& [size, kept, index, end, chain] = scratch;
  size.assign(n, 0);
  end.resize(n);
  for (int32_t u = 0; u < n; ++u) {
    const int32_t p = forest.parent[u];
    FEATHER_REQUIRE(p >= -1 && p < u, "node " << u << " has parent " << p << ": parents come before their children");
    FEATHER_REQUIRE(forest.length[u] >= 0, "node " << u << " has length " << forest.length[u] << ": give tokens");
    end[u] = forest.length[u] + (p < 0 ? 0 : end[p]);
    FEATHER_REQUIRE(end[u] <= INT32_MAX, "node " << u << " ends at position " << end[u] << ": beyond int32");
  }
  for (int32_t r = 0; r < forest.n_requests; ++r) {
    const int32_t u = forest.request_node[r];
    FEATHER_REQUIRE(u >= -1 && u < n, "request " << r << " is at node " << u << ": the forest has " << n << " nodes");
    const int64_t shared = u < 0 ? 0 : end[u];
    FEATHER_REQUIRE(forest.seq_len[r] >= shared, "request " << r << " has " << forest.seq_len[r]
                                                            << " tokens and nodes of " << shared
                                                            << ": a sequence includes its shared nodes");
    FEATHER_REQUIRE(forest.row_offset[r] >= 0, "request " << r << " has row offset " << forest.row_offset[r]);
    if (u >= 0) ++size[u];
  }
  chain.assign(n, 0);
  for (int32_t u = n - 1; u >= 0; --u) {
    if (forest.parent[u] >= 0) size[forest.parent[u]] += size[u];
  }
  for (int32_t u = 0; u < n; ++u) {
    const int32_t p = forest.parent[u];
    if (p >= 0 && size[p] == size[u]) chain[p] = 1;
  }
  tree.parent.clear();
  tree.begin.clear();
  tree.end.clear();
  tree.size.clear();
  kept.resize(n);  // the deepest kept node at or above u
  for (int32_t u = 0; u < n; ++u) {
    const int32_t above = forest.parent[u] < 0 ? -1 : kept[forest.parent[u]];
    const int32_t begin = above < 0 ? 0 : tree.end[above];
    kept[u] = above;
    if (size[u] < 2 || chain[u] || end[u] == begin) continue;
    kept[u] = tree.n_nodes();
    tree.parent.push_back(above);
    tree.begin.push_back(begin);
    tree.end.push_back(static_cast<int32_t>(end[u]));
    tree.size.push_back(size[u]);
  }
  tree.node.resize(forest.n_requests);
  for (int32_t r = 0; r < forest.n_requests; ++r) {
    tree.node[r] = forest.request_node[r] < 0 ? -1 : kept[forest.request_node[r]];
  }
}

// Writes a folded tree with its nodes in canonical order: by lowest request below, then from root to leaf. Returns
// the number of nodes.
inline int64_t write_canonical(const Tree& tree, int32_t* parent, int32_t* length, int32_t* request_node) {
  const int32_t n = tree.n_nodes(), n_requests = static_cast<int32_t>(tree.node.size());
  std::vector<int32_t> lowest(n, INT32_MAX), order(n), place(n);
  for (int32_t r = n_requests - 1; r >= 0; --r) {
    if (tree.node[r] >= 0) lowest[tree.node[r]] = r;
  }
  for (int32_t u = n - 1; u >= 0; --u) {
    const int32_t p = tree.parent[u];
    if (p >= 0) lowest[p] = std::min(lowest[p], lowest[u]);
  }
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::make_pair(lowest[a], tree.end[a]) < std::make_pair(lowest[b], tree.end[b]);
  });
  for (int32_t i = 0; i < n; ++i) place[order[i]] = i;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t u = order[i];
    parent[i] = tree.parent[u] < 0 ? -1 : place[tree.parent[u]];
    length[i] = tree.end[u] - tree.begin[u];
  }
  for (int32_t r = 0; r < n_requests; ++r) request_node[r] = tree.node[r] < 0 ? -1 : place[tree.node[r]];
  return n;
}

// Indices of ids, by binary search.
class IdIndex {
 public:
  IdIndex(const int64_t* ids, int32_t n) : entries_(n) {
    for (int32_t i = 0; i < n; ++i) entries_[i] = {ids[i], i};
    std::sort(entries_.begin(), entries_.end());
    for (int32_t i = 1; i < n; ++i) {
      FEATHER_REQUIRE(entries_[i].first != entries_[i - 1].first,
                      "node_ids has " << entries_[i].first << " twice: give each node its own id");
    }
  }
  int32_t find(int64_t id) const {  // -1 when absent
    auto at = std::lower_bound(entries_.begin(), entries_.end(), std::make_pair(id, 0));
    return at != entries_.end() && at->first == id ? at->second : -1;
  }

 private:
  std::vector<std::pair<int64_t, int32_t>> entries_;
};

inline int64_t forest_from_nodes(int32_t n, const int64_t* ids, const int64_t* parent_ids, const int32_t* lengths,
                                 int32_t n_requests, const int64_t* request_ids, const int32_t* seq_len,
                                 int32_t* parent, int32_t* length, int32_t* request_node) {
  const IdIndex index(ids, n);
  std::vector<int32_t> above(n), depth(n, -1), path;
  for (int32_t u = 0; u < n; ++u) {
    above[u] = parent_ids[u] == -1 ? -1 : index.find(parent_ids[u]);
    FEATHER_REQUIRE(above[u] >= 0 || parent_ids[u] == -1,
                    "node " << ids[u] << " has parent " << parent_ids[u] << ": no such node (a root's parent is -1)");
  }
  int32_t deepest = 0;
  for (int32_t u = 0; u < n; ++u) {
    path.clear();
    int32_t v = u;
    while (v >= 0 && depth[v] == -1) {
      depth[v] = -2;  // on the path
      path.push_back(v);
      v = above[v];
    }
    FEATHER_REQUIRE(v < 0 || depth[v] >= 0, "node " << ids[u] << " is its own ancestor: give a forest");
    int32_t d = v < 0 ? -1 : depth[v];
    for (auto w = path.rbegin(); w != path.rend(); ++w) depth[*w] = ++d;
    deepest = std::max(deepest, d);
  }
  std::vector<int32_t> first(deepest + 2, 0), place(n), sorted_parent(n), sorted_length(n), node(n_requests);
  for (int32_t u = 0; u < n; ++u) ++first[depth[u] + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  for (int32_t u = 0; u < n; ++u) place[u] = first[depth[u]]++;
  for (int32_t u = 0; u < n; ++u) {
    FEATHER_REQUIRE(lengths[u] >= 0, "node " << ids[u] << " has length " << lengths[u] << ": give tokens");
    sorted_parent[place[u]] = above[u] < 0 ? -1 : place[above[u]];
    sorted_length[place[u]] = lengths[u];
  }
  for (int32_t r = 0; r < n_requests; ++r) {
    const int32_t u = request_ids[r] == -1 ? -1 : index.find(request_ids[r]);
    FEATHER_REQUIRE(u >= 0 || request_ids[r] == -1,
                    "request " << r << " is at node " << request_ids[r] << ": no such node");
    node[r] = u < 0 ? -1 : place[u];
  }
  const std::vector<int64_t> no_rows(n_requests, 0);
  FoldScratch scratch;
  Tree tree;
  fold({sorted_parent.data(), sorted_length.data(), n, node.data(), seq_len, no_rows.data(), n_requests}, scratch,
       tree);
  return write_canonical(tree, parent, length, request_node);
}

// The first page at or after `from`, and before `to`, in which two rows differ; `to` if none.
template <typename Id>
int64_t first_difference(const Id* a, const Id* b, int64_t from, int64_t to) {
  constexpr int64_t kBlock = 64;
  while (from + kBlock <= to && std::memcmp(a + from, b + from, kBlock * sizeof(Id)) == 0) from += kBlock;
  while (from < to && a[from] == b[from]) ++from;
  return from;
}

// A group shares the pages before `page`, and its node. Of those with one more page in common, each is compared once
// with a leader's row, from that page to where it differs, and from there on with those that differ there too: no page
// of a row is looked at twice, but where a comparison ended.
template <typename Id>
int64_t forest_from_block_table(const Id* table, int32_t n_requests, int64_t n_pages, int64_t page_size,
                                const int32_t* seq_len, int32_t* parent, int32_t* length, int32_t* request_node) {
  struct Group {
    int32_t first, last, node;
    int64_t page;
  };
  std::vector<int32_t> raw_parent, raw_length, members(n_requests), node(n_requests, -1);
  std::vector<int64_t> common(n_requests);  // pages of each request that are its leader's, too
  std::vector<Group> groups{{0, n_requests, -1, 0}};
  for (int32_t r = 0; r < n_requests; ++r) {
    members[r] = r;
    FEATHER_REQUIRE(seq_len[r] >= 0 && (seq_len[r] + page_size - 1) / page_size <= n_pages,
                    "request " << r << " has " << seq_len[r] << " tokens: its row has " << n_pages << " pages of "
                               << page_size);
  }
  auto full_pages = [&](int32_t r) { return seq_len[r] / page_size; };
  auto id = [&](int32_t r, int64_t page) { return table[r * n_pages + page]; };
  while (!groups.empty()) {
    const Group group = groups.back();
    groups.pop_back();
    auto last = std::partition(members.begin() + group.first, members.begin() + group.last, [&](int32_t r) {
      node[r] = group.node;
      return full_pages(r) > group.page;
    });
    const int32_t end = static_cast<int32_t>(last - members.begin());
    std::sort(members.begin() + group.first, last, [&](int32_t a, int32_t b) {
      return std::make_pair(id(a, group.page), a) < std::make_pair(id(b, group.page), b);
    });
    for (int32_t i = group.first, j; i < end; i = j) {
      const int32_t lead = members[i];
      for (j = i + 1; j < end && id(members[j], group.page) == id(lead, group.page); ++j) {
        const int32_t r = members[j];
        common[r] = first_difference(table + lead * n_pages, table + r * n_pages, group.page,
                                     std::min<int64_t>(full_pages(lead), full_pages(r)));
      }
      std::sort(members.begin() + i + 1, members.begin() + j, [&](int32_t a, int32_t b) {
        return std::make_pair(common[a], a) < std::make_pair(common[b], b);
      });
      int64_t page = group.page;
      for (int32_t k = i + 1, next; k < j; k = next) {  // down the leader's path
        const int64_t stop = common[members[k]];
        for (next = k + 1; next < j && common[members[next]] == stop;) ++next;
        raw_parent.push_back(node[lead]);
        raw_length.push_back(static_cast<int32_t>((stop - page) * page_size));
        node[lead] = static_cast<int32_t>(raw_parent.size()) - 1;
        page = stop;
        groups.push_back({k, next, node[lead], page});
      }
    }
  }
  const std::vector<int64_t> no_rows(n_requests, 0);
  FoldScratch scratch;
  Tree tree;
  fold({raw_parent.data(), raw_length.data(), static_cast<int32_t>(raw_parent.size()), node.data(), seq_len,
        no_rows.data(), n_requests},
       scratch, tree);
  return write_canonical(tree, parent, length, request_node);
}

}  // namespace feather
