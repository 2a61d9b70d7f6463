// Writes a schedule into the buffer that the kernel reads.
#pragma once

#include <array>

#include "planner/plan.h"

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
  explicit Layout(const Config& config) : Layout(config.max_requests, config.max_items, config.max_members) {}
};

struct EmitScratch {
  struct Entry {
    uint32_t key;
    int32_t row, chunk;
  };
  std::vector<Entry> entries, swap;
  std::vector<int32_t> cursor;     // of each request: its next part
  std::vector<int32_t> first_part;  // of each member of each row tile: its part in the tile's first chunk
  std::vector<int32_t> last_part;   // of each request: the one that closes it, if any does; kNoParts if it has one only
  std::vector<char> awaited;        // of each request
  std::vector<char> closes;         // of each row tile: its last item closes a request
};
constexpr int32_t kNoParts = -1;

// Orders items by keys of so many bits, keeping the order of equals; up to 9 bits a pass, as many in each.
inline void sort_entries(EmitScratch& scratch, int key_bits) {
  constexpr int kMostBits = 9;
  const int passes = (key_bits + kMostBits - 1) / kMostBits, bits = (key_bits + passes - 1) / passes;
  const uint32_t mask = (1u << bits) - 1;
  scratch.swap.resize(scratch.entries.size());
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * bits;
    std::array<int32_t, (1 << kMostBits) + 1> begin{};
    for (const auto& entry : scratch.entries) ++begin[((entry.key >> shift) & mask) + 1];
    for (uint32_t i = 1; i <= mask; ++i) begin[i] += begin[i - 1];
    for (const auto& entry : scratch.entries) scratch.swap[begin[(entry.key >> shift) & mask]++] = entry;
    scratch.entries.swap(scratch.swap);
  }
}

// Numbers each request's parts in order of position, which is the order of its row tiles; the one that closes it, if
// any, has the number after the last that is deposited. Returns the partial rows.
inline int32_t number_parts(const Config& config, const Packing& packing, const Schedule& schedule,
                            EmitScratch& scratch, int32_t* part_begin) {
  const int32_t n_requests = static_cast<int32_t>(schedule.parts.size());
  auto& [entries, swap, cursor, first_part, last_part, awaited, closes] = scratch;
  cursor.resize(n_requests);
  last_part.resize(n_requests);
  int32_t parts = 0;
  for (int32_t r = 0; r < n_requests; ++r) {
    part_begin[r] = cursor[r] = parts;
    parts += config.deposits(schedule.parts[r]);
    last_part[r] = schedule.parts[r].count == 1 ? kNoParts : parts;
  }
  part_begin[n_requests] = parts;
  first_part.resize(packing.members.size());
  for (const RowTile& row : schedule.rows) {
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      first_part[j] = cursor[r];
      cursor[r] += row.n_chunks;
    }
  }
  return parts;
}

// What a member's entry says of its part: the only one, closes, or a partial row.
inline int32_t part_entry(const EmitScratch& scratch, int32_t request, int32_t part) {
  const int32_t last = scratch.last_part[request];
  if (last == kNoParts) return -1;
  return part == last ? kCloses : part;
}

// In place of a row tile: the entry's `chunk` is a request, which an item without tokens closes.
constexpr int32_t kNoRow = -1;

