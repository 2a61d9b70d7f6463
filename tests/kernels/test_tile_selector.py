"""The rule for n: the largest within 2% of the best, by KV length."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from feather_kernels import Planner
from feather_kernels.device import Device, NRule
from feather_kernels.paths import KernelPath
from feather_kernels.tiles import TILES, chosen_tiles
from feather_kernels.tune.cli import profile_n
from feather_kernels.tune.selector import derive_pieces

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
    def time_of(n, kv_len):
        raise AssertionError

    assert derive_pieces([32], time_of, LENS) == ((None, 32),)


def test_what_is_built_for_hopper_is_what_the_h200_chose_at_all_lengths():
    """The portable path is for other GPUs."""
    assert Device.load("h200").n_rule["hopper"].pieces == {m: ((None, n),) for m, n in TILES["hopper"]}


def test_a_gpu_runs_with_the_n_of_its_rule_for_long_kv():
    rules = {"hopper": NRule({8: ((None, 16),), 16: ((None, 16),), 64: ((96, 64), (None, 32)), 128: ((None, 64),)})}
    assert chosen_tiles("hopper", 128, rules) == ((8, 16), (16, 16), (64, 32), (128, 64))
    assert chosen_tiles("portable", 128, rules) == TILES["portable"]  # no rule
    assert chosen_tiles("hopper", 64, rules) == TILES["hopper"]  # not timed
    assert chosen_tiles("hopper", 128, Device.load("h200").n_rule) == TILES["hopper"]


def test_the_h200s_rule_is_that_of_its_times(monkeypatch):
    """docs/measured has what `tiles --profile` printed, each n at each length that it asked for."""
    pytest.importorskip("torch")
    printed = (Path(__file__).parents[2] / "docs" / "measured" / "tile_times_h200.txt").read_text()
    pattern = r"(\w+) m +(\d+) n +(\d+) KV +(\d+): ([\d.]+) us\n"
    times = {(path, *map(int, figures)): float(us) for path, *figures, us in re.findall(pattern, printed)}
    assert len(times) == len(printed.splitlines()) == 26

    class Timer:
        def __init__(self, path, *_):
            self.path = path

        def time_us(self, *figures):
            return times.pop((self.path, *figures))

    monkeypatch.setattr("feather_kernels.tune.timing.UnitTimer", Timer)
    device = Device.load("h200")
    assert {path: profile_n(path, device, 128, "float16") for path in TILES} == device.n_rule
    assert not times


@pytest.mark.parametrize(
    "path, timed",
    [("hopper", {(64, 32), (64, 64), (128, 32), (128, 64)}), ("portable", {(32, 16), (32, 32), (64, 64)})],
)
def test_every_feasible_n_is_timed_and_nothing_else(path, timed, monkeypatch, capsys):
    """With whole tiles alone the larger n is as good at its multiples only, so the choice never settles."""
    pytest.importorskip("torch")
    asked = set()

    class Timer:
        def __init__(self, *arguments):
            assert arguments == (path, 128, "float16")

        def time_us(self, m, n, kv_len):
            asked.add((m, n))
            return padded(n, kv_len)

    monkeypatch.setattr("feather_kernels.tune.timing.UnitTimer", Timer)
    rule = profile_n(path, Device.load("h200"), 128, "float16")
    assert asked == timed | {(64, 32)}
    assert set(rule.pieces) == {m for m, _ in TILES[path]} and rule.pieces[8] == rule.pieces[16] == ((None, 16),)
    assert [rule.choose_n(64, kv_len) for kv_len in (32, 64, 96, 128)] == [32, 64, 32, 64]
    assert f"{path} m  64 n  64 KV   96: 128.0 us" in capsys.readouterr().out


@pytest.mark.parametrize("path, m", [("hopper", 64), ("hopper", 128), ("portable", 32), ("portable", 64)])
def test_what_is_timed_is_one_tile_in_whole_rounds(path, m):
    """Its queue has a unit for every pack and KV head, full tiles, and no other queue has any; nobody leaves parts."""
    pytest.importorskip("torch")
    from feather_kernels.tune.timing import GROUP, KV_HEADS, PLANNER, full_packs

    rows = [rows for rows, _ in TILES[path]]
    arguments = {"tiles": TILES[path], "max_requests": 33 * m // GROUP, "n_sm": 132, **PLANNER}
    plan = Planner(GROUP * KV_HEADS, KV_HEADS, 128, **arguments).plan(full_packs(33, m, 96))
    queue = len(rows) - 1 - rows.index(m)
    assert plan.n_items == 33 and plan.n_parts == 0
    assert [end - begin for begin, end in pairwise(plan.queue_begin.tolist())] == [
        33 * (index == queue) for index in range(len(rows))
    ]
    assert (plan.items[:, 3] - plan.items[:, 2]).tolist() == [96] * 33
    teams = 132 * KernelPath.of(path, 128).teams_per_processor(m)
    assert 33 * KV_HEADS % teams == 0


def test_an_unknown_m_is_said():
    with pytest.raises(ValueError, match="no rule for m = 128: it has 16, 64"):
        NRule({16: ((None, 16),), 64: ((None, 64),)}).choose_n(128, 1)


def test_a_rule_is_read_back_as_it_was_written():
    rule = NRule({16: ((128, 16), (None, 32))})
    assert rule.to_json() == {"16": [[128, 16], [None, 32]]}
    assert NRule.from_json(rule.to_json()) == rule
