// The planner's entry points. All arrays are contiguous host arrays; Python checks their types and lengths.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <new>
#include <stdexcept>

#include "planner/emit.h"
#include "planner/forest.h"
#include "planner/interface.h"
#include "planner/pack.h"
#include "planner/plan.h"
#include "planner/split.h"

namespace feather {
namespace {

using tvm::ffi::TensorView;

template <typename T>
T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

int32_t length(const TensorView& tensor) {
  FEATHER_REQUIRE(tensor.size(0) <= INT32_MAX, "an array has " << tensor.size(0) << " entries: give fewer");
  return static_cast<int32_t>(tensor.size(0));
}

// What a function answers, or an error where memory does not suffice.
template <class Function>
auto in_memory(Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  FEATHER_REFUSE("memory does not suffice for this batch: give fewer requests or nodes, or use profit");
}

// No count of bytes exceeds its 64 bits: packs and their parts have no more than all requests' tokens.
void check_traffic(const Config& config, const Forest& forest) {
  int64_t tokens = 2 * int64_t{forest.n_requests};  // a request without any may have parts
  for (int32_t r = 0; r < forest.n_requests; ++r) tokens += forest.seq_len[r];
  const double each = static_cast<double>(config.num_kv_heads) *
                      static_cast<double>(std::max(config.token_bytes(), config.part_bytes()));
  FEATHER_REQUIRE(static_cast<double>(tokens) * each < 0x1p62, "a batch of " << tokens << " tokens, each of up to " << each
                                                        << " bytes, is more than is counted: give fewer");
}

struct Workspace {
  FoldScratch fold;
  Tree tree;
  PackScratch pack;
  Packing packing;
  RoundsScratch rounds;
  Schedule schedule;
  EmitScratch emit;
  std::vector<Parts> packed;
};

Workspace& workspace() {
  thread_local Workspace instance;
  return instance;
}

void write_stats(const Config& config, const Packing& packing, const Schedule& schedule, PlanStats& stats,
                 std::vector<Parts>& parts) {
  parts.assign(schedule.parts.size(), Parts{});
  int64_t tokens = 0, split_parts = 0, run = 0;
  for (const Pack& pack : packing.packs) {
    const int32_t length = pack.length();
    tokens += length;
    const int32_t pieces = pack.chunk ? static_cast<int32_t>((int64_t{length} + pack.chunk - 1) / pack.chunk) : 1;
    const int32_t first = pack.first, count = pack.count;
    for (int32_t i = first; i < first + count; ++i) parts[packing.members[i]].add(pieces, count == 1);
  }
  for (const Parts mine : parts) split_parts += config.deposits(mine);
  for (const RowTile& row : schedule.rows) run += packing.packs[row.pack].length() + row.folded_tokens;
  const int64_t token = config.token_bytes() * config.num_kv_heads, part = config.part_bytes() * config.num_kv_heads;
  stats.model_kv = tokens * token;
  stats.model_partial = split_parts * part;
  stats.scheduled_kv = run * token;
  stats.scheduled_partial = schedule.n_parts * part;
  stats.items = schedule.n_items;
  stats.members = schedule.n_members;
  stats.parts = schedule.n_parts;
  stats.widened = schedule.widened;
}

Config config_of(const TensorView& options) { return {*data<PlannerOptions>(options)}; }

// Plans a forest. A buffer of length 0 asks for the counts only; an error leaves the buffer as it was.
void plan(TensorView options, TensorView parent, TensorView node_length, TensorView request_node, TensorView seq_len,
          TensorView row_offset, TensorView buffer, TensorView stats) {
  Config config = config_of(options);
  const Forest forest{data<int32_t>(parent),       data<int32_t>(node_length), length(parent),
                      data<int32_t>(request_node), data<int32_t>(seq_len),     data<int64_t>(row_offset),
                      length(request_node)};
  FEATHER_REQUIRE(forest.n_requests <= config.max_requests,
                  "a batch of " << forest.n_requests << " requests exceeds the planner's " << config.max_requests
                                << ": raise max_requests");
  Workspace& w = workspace();
  in_memory([&] {
    fold(forest, w.fold, w.tree);
    check_traffic(config, forest);
    decide_by_strategy(config, forest, w.tree, w.pack);
    make_packs(config, forest, w.tree, w.pack, w.packing);
    try {
      schedule(config, forest, w.packing, w.rounds, w.schedule);
    } catch (const tvm::ffi::Error&) {  // it does not fit: closing items apart take more room
      if (config.fan_in == 0) throw;
      config.fan_in = 0;
      schedule(config, forest, w.packing, w.rounds, w.schedule);
    }
    write_stats(config, w.packing, w.schedule, *data<PlanStats>(stats), w.packed);
    if (buffer.size(0)) emit(config, forest, w.packing, w.schedule, w.emit, data<int32_t>(buffer));
  });
}

int64_t buffer_size(TensorView options) { return Layout(config_of(options)).size; }

tvm::ffi::String interface() { return describe_interface(); }

int64_t from_nodes(TensorView ids, TensorView parent_ids, TensorView lengths, TensorView request_ids,
                   TensorView seq_len, TensorView parent, TensorView node_length, TensorView request_node) {
  return in_memory([&] {
    return forest_from_nodes(length(ids), data<int64_t>(ids), data<int64_t>(parent_ids), data<int32_t>(lengths),
                             length(request_ids), data<int64_t>(request_ids), data<int32_t>(seq_len),
                             data<int32_t>(parent), data<int32_t>(node_length), data<int32_t>(request_node));
  });
}

int64_t from_block_table(TensorView table, int64_t page_size, TensorView seq_len, TensorView parent,
                         TensorView node_length, TensorView request_node) {
  auto build = [&](auto* ids) {
    return forest_from_block_table(ids, length(table), table.size(1), page_size, data<int32_t>(seq_len),
                                   data<int32_t>(parent), data<int32_t>(node_length), data<int32_t>(request_node));
  };
  return in_memory(
      [&] { return table.dtype().bits == 64 ? build(data<int64_t>(table)) : build(data<int32_t>(table)); });
}

}  // namespace
}  // namespace feather

TVM_FFI_DLL_EXPORT_TYPED_FUNC(interface, feather::interface)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, feather::plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(buffer_size, feather::buffer_size)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forest_from_nodes, feather::from_nodes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forest_from_block_table, feather::from_block_table)
