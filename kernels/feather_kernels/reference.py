"""Decode attention in NumPy: plan, forward and merge as the kernel does them, and without any plan.

For tests; float64 throughout. Both say what the kernel must compute, ``reference_decode`` from the very buffer that the
kernel reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest, IntArray
from feather_kernels.plan import CLOSES, PackPlan

Array = npt.NDArray[np.floating]
Result = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def reference_decode(
    plan: PackPlan,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    table: IntArray,
    page_size: int,
    sm_scale: float | None = None,
    logit_soft_cap: float = 0.0,
    seq_lens: IntArray | None = None,
    sinks: Array | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Result:
    """Run every item of a plan, in the order of their launch, and merge the partial results (PAT 7).

    An item that closes a request merges its parts, with its own, if it has tokens, as the last one. With
    ``merge="kernel"`` all requests with parts are merged in the end.

    Parameters
    ----------
    plan : PackPlan
        Only its queues, items, members and part_begin are used.
    q : float [requests, q_heads, head_dim]
    k_cache, v_cache : float [slots, kv_heads, head_dim]
        Values may have fewer columns: those of latents are their first 512, and each tile of heads has them as its own.
    table : int [entries]
        Flat; entry ``row_offset + p // page_size`` holds the page of position p.
    page_size : int
        Tokens a page.
    sm_scale : float, optional
        Default ``head_dim ** -0.5``.
    logit_soft_cap : float
        Logits become ``cap * tanh(logit / cap)``; 0 for none.
    seq_lens : int [requests], optional
        Lengths now, where they have grown since the plan was made.
    sinks : float [q_heads], optional
        A logit a head that joins the softmax's sum, once a request, and no value.
    k_scale, v_scale : float
        What the caches' values stand for times.

    Returns
    -------
    out : float64 [requests, q_heads, columns of values]
        NaN where no item has written.
    lse : float64 [requests, q_heads]
        Natural log-sum-exp of the scaled logits; -inf for an empty sequence, whose output is 0.

    Raises
    ------
    AssertionError
        A part is deposited or taken in twice, or an item waits for one that no earlier item deposits.
    """
    seq_lens = plan.forest.seq_len if seq_lens is None else seq_lens
    sm_scale = (q.shape[2] ** -0.5 if sm_scale is None else sm_scale) * k_scale
    heads, value_dim = q.shape[1], v_cache.shape[2]
    out, lse = np.full((len(q), heads, value_dim), np.nan), np.full(q.shape[:2], np.nan)
    part_out, part_lse = np.full((plan.n_parts, heads, value_dim), np.nan), np.full((plan.n_parts, q.shape[1]), np.nan)
    deposited, taken = np.zeros(plan.n_parts, bool), np.zeros(plan.n_parts, bool)
    begin = plan.part_begin.tolist()
    for item in _launch_order(plan):
        start, (first, count), (first_part, parts) = item[2], item[5:7], item[10:12]
        slots = _item_slots(item, table, page_size, seq_lens)
        members = plan.members[first : first + count]
        if parts and members[0, 1] != CLOSES:  # the tails of its members, behind what they share
            tails = (_item_slots(tail, table, page_size, seq_lens) for tail in plan.items[first_part:][:parts].tolist())
            read, parts = [np.append(slots, tail) for tail in tails], 0
            results = [
                _attend(q[request : request + 1], k_cache[own], v_cache[own], sm_scale, logit_soft_cap)
                for (request, _), own in zip(members.tolist(), read, strict=True)
            ]
            values, sums = (np.concatenate(of) for of in zip(*results, strict=True))
        else:
            seen = seq_lens[members[:, 0]] - start  # of these tokens; all of them, but in a causal block
            rows = q[members[:, 0]]
            values, sums = _attend(rows, k_cache[slots], v_cache[slots], sm_scale, logit_soft_cap, seen=seen)
        for (request, part), value, total in zip(members.tolist(), values, sums, strict=True):
            if parts:
                mine = slice(first_part, first_part + parts)
                assert deposited[mine].all(), f"request {request} takes in parts before all of them are there"
                assert not taken[mine].any(), f"a part of request {request} is taken in twice"
                taken[mine] = True
                value, total = merge(np.append(part_out[mine], [value], 0), np.append(part_lse[mine], [total], 0))
            if part < 0:
                out[request], lse[request] = value, total
            else:
                assert not deposited[part], f"part {part} is deposited twice"
                part_out[part], part_lse[part], deposited[part] = value, total, True
    if plan.options.merge == "fused":
        assert taken.all(), "a part is not taken in"
    else:
        for request, mine in enumerate(map(slice, begin[:-1], begin[1:])):
            if mine.start < mine.stop:
                out[request], lse[request] = merge(part_out[mine], part_lse[mine])
    return _take_in(sinks, out * v_scale, lse)


def direct_decode(
    forest: Forest,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    table: IntArray,
    page_size: int,
    sm_scale: float | None = None,
    logit_soft_cap: float = 0.0,
    sinks: Array | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Result:
    """Attention of each request over its own row, from the definition; arguments and results as `reference_decode`."""
    out, lse = np.empty((*q.shape[:2], v_cache.shape[2])), np.empty(q.shape[:2])
    for request, (row, length) in enumerate(zip(forest.row_offset.tolist(), forest.seq_len.tolist(), strict=True)):
        slots = _slots(table, row, 0, length, page_size)
        one = q[request : request + 1]
        keys, values = k_cache[slots] * k_scale, v_cache[slots] * v_scale
        values, sums = _attend(one, keys, values, sm_scale, logit_soft_cap, sinks)
        out[request], lse[request] = values[0], sums[0]
    return out, lse


def _take_in(sinks: Array | None, out: npt.NDArray[np.float64], lse: npt.NDArray[np.float64]) -> Result:
    """Results over all tokens, float64 [requests, q_heads, head_dim] and [requests, q_heads], with the sinks."""
    if sinks is None:
        return out, lse
    with np.errstate(invalid="ignore"):  # NaN where nothing was written
        joined = np.logaddexp(lse, sinks.astype(np.float64))
    return out * np.exp(lse - np.where(np.isneginf(joined), 0.0, joined))[:, :, None], joined


def merge(part_out: Array, part_lse: Array) -> Result:
    """One request's result from its parts, float64 [parts, q_heads, head_dim] and [parts, q_heads]."""
    top = part_lse.max(axis=0)
    finite = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(part_lse - finite)
    total = weight.sum(axis=0)
    out = (weight[:, :, None] * part_out).sum(axis=0) / np.where(total > 0, total, 1.0)[:, None]
    return out, _log(total) + finite


