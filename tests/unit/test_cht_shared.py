"""How many chunks of each active request another active one covers, against a comparison of all prompts."""

from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.cht import ChunkedHashTree
from oracles.sequences import common

STATES = ["active", "active", "active", "waiting", "held", "finished", "removed", "back in line", "admitted again"]

# Two tokens and a few stems: prefixes of several levels, equal prompts, parts of others, empty ones.
prompts = st.builds(
    lambda stem, tail: stem + tail,
    st.sampled_from([[], [], [0] * 4, [0] * 4 + [1] * 3]),
    st.lists(st.integers(0, 1), max_size=5),
)
requests = st.lists(
    st.tuples(prompts, st.sampled_from([None, None, None, "lora"]), st.sampled_from(STATES)), max_size=9
)


def chunks_of(prompt, chunk_size):
    return [prompt[start : start + chunk_size] for start in range(0, len(prompt), chunk_size)]


def brute_force(active, chunk_size):
    """`active`: prompt and extra key by id, in order of admission."""
    counts = []
    for name, (prompt, key) in active.items():
        chunks = chunks_of(prompt, chunk_size)
        others = [chunks_of(p, chunk_size) for other, (p, k) in active.items() if other != name and k == key]
        counts.append((name, max((common(chunks, other) for other in others), default=0)))
    return counts


def tree_of(chunk_size=1, active=(), **prompts):
    tree = ChunkedHashTree(chunk_size)
    for name, prompt in prompts.items():
        tree.insert(name, [ord(letter) for letter in prompt])
    for name in active:
        tree.add_to_batch(name)
    return tree


@given(requests, st.integers(1, 3), st.randoms(use_true_random=False))
def test_they_are_those_that_a_comparison_of_all_prompts_finds(requests, chunk_size, draw):
    tree, active = ChunkedHashTree(chunk_size), {}
    for name, (prompt, key, _) in enumerate(requests):
        tree.insert(name, prompt, extra_key=key)
    order = list(enumerate(requests))
    draw.shuffle(order)
    for name, (prompt, key, state) in order:
        if state in ("held", "removed"):
            (tree.hold if state == "held" else tree.remove)(name)
        elif state != "waiting":
            tree.add_to_batch(name)
            active[name] = prompt, key
            assert tree.shared_counts() == brute_force(active, chunk_size)
    draw.shuffle(order)
    for name, (prompt, key, state) in order:
        if state in ("finished", "back in line", "admitted again"):
            (tree.finish if state == "finished" else tree.requeue)(name)
            del active[name]
        if state == "admitted again":
            tree.add_to_batch(name)
            active[name] = prompt, key
        assert tree.shared_counts() == brute_force(active, chunk_size)


def test_without_an_active_request_there_are_none():
    assert ChunkedHashTree(2).shared_counts() == []
    tree = tree_of(one="abc", two="abd", active=["one"])
    tree.finish("one")
    assert tree.shared_counts() == []


def test_a_lone_active_request_shares_with_nobody_whoever_waits():
    tree = tree_of(chunk_size=2, waits="abcde", runs="abcde", longer="abcdef", active=["runs"])
    tree.hold("longer")
    assert tree.shared_counts() == [("runs", 0)]


def test_the_order_is_that_of_admission():
    tree = tree_of(one="ab", two="cd", three="ef", active=["three", "one", "two"])
    assert [name for name, _ in tree.shared_counts()] == ["three", "one", "two"]
    tree.requeue("three")
    tree.add_to_batch("three")
    assert [name for name, _ in tree.shared_counts()] == ["one", "two", "three"]


def test_a_chunk_counts_once_another_active_request_has_it():
    tree = tree_of(chunk_size=2, long="abcdefg", part="abcd", twin="abcdefg", active=["long"])
    assert tree.shared_counts() == [("long", 0)]
    tree.add_to_batch("part")
    assert tree.shared_counts() == [("long", 2), ("part", 2)]
    tree.add_to_batch("twin")  # the last chunk, too, though it is not whole
    assert tree.shared_counts() == [("long", 4), ("part", 2), ("twin", 4)]
    tree.finish("long")
    assert tree.shared_counts() == [("part", 2), ("twin", 2)]


def test_a_partial_chunk_is_shared_with_its_equal_only():
    tree = tree_of(chunk_size=4, whole="abcd", part="abc", active=["whole", "part"])
    assert tree.shared_counts() == [("whole", 0), ("part", 0)]
