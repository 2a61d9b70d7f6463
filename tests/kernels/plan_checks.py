"""What the planner's tests share: random forests, and everything that must hold of any plan."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from feather_kernels.plan import make_plan
from feather_kernels.trees import forest_table, random_forest

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
GROUP = HEADS["num_qo_heads"] // HEADS["num_kv_heads"]
ONE_TILE = {"split": "none", "tiles": ((1 << 20, 16),)}  # items are the packs themselves


def plan_of(forest, **arguments):
    return make_plan(forest, **{**HEADS, **arguments})


@st.composite
def forests(draw, most=40, tokens=64, tail=64):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_forest(rng, draw(st.integers(1, most)), max_node_tokens=tokens, max_tail_tokens=tail)


def offsets(plan):
    """int64 [items]: each item's place in the table."""
    items = plan.items.astype(np.int64)
    return items[:, 1] << 32 | items[:, 0] & 0xFFFFFFFF


def packs_in(plan):
    """The plan's items as the oracle writes packs."""
    members = plan.members[:, 0].tolist()
    items = plan.items.tolist()
    return {(item[2], item[3], frozenset(members[item[5] : item[5] + item[6]])) for item in items}


def check_plan(plan, forest):
    """Each (request, KV token) pair once, rows within tiles, parts and queues numbered as the kernel expects."""
    items, members, group = plan.items, plan.members, plan.group_size
    assert items[:, 6].sum() == len(members) == plan.n_members and (items[:, 6] > 0).all()
    assert (items[:, 5] == np.cumsum(items[:, 6]) - items[:, 6]).all()
    check_rows(plan, group)
    table, _ = forest_table(forest)
    parts = [[] for _ in range(forest.n_requests)]  # of each request: (start, stop, partial row, grows)
    for offset, item in zip(offsets(plan).tolist(), items.tolist(), strict=True):
        _, _, start, stop, grows, first, count, _ = item
        slots = table[offset + start : offset + stop]
        for request, part in members[first : first + count].tolist():
            row = int(forest.row_offset[request])
            assert (slots == table[row + start : row + stop]).all()
            parts[request].append((start, stop, part, grows))
    check_parts(plan, forest, parts)


def check_rows(plan, group):
    rows, (m, _) = plan.items[:, 6] * group, np.array(plan.tiles).T
    tile = plan.items[:, 7]
    assert (rows <= m[tile]).all()
    assert ((tile == 0) | (rows > m[tile - 1])).all()  # no smaller tile would do
    queues = plan.queue_begin.tolist()
    assert queues[0] == 0 and queues[-1] == plan.n_items and queues == sorted(queues)
    for queue, (begin, end) in enumerate(pairwise(queues)):
        assert (tile[begin:end] == len(plan.tiles) - 1 - queue).all()
        lengths = plan.items[begin:end, 3] - plan.items[begin:end, 2]
        assert (lengths[:-1] >= lengths[1:]).all()


def check_parts(plan, forest, parts):
    begin = plan.part_begin.tolist()
    assert begin[0] == 0 and begin[-1] == plan.n_parts
    for request, mine in enumerate(parts):
        mine.sort()
        ends = [0, *(stop for _, stop, _, _ in mine)]
        assert [start for start, _, _, _ in mine] == ends[:-1] and ends[-1] == forest.seq_len[request]
        expected = list(range(begin[request], begin[request + 1])) if len(mine) > 1 else [-1]
        assert [part for _, _, part, _ in mine] == expected
        assert begin[request + 1] - begin[request] == (len(mine) if len(mine) > 1 else 0)
        growing = [grows for _, _, _, grows in mine if grows >= 0]
        assert growing == ([request] if plan.planner.grow else [])
        assert not plan.planner.grow or mine[-1][3] == request
