// The layout of the buffer that the planner writes and the kernels read.
#pragma once

#include <cstdint>

namespace feather {

// int32, packed, so that one short copy to the device moves a plan. Offsets count int32 from its start
// and stand in the header, which the kernel reads: a CUDA graph may be replayed for a plan of another size. `used` is
// where the last entry ends.

constexpr int32_t kMagic = 0x70616b31;
constexpr int32_t kHeaderSize = 32;
constexpr int32_t kMaxTiles = 15;
constexpr int32_t kItemSize = 12;
constexpr int32_t kMemberSize = 2;  // request; partial row, -1 for a request's only item, or kCloses
constexpr int32_t kCloses = -2;     // the item waits for its request's partial rows and writes the result
constexpr int64_t kAlign = 32;  // regions start at multiples of 128 bytes

enum HeaderField : int32_t {
  kHeaderMagic,
  kHeaderItems,
  kHeaderMembers,
  kHeaderRequests,
  kHeaderParts,
  kHeaderTiles,
  kHeaderItemsBegin,
  kHeaderMembersBegin,
  kHeaderPartBegin,
  kHeaderUsed,
  kHeaderSerial,      // counts the plans written into this buffer
  kHeaderClosing,     // items that close a request; all in the last queue with work, or behind the queues
  kHeaderHeadPack,    // KV heads to a unit of the tail tile's queue, where that tile has 8 rows
  kHeaderMerges,      // items behind the queues: closing ones without tokens
  kHeaderQueue = 16,  // n_tiles + 1 entries: queue q serves tile n_tiles - 1 - q
};

enum ItemField : int32_t {
  kItemOffsetLow,
  kItemOffsetHigh,
  kItemStart,
  kItemStop,
  kItemGrows,
  kItemFirstMember,
  kItemMembers,
  kItemTile,
  kItemRequest,    // of its first member, and that member's part: who runs single requests needs no more
  kItemPart,
  kItemFirstPart,  // the partial rows that it takes in, if it closes a request
  kItemParts,
};

}  // namespace feather
