"""The parts of a prompt that other requests share, against a comparison of all prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.tree.cht import ChunkedHashTree, UnknownRequestError
from oracles.sequences import common

STATES = ["active", "active", "waiting", "held", "finished", "removed", "back in line"]

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


def assert_paths_agree(tree, prompts, chunk_size):
    """`prompts`: prompt and extra key of every request in the tree, by id."""
    paths = {name: tree.path(name) for name in prompts}
    for name, (prompt, key) in prompts.items():
        chunks = chunks_of(prompt, chunk_size)
        others = [chunks_of(p, chunk_size) for other, (p, k) in prompts.items() if other != name and k == key]
        assert sum(count for _, count in paths[name]) == max((common(chunks, other) for other in others), default=0)
        assert all(count > 0 for _, count in paths[name])
        for other, (p, k) in prompts.items():
            alike = common(chunks, chunks_of(p, chunk_size)) if k == key else 0
            both = [part for part in paths[name] if part in paths[other]]
            if other != name:
                assert sum(count for _, count in both) == alike
            assert paths[name][len(paths[name]) - len(both) :] == both  # the first parts of a prompt come last


def tree_of(chunk_size=1, active=(), **prompts):
    tree = ChunkedHashTree(chunk_size)
    for name, prompt in prompts.items():
        tree.insert(name, [ord(letter) for letter in prompt])
    for name in active:
        tree.add_to_batch(name)
    return tree


@given(requests, st.integers(1, 3), st.randoms(use_true_random=False))
def test_two_requests_have_those_parts_in_common_that_a_comparison_of_their_prompts_finds(requests, chunk_size, draw):
    tree, prompts = ChunkedHashTree(chunk_size), {}
    for name, (prompt, key, _) in enumerate(requests):
        tree.insert(name, prompt, extra_key=key)
        prompts[name] = prompt, key
        assert_paths_agree(tree, prompts, chunk_size)
    order = list(enumerate(requests))
    draw.shuffle(order)
    for name, (_, _, state) in order:
        if state in ("held", "removed"):
            (tree.hold if state == "held" else tree.remove)(name)
        elif state != "waiting":
            tree.add_to_batch(name)
        if state == "removed":
            del prompts[name]
        assert_paths_agree(tree, prompts, chunk_size)
    draw.shuffle(order)
    for name, (_, _, state) in order:
        if state in ("finished", "back in line"):
            (tree.finish if state == "finished" else tree.requeue)(name)
        if state == "finished":
            del prompts[name]
        assert_paths_agree(tree, prompts, chunk_size)


def test_the_parts_of_a_path_in_chunks_the_last_one_first():
    tree = tree_of(chunk_size=2, long="abcdefghi", part="abcdef", other="abxy", lone="zz", active=["long"])
    assert [chunks for _, chunks in tree.path("long")] == [2, 1]
    assert tree.path("part") == tree.path("long") and tree.path("other") == tree.path("long")[1:]
    assert tree.path("lone") == []


def test_a_partial_chunk_is_shared_with_its_equal_only():
    tree = tree_of(chunk_size=4, whole="abcd", part="abc", twin="abc", active=["whole", "part"])
    assert tree.path("whole") == []
    assert [chunks for _, chunks in tree.path("part")] == [1] and tree.path("twin") == tree.path("part")


def test_a_request_that_is_not_there_has_none():
    with pytest.raises(UnknownRequestError, match="'gone' is not in the tree"):
        tree_of(one="ab").path("gone")