def _launch_order(plan: PackPlan) -> Iterator[list[int]]:
    """Queue by queue, items in order within each; then those behind the queues that close requests."""
    queues = plan.queue_begin.tolist()
    for begin, end in pairwise(queues):
        yield from plan.items[begin:end].tolist()
    yield from plan.items[plan.n_items - plan.n_merges :].tolist()


def _item_slots(item: list[int], table: IntArray, page_size: int, seq_lens: IntArray) -> npt.NDArray[np.int64]:
    """What an item reads, up to where its tail is now."""
    low, high, start, stop, grows = item[:5]
    row = (high << 32) | (low & 0xFFFFFFFF)
    return _slots(table, row, start, int(seq_lens[grows]) if grows >= 0 else stop, page_size)


def _slots(table: IntArray, row: int, start: int, stop: int, page_size: int) -> npt.NDArray[np.int64]:
    position = np.arange(start, stop, dtype=np.int64)
    return table[row + position // page_size].astype(np.int64) * page_size + position % page_size


def _attend(
    q: Array, k: Array, v: Array, sm_scale: float | None, logit_soft_cap: float, sinks: Array | None = None,
    seen: IntArray | None = None,
) -> Result:  # fmt: skip
    """q [n, q_heads, d], k and v [tokens, kv_heads, d or less] -> [n, q_heads, columns of v] and sums [n, q_heads].

    ``seen`` [n]: how many of the tokens count for each, from the first one on; all by default.
    """
    n, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.astype(np.float64).reshape(n, kv_heads, q_heads // kv_heads, head_dim)
    logits = grouped @ k.astype(np.float64).transpose(1, 2, 0)
    logits *= head_dim**-0.5 if sm_scale is None else sm_scale
    if logit_soft_cap:
        logits = logit_soft_cap * np.tanh(logits / logit_soft_cap)
    if seen is not None:
        hidden = np.arange(len(k)) >= seen[:, None]
        logits = np.where(hidden[:, None, None], -np.inf, logits)
    sink = np.full(q_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    sink = sink.reshape(kv_heads, -1)[:, :, None]
    top = np.maximum(logits.max(axis=-1, keepdims=True, initial=-1e300), sink)
    weight = np.exp(logits - top)
    total = weight.sum(axis=-1) + np.exp(sink - top)[..., 0]
    out = weight @ v.astype(np.float64).transpose(1, 0, 2) / np.where(total > 0, total, 1.0)[..., None]
    return out.reshape(n, q_heads, -1), (_log(total) + top[..., 0]).reshape(n, q_heads)


def _log(total: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(total)
