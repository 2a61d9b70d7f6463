"""Equal tokens hash equal whatever holds them, and an int64 buffer is read in place."""

import tracemalloc
from array import array
from collections import UserList, deque

import numpy as np
import pytest

from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from feather_sglang.scheduling.tree.chunk_hash import hash_vector

TOKENS = [0, 1, 2, 100, 7, 7, 1, 0, 42]


def vector(tokens):
    return hash_vector(tokens, 2, 1, None)


@pytest.mark.parametrize(
    "tokens",
    [
        array("q", TOKENS),
        array("l", TOKENS),
        array("i", TOKENS),
        array("B", TOKENS),
        bytes(TOKENS),
        bytearray(TOKENS),
        tuple(TOKENS),
        deque(TOKENS),
        UserList(TOKENS),
        [np.int32(token) for token in TOKENS],
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint64),
        np.array(TOKENS, dtype=np.int32),
        np.array(TOKENS, dtype=np.uint8),
        np.array(TOKENS, dtype=">i8"),
        np.repeat(TOKENS, 3)[::3],
        np.array(TOKENS[::-1])[::-1],
        memoryview(array("q", TOKENS)),
        memoryview(np.array(TOKENS)),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', getattr(tokens, 'typecode', ''))}",
)
def test_equal_tokens_hash_equal(tokens):
    assert vector(tokens) == vector(TOKENS)


@pytest.mark.parametrize("empty", [[], (), array("q"), np.array([], dtype=np.int64), b"", range(0)])
def test_empty_prompts_have_no_chunks(empty):
    assert vector(empty) == b""


def test_negative_tokens_and_the_ends_of_int64():
    ends = [-(2**63), -1, 2**63 - 1]
    assert vector(ends) == vector(array("q", ends)) == vector(np.array(ends))


def test_vectors_are_cumulative():
    whole, shorter = vector(TOKENS), vector(TOKENS[:4])
    assert len(whole) == 5 * 8
    assert whole[:16] == shorter
    other = vector([9, *TOKENS[1:]])  # a change in the first chunk changes every hash
    assert all(whole[at : at + 8] != other[at : at + 8] for at in range(0, 40, 8))


def memory_of_inserting(tokens):
    """What a tree of one prompt holds of it, and what it held at most."""
    tree = ChunkedHashTree(chunk_size=4096)
    tracemalloc.start()
    tree.insert("x", tokens)
    found = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("make", [lambda n: array("q", bytes(8 * n)), lambda n: np.zeros(n, dtype=np.int64)])
def test_an_int64_buffer_is_not_copied_and_not_kept(make):
    tokens = make(4_000_000)  # 32 MB
    kept, peak = memory_of_inserting(tokens)
    assert peak < 1_000_000
    assert kept < 100_000
    if isinstance(tokens, array):
        tokens.append(1)  # raises BufferError while anybody still holds the buffer


def test_a_converted_prompt_is_copied_once_and_not_kept():
    tokens = np.zeros(1_000_000, dtype=np.int32)
    kept, _ = memory_of_inserting(tokens)
    assert kept < 100_000
