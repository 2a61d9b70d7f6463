"""``feather explain-plan``: its numbers against those counted one by one, its text, and its errors."""

import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest

from feather_kernels.costs import STEP_NS, UNIT_NS
from feather_kernels.errors import BuildError, PlanError
from feather_kernels.forest import Forest
from feather_kernels.pack import STRATEGIES
from feather_kernels.plan import CLOSES, make_plan
from feather_kernels.plans import explain as explain_module
from feather_kernels.plans.batch_file import LATEST, Batch, batch_text, load_batch, path_of
from feather_kernels.plans.explain import Spread, explain
from feather_kernels.tiles import TILES, built_tiles, n_choices
from feather_kernels.trees import forest_table, parse_tree, random_forest, tree_forest
from feather_sglang.cli import main

TREE = "1,4,256_32,256,32"


def arguments(qo=32, kv=8, **others):
    return {"num_qo_heads": qo, "num_kv_heads": kv, "head_dim": 128, "n_sm": 132, "tiles": TILES["hopper"], **others}


def tree(name):
    return tree_forest(*parse_tree(name))


def random(seed, requests):
    return random_forest(np.random.default_rng(seed), requests, max_node_tokens=900, max_tail_tokens=700)


CASES = {
    "one group": (tree("1,10_4096,416"), arguments()),
    "levels": (tree(TREE), arguments(64, 8, strategy="profit")),
    "alone": (tree("40_700"), arguments(32, 32)),
    "random": (random(0, 120), arguments()),
    "relay": (random(1, 90), arguments(16, 2, strategy="relay")),
    "naive": (random(2, 60), arguments(strategy="naive")),
    "naive, row tiles": (tree("2,200_300,50"), arguments(strategy="naive")),
    "chunks": (random(3, 50), arguments(strategy="two-phase")),
    "portable": (random(4, 300), arguments(tiles=TILES["portable"], tail_warps=8)),
    "merge kernel": (random(5, 80), arguments(merge="kernel")),
}


@pytest.fixture(params=CASES)
def case(request):
    forest, given = CASES[request.param]
    return forest, given, make_plan(forest, **given)


def per_slot(forest):
    """The requests that read each KV slot, from the table itself."""
    table, _ = forest_table(forest)
    readers = {}
    for request, (row, length) in enumerate(zip(forest.row_offset.tolist(), forest.seq_len.tolist(), strict=True)):
        for slot in table[row : row + length].tolist():
            readers.setdefault(slot, set()).add(request)
    return readers


# Numbers --------------------------------------------------------------------------------------------------------


