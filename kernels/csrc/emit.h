// Writes a schedule into the buffer that the kernel reads.
#pragma once

#include <array>

#include "plan.h"

namespace feather {

struct Layout {
  int64_t part_begin, items, members, size;

  Layout(int64_t n_requests, int64_t n_items, int64_t n_members) {
    auto aligned = [](int64_t at) { return (at + kAlign - 1) / kAlign * kAlign; };
    part_begin = kHeaderSize;
    items = aligned(part_begin + n_requests + 1);
    members = aligned(items + n_items * kItemSize);
    size = aligned(members + n_members * kMemberSize);
  }
  // As large as any plan within the capacity.
  explicit Layout(const Config& config) : Layout(config[kMaxRequests], config[kMaxItems], config[kMaxMembers]) {}
};

struct EmitScratch {
  struct Entry {
    uint32_t key;
    int32_t row, chunk;
  };
  std::vector<Entry> entries, swap;
  std::vector<int32_t> cursor;     // of each request: its next part
  std::vector<int32_t> first_part;  // of each member of each row tile: its part in the tile's first chunk
};

// Orders items by key, keeping the order of equals; 11 bits a pass.
inline void sort_entries(EmitScratch& scratch, uint32_t highest) {
  constexpr int kBits = 11;
  scratch.swap.resize(scratch.entries.size());
  for (int shift = 0; shift < 32 && highest >> shift; shift += kBits) {
    std::array<int32_t, (1 << kBits) + 1> begin{};
    constexpr uint32_t kMask = (1 << kBits) - 1;
    for (const auto& entry : scratch.entries) ++begin[((entry.key >> shift) & kMask) + 1];
    for (size_t i = 1; i < begin.size(); ++i) begin[i] += begin[i - 1];
    for (const auto& entry : scratch.entries) scratch.swap[begin[(entry.key >> shift) & kMask]++] = entry;
    scratch.entries.swap(scratch.swap);
  }
}

inline void emit(const Config& config, const Forest& forest, const Packing& packing, const Schedule& schedule,
                 EmitScratch& scratch, int32_t* buffer) {
  const Layout layout(forest.n_requests, schedule.n_items, schedule.n_members);
  const int32_t n_tiles = config.n_tiles();
  int32_t* part_begin = buffer + layout.part_begin;
  auto& [entries, swap, cursor, first_part] = scratch;
  cursor.resize(forest.n_requests);
  int32_t parts = 0;
  for (int32_t r = 0; r < forest.n_requests; ++r) {
    part_begin[r] = cursor[r] = parts;
    parts += schedule.parts[r] > 1 ? schedule.parts[r] : 0;
  }
  part_begin[forest.n_requests] = parts;

  // Packs come in order of position for each of their requests, so counting up in their order numbers the parts.
  first_part.resize(packing.members.size());
  entries.clear();
  int32_t longest = 0;
  for (const RowTile& row : schedule.rows) longest = std::max(longest, row.chunk);
  int length_bits = 0;
  while (longest >> length_bits) ++length_bits;
  const int drop = std::max(0, length_bits - 28);  // the key has 4 bits for the queue
  const int queue_shift = length_bits - drop;
  std::array<int32_t, kMaxTiles + 1> queue_begin{};
  for (size_t i = 0; i < schedule.rows.size(); ++i) {
    const RowTile& row = schedule.rows[i];
    const int32_t length = packing.packs[row.pack].stop - packing.packs[row.pack].start;
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      first_part[j] = cursor[r];
      cursor[r] += row.n_chunks;
    }
    const uint32_t queue = n_tiles - 1 - row.tile;
    queue_begin[queue + 1] += row.n_chunks;
    for (int32_t chunk = 0; chunk < row.n_chunks; ++chunk) {
      const int32_t size = std::min(row.chunk, length - chunk * row.chunk);
      const uint32_t rank = static_cast<uint32_t>((longest - size) >> drop);  // longest first
      entries.push_back({queue << queue_shift | rank, static_cast<int32_t>(i), chunk});
    }
  }
  for (int32_t q = 0; q < n_tiles; ++q) queue_begin[q + 1] += queue_begin[q];
  sort_entries(scratch, ((uint32_t(n_tiles) << queue_shift) - 1));

  int32_t* item = buffer + layout.items;
  int32_t* member = buffer + layout.members;
  int32_t n_members = 0;
  for (const auto& entry : entries) {
    const RowTile& row = schedule.rows[entry.row];
    const Pack& pack = packing.packs[row.pack];
    const bool last = entry.chunk + 1 == row.n_chunks;
    const int64_t offset = forest.row_offset[packing.members[row.first]];
    item[kItemOffsetLow] = static_cast<int32_t>(static_cast<uint32_t>(offset));
    item[kItemOffsetHigh] = static_cast<int32_t>(offset >> 32);
    item[kItemStart] = pack.start + entry.chunk * row.chunk;
    item[kItemStop] = last ? pack.stop : pack.start + (entry.chunk + 1) * row.chunk;
    item[kItemGrows] = last ? pack.grows : -1;
    item[kItemFirstMember] = n_members;
    item[kItemMembers] = row.count;
    item[kItemTile] = row.tile;
    item += kItemSize;
    n_members += row.count;
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      *member++ = r;
      *member++ = schedule.parts[r] > 1 ? first_part[j] + entry.chunk : -1;
    }
  }

  const uint32_t plans = buffer[kHeaderMagic] == kMagic ? static_cast<uint32_t>(buffer[kHeaderSerial]) : 0;
  const int32_t serial = static_cast<int32_t>((plans + 1) & INT32_MAX);
  std::fill_n(buffer, kHeaderSize, 0);
  buffer[kHeaderMagic] = kMagic;
  buffer[kHeaderItems] = static_cast<int32_t>(entries.size());
  buffer[kHeaderMembers] = n_members;
  buffer[kHeaderRequests] = forest.n_requests;
  buffer[kHeaderParts] = parts;
  buffer[kHeaderTiles] = n_tiles;
  buffer[kHeaderItemsBegin] = static_cast<int32_t>(layout.items);
  buffer[kHeaderMembersBegin] = static_cast<int32_t>(layout.members);
  buffer[kHeaderPartBegin] = static_cast<int32_t>(layout.part_begin);
  buffer[kHeaderUsed] = static_cast<int32_t>(layout.members) + n_members * kMemberSize;
  buffer[kHeaderSerial] = serial;
  std::copy_n(queue_begin.begin(), n_tiles + 1, buffer + kHeaderQueue);
}

}  // namespace feather