// Lists the items, sorted: queue by queue, the longest first. With the fused merge, the tail tile's queue, which is the
// last with work, has first the items that neither wait for one of this queue nor are waited for, then those that
// others wait for, then closing items that wait for any of these. Those without tokens come behind all queues. Work is
// taken in this order, so an item waits only for items that were taken before.
inline void sort_items(const Config& config, const Packing& packing, const Schedule& schedule,
                       EmitScratch& scratch, int32_t* queue_begin) {
  const int32_t n_tiles = config.n_tiles, tail = config.tail_tile();
  auto& [entries, swap, cursor, first_part, last_part, awaited, closes] = scratch;
  int32_t longest = 0;
  for (const RowTile& row : schedule.rows) longest = std::max(longest, row.chunk + row.folded_tokens);
  int length_bits = 0;
  while (longest >> length_bits) ++length_bits;
  const int drop = std::max(0, length_bits - 27);  // the key has 5 bits for the queue
  const int queue_shift = length_bits - drop;
  auto key = [&](int32_t queue, int32_t size) {
    return static_cast<uint32_t>(queue) << queue_shift | static_cast<uint32_t>((longest - size) >> drop);
  };
  awaited.assign(schedule.parts.size(), 0);  // of each request: an item of the tail tile deposits parts of it
  closes.resize(schedule.rows.size());
  for (size_t i = 0; i < schedule.rows.size(); ++i) {
    const RowTile& row = schedule.rows[i];
    const int32_t last = first_part[row.first] + row.n_chunks - 1;
    closes[i] = row.count == 1 && part_entry(scratch, packing.members[row.first], last) == kCloses;
    if (!config.items_close() || row.tile != tail || row.n_chunks == closes[i]) continue;
    for (int32_t j = row.first; j < row.first + row.count; ++j) {
      const int32_t r = packing.members[j];
      awaited[r] = schedule.parts[r].count > 1;
    }
  }
  // The queues after the tail tile's are empty: their numbers order its items, and those behind them.
  const int32_t deposits = n_tiles, waits = n_tiles + 1, merges = n_tiles + 2;
  entries.clear();
  std::fill_n(queue_begin, n_tiles + 1, 0);
  for (size_t i = 0; i < schedule.rows.size(); ++i) {
    const RowTile& row = schedule.rows[i];
    const int32_t length = packing.packs[row.pack].length();
    const int32_t queue = n_tiles - 1 - row.tile;
    bool awaits = false;  // it is waited for, or waits, within this queue
    for (int32_t j = row.first; row.tile == tail && j < row.first + row.count; ++j) {
      awaits |= awaited[packing.members[j]] != 0;
    }
    queue_begin[queue + 1] += row.n_chunks;
    for (int32_t chunk = 0; chunk < row.n_chunks; ++chunk) {
      const bool ends = chunk + 1 == row.n_chunks;
      const int32_t size = std::min(row.chunk, length - chunk * row.chunk) + (ends ? row.folded_tokens : 0);
      const bool last = closes[i] && ends;
      entries.push_back({key(!awaits ? queue : last ? waits : deposits, size), static_cast<int32_t>(i), chunk});
    }
  }
  for (size_t r = 0; r < schedule.parts.size(); ++r) {
    if (!config.closed_apart(schedule.parts[r])) continue;
    entries.push_back({key(merges, 0), kNoRow, static_cast<int32_t>(r)});
  }
  for (int32_t q = 0; q < n_tiles; ++q) queue_begin[q + 1] += queue_begin[q];
  int queue_bits = 0;
  while ((n_tiles + 2) >> queue_bits) ++queue_bits;
  sort_entries(scratch, queue_shift + queue_bits);
}

struct Taken {
  int32_t first, count;  // partial rows
};

// The partial rows that the item takes in which closes a request.
inline Taken closing(const Config& config, const Schedule& schedule, const int32_t* part_begin, int32_t request) {
  return {part_begin[request], config.deposits(schedule.parts[request])};
}

inline void write_item(int32_t* item, int64_t offset, int32_t start, int32_t stop, int32_t grows, int32_t first_member,
                       int32_t members, int32_t tile, const int32_t* member, Taken taken) {
  item[kItemOffsetLow] = static_cast<int32_t>(static_cast<uint32_t>(offset));
  item[kItemOffsetHigh] = static_cast<int32_t>(offset >> 32);
  item[kItemStart] = start;
  item[kItemStop] = stop;
  item[kItemGrows] = grows;
  item[kItemFirstMember] = first_member;
  item[kItemMembers] = members;
  item[kItemTile] = tile;
  item[kItemRequest] = member[0];
  item[kItemPart] = member[1];
  item[kItemFirstPart] = taken.first;
  item[kItemParts] = taken.count;
}

