"""Requests that have come and gone leave nothing behind."""

import random
import tracemalloc
from array import array
from itertools import count

import pytest

from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from feather_sglang.scheduling.tree.prefix_trie import Node, check

GROUPS = [array("q", [group] * 6) for group in range(5)]


def members_and_entries(tree):
    """Nodes and requests of the trie, and all entries that it ranks or keeps by age."""
    members = check(tree._root)
    ranked = sum(member.entries for member in members if isinstance(member, Node))
    return len(members), ranked + len(tree._ages) + len(tree._returned)


def pass_through(tree, ids, draw, queue=50, batch=30):
    """Let requests come, join the batch and go, some by another way, keeping `queue` waiting and `batch` active."""
    running = []
    for number in ids:
        tree.insert(number, GROUPS[number % 5] + array("q", [number, number]) if number % 3 else GROUPS[number % 5])
        while len(tree.waiting) > queue:
            best = tree.find_best().request_id
            if best % 7 == 0:
                tree.remove(best)
                continue
            if best % 11 == 0:
                tree.hold(best)
                tree.requeue(best)
            tree.add_to_batch(best)
            running.append(best)
        while len(running) > batch:
            place = draw.randrange(batch)
            running[place], leaving = running[-1], running[place]
            running.pop()
            if draw.random() < 0.1:
                tree.requeue(leaving, array("q", [leaving]))
            else:
                tree.finish(leaving)
    for number in running:
        tree.finish(number)
    for number in list(tree.waiting):
        tree.remove(number)


@pytest.mark.slow
def test_a_hundred_thousand_requests_leave_nodes_entries_and_memory_at_the_start():
    tree, draw, ids = ChunkedHashTree(chunk_size=2), random.Random(0), count()
    for group, prompt in enumerate(GROUPS):  # a few stay: their nodes' heaps must not fill up
        tree.insert(f"resident {group}", prompt)
        tree.hold(f"resident {group}")

    def come_and_go(requests):
        pass_through(tree, (next(ids) for _ in range(requests)), draw)
        assert members_and_entries(tree) == (6, 0)  # exactly: one that stays among all that came would show

    come_and_go(20_000)  # warm: the capacities of dicts and lists
    tracemalloc.start()
    come_and_go(20_000)
    before = tracemalloc.get_traced_memory()[0]
    come_and_go(40_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes after 40,000 more requests"
    come_and_go(20_000)
    tree.check_invariants()
    for group in range(5):
        tree.remove(f"resident {group}")
    assert members_and_entries(tree) == (1, 0)
    assert len(tree) == 0


def test_a_burst_that_leaves_without_being_served_gives_its_memory_back():
    tree = ChunkedHashTree(chunk_size=2)
    tree.insert("stays", [1])
    for number in range(5000):
        tree.insert(number, [number, 5, 6])
    for number in range(5000):
        tree.remove(number)
    members, entries = members_and_entries(tree)
    assert members == 2
    assert entries < 100
    assert tree.find_best().request_id == tree.oldest() == "stays"


def test_holding_and_requeueing_for_ever_does_not_grow():
    tree = ChunkedHashTree(chunk_size=2)
    for number in range(20):
        tree.insert(number, [1, 2, number])
    for _ in range(500):
        for number in range(20):
            tree.hold(number)
        for number in range(20):
            tree.requeue(number)
    assert members_and_entries(tree)[1] < 400
    assert tree.oldest() == 0
