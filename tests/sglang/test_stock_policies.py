"""The stock policies that the benchmark compares with are SGLang's own, on its own cache, without the 128 limit."""

import sys
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cht_measure import measure_rounds
from stock_policies import STOCK_POLICIES, StockPolicies

GROUPS = [array("q", range(start, start + 64)) for start in (1000, 2000, 3000)]
SHARED = [64, 16, 48]  # tokens of each group's prefix that a waiting request repeats
WAITING = [GROUPS[place % 3][: SHARED[place % 3]] + array("q", [9000 + place] * 8) for place in range(300)]


@pytest.fixture(scope="module")
def stock():
    return StockPolicies(GROUPS, WAITING)


def test_the_cache_is_the_one_this_release_builds_by_default(stock):
    release = tuple(int(part) for part in stock.version.split(".")[:3])
    unified = "UnifiedTreeCore" if release < (0, 5, 21) else "RustUnifiedTreeCore"
    assert stock.cache_name == ("RadixCache" if release < (0, 5, 19) else f"UnifiedRadixCache ({unified})")


def test_lpm_sorts_by_matched_length_beyond_128_waiting_requests(stock):
    order = stock.run_round("lpm").order
    assert len(order) == 300
    # (Below 32 matched tokens LPM also looks for prefixes shared within the queue; 16 are too few for it to act.)
    assert [place % 3 for place in order] == [0] * 100 + [2] * 100 + [1] * 100


def test_dfs_weight_keeps_each_group_together(stock):
    groups = [place % 3 for place in stock.run_round("dfs-weight").order]
    assert sorted(groups) == sorted(place % 3 for place in range(300))
    assert sum(left != right for left, right in pairwise(groups)) == 2


@pytest.mark.parametrize("policy", STOCK_POLICIES)
def test_a_round_leaves_the_queue_in_arrival_order_for_the_next(stock, policy):
    first, second = stock.run_round(policy), stock.run_round(policy)
    assert first.order == second.order
    assert first.seconds > 0 and second.seconds > 0


@pytest.mark.parametrize("policy", STOCK_POLICIES)
def test_a_feather_round_is_a_hundred_times_cheaper(policy):
    """Reduced size: a quarter of the benchmark's tokens and queue; one insertion in every round, the worst case."""
    figures = [measure_rounds(5_000, waiting=500, repeats=3, stock=StockPolicies, policies=[policy]) for _ in range(3)]
    assert max(row[f"{policy}_us"] / row["feather_worst_us"] for row in figures) >= 100
