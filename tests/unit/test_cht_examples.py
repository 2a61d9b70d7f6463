"""The paper's worked examples, and the rules that a serving system adds to them."""

import random

import pytest

from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree


def tree_of(chunk_size=1, **prompts):
    """A tree in which each named prompt waits; a prompt is a string, a token its letter."""
    tree = ChunkedHashTree(chunk_size)
    for name, prompt in prompts.items():
        tree.insert(name, [ord(letter) for letter in prompt])
    return tree


def test_figure_4_2_a_tip_shrinks_when_a_request_joins_and_grows_when_one_finishes():
    tree = tree_of(chunk_size=2, R1="ABCDEF", R3="ABXYZW", R2="ABCDGH", R4="UVWXYZ")
    assert [tree.missing_count(name) for name in ("R1", "R2", "R3", "R4")] == [3, 3, 3, 3]
    assert tree.tip == 0

    tree.add_to_batch("R1")  # (b): the working set is R1's chunks, the tip R1's last
    assert tree.tip == 3
    assert [tree.missing_count(name) for name in ("R1", "R2", "R3", "R4")] == [0, 1, 2, 3]

    assert tree.find_best() == Candidate("R2", missing_chunks=1, tip_before=3, tip_after=2, peers=0)  # (c)
    tree.add_to_batch("R2")
    assert tree.tip == 2
    assert tree.find_best() == Candidate("R3", missing_chunks=2, tip_before=2, tip_after=1, peers=0)

    tree.finish("R1")  # (d): the tip extends to R2's final level
    assert tree.tip == 3
    assert [tree.missing_count(name) for name in ("R2", "R3", "R4")] == [0, 2, 3]
    tree.check_invariants()


def test_figure_a_2_the_working_set_prefers_the_request_that_lets_the_tip_recover():
    # Level 1 is shared; level 2 splits into R1, {R2, R3} and R4. R4 came before R3 and is as long.
    tree = tree_of(R1="aR", R2="aSx", R4="aTz", R3="aSy")
    tree.add_to_batch("R1")
    tree.add_to_batch("R2")
    assert tree.tip == 1
    assert (tree.missing_count("R3"), tree.missing_count("R4")) == (1, 2)
    # By the tip alone the two are equal ...
    assert tree.candidate("R3").tip_after == tree.candidate("R4").tip_after == 1
    # ... the working set tells them apart,
    assert tree.find_best().request_id == "R3"
    tree.add_to_batch("R3")
    tree.finish("R1")
    assert tree.tip == 2  # ... so the tip reaches level 2 once R1 is gone, which with R4 it could not.


@pytest.mark.parametrize(
    ("r_w", "r_s", "missing_w", "missing_s", "after_w", "after_s"),
    [
        pytest.param("abPQ", "abcX", 2, 1, 2, 3, id="case 1: r_S matches the whole tip"),
        pytest.param("aPQR", "abXY", 3, 2, 1, 2, id="case 2: both leave before the tip"),
    ],
)
def test_figure_a_3_missing_count_agrees_with_the_loss_of_the_tip(r_w, r_s, missing_w, missing_s, after_w, after_s):
    tree = tree_of(r_1="abc1", r_2="abc2", r_W=r_w, r_S=r_s)
    tree.add_to_batch("r_1")
    tree.add_to_batch("r_2")
    assert tree.tip == 3
    assert (tree.missing_count("r_W"), tree.missing_count("r_S")) == (missing_w, missing_s)
    # m_S of the paper: the chunks of the tip that the request lacks.
    losses = [tree.tip - tree.candidate(name).tip_after for name in ("r_W", "r_S")]
    assert losses == [3 - after_w, 3 - after_s]
    assert tree.find_best().request_id == "r_S"


