"""Cumulative chunk hashes of a prompt (paper algorithm 1): equal hashes at a depth mean equal tokens up to it."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

DIGEST = 8  # bytes of one hash
PROCESS_SEED = secrets.randbits(64)  # unknown outside the process, so that nobody can craft colliding prompts
TokenIds = Sequence[int] | np.ndarray  # or any other buffer of integers
_INT64 = ("q", "l") if array("l").itemsize == 8 else ("q",)  # buffer formats of a native int64


class HashedPrompt:
    """A prompt that has been hashed: whoever serves it again and again need not hash it again."""

    __slots__ = ("tokens", "vector")

    def __init__(self, token_ids: TokenIds, chunk_size: int, seed: int) -> None:
        self.tokens = len(token_ids)
        self.vector = hash_vector(token_ids, chunk_size, seed)

    def __len__(self) -> int:
        return self.tokens


def hash_vector(token_ids: TokenIds | HashedPrompt, chunk_size: int, seed: int, extra_key: object = None) -> bytes:
    """Return the XXH3-64 digests of all prefixes of 1, 2, ... chunks and of the whole prompt, packed.

    Parameters
    ----------
    token_ids : sequence of int, shape (tokens,)
        An int64 buffer is read in place; anything else is converted, equal tokens to equal hashes. A ``HashedPrompt``
        has been hashed, by the same seed and into the same chunks.
    extra_key : str, bytes, tuple of these, or None
        Part of the hash function, by its ``repr``: nothing is shared across different keys.

    Returns
    -------
    bytes, ``DIGEST * ceil(tokens / chunk_size)`` long
    """
    if isinstance(token_ids, HashedPrompt):
        return token_ids.vector
    tokens = _int64_bytes(token_ids)
    if extra_key is not None:
        seed = xxh3_64_intdigest(repr(extra_key).encode(), seed)
    state = xxh3_64(seed=seed)
    update, digest = state.update, state.digest
    step = chunk_size * 8
    digests = []
    for start in range(0, len(tokens), step):
        update(tokens[start : start + step])
        digests.append(digest())
    return b"".join(digests)


def _int64_bytes(token_ids: Any) -> memoryview | bytes:
    """Return the tokens as the bytes of native int64, without a copy where they already are."""
    if hasattr(token_ids, "__array__"):  # NumPy, and CPU tensors of any framework
        token_ids = np.asarray(token_ids)
    try:
        view = memoryview(token_ids)
    except TypeError:
        return _packed(token_ids)
    if view.ndim != 1:
        raise ValueError(f"token ids must have one dimension, got {view.ndim}")
    if view.format in _INT64 and view.c_contiguous:
        return view.cast("B") if len(view) else b""
    ids = np.asarray(view)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got an array of {ids.dtype}")
    if ids.dtype == np.uint64 and len(ids) and int(ids.max()) >> 63:
        raise ValueError("token ids must fit a signed 64-bit integer")
    return ids.astype(np.int64).tobytes()


def _packed(token_ids: Any) -> bytes:
    """Return a sequence of Python integers as the bytes of native int64."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise TypeError(f"token ids must be a sequence of integers, got {type(token_ids).__name__}")
    try:
        packed = array("q", token_ids)
    except OverflowError:
        raise ValueError("token ids must fit a signed 64-bit integer") from None
    except TypeError as error:
        raise TypeError(f"token ids must be integers: {error}") from None
    if packed and np.frombuffer(packed, np.uint64).min() < 2 and bool in map(type, token_ids):
        raise TypeError("token ids must be integers, got a bool")
    return packed.tobytes()
