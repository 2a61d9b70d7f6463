// Warpgroups that share each KV tile work through the queue of its shape.
#pragma once
#include "common/merge.cuh"
#include "sm90/kv_pipeline.cuh"
#include "sm90/warpgroup_tile.cuh"
#include "sm90/widening_producer.cuh"

namespace feather {

// kGroups warpgroups that share each KV tile, m = 64 kGroups, n = kTokens.
template <typename T, int kHeadDim, int kGroups, int kTokens, int kStages>
struct WarpgroupTeam {
  using Tile = WarpgroupTile<T, kHeadDim, kTokens>;
  using Pipeline = KvPipeline<T, kHeadDim, kTokens, kGroups, kStages>;
  using Control = typename Pipeline::Control;
  using Value = typename Pipeline::Value;
  using Producer = std::conditional_t<kFp8, WideningProducer<T, Pipeline>, KvProducer<T, Pipeline>>;

  // Copying warp `index` of 2 kGroups.
  static __device__ void produce(Params<T> const& params, Queue const& queue, int first, int stride,
                                 unsigned char* ring, Control& control, int index) {
    Producer producer(params, queue, reinterpret_cast<Value*>(ring), index % 2 == 0, index / 2, first, stride);
    wait_on_dependent_grids();
    producer.run(control);
  }

  static __device__ void fetch(Params<T> const& params, Tile& tile, StageInfo const& info, int const* members,
                               int warp) {
    T const* queries[2];
    find_queries<T, kHeadDim>(params, info, members, 16 * warp, queries);
    tile.fetch(queries);
#if FEATHER_CAUSAL
    tile.find_ends(params, members, info.n_members, 16 * warp, info.stop);
#endif
  }

  // The first unit's queries, while its first tokens are on their way.
  static __device__ void fetch_first(Params<T> const& params, Queue const& queue, int unit, Tile& tile, int warp) {
    int const item = params.kv_heads_div.div(unit), words = load_item(params, queue.first_item + item);
    StageInfo const info{0, (unit - item * params.kv_heads) << kHeadShift,
                         item_word(words, kItemMembers) FEATHER_ENDS_AT(item_word(words, kItemStop))};
    fetch(params, tile, info,
          params.plan + params.plan[kHeaderMembersBegin] + kMemberSize * item_word(words, kItemFirstMember), warp);
  }

  // `first`: the unit that the copying warps begin with, if it is in the queue. In line, see run_unit.
  static __device__ __forceinline__ void consume(Params<T> const& params, Queue const& queue, int first,
                                                 unsigned char* ring, Control& control, int warp) {
    KvConsumer<T, Pipeline> consumer(control, reinterpret_cast<Value*>(ring));
    Tile tile;
    if (first < queue.n_work) fetch_first(params, queue, first, tile, warp);
    PendingPublish pending;
    while (true) {
      StageInfo const info = consumer.open();
      if (info.tokens < 0) break;
      if (kGroups > 1 && warp / 4 * kWarpgroupRows >= info.n_members * params.group) {  // no row for this warpgroup
        consumer.skip(info.tokens);
        tile.ahead = false;
        continue;
      }
      run_unit(params, consumer, tile, info, warp, pending);
    }
    pending.publish(params);
  }

  // Two warpgroups on one tile are short of time, not of KV: a stage is waited for while products of the one before it
  // are under way. In a ring of its own a single one would only be held up.
  static constexpr bool kLarge = kGroups > 1;
  static_assert(!kLarge || kStages > 2, "a stage is waited for while two are held");

  // The scores of a stage are computed while the probabilities of the one before it meet V: matrix units and
  // exponentials work at the same time (FlashAttention-3, 3.2). In line, as wgmma in a function of its own would be
  // serialised.
  static __device__ __forceinline__ void run_unit(Params<T> const& params, KvConsumer<T, Pipeline>& consumer,
                                                  Tile& tile, StageInfo const& info, int warp,
                                                  PendingPublish& pending) {
    int stage = consumer.take(), left = info.tokens;
    if (left == 0) return epilogue_empty(params, consumer, tile, info, stage, warp, pending);
    if (!tile.ahead) fetch(params, tile, info, consumer.members(stage), warp);
    tile.begin();
    tile.score(consumer.k_tile(stage));
    if (kLarge && left > Pipeline::kTokens) consumer.wait();
    tile.template wait<0>();
    tile.online_softmax_first(left, params);
    consumer.release_keys(stage);
    tile.round_probabilities();
    pending.publish(params);  // of the unit before: its values have been written meanwhile
    while ((left -= Pipeline::kTokens) > 0) {
      if (!kLarge) consumer.wait();
      int const next = consumer.take();
      tile.score(consumer.k_tile(next));
      consumer.wait_for_values();
      tile.accumulate(consumer.v_tile(stage));
      if (kLarge && left > Pipeline::kTokens) consumer.wait();
      tile.template wait<1>();
      bool const fits = tile.online_softmax_next(left, params);
      tile.template wait<0>();
      if (!fits) tile.online_softmax_redo(consumer.k_tile(next), left, params);
      consumer.release_keys(next);
      consumer.release(stage);
      tile.round_probabilities();
      stage = next;
    }
    consumer.wait_for_values();
    tile.accumulate(consumer.v_tile(stage));
    Row rows[2];
    find_rows<typename Tile::Layout>(params, consumer.info(stage), consumer.members(stage), 16 * warp, rows);
    tile.template wait<0>();
    consumer.release(stage);
    StageInfo const behind = consumer.peek();  // the next unit's queries, in time for them to be there
    if (behind.tokens >= 0) fetch(params, tile, behind, consumer.members(consumer.stage), warp);
    pending = write(params, tile, rows);
  }

  static __device__ PendingPublish write(Params<T> const& params, Tile& tile, Row const (&rows)[2]) {
    float lse[2];
    tile.end(lse);
    return epilogue<kHeadDim, typename Tile::Layout, false>(params, tile.out, lse, rows);
  }

  // A tail in a large tile may have no tokens: its stage holds nothing that could be multiplied.
  static __device__ void epilogue_empty(Params<T> const& params, KvConsumer<T, Pipeline>& consumer, Tile& tile,
                                      StageInfo const& info, int stage, int warp, PendingPublish& pending) {
    Row rows[2];
    find_rows<typename Tile::Layout>(params, info, consumer.members(stage), 16 * warp, rows);
    consumer.wait_for_values();
    consumer.release_keys(stage);
    consumer.release(stage);
    pending.publish(params);
    tile.begin();
    pending = write(params, tile, rows);
  }
};

}  // namespace feather