def test_peers_are_the_other_waiting_requests_that_share_the_prefix_at_the_new_depth():
    tree = tree_of(first="abcd", near="abcX", also="abcY", far="aZ", alien="Q")
    assert tree.find_best() == Candidate("alien", 1, 0, 0, 4)  # empty batch: the shortest, everybody shares nothing
    tree.add_to_batch("first")
    assert tree.candidate("near") == Candidate("near", 1, 4, 3, 1)
    assert tree.candidate("far") == Candidate("far", 1, 4, 1, 2)
    assert tree.candidate("alien") == Candidate("alien", 1, 4, 0, 3)
    tree.hold("also")  # a held request is no peer and no candidate
    assert tree.candidate("near").peers == 0


def test_ties_go_to_the_oldest_and_a_requeued_request_keeps_its_age():
    tree = tree_of(old="ab", young="ab")
    tree.add_to_batch("old")
    tree.insert("newest", [ord("a"), ord("b")])
    assert tree.find_best().request_id == tree.oldest() == "young"
    tree.requeue("old")
    assert tree.find_best().request_id == tree.oldest() == "old"
    tree.remove("old")
    assert tree.find_best().request_id == tree.oldest() == "young"
    tree.hold("young")
    assert tree.find_best().request_id == tree.oldest() == "newest"
    tree.requeue("young")
    assert tree.find_best().request_id == tree.oldest() == "young"


def test_common_depth_is_that_of_two_prompts_whatever_their_states():
    tree = tree_of(long="abcdef", other="abcxyz", prefix="abc", stranger="xbc")
    tree.add_to_batch("long")
    tree.hold("other")
    assert [tree.common_depth("long", name) for name in ("long", "other", "prefix", "stranger")] == [6, 3, 3, 0]
    assert [tree.common_depth(name, "long") for name in ("other", "prefix", "stranger")] == [3, 3, 0]


def test_priority_comes_before_the_missing_count():
    tree = ChunkedHashTree(1)
    tree.insert("running", [1, 2, 3])
    tree.insert("close", [1, 2, 3], priority=1)
    tree.insert("urgent", [7, 8, 9])
    tree.add_to_batch("running")
    assert tree.find_best().request_id == "urgent"
    tree.add_to_batch("urgent")
    tree.requeue("urgent", [7, 8, 9, 10])  # priority outlives the batch
    assert tree.find_best() == Candidate("urgent", 4, 3, 0, 1)


def test_requeue_with_the_output_so_far_recomputes_the_vector():
    tree = tree_of(chunk_size=2, short="ab", long="abcdef")
    tree.add_to_batch("short")
    assert tree.missing_count("long") == 2
    tree.requeue("short", [ord(letter) for letter in "abcdefgh"])
    assert (tree.missing_count("short"), tree.missing_count("long")) == (4, 3)
    tree.add_to_batch("long")
    assert tree.missing_count("short") == 1


def test_a_partial_last_chunk_counts_and_matches_only_its_equal():
    tree = tree_of(chunk_size=4, whole="abcd", part="abc", same="abc", more="abcde")
    assert [tree.missing_count(name) for name in ("whole", "part", "same", "more")] == [1, 1, 1, 2]
    tree.add_to_batch("part")
    assert [tree.missing_count(name) for name in ("whole", "part", "same", "more")] == [1, 0, 0, 2]


def test_sharing_counts_those_who_wait_for_the_same_first_chunks():
    tree = tree_of(one="abcd", two="abce", three="abX", other="Q")
    assert [tree.sharing("one", depth) for depth in range(1, 6)] == [3, 3, 2, 1, 1]
    tree.add_to_batch("two")  # asked of whom it may be, it counts who waits
    tree.hold("three")
    assert [tree.sharing("one", depth) for depth in (2, 3, 4)] == [1, 1, 1]
    assert [tree.sharing("two", depth) for depth in (2, 3, 4)] == [1, 1, 0]
    assert [tree.sharing("three", depth) for depth in (2, 3)] == [1, 0]
    tree.check_invariants()


def test_distinct_chunks_counts_a_shared_prefix_once_whoever_has_it():
    tree = tree_of(one="abcd", two="abce", twin="abcd", other="Q", none="")
    assert tree.distinct_chunks == len("abcdeQ")
    tree.add_to_batch("one")
    tree.hold("two")
    assert tree.distinct_chunks == 6
    tree.requeue("one", [ord(letter) for letter in "abcdef"])
    assert tree.distinct_chunks == 8
    for name, left in (("twin", 8), ("one", 5), ("two", 1), ("other", 0), ("none", 0)):
        tree.remove(name)
        assert tree.distinct_chunks == left
        tree.check_invariants()


