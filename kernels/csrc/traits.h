// The kernels' compile-time constants: what the build may choose, and the shapes that a head dimension allows.
#pragma once
#include <cstdint>

// KB of shared memory that a multiprocessor has: 228 (sm_90, sm_100), 164 (sm_80), 100 (sm_86, sm_89, sm_120).
#ifndef FEATHER_SHARED_KB
#define FEATHER_SHARED_KB 228
#endif
// n of the tiles that can be built with another one, by path and m (feather_kernels/tiles.py).
#ifndef FEATHER_PORTABLE_32
#define FEATHER_PORTABLE_32 32
#endif
#ifndef FEATHER_PORTABLE_64
#define FEATHER_PORTABLE_64 32
#endif
#ifndef FEATHER_HOPPER_64
#define FEATHER_HOPPER_64 64
#endif
#ifndef FEATHER_HOPPER_128
#define FEATHER_HOPPER_128 64
#endif

namespace feather {

#if FEATHER_KV_FP8  // e4m3 in the cache instead of 16 bits
constexpr bool kFp8 = true;
#else
constexpr bool kFp8 = false;
#endif
constexpr int kKvBytes = kFp8 ? 1 : 2;  // of a value in the cache

constexpr int kWarp = 32;         // lanes
constexpr int32_t kWarpRows = 16;  // the most that a tile of single warps holds: a fragment of mma.sync
constexpr int32_t kThinRows = 8;   // of the tile that runs one request's query heads: mma.sync with swapped operands
constexpr int kWarpTokens = 16;   // a step of both
constexpr int kWarpgroupRows = 64;
constexpr int kPartChunk = 8;     // neighbouring values of a part that a lane holds: 16 bytes
constexpr int kPatience = 1 << 24;  // looks at a part that does not come before the kernel gives up

// Four warps a CTA (sm_80 and later). Rings take as much shared memory as there is: feather_kernels/paths.py knows them.
template <int kHeadDim_>
struct PortableTraits {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarps = 4, kThreads = kWarp * kWarps;
  static constexpr int kShared = FEATHER_SHARED_KB;
  static constexpr int kMinCtas = kHeadDim <= 128 && kShared >= 164 ? 2 : 1;  // of a multiprocessor
  static constexpr int kRingKb =                                             // of a warp
      kHeadDim == 256 ? (kShared >= 164 ? 32 : kFp8 ? 20 : 24)
                      : (kShared >= 228 ? 24 : kShared < 164 ? 20 : kHeadDim == 64 ? 16 : 18);
  static constexpr int kRingBytes = kRingKb * 1024;
  static constexpr int kTokens64 = FEATHER_PORTABLE_64;  // n, by m
  static constexpr int kTokens32 = kHeadDim == 256 && kShared < 164 ? 16 : FEATHER_PORTABLE_32;
};

// Stages of 8 bits that travel ahead of those that are widened, on the Hopper path.
template <int kHeadDim>
inline constexpr int kWideningDepth = kHeadDim == 64 ? 3 : 2;

// Warpgroups that compute, and one that copies for them (sm_90a). At head_dim 256 two warpgroups' results do not fit
// into registers.
template <int kHeadDim_>
struct HopperTraits {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kThreads = 128 * (kGroups + 1), kComputing = 128 * kGroups, kMinCtas = 1;
  static constexpr int kRingTokens = kHeadDim == 64 ? 384 : kHeadDim == 128 ? 192 : kFp8 ? 192 : 128;  // of a group
  static constexpr int kTokens128 = FEATHER_HOPPER_128, kTokens64 = FEATHER_HOPPER_64;                // n, by m
  // Of a ring that so many groups share. Stages in 8 bits, half as large, leave room for fewer; of more than four there
  // is no room for what must be known of each.
  static constexpr int stages(int tokens, int groups) {
    int const all = groups * kRingTokens / tokens, fewer = all - (kWideningDepth<kHeadDim> + 1) / 2;
    return !kFp8 ? all : fewer < 4 ? fewer : 4;
  }
  // Registers of a thread at launch, and then: as many as the copying warps give up, the computing ones get. Beside one
  // group alone, every thread has as many as it can use from the start.
  static constexpr bool kLends = kGroups == 2;
  static constexpr int kRegisters = 168, kCopyRegisters = 88, kComputeRegisters = 208;
  // Warps of a group that take tails, a matter of latency: those that copied for it compute too.
  static constexpr int kTailWarps = 4 + 4 / kGroups;
};

// Latent attention (sm_90a): one KV head whose keys are a slot's 576 columns and whose values are the first 512 of
// them. Two warpgroups have half of an output row's columns each, and a third copies for them.
struct LatentTraits {
  static constexpr int kKeyDim = 576, kValueDim = 512, kHalfDim = kValueDim / 2;
  static constexpr int kTokens = 64, kStages = 2;
  static constexpr int kMergedAtOnce = 32;  // loads of a lane: parts of a row are many, and nothing else hides them
  static constexpr int kThreads = 384, kComputing = 256, kMinCtas = 1;
  static constexpr int kRegisters = 168, kCopyRegisters = 72, kComputeRegisters = 216;
};

}  // namespace feather
