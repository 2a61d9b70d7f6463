// What the planner's parts hand to each other, and the layout of the buffer that the kernel reads.
//
// forest.h -> Tree -> pack.h -> Packing -> row_tiles.h, split.h -> Schedule -> emit.h -> buffer
//
// Every list lives in one Workspace per thread and keeps its memory from plan to plan.
#pragma once

#include <tvm/ffi/error.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <vector>

#include "common/plan_buffer.h"
#include "planner/interface.h"
#include "traits.h"

namespace feather {

struct Tile {
  int32_t m, n;
};

// How many row tiles a pack takes: all but the last are of the largest tile.
struct RowCut {
  int32_t tiles;
  int32_t last;  // tile
};

// The parts of a request.
struct Parts {
  int32_t count;
  bool tail;  // the last one's item (or pack) has no other member and is in the tail tile

  void add(int32_t more, bool in_tail) { count += more, tail = in_tail; }  // in order of position
};

// The options with what follows from them.
struct Config : PlannerOptions {
  Tile tile(int32_t t) const { return {static_cast<int32_t>(tile_m[t]), static_cast<int32_t>(tile_n[t])}; }
  bool balances() const { return split >= kSplitBalanced; }
  bool gives_tails() const { return split >= kSplitRounds; }  // to teams, where that suits them
  int64_t teams(int32_t t) const { return std::max<int64_t>(1, std::llround(1 / alpha[t])); }  // of a processor

  // The round-up rule of PAT 5.2: the smallest tile that holds the requests' rows, or the largest one there is. A tile
  // of 8 rows holds one request's only: they are consecutive query heads.
  int32_t tile_for(int64_t requests) const {
    const int64_t least = std::max<int64_t>(requests * group_size, requests > 1 ? kThinRows + 1 : 1);
    int32_t t = 0;
    while (t + 1 < n_tiles && tile(t).m < least) ++t;
    return t;
  }
  // The tile of an item of one request, tails above all. Its queue is the last one with work.
  int32_t tail_tile() const { return tile_for(1); }
  // Requests that a tile holds.
  int32_t capacity(int32_t t) const {
    const int32_t m = tile(t).m;
    return m > kThinRows ? static_cast<int32_t>(m / group_size) : 1;
  }
  // One tile where the largest allowed, which holds `capacity` requests, holds all; else as few as that one can.
  RowCut cut_rows(int32_t requests, int32_t capacity) const {
    if (requests <= capacity) return {1, tile_for(requests)};
    const int32_t tiles = (requests + capacity - 1) / capacity;
    return {tiles, tile_for(requests - (tiles - 1) * capacity)};
  }

  // Fused merge: an item closes each request of several parts. It waits for them, combines them and writes the result.
  bool fused() const { return merge == kMergeFused; }
  // Whether an item may close a request: not where it may read tails behind its own tokens.
  bool items_close() const { return fused() && !fold_tails; }
  // The item of the last part does that, and combines the others with its own. It takes in one after the other, so
  // there must not be many.
  bool closed_by_last(Parts parts) const {
    return items_close() && parts.count > 1 && parts.tail && (fan_in == 0 || parts.count <= fan_in);
  }
  // An item without tokens does, behind the queues.
  bool closed_apart(Parts parts) const { return fused() && parts.count > 1 && !closed_by_last(parts); }
  // The parts of a request that are deposited.
  int32_t deposits(Parts parts) const { return parts.count < 2 ? 0 : parts.count - closed_by_last(parts); }

  // The traffic model, bytes per KV head. One KV token is K and V; one part of a request is its group's
  // rows of output in 16 bits, each with a log-sum-exp and a step in fp32, written once and read once. A request with
  // one part only has none: its item writes the result itself; neither has the part that closes a request.
  int64_t token_bytes() const { return token_values * kv_value_bytes; }
  int64_t part_bytes() const { return group_size * (head_dim + 4) * 2 * 2; }
};

// A forest as Python holds it.
struct Forest {
  const int32_t* parent;
  const int32_t* length;
  int32_t n_nodes;
  const int32_t* request_node;
  const int32_t* seq_len;
  const int64_t* row_offset;
  int32_t n_requests;
};

// The shared nodes only: two or more requests each, some tokens, and no two with the same requests. Parents precede
// children.
struct Tree {
  std::vector<int32_t> parent, begin, end;  // positions
  std::vector<int32_t> size;                // requests in and below the node
  std::vector<int32_t> node;                // of each request, -1 for none
  int32_t n_nodes() const { return static_cast<int32_t>(parent.size()); }
  int32_t shared(int32_t request) const { return node[request] < 0 ? 0 : end[node[request]]; }
};

// Requests that read the positions [start, stop) together.
struct Pack {
  int32_t start, stop;
  int32_t first, count;  // in Packing::members
  int32_t grows;         // the request whose tail this is, or -1
  int32_t chunk;         // a fixed chunk (two-phase), or 0
  bool ragged = false;   // a member may end before `stop`

  int32_t length() const { return stop - start; }
};

struct Packing {
  std::vector<Pack> packs;  // a request's packs come in order of position
  std::vector<int32_t> members;
};

// A pack's rows in one tile, cut into n_chunks of `chunk` positions (the last one shorter).
struct RowTile {
  int32_t pack;
  int32_t first, count;
  int32_t tile;
  int32_t longest = 0;  // chunk
  int32_t chunk = 0, n_chunks = 0;
  bool settled = false;  // `longest` is an even share, and stays so
  int32_t folded = -1;   // in Schedule::folded: the tail of each member, which the last chunk reads, too
  int32_t folded_tokens = 0;
};

struct Schedule {
  std::vector<RowTile> rows;
  std::vector<RowTile> larger;  // scratch: what they were cut from
  std::vector<Parts> parts;     // of each request
  std::vector<int32_t> folded;  // packs of tails that are read by units of other packs, or kNoTail
  std::vector<int32_t> host, tail;  // scratch, of each request: the row tile that may read its tail, and that tail's
  std::vector<char> gone;           // scratch, of each row tile: it is read by another
  int64_t n_cut;                // items with KV
  int64_t n_items, n_members, n_parts, n_closing, widened;
  int32_t head_pack;            // KV heads to a unit of the tail tile's queue
  std::vector<uint64_t> queue;  // scratch, rows of a tile: tokens << 32 | ~row; what is longer is larger
};

constexpr int32_t kNoTail = -1;

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Refuse in one line. Without the backtrace of TVM_FFI_THROW: the first one of a process reads the symbols of all that
// is loaded, a second long, while a server waits for its plan.
#define FEATHER_REFUSE(message)                                    \
  do {                                                             \
    std::ostringstream line;                                       \
    line << message;                                               \
    throw ::tvm::ffi::Error("ValueError", line.str(), "");         \
  } while (0)

#define FEATHER_REQUIRE(condition, message)     \
  do {                                          \
    if (!(condition)) FEATHER_REFUSE(message);  \
  } while (0)

}  // namespace feather