def test_waiting_requests_defer_each_other_but_not_a_lone_one():
    tree = tree_of(one="abcd", two="abce", other="QRSTUV")
    tree.defer("one", 3)
    assert tree.deferred == 2 and tree.find_best().request_id == "other" and tree.oldest() == "one"
    tree.defer("other", 2)  # shares with nobody
    assert tree.deferred == 2 and tree.find_best().request_id == "other"
    tree.check_invariants()
    tree.resume()
    assert tree.deferred == 0 and tree.find_best().request_id == "one"


def test_empty_prompts_miss_nothing_and_share_nothing():
    tree = tree_of(one="", two="", other="ab")
    assert tree.find_best() == Candidate("one", 0, 0, 0, 2)
    tree.add_to_batch("other")
    assert tree.find_best() == Candidate("one", 0, 2, 0, 1)
    tree.add_to_batch("one")
    assert tree.tip == 0
    tree.finish("one")
    assert tree.tip == 2


def test_an_extra_key_isolates():
    tree = ChunkedHashTree(2)
    keys = [None, "None", "a", b"a", ("a",), ("a", "b"), "('a', 'b')", ""]
    for number, key in enumerate(keys):
        tree.insert(number, [1, 2, 3, 4], extra_key=key)
        tree.insert(f"twin of {number}", [1, 2, 3, 4, 5], extra_key=key)
    for number in range(len(keys)):
        tree.add_to_batch(number)
        shared = [other for other in range(len(keys)) if tree.missing_count(f"twin of {other}") == 1]
        assert shared == [number]
        tree.requeue(number)  # keeps its key
        assert tree.missing_count(number) == 2


def test_the_result_is_cached_until_a_change():
    tree = tree_of(one="ab", two="cd")
    assert tree.find_best() is tree.find_best()
    before = tree.find_best()
    tree.insert("three", [1])
    assert tree.find_best().request_id == "three" and tree.find_best() is not before


def test_views_are_live_and_read_only():
    tree = tree_of(one="a", two="b")
    waiting, active, held = tree.waiting, tree.active, tree.held
    tree.add_to_batch("one")
    tree.hold("two")
    assert (waiting, active, held) == (set(), {"one"}, {"two"})
    assert len(tree) == 2 and "one" in tree and "three" not in tree
    for view in (waiting, active, held):
        assert not hasattr(view, "add") and not hasattr(view, "remove")


def test_a_seed_fixes_the_order_and_no_seed_hides_it():
    def order(seed):
        tree = ChunkedHashTree(2, seed=seed)
        for row, group in enumerate("abcdabcd"):
            tree.insert(row, [ord(group)] * 2)
        return tree.row_order(range(8))

    assert order(5) == order(5) and order(None) == order(None)  # one process, one seed
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_colliding_hashes_cost_sharing_never_an_error(monkeypatch):
    """Vectors of two-valued "hashes" collide all the time; every operation must still work and leave nothing."""
    draw = random.Random(3)
    monkeypatch.setattr(
        "feather_sglang.scheduling.tree.cht.hash_vector",
        lambda tokens, *_: b"".join(draw.choice((b"a" * 8, b"b" * 8)) for _ in tokens),
    )
    tree = ChunkedHashTree(1)
    for number in range(3000):
        tree.insert(number, range(draw.randrange(9)))
        if draw.random() < 0.7:
            tree.add_to_batch(draw.choice([tree.find_best().request_id, tree.oldest()]))
        if tree.active and draw.random() < 0.7:
            draw.choice([tree.finish, tree.requeue])(draw.choice(list(tree.active)))
        assert tree.tip >= 0
    for request in list(tree.active):
        tree.finish(request)
    for request in list(tree.waiting):
        tree.remove(request)
    tree.check_invariants()
    assert len(tree) == 0
