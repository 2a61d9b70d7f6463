"""How balanced chunks are cut, from the rule in words: the oracle of ``feather_kernels``' KV split.

Shares no code and no data structure with the product.
"""

import math


def up(value, step):
    return -(-value // step) * step


def pieces(length, longest, step):
    """Lengths of a range's chunks: as few as `longest` allows, even, whole steps but for the last."""
    if length <= longest:
        return (length,)
    chunk = up(-(-length // -(-length // longest)), step)
    rest = length % chunk
    return (chunk,) * (length // chunk) + ((rest,) if rest else ())


def least_chunk(min_chunk, step, alone=False):
    """The length that no limit is below: as asked for, and eight steps of the tile unless single warps are alone."""
    return min_chunk if alone else max(min_chunk, 8 * step)


def tile_limit(lengths, alpha, kv_heads, n_sm, least, step):
    """The longest chunk in a tile whose row tiles have these lengths, by their even share alone, in whole steps."""
    return up(max(least, math.ceil(alpha * sum(lengths) * kv_heads / n_sm)), step)


def group_limit(capacity, alpha, least, step):
    """The same where a group's capacity is given: a team's share of it, however much there is in all."""
    return up(max(least, math.ceil(alpha * capacity)), step)


def head_pack(group_size, kv_heads, head_dim):
    """KV heads to a unit of the tile of 8 rows."""
    return 2 if 2 * group_size <= 8 and kv_heads % 2 == 0 and head_dim <= 128 else 1


def limits_of_warps(packs, units, warps, busy, least, step, two_rounds=False):
    """The longest chunk of each pack in a tile of single warps, for packs from the longest to the shortest.

    A pack is so many units, a chunk of it as many. The longest packs, as many as fill whole rounds of the warps, are
    cut only where they exceed five quarters of a warp's even share of all tokens; the others so that their chunks are
    no more than one round, where up to eight longer tries reach that. Without a whole round, a chunk is the share of
    one of `busy` warps; if that round's chunks are longer than two and a half even shares of all warps, they are cut to
    one. With `two_rounds`, chunks for no more than two warps of three give way to chunks of two rounds that are shorter
    than half as long, but at least 16 steps.
    """
    rounds = sum(length > 0 for length in packs) * units // warps
    whole = rounds * warps // units
    last = packs[whole:]

    def chunks(longest):
        return sum(up(length, longest) // longest for length in last)

    def chunk(sharing, most):
        found = up(max(least, share(last, units, sharing)), step)
        for _ in range(8):
            if chunks(found) <= most:
                break
            found = up(found * 5 // 4, step)
        return found

    round_of = warps // units
    longest = chunk(warps if whole else busy, round_of)
    even = up(max(least, share(packs, units, warps)), step)
    longest = even if not whole and longest > 2.5 * even else longest
    if two_rounds and 3 * chunks(longest) <= 2 * round_of:
        shorter = chunk(2 * warps, 2 * round_of)
        longest = shorter if 2 * shorter < longest and shorter >= 16 * step else longest
    return [up(max(least, share(packs, units, warps) * 5 // 4), step)] * whole + [longest] * len(last)


def share(packs, units, warps):
    """Tokens that fall to each warp."""
    return sum(packs) * units // warps


def least_promoted(lengths, kv_heads, warps):
    """The length from which a pack of several requests leaves its tile of at most 16 rows for the next larger one.

    `lengths` are those of all such packs, which so many warps share; a pack is long if it is four times what falls to a
    warp.
    """
    return max(256, 4 * share(lengths, kv_heads, warps))


def most_rounds(of_tiles, team, tail):
    """Of units of few packs, for a team of the tile `team`: more, if they are in more kinds of tiles (`of_tiles`)."""
    larger, same = any(tile > team for tile in of_tiles), team in of_tiles
    if any(tile < team and tile != tail for tile in of_tiles) and (larger or same):
        return 3
    return (2 if same else 1) if larger else 1.5


def are_few(rounds, most, tokens, teams):
    """Packs are, in no more than so many rounds of units for each team, and with no more than 3,000 tokens for each."""
    return rounds <= most and tokens <= 3000 * teams


def unlike(lengths):
    """Whether the longest is longer than two of the mean length."""
    return max(lengths) > 2 * (sum(lengths) / len(lengths))


def gathers(rows, tiles, teams, group, kv_heads, tails_too):
    """The tile that takes all (tile, start, stop, members) of a batch, or None.

    It is the smallest of more than 16 rows; packs of more rows are cut into several. It takes them where they are few
    and, with `tails_too`, tails alone in no more than one round.
    """
    team, tail = team_and_tail(tiles, group)
    if team is None:
        return None
    capacity = tiles[team][0] // group
    cut = [(stop - start, -(-len(members) // capacity)) for _, start, stop, members in rows]
    rounds = sum(count for _, count in cut) * kv_heads / teams[team]
    tokens, of_tiles = sum(length * count for length, count in cut) * kv_heads, {tile for tile, *_ in rows}
    few = are_few(rounds, most_rounds(of_tiles, team, tail), tokens, teams[team])
    return team if few or (tails_too and of_tiles <= {tail} - {team} and rounds <= 1) else None


def team_and_tail(tiles, group):
    """The smallest tile of more than 16 rows that holds one request, or None, and the smallest of all that does."""
    team = next((tile for tile, (m, _) in enumerate(tiles) if m > 16 and m >= group), None)
    return team, next(tile for tile, (m, _) in enumerate(tiles) if m >= group)


def teams_take_tails(tails, others, rounds):
    """Whether they take tails of these lengths, where packs are not few: in so many rounds, beside so many others."""
    if not tails or rounds <= 1:
        return False
    mean = sum(tails) / len(tails)
    if unlike(tails):
        return not others or mean >= 600
    return not others and mean >= 1000 and (rounds >= 8 or rounds % 1 >= 0.6)


def even_limits(longest, least, step):
    """The limits that `rounds` tries: the longest pack in one piece, in two, and so on, in whole steps."""
    for pieces in range(1, longest + 1):
        limit = max(least, up(-(-longest // pieces), step))
        yield limit
        if limit == least:
            return


class Processors:
    """The modelled time of a batch, in ns, as units are dealt out to processors one by one.

    ``unit`` and ``step`` are a tile's costs of a processor, ``part`` what a request's part costs. ``tails`` are the
    lengths of the tail tile's packs of ``heads`` KV heads each, of which every processor takes ``hands`` heads at once;
    ``others`` those of packs in other tiles of single warps, with their tiles.
    """

    def __init__(self, count, tiles, unit, step, part, heads, hands, waits, tail, tails, others):
        self.loads, self.turn = [0.0] * count, 0
        self.tiles, self.unit, self.step, self.part = tiles, unit, step, part
        self.heads, self.hands, self.waits = heads, hands, waits
        self.tails = [self.cost(tail, length) for length in tails for _ in range(heads)]
        self.extra = sum(self.cost(tile, length) * heads for tile, length in others)

    def cost(self, tile, length):
        return self.unit[tile] + self.step[tile] * -(-length // self.tiles[tile][1])

    def deal(self, tile, rows, limit, whole, teams):
        """The time with this tile's (length, members), all but the first `whole`, cut to the limit.

        Then loads, turn, parts' price and units.
        """
        loads, turn, units, parts = list(self.loads), self.turn, [], 0.0
        for index, (length, members) in enumerate(rows):
            pieces = 1 if index < whole else max(1, -(-length // limit))
            units += [self.cost(tile, -(-length // pieces))] * (pieces * self.heads)
            parts += (pieces - 1) * members * self.part
        for index, cost in enumerate(sorted(units, reverse=True)):
            first = index // len(loads) % teams == 0
            loads[turn] += cost * (1 if teams == 1 else 1.5 if first else (teams - 1.5) / (teams - 1))
            turn = (turn + 1) % len(loads)
        top = max(loads)
        taken = sum(self.tails) / len(self.tails) * self.hands if self.tails else 0
        overlapped = sum(min(top - load, taken) if self.waits else top - load for load in loads)
        time = top + (max(0, sum(self.tails) - overlapped) + self.extra + parts) / len(loads)
        return time, loads, turn, parts, len(units)

    def settle(self, tile, rows, limit, least, teams):
        """The limit of the least time, and how many of the rows, from the longest to the shortest, it does not concern.

        Unless that time is hardly less than with the limit given for all; of up to six units for each processor. All
        rows are cut or, where a processor has several teams, all behind the last whole round of units.
        """
        most, round_of, whole = 6 * len(self.loads), teams * len(self.loads), 0
        best = self.deal(tile, rows, limit, whole, teams)
        rounds = (len(rows) - 1) * self.heads // round_of if teams > 1 else 0
        for first in dict.fromkeys((rounds * round_of // self.heads, 0)):
            for other in even_limits(rows[first][0], least, self.tiles[tile][1]):
                found = self.deal(tile, rows, other, first, teams)
                if max(best[4], found[4]) > most:
                    break
                if found[0] < 0.98 * best[0]:
                    best, limit, whole = found, other, first
        _, self.loads, self.turn, parts, _ = best
        self.extra += parts
        return limit, whole