def test_queues(case):
    forest, given, plan = case
    group, kv = plan.group_size, given["num_kv_heads"]
    counted = {}
    queued = plan.items[: plan.queue_begin[-1]].tolist()
    for _, _, start, stop, _, first, count, tile, *_ in queued:
        m, n = plan.tiles[tile]
        now = counted.setdefault(m, Counter())
        deposited = sum(part >= 0 for _, part in plan.members[first : first + count].tolist())
        pair = plan.head_pack if m == 8 else 1
        now.update(items=1, units=kv // pair, tokens=stop - start, parts=deposited)
        now["rows"] += count * group * pair
        now["longest"] = max(now["longest"], stop - start)
        if m in UNIT_NS:
            step_ns = STEP_NS[m] * n / dict(TILES["hopper"])[m]  # priced with the Hopper path's n
            now["ns"] += kv * (UNIT_NS[m] + -(-(stop - start) // n) * step_ns + deposited * 60 * group)
    report = explain(Batch("", forest, given))
    assert report.plan.merges == plan.n_items - len(queued)
    assert [queue.m for queue in report.queues] == sorted(counted, reverse=True)
    for queue in report.queues:
        found = counted[queue.m]
        for name in ("items", "units", "tokens", "parts", "longest"):
            assert getattr(queue, name) == found[name]
        rows = found["rows"] / found["items"]
        assert queue.rows == pytest.approx(rows) and queue.padding == pytest.approx(1 - rows / queue.m)
        assert queue.rows <= queue.m
        if queue.m in UNIT_NS:
            assert queue.modelled_us == pytest.approx(found["ns"] / 132 / 1000)
        assert queue.busy == min(queue.units, queue.teams) and queue.processors == min(queue.units, 132)
        assert (queue.rounds - 1) * queue.teams < queue.units <= queue.rounds * queue.teams


def test_teams_are_the_kernels():
    hopper, portable = CASES["random"], CASES["portable"]
    teams = {queue.m: queue.teams for queue in explain(Batch("", *hopper)).queues}
    assert teams == {m: 132 * {8: 12, 16: 8, 64: 2, 128: 1}[m] for m in teams} and len(teams) >= 2
    teams = {queue.m: queue.teams for queue in explain(Batch("", *portable)).queues}
    assert teams == {m: 132 * {8: 8, 16: 8, 32: 4, 64: 2}[m] for m in teams} and len(teams) >= 2


def test_tokens_and_parts(case):
    forest, given, plan = case
    report = explain(Batch("", forest, given))
    readers = per_slot(forest)
    read = sum(item[3] - item[2] for item in plan.items.tolist())
    assert report.attended == sum(map(len, readers.values())) and report.unique == len(readers)
    assert report.plan.read == read and report.plan.reuse == pytest.approx(report.attended / read)
    assert report.plan.kv_bytes == read * 2 * 2 * 128 * given["num_kv_heads"]
    assert report.plan.items == plan.n_items
    parts = Counter(request for request, part in plan.members.tolist() if part >= 0)
    assert report.plan.parts == sum(parts.values()) and report.plan.divided == len(parts)
    assert report.plan.most_parts == max(parts.values(), default=0)


def test_shared_packs_of_naive_are_the_sets_of_readers():
    for name in ("naive", "naive, row tiles", "chunks"):
        forest, given = CASES[name]
        runs = Counter(frozenset(requests) for requests in per_slot(forest).values() if len(requests) > 1)
        facts = explain(Batch("", forest, given)).plan
        assert facts.pack_requests == Spread.of(map(len, runs)) and facts.pack_tokens == Spread.of(runs.values())
        assert facts.pack_requests.count > 1


def test_shared_packs_load_what_the_traffic_model_says(case):
    forest, given, plan = case
    packs = explain_module._shared_packs(Batch("", forest, given), plan)
    tails = sum(length - start for length, start in zip(forest.seq_len.tolist(), tail_starts(plan), strict=True))
    assert (sum(tokens for _, tokens in packs) + tails) * 512 * given["num_kv_heads"] == plan.traffic.kv
    assert all(requests > 1 for requests, _ in packs)


def tail_starts(plan):
    """Where each request's own pack starts: behind the last item that it has in common with others."""
    starts = [0] * plan.n_requests
    own = {}
    for _, _, start, stop, grows, first, count, *_ in plan.items.tolist():
        for request, _ in plan.members[first : first + count].tolist():
            if grows == request:
                own[request] = start
            elif count > 1:
                starts[request] = max(starts[request], stop)
    # A pack's last row tile may hold one request: then the request's items of the pack are alone, like its tail's.
    assert all(starts[request] <= begin for request, begin in own.items())
    return starts


def test_forest_groups(case):
    forest, given, _ = case
    below = [set() for _ in range(forest.n_nodes)]
    ends = Counter(forest.request_node.tolist())
    for request, node in enumerate(forest.request_node.tolist()):
        while node >= 0:
            below[node].add(request)
            node = int(forest.parent[node])
    report = explain(Batch("", forest, given))
    nodes = Counter()
    for group in report.forest:
        nodes[group.tokens, group.requests] += group.nodes
        if group.parent >= 0:
            above = report.forest[group.parent]
            assert above.nodes <= group.nodes and above.requests >= group.requests
    assert nodes == Counter((tokens, len(mine)) for tokens, mine in zip(forest.length.tolist(), below, strict=True))
    assert sum(group.tails.count for group in report.forest) + ends[-1] == forest.n_requests
    assert report.alone == Spread.of(forest.seq_len[forest.request_node == -1].tolist())


def test_alike_nodes_are_one_group_with_the_tails_of_all():
    parent, length, node = [-1, 0, 0, 0], [100, 20, 20, 20], [1, 1, 2, 2, 3, 3, 3, 0]
    forest = Forest(parent, length, node, [125, 130, 121, 140, 126, 127, 128, 150], np.arange(8) * 200)
    root, three, twos = explain(Batch("", forest, arguments())).forest[:3]
    if three.requests == 2:
        three, twos = twos, three
    assert (root.nodes, root.tokens, root.requests, root.tails) == (1, 100, 8, Spread(1, 50, 50.0, 50))
    assert (twos.nodes, twos.requests, twos.parent, twos.tails) == (2, 2, 0, Spread(4, 1, 7.5, 20))
    assert (three.nodes, three.requests, three.tails) == (1, 3, Spread(3, 6, 7.0, 8))


def test_items(case):
    forest, given, plan = case
    listed = explain(Batch("", forest, given), items=True).items
    assert len(listed) == plan.n_items
    for item, planned in zip(listed, plan.items.tolist(), strict=True):
        _, _, start, stop, grows, first, count, tile, *_, taken = planned
        members = plan.members[first : first + count].tolist()
        assert (item.m, item.n) == plan.tiles[tile] and (item.start, item.stop) == (start, stop)
        assert item.requests == [request for request, _ in members] and item.grows == (grows >= 0)
        assert item.parts == [part for _, part in members if part >= 0]
        combines = start == stop and not item.grows  # without tokens of its own, it closes a request or adds a part
        assert item.takes == taken and bool(taken) == (members[0][1] == CLOSES or combines)


def test_compared_strategies_are_planned_alike():
    batch = Batch("", *CASES["random"])
    report = explain(batch, compare=True)
    assert [plan.strategy for plan in report.compared] == list(STRATEGIES) and not report.refused
    for plan in report.compared:
        assert plan == explain(replace(batch, arguments={**batch.arguments, "strategy": plan.strategy})).plan
    assert len({plan.read for plan in report.compared}) > 2


def test_a_strategy_that_does_not_fit_is_named():
    # Three levels in a pack of their own each have more members than the server's buffer has room for.
    batch = Batch("", tree("1,2,4,64_16,16,16,200"), arguments(max_items=500, max_members=140))
    report = explain(batch, compare=True)
    assert {plan.strategy for plan in report.compared} == set(STRATEGIES) - {"naive", "two-phase"}
    assert set(report.refused) == {"naive", "two-phase"} and "members" in report.refused["naive"]


# Recorded batches -----------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path):
    """A file as a server writes it, and the plan in it; its last three rows are padding."""
    forest = random(6, 40)
    lens = forest.seq_len.copy()
    node = forest.request_node.copy()
    node[-3:], lens[-3:] = -1, 1
    forest = Forest(forest.parent, forest.length, node, lens, forest.row_offset + 7)
    plan = make_plan(forest, **arguments(16, 4, strategy="naive", max_requests=64, max_items=900, max_members=9000))
    file = tmp_path / LATEST
    file.write_text(batch_text(plan, 37))
    return file, plan


def test_a_recorded_batch_has_the_servers_plan(recorded):
    file, plan = recorded
    for path in (file, file.parent):
        report = explain(load_batch(path))
        assert report.same_as_server is True
        assert (report.requests, report.padding, report.plan.strategy) == (37, 3, "naive")
        assert (report.plan.items, report.plan.kv_bytes) == (plan.n_items, plan.scheduled_traffic.kv)
        assert report.alone.count + sum(group.tails.count for group in report.forest) == 37


def test_a_recorded_batch_on_a_cache_of_8_bits_has_the_servers_plan(tmp_path):
    file = tmp_path / LATEST
    given = {"strategy": "profit", "kv_value_bytes": 1, "max_requests": 64, "max_items": 900, "max_members": 9000}
    file.write_text(batch_text(make_plan(tree("1,2_8,5"), **arguments(16, 4, **given)), 2))
    assert explain(load_batch(file)).same_as_server is True
    found = json.loads(file.read_text())
    del found["planner"]["kv_value_bytes"]  # as older servers write it, of 16 bits
    file.write_text(json.dumps(found))
    assert explain(load_batch(file)).same_as_server is False
    found["planner"]["kv_value_bytes"] = 3
    file.write_text(json.dumps(found))
    with pytest.raises(PlanError, match="kv_value_bytes is 3: expected a whole number from 1 to 2"):
        load_batch(file)


def test_another_plan_than_the_servers_is_said_to_be(recorded, capsys):
    file, _ = recorded
    found = json.loads(file.read_text())
    found["forest"]["seq_len"][0] += 1
    file.write_text(json.dumps(found))
    assert main(["explain-plan", str(file)]) == 0
    assert "not the server's" in capsys.readouterr().out
    assert main(["explain-plan", str(file), "--strategy", "query"]) == 0  # nobody expects the server's
    assert "server" not in capsys.readouterr().out


def changed(**fields):
    def change(found):
        for path, value in fields.items():
            *parents, last = path.split("__")
            place = found
            for name in parents:
                place = place[name]
            if value is None:
                del place[last]
            else:
                place[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed(format="x"), 'no recorded batch (its "format" is not "feather-batch")'),
        (changed(version=2), "a batch of version 2, this feather reads version 1"),
        (changed(forest=None), "'forest' is missing"),
        (changed(planner=[1]), "planner and forest must be JSON objects"),
        (changed(forest__length=None), "'length' is missing"),
        (changed(forest__length=["a"]), "length is <U1: give integers"),
        (changed(forest__parent=[0] * 40), "parent has 40 entries and length has"),
        (changed(forest__seq_len=[-1] * 40), "request 0"),
        (changed(planner__n_sm="many"), "n_sm is 'many': expected a whole number from 1"),
        (changed(planner__head_dim=2**40), "head_dim is 1099511627776: expected a whole number from 1"),
        (changed(planner__tiles=[[7, 7]]), "the kernels have no tiles ((7, 7),) at head_dim 128"),
        (changed(planner__tiles=[[64, 128]]), "the kernels have no tiles ((64, 128),) at head_dim 128"),
        (changed(planner__strategy="magic"), "strategy is 'magic': use one of query"),
        (changed(planner__max_items=1), "items"),
        (changed(padding=41), "padding is 41, and there are 40 rows"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_line(recorded, capsys, change, says):
    file, _ = recorded
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))
    assert main(["explain-plan", str(file)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("feather: error: ") and LATEST in line and says in line


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("path", sorted(TILES))
def test_the_path_of_a_batch_is_known_by_its_tiles(path, head_dim):
    built = built_tiles(path, head_dim)
    assert path_of(built) == path
    for n in n_choices(path, 64, head_dim) if head_dim < 256 else ():  # a GPU's own choice
        assert path_of([(m, n if m == 64 else other) for m, other in built]) == path


# The command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give one of"),
        (["none.json", "--tree", TREE], "give one of"),
        (["/no/such/batch.json"], "/no/such/batch.json: No such file or directory"),
        (["x" * 300], "xxx: File name too long"),
        ([__file__], "not JSON"),
        (["--tree", "1,2"], "--tree '1,2': give nodes and tokens per level"),
        (["--tree", "1,x_2,3"], "--tree '1,x_2,3': give nodes and tokens per level"),
        (["--tree", "1,2_3"], "--tree '1,2_3': give nodes and tokens per level"),
        (["--tree", "1,0_3,3"], "--tree '1,0_3,3': give nodes and tokens per level"),
        (["--tree", "1,2_3,-3"], "0 to 2,147,483,647 tokens"),
        (["--tree", "1,2_2147483647,1"], "0 to 2,147,483,647 tokens"),
        (["--tree", "1,9999999_1,1"], "at most 1,048,576 nodes"),
        (["--tree", TREE, "--heads", "32/5"], "num_qo_heads 32 is no multiple of num_kv_heads 5"),
    ],
)
def test_a_users_mistake_is_one_clear_line(capsys, argv, says):
    assert main(["explain-plan", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("feather: error: ") and says in line


def test_without_a_compiler(monkeypatch):
    from feather_kernels import build

    def refuse():
        raise BuildError("no C++ compiler for the planner")

    monkeypatch.setattr(build, "load_planner", refuse)
    with pytest.raises(BuildError, match="no C"):
        explain(Batch("", *CASES["alone"]))


def test_the_text(capsys):
    assert main(["explain-plan", "--tree", TREE, "--compare"]) == 0
    text = capsys.readouterr().out
    report = explain(Batch("", tree(TREE), arguments()), compare=True)
    assert f"tree {TREE}: 256 requests, 32/8 heads of 128" in text
    assert "forest: 5 shared nodes\n└── 32 tokens, 256 requests\n" in text
    assert "    └── 4 nodes of 256 tokens, 64 requests each; tails of 32 tokens" in text
    assert f"{report.attended:,} attended, {report.plan.read:,} read ({report.plan.reuse:.2f}x)" in text
    rows = [line.split() for line in text.splitlines()]
    for queue in report.queues:
        (row,) = [row for row in rows if row[:3] == [str(queue.m), "x", str(queue.n)]]
        assert row[3:6] == [f"{queue.items:,}", f"{queue.units:,}", f"{queue.tokens:,}"]
    for plan in report.compared:
        assert [plan.strategy, str(plan.pack_requests.count), f"{plan.items:,}"] in [row[:3] for row in rows]


def test_what_is_combined_after_all_else_is_said(capsys):
    assert main(["explain-plan", "--tree", "1_32000", "--heads", "32/8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "; those of 1 request combined after all other work" in text
    assert "1 request that shares nothing, of 32,000 tokens" in text
    assert main(["explain-plan", "--tree", TREE]) == 0
    assert "combined" not in capsys.readouterr().out


def test_flags_change_the_plan(capsys):
    argv = ["explain-plan", "--tree", TREE, "--json"]
    changes = ["--heads", "16/2", "--head-dim", "256", "--strategy", "query", "--sm", "7"]
    assert main([*argv, *changes, "--items"]) == 0
    given = json.loads(capsys.readouterr().out)
    expected = arguments(16, 2, head_dim=256, strategy="query", n_sm=7, tiles=TILES["hopper"][:-1])
    assert given == {**asdict(explain(Batch("", tree(TREE), expected), items=True)), "source": f"tree {TREE}"}
    assert given["plan"]["reuse"] == 1 and given["n_sm"] == 7


def test_a_page_for_500_requests(capsys, tmp_path):
    forest = random(7, 500)
    (tmp_path / LATEST).write_text(batch_text(make_plan(forest, **arguments()), 500))
    assert main(["explain-plan", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "plan that the server ran" in text and "more nodes of" in text
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 120
    assert main(["explain-plan", str(tmp_path), "--items"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 500


def test_a_deep_forest(capsys, tmp_path):
    depth = 1500  # deeper than Python's stack
    lens = np.arange(1, depth + 1) * 2 + 1
    forest = Forest(np.arange(-1, depth - 1), [2] * depth, np.arange(depth), lens, np.arange(depth) * 2 * depth)
    (tmp_path / LATEST).write_text(batch_text(make_plan(forest, **arguments(strategy="query")), depth))
    assert main(["explain-plan", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["forest"]) == depth
    assert main(["explain-plan", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 60
