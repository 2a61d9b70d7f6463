// The constants that measurements set: who takes which unit, how long KV is cut, when a softmax is rescaled.
//
// Each has the measurement that set it. Questions in quotes are those of docs/lab/kernel.md, which has the figures: an
// H200, head_dim 128, float16.
#pragma once
#include <cstdint>

namespace feather {

// ---- Over how many levels a range may be carried, at first (planner/pack.h).
// A chain of 4,096 nodes of 16 tokens is decided in 38 ms of 154; with 128 and 256 first it took 70 and 57.
constexpr int32_t kFirstLevels = 512;
constexpr int32_t kMoreLevels = 4;  // times as many, where those do not suffice

// ---- Few packs go to the smallest tile of teams, all of them (planner/row_tiles.h).
// "How is work cut for single warps?": one request of 2,000 tokens in half the time, `1,3,9,36_1258,45,59,149` 17 us
// for 38. In rounds of units for the teams; the more kinds of tiles would follow each other otherwise, the more rounds.
constexpr double kFewRounds = 1.5;       // where no larger tile has packs
constexpr double kFewRoundsLarge = 1;    // where larger tiles have packs ...
constexpr double kFewRoundsMedium = 2;   // ... and that tile, too
constexpr double kFewRoundsMixed = 3;    // where single warps share packs beside either
constexpr double kFewTokens = 3000;      // for a team: beyond, units handed out one by one to single warps are faster

// ---- Tails go to teams (planner/row_tiles.h).
// "Who should read tails of unlike lengths?": 5% off tails alone in 112 random batches, 5% off 76 beside other packs.
constexpr double kUnlike = 2;              // the longest over the mean
constexpr double kTailTokensBeside = 600;  // in the mean, beside other packs: shorter ones took 3 to 13% more
// Of like lengths: up to 16% longer beside other packs, so only alone; the other limits are from the same batches.
constexpr double kTailTokensAlike = 1000;  // in the mean
constexpr double kManyTailRounds = 8;      // or
constexpr double kLastTailRound = 0.6;     // so full a last one

// ---- Long packs of few requests go to the next larger tile (planner/row_tiles.h).
// "How is work cut for single warps?", lost: few long packs left to single warps.
constexpr int64_t kLongPack = 256;      // tokens
constexpr int64_t kLongPackShares = 4;  // of a warp's even share of all such packs

// ---- Tails are read by units of other packs (planner/row_tiles.h): latent attention only. "Latent attention": 36 us for
// 88 on `1,16,32,64,128,1024_256,128,64,32,32,32` at 8 heads.
constexpr int32_t kMostFolded = 32;    // tails to a unit: a lane each
constexpr double kFoldedShares = 1;    // of a processor's even share of all work that they may take

// ---- Two KV heads to a unit of tails (planner/row_tiles.h).
// "How is work cut for single warps?": a unit's own cost half as often; beyond, a warp's ring would have one slot.
constexpr int64_t kHeadPackWidest = 128;  // head_dim

// ---- How long chunks are (planner/split.h).
// "How is work cut for single warps?"
constexpr int64_t kMinSteps = 8;         // of a tile: a part has its price, 60 ns a row ("Do better prices ...?")
constexpr int64_t kTwoRoundsSteps = 16;  // two rounds of even chunks: 3 to 16% off, if they are not shorter
constexpr double kMostShares = 2.5;      // 363 us for 705 for 5 requests of 6,000 and 90 of 700 tokens at 32/32
constexpr double kWiden = 1.25;          // chunks beyond the capacity, step by step; not measured

// ---- The split `rounds` (planner/rounds.h).
// "How are packs cut?": a tenth off batches of long prompts that many share, 27% off one, 7% more on another.
constexpr int64_t kMostRounds = 6;    // up to twelve: 3 and 6% more on two batches
constexpr double kRoundsGain = 0.98;  // what a change must lower the modelled time to; not measured by itself
constexpr double kUnitAlone = 1.5;    // times its cost that a unit takes while other teams are idle: estimated

// ---- Who takes which unit on the Hopper path (sm90/forward.cuh).
// "Dealt out or popped?": up to a third off a batch, 5 to 14% off ten trees of several levels.
constexpr int kDealtRounds = 4;  // of small units, and of tails alone
constexpr int kDealtBeside = 2;  // of tails beside larger tiles: three or four are 2% slower
// ... and there only with these: without them one batch took 22% longer.
constexpr bool exceeds_a_round(int units, int warps) { return 4 * units >= 5 * warps; }
constexpr bool nearly_even(int left, int ctas) { return 3 * left >= 2 * ctas; }
// "How is work cut for single warps?": eight warps with longer rings are faster from two rounds of tails on.
constexpr int kManyRounds = 2;
constexpr int few_tail_warps(int warps) { return warps * 2 / 3; }
// The same: packs of up to 16 rows take twice as long with two.
constexpr int kSmallStages = 3;

// ---- The online softmax (common/softmax.cuh).
// row_max is followed only when it has grown by more than 2^8: sums stay well inside fp16 and fp32, and results are
// rescaled rarely. "What binds large nodes?": so a sum can say that no maximum is needed, a part of 3% off 16 trees.
constexpr float kRescaleThreshold = 8.f;

}  // namespace feather
