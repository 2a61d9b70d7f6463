"""A mistake raises a clear exception and leaves the tree as it was."""

from array import array

import numpy as np
import pytest

from feather_sglang.scheduling.tree.cht import ChunkedHashTree, RequestStateError, UnknownRequestError


def snapshot(tree):
    ids = [*tree.waiting, *tree.active, *tree.held]
    figures = {i: (tree.missing_count(i), tree.depth(i)) for i in ids}
    candidates = {i: tree.candidate(i) for i in tree.waiting}
    return set(tree.waiting), set(tree.active), set(tree.held), figures, candidates, tree.tip, tree.find_best()


@pytest.fixture
def tree():
    tree = ChunkedHashTree(2)
    for name in ("waiting", "active", "held"):
        tree.insert(name, [1, 2, 3])
    tree.add_to_batch("active")
    tree.hold("held")
    return tree


def assert_refused(tree, error, message, operation, *arguments):
    """`message`: a pattern, or None for any."""
    before = snapshot(tree)
    with pytest.raises(error, match=message):
        getattr(tree, operation)(*arguments)
    tree.check_invariants()
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    "operation", ["add_to_batch", "finish", "remove", "requeue", "hold", "candidate", "missing_count", "depth"]
)
def test_unknown_id(tree, operation):
    assert_refused(tree, UnknownRequestError, "^request 'nobody' is not in the tree$", operation, "nobody")
    assert_refused(tree, KeyError, "nobody", operation, "nobody")


@pytest.mark.parametrize(
    ("operation", "state"),
    [
        ("add_to_batch", "active"),
        ("add_to_batch", "held"),
        ("finish", "waiting"),
        ("finish", "held"),
        ("remove", "active"),
        ("requeue", "waiting"),
        ("hold", "active"),
        ("hold", "held"),
        ("candidate", "active"),
        ("candidate", "held"),
        ("defer", "held"),
    ],
)
def test_wrong_state(tree, operation, state):
    depth = [1] * (operation == "defer")
    assert_refused(tree, RequestStateError, f"request '{state}' is {state}: ", operation, state, *depth)


@pytest.mark.parametrize("operation", ["defer", "sharing"])
def test_unknown_id_at_a_depth(tree, operation):
    assert_refused(tree, UnknownRequestError, "^request 'nobody' is not in the tree$", operation, "nobody", 1)


@pytest.mark.parametrize("depth", [0, -1])
def test_all_requests_cannot_be_deferred(tree, depth):
    assert_refused(tree, ValueError, f"depth must be at least 1, got {depth}", "defer", "waiting", depth)


@pytest.mark.parametrize("state", ["waiting", "active", "held"])
def test_duplicate_id(tree, state):
    assert_refused(tree, RequestStateError, rf"'{state}' is already in the tree \({state}\)", "insert", state, [9])


def test_unhashable_id(tree):
    assert_refused(tree, TypeError, "unhashable", "insert", [1], [9])


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        pytest.param([1, 2.0], TypeError, id="float"),
        pytest.param(np.array([1.0]), TypeError, id="float array"),
        pytest.param(array("d", [1.0]), TypeError, id="double buffer"),
        pytest.param("12", TypeError, id="string"),
        pytest.param(["1"], TypeError, id="list of strings"),
        pytest.param([3, True], TypeError, id="bool"),
        pytest.param(np.array([True]), TypeError, id="bool array"),
        pytest.param([None], TypeError, id="list of None"),
        pytest.param(None, TypeError, id="None"),
        pytest.param(5, TypeError, id="a number"),
        pytest.param({1, 2}, TypeError, id="unordered set"),
        pytest.param({1: 2}, TypeError, id="mapping"),
        pytest.param(np.array([1, None], dtype=object), (TypeError, ValueError), id="object array"),
        pytest.param([2**63], ValueError, id="too large"),
        pytest.param([-(2**63) - 1], ValueError, id="too small"),
        pytest.param(np.array([2**63], dtype=np.uint64), ValueError, id="too large for int64"),
        pytest.param(np.zeros((2, 2), dtype=np.int64), ValueError, id="two dimensions"),
        pytest.param(np.int64(3), (TypeError, ValueError), id="no dimension"),
    ],
)
def test_token_ids_that_are_not_integers(tree, tokens, error):
    assert_refused(tree, error, None, "insert", "new", tokens)
    if tokens is not None:
        assert_refused(tree, error, None, "requeue", "active", tokens)
        assert_refused(tree, error, None, "requeue", "held", tokens)


def test_a_priority_that_is_no_integer(tree):
    assert_refused(tree, TypeError, None, "insert", "new", [1], None, "high")


@pytest.mark.parametrize("arguments", [(0,), (-1,), (64, -1), (64, 2**64)])
def test_constructor_ranges(arguments):
    with pytest.raises(ValueError, match="must be"):
        ChunkedHashTree(*arguments)


def test_constructor_types():
    with pytest.raises(TypeError):
        ChunkedHashTree(6.4)
    with pytest.raises(TypeError):
        ChunkedHashTree(64, seed="seed")
