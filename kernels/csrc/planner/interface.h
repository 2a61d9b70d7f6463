// What Python and the planner hand to each other, by name: feather_kernels/options.py has the same fields in the same
// order, and compares them with describe_interface() when it loads the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "common/plan_buffer.h"

namespace feather {

enum Strategy : int64_t { kQuery, kRelay, kTwoPhase, kNaive, kCompute, kProfit, kOptimal, kTime };
enum Split : int64_t { kSplitNone, kSplitMean, kSplitBalanced, kSplitRounds, kSplitGroups };
enum Merge : int64_t { kMergeFused, kMergeKernel };

constexpr const char* kChoices =
    "query relay two-phase naive compute profit optimal time | none mean balanced rounds groups | fused kernel";

// What stays the same from plan to plan. All entries have eight bytes.
struct PlannerOptions {
  Strategy strategy;
  Split split;
  Merge merge;
  int64_t grow;
  int64_t num_kv_heads;
  int64_t group_size;
  int64_t head_dim;
  int64_t kv_value_bytes;  // of a value in the caches
  int64_t token_values;    // of a token there, for one KV head: K and V
  int64_t n_sm;
  int64_t max_requests;
  int64_t max_items;
  int64_t max_members;
  int64_t max_parts;
  int64_t min_chunk;
  int64_t shared_chunk;
  int64_t item_overhead;
  int64_t head_pack;   // 0: the planner decides
  int64_t tail_warps;  // of a processor, that take the tail tile's units
  int64_t fan_in;      // the most parts that a request has if its last one closes it; 0: any number, and none is apart
  int64_t causal_tails;  // tails of one row of slots that end one token after the other share a pack
  int64_t fold_tails;      // units of several requests may read their tails, too
  int64_t group_capacity;  // token-heads that a processor's teams take at once, with the split `groups`
  int64_t n_tiles;
  int64_t tile_m[kMaxTiles];  // ascending
  int64_t tile_n[kMaxTiles];
  double profit_factor;  // 0: the traffic model decides
  double compute_split_cost;
  double part_ns;
  double part_row_ns;
  double alpha[kMaxTiles];
  double unit_ns[kMaxTiles];  // of a processor for one KV head: of a work unit, and of each step of n tokens in it
  double step_ns[kMaxTiles];
};

// What a plan answers besides its buffer.
struct PlanStats {
  int64_t model_kv;  // bytes, all KV heads, of the packs before row tiling and KV split
  int64_t model_partial;
  int64_t scheduled_kv;  // the same of the items as they are run
  int64_t scheduled_partial;
  int64_t items;  // needed
  int64_t members;
  int64_t parts;
  int64_t widened;  // 1: chunks were made longer than asked for, to stay within the capacity
};

// "name:kind offset " of a field, with i for integers and f for floating point.
template <class Field>
std::string describe_field(const char* name, size_t offset) {
  const char* kind = std::is_floating_point_v<std::remove_all_extents_t<Field>> ? "f" : "i";
  return std::string(name) + ":" + kind + std::to_string(offset) + " ";
}

// A line for each of the structs, then the names of the choices.
inline std::string describe_interface() {
  std::string text = "options ";
#define FIELD(name) text += describe_field<decltype(PlannerOptions::name)>(#name, offsetof(PlannerOptions, name))
  FIELD(strategy), FIELD(split), FIELD(merge), FIELD(grow), FIELD(num_kv_heads), FIELD(group_size), FIELD(head_dim);
  FIELD(kv_value_bytes), FIELD(token_values), FIELD(n_sm), FIELD(max_requests), FIELD(max_items), FIELD(max_members);
  FIELD(max_parts), FIELD(min_chunk);
  FIELD(shared_chunk), FIELD(item_overhead), FIELD(head_pack), FIELD(tail_warps), FIELD(fan_in);
  FIELD(causal_tails), FIELD(fold_tails);
  FIELD(group_capacity), FIELD(n_tiles), FIELD(tile_m), FIELD(tile_n), FIELD(profit_factor);
  FIELD(compute_split_cost), FIELD(part_ns), FIELD(part_row_ns);
  FIELD(alpha), FIELD(unit_ns), FIELD(step_ns);
#undef FIELD
  text += "size:" + std::to_string(sizeof(PlannerOptions)) + "\nstats ";
#define FIELD(name) text += describe_field<decltype(PlanStats::name)>(#name, offsetof(PlanStats, name))
  FIELD(model_kv), FIELD(model_partial), FIELD(scheduled_kv), FIELD(scheduled_partial), FIELD(items), FIELD(members);
  FIELD(parts), FIELD(widened);
#undef FIELD
  return text + "size:" + std::to_string(sizeof(PlanStats)) + "\nchoices " + kChoices;
}

}  // namespace feather