// Writes the items in the order of their entries, and their members. Between those in the queues and those behind are
// tails that units of other packs read: one for each of an item's members, which names the first.
inline void write_items(const Config& config, const Forest& forest, const Packing& packing, const Schedule& schedule,
                        const EmitScratch& scratch, const int32_t* part_begin, int32_t in_queues, int32_t* item,
                        int32_t* member) {
  const int32_t tail_tile = config.tail_tile();
  const int32_t tails = static_cast<int32_t>(schedule.folded.size());
  int32_t n_members = 0, n_written = 0, tail = in_queues;
  int32_t* const items = item;
  auto add_member = [&](int32_t request, int32_t part) {
    member[kMemberSize * n_members] = request;
    member[kMemberSize * n_members++ + 1] = part;
  };
  for (const auto& entry : scratch.entries) {
    item = items + int64_t{kItemSize} * (n_written + (n_written < in_queues ? 0 : tails));
    ++n_written;
    if (entry.row == kNoRow) {
      const int32_t r = entry.chunk, stop = forest.seq_len[r], first_member = n_members;
      add_member(r, kCloses);
      write_item(item, forest.row_offset[r], stop, stop, -1, first_member, 1, tail_tile,
                 member + kMemberSize * first_member, closing(config, schedule, part_begin, r));
    } else {
      const RowTile& row = schedule.rows[entry.row];
      const Pack& pack = packing.packs[row.pack];
      const bool last = entry.chunk + 1 == row.n_chunks;
      const int32_t start = pack.start + entry.chunk * row.chunk, stop = last ? pack.stop : start + row.chunk;
      const int32_t first_member = n_members;
      for (int32_t j = row.first; j < row.first + row.count; ++j) {
        const int32_t r = packing.members[j];
        add_member(r, part_entry(scratch, r, scratch.first_part[j] + entry.chunk));
      }
      const int32_t* const of_first = member + kMemberSize * first_member;
      const Taken none{part_begin[of_first[0]], 0};
      write_item(item, forest.row_offset[packing.members[row.first]], start, stop, last ? pack.grows : -1,
                 first_member, row.count, row.tile, of_first,
                 of_first[1] == kCloses ? closing(config, schedule, part_begin, of_first[0]) : none);
      if (row.folded == kNoTail || !last) continue;
      item[kItemFirstPart] = tail;
      item[kItemParts] = row.count;
      for (int32_t j = 0; j < row.count; ++j, ++tail) {
        const int32_t index = schedule.folded[row.folded + j], r = packing.members[row.first + j];
        const Pack own = index == kNoTail ? Pack{pack.stop, pack.stop, 0, 0, -1, 0} : packing.packs[index];
        const int32_t no_part[2] = {r, -1};
        write_item(items + int64_t{kItemSize} * tail, forest.row_offset[r], own.start, own.stop, own.grows, 0, 0,
                   row.tile, no_part, {0, 0});
      }
    }
  }
}

inline void emit(const Config& config, const Forest& forest, const Packing& packing, const Schedule& schedule,
                 EmitScratch& scratch, int32_t* buffer) {
  const Layout layout(forest.n_requests, schedule.n_items, schedule.n_members);
  const int32_t n_tiles = config.n_tiles, n_members = static_cast<int32_t>(schedule.n_members);
  int32_t* part_begin = buffer + layout.part_begin;
  const int32_t parts = number_parts(config, packing, schedule, scratch, part_begin);
  std::array<int32_t, kMaxTiles + 1> queue_begin;
  sort_items(config, packing, schedule, scratch, queue_begin.data());
  write_items(config, forest, packing, schedule, scratch, part_begin, queue_begin[n_tiles], buffer + layout.items,
              buffer + layout.members);

  const uint32_t plans = buffer[kHeaderMagic] == kMagic ? static_cast<uint32_t>(buffer[kHeaderSerial]) : 0;
  const int32_t serial = static_cast<int32_t>((plans + 1) & INT32_MAX);
  std::fill_n(buffer, kHeaderSize, 0);
  buffer[kHeaderMagic] = kMagic;
  buffer[kHeaderItems] = static_cast<int32_t>(schedule.n_items);
  buffer[kHeaderMembers] = n_members;
  buffer[kHeaderRequests] = forest.n_requests;
  buffer[kHeaderParts] = parts;
  buffer[kHeaderTiles] = n_tiles;
  buffer[kHeaderItemsBegin] = static_cast<int32_t>(layout.items);
  buffer[kHeaderMembersBegin] = static_cast<int32_t>(layout.members);
  buffer[kHeaderPartBegin] = static_cast<int32_t>(layout.part_begin);
  buffer[kHeaderUsed] = static_cast<int32_t>(layout.members) + n_members * kMemberSize;
  buffer[kHeaderSerial] = serial;
  buffer[kHeaderClosing] = static_cast<int32_t>(schedule.n_closing);
  buffer[kHeaderHeadPack] = schedule.head_pack;
  const int64_t read = schedule.n_items - static_cast<int64_t>(schedule.folded.size());
  buffer[kHeaderMerges] = static_cast<int32_t>(read) - queue_begin[n_tiles];
  std::copy_n(queue_begin.begin(), n_tiles + 1, buffer + kHeaderQueue);
}

}  // namespace feather
