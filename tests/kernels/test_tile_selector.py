"""The rule for n: the largest within 2% of the best, by KV length."""

import pytest

from feather_kernels.device import Device
from feather_kernels.tile_selector import NRule, derive_pieces, derive_rule
from feather_kernels.tiles import TILES, profile_n

LENS = (64, 128, 192, 256, 320, 384, 448, 512)


def padded(n, kv_len):
    """A time that grows with whole tiles only."""
    return -(-kv_len // n) * n


def test_short_kv_takes_the_small_tile_until_the_large_one_is_as_good():
    # n = 128 costs 128 at 64 tokens and 256 at 192; from 256 on the times below are equal
    time_of = {64: lambda kv: kv, 128: lambda kv: padded(128, kv) if kv < 256 else kv}
    pieces = derive_pieces([64, 128], lambda n, kv: time_of[n](kv), LENS)
    assert pieces == ((64, 64), (128, 128), (192, 64), (None, 128))
    rule = NRule({64: pieces})
    assert [rule.choose_n(64, kv) for kv in (1, 64, 65, 128, 129, 192, 193, 100_000)] == [
        64,
        64,
        *[128] * 2,
        64,
        64,
        128,
        128,
    ]


def test_two_per_cent_is_as_good():
    assert derive_pieces([16, 32], lambda n, kv: 102.0 if n == 32 else 100.0, LENS) == ((None, 32),)
    assert derive_pieces([16, 32], lambda n, kv: 102.1 if n == 32 else 100.0, LENS) == ((None, 16),)


def test_the_sweep_ends_once_the_choice_is_stable():
    asked = []

    def time_of(n, kv_len):
        asked.append(kv_len)
        return 1.0

    derive_pieces([16, 32], time_of, LENS)
    assert sorted(set(asked)) == [64, 128, 192]


def test_one_n_is_never_timed():
    def time_of(m, n, kv_len):
        raise AssertionError

    assert derive_rule(((16, 16), (64, 32)), time_of, LENS).pieces == {16: ((None, 16),), 64: ((None, 32),)}


@pytest.mark.parametrize("path", sorted(TILES))
def test_the_rule_of_the_h200_is_that_of_the_tiles_that_are_built(path):
    rule = Device.load("h200").n_rule[path]
    assert rule == profile_n(path)
    assert [rule.choose_n(m, 4096) for m, _ in TILES[path]] == [n for _, n in TILES[path]]


def test_an_unknown_m_is_said():
    with pytest.raises(ValueError, match="no rule for m = 128: it has 16, 64"):
        NRule({16: ((None, 16),), 64: ((None, 64),)}).choose_n(128, 1)


def test_a_rule_is_read_back_as_it_was_written():
    rule = NRule({16: ((128, 16), (None, 32))})
    assert rule.to_json() == {"16": [[128, 16], [None, 32]]}
    assert NRule.from_json(rule.to_json()) == rule
