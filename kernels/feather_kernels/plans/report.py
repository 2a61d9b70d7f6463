"""A plan's report in the terminal: a page, however many requests the batch has."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from feather_kernels.plans.explain import ItemFacts, NodeGroup, PlanFacts, QueueFacts, Report, Spread

MOST_LINES, MOST_LEVELS = 24, 10  # of the forest; deeper ones would run out of columns
MOST_REQUESTS = 8  # named for one item


def print_report(report: Report, console: Console) -> None:
    """Print a report as text."""
    rows = f", {report.padding:,} {_plural(report.padding, 'row')} of padding" if report.padding else ""
    heads = f"{report.num_qo_heads}/{report.num_kv_heads} heads of {report.head_dim}"
    title = f"[bold]{escape(report.source)}[/bold]: {_requests(report.requests)}{rows}, {heads}"
    console.print(f"{title}\n", soft_wrap=True)
    console.print(forest_tree(report))
    console.print()
    console.print(facts_table(report))
    console.print()
    console.print(queues_table(report.queues))
    if report.compared is not None:
        console.print()
        console.print(strategies_table(report.compared, report.plan.strategy))
        for strategy, reason in report.refused.items():
            console.print(f"{strategy}: {escape(reason)}", soft_wrap=True)
    if report.items is not None:
        console.print()
        console.print(items_table(report.items))


# The forest -----------------------------------------------------------------------------------------------------


def forest_tree(report: Report) -> Tree:
    """The forest's largest groups of nodes; the others below a node are one line."""
    groups = report.forest
    children: list[list[int]] = [[] for _ in range(len(groups) + 1)]  # of no parent, -1: the last
    for place, group in enumerate(groups):
        children[group.parent].append(place)
    nodes = sum(group.nodes for group in groups)
    shown = _largest(groups, children)
    drawn = [Tree("")] * len(groups) + [Tree(f"[bold]forest[/bold]: {nodes:,} shared {_plural(nodes, 'node')}")]
    for place in sorted(shown):  # parents come first
        drawn[place] = drawn[groups[place].parent].add(_group_text(groups[place]))
    for parent in [*sorted(shown), -1]:
        if hidden := [groups[child] for child in children[parent] if child not in shown]:
            drawn[parent].add(_hidden_text(hidden))
    if report.alone.count:
        share = "shares" if report.alone.count == 1 else "share"
        drawn[-1].add(f"{_requests(report.alone.count)} that {share} nothing, of {_range(report.alone)} tokens")
    return drawn[-1]


def _largest(groups: Sequence[NodeGroup], children: Sequence[Sequence[int]]) -> set[int]:
    """The groups with most requests. A node has no more than its parent, so whatever is taken hangs together."""
    waiting: list[tuple[int, int, int]] = []  # requests, place, level
    shown: set[int] = set()

    def offer(places: Sequence[int], level: int) -> None:
        for place in places:
            heapq.heappush(waiting, (-groups[place].nodes * groups[place].requests, place, level))

    offer(children[-1], 1)
    while waiting and len(shown) < MOST_LINES:
        _, place, level = heapq.heappop(waiting)
        shown.add(place)
        if level < MOST_LEVELS:
            offer(children[place], level + 1)
    return shown


def _group_text(group: NodeGroup) -> str:
    if group.nodes == 1:
        text = f"{group.tokens:,} tokens, {_requests(group.requests)}"
    else:
        text = f"{group.nodes:,} nodes of {group.tokens:,} tokens, {_requests(group.requests)} each"
    if group.tails.count:
        ends = "" if group.tails.count == group.nodes * group.requests else f"{group.tails.count:,} end here, "
        text += f"; {ends}tails of {_range(group.tails)} tokens"
    return text


def _hidden_text(groups: Sequence[NodeGroup]) -> str:
    nodes = sum(group.nodes for group in groups)
    least, most = min(group.tokens for group in groups), max(group.tokens for group in groups)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    requests = _requests(sum(group.nodes * group.requests for group in groups))
    return f"[dim]{nodes:,} more {_plural(nodes, 'node')} of {tokens} tokens, {requests}, and what is below[/dim]"


def _range(spread: Spread) -> str:
    """Least, median and most, or the one value."""
    if spread.least == spread.most:
        return f"{spread.most:,}"
    return f"{spread.least:,} / {spread.median:,.0f} / {spread.most:,}"


def _requests(number: int) -> str:
    return f"{number:,} {_plural(number, 'request')}"


def _plural(number: int, word: str) -> str:
    return word if number == 1 else f"{word}s"


# The plan -------------------------------------------------------------------------------------------------------


def facts_table(report: Report) -> Table:
    """The plan as a whole, a line a fact."""
    plan = report.plan
    packs = plan.pack_requests.count
    parts = f"{plan.parts:,} results of {_requests(plan.divided)}, at most {plan.most_parts} of one"
    shared = f"{packs:,} shared"
    tokens = f"{report.attended:,} attended, {plan.read:,} read ({plan.reuse:.2f}x), {report.unique:,} unique"
    if packs:
        shared += f", of {_range(plan.pack_requests)} requests and {_range(plan.pack_tokens)} tokens"
    if plan.merges:
        parts += f"; those of {_requests(plan.merges)} combined after all other work"
    pair = f"; {report.head_pack} in the last queue" if report.head_pack > 1 else ""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("strategy", f"{plan.strategy}, for {report.n_sm} processors"),
        ("packs", f"{shared}; {report.requests + report.padding:,} of one request"),
        ("work", f"{plan.items:,} items, {plan.units:,} units (an item and one KV head{pair})"),
        ("KV tokens", tokens),
        ("partial", parts),
        ("traffic", f"{_megabytes(plan.kv_bytes)} of KV, {_megabytes(plan.part_bytes)} of partial results, a layer"),
        ("model", f"{plan.modelled_us:,.1f} us a layer, were the work spread evenly (costs of an H200)"),
    ):
        table.add_row(f"[bold]{name}", value)
    if plan.widened:
        table.add_row("[bold]capacity", "chunks are longer than the split asks for, so that the plan fits")
    if report.same_as_server is not None:
        same = "it is the plan that the server ran" if report.same_as_server else (
            "it is not the server's plan, which another version of feather made"
        )  # fmt: skip
        table.add_row("[bold]this plan", same)
    return table


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"


QUEUE_COLUMNS = {
    "tile": "{0.m} x {0.n}",
    "items": "{0.items:,}",
    "units": "{0.units:,}",
    "KV tokens": "{0.tokens:,}",
    "longest": "{0.longest:,}",
    "rows": "{0.rows:.1f}",
    "padding": "{0.padding:.0%}",
    "parts": "{0.parts:,}",
    "processors": "{0.processors:,}",
    "teams busy": "{0.busy:,} of {0.teams:,}",
    "rounds": "{0.rounds:,}",
}
STRATEGY_COLUMNS = {
    "strategy": "{0.strategy}",
    "packs": "{0.pack_requests.count:,}",
    "items": "{0.items:,}",
    "units": "{0.units:,}",
    "KV read": "{0.read:,}",
    "reuse": "{0.reuse:.2f}x",
    "KV MB": "{1:,.1f}",
    "partial MB": "{2:,.1f}",
    "model us": "{0.modelled_us:,.1f}",
}


def queues_table(queues: Sequence[QueueFacts]) -> Table:
    """A row per tile that has work."""
    table, whole = _numbers(*QUEUE_COLUMNS, "time"), sum(queue.modelled_us for queue in queues)
    for queue in queues:
        share = f"{queue.modelled_us / whole:.0%}" if whole else ""
        table.add_row(*(form.format(queue) for form in QUEUE_COLUMNS.values()), share)
    return table


def strategies_table(plans: Sequence[PlanFacts], chosen: str) -> Table:
    """A row per strategy; the plan's own is bold."""
    table = _numbers(*STRATEGY_COLUMNS)
    for plan in plans:
        megabytes = plan.kv_bytes / 1e6, plan.part_bytes / 1e6
        row = (form.format(plan, *megabytes) for form in STRATEGY_COLUMNS.values())
        table.add_row(*row, style="bold" if plan.strategy == chosen else None)
    return table


def items_table(items: Sequence[ItemFacts]) -> Table:
    """A row per work item, in the order of the queues; what is behind them is last."""
    table = _numbers("item", "tile", "positions", "tokens", "requests", "parts", "takes")
    table.add_column("which", no_wrap=True)
    for index, item in enumerate(items):
        named = ", ".join(map(str, item.requests[:MOST_REQUESTS]))
        table.add_row(
            f"{index}",
            f"{item.m} x {item.n}",
            f"{item.start:,} - {item.stop:,}{'+' if item.grows else ''}",
            f"{item.stop - item.start:,}",
            f"{len(item.requests):,}",
            f"{len(item.parts):,}",
            f"{item.takes:,}",
            f"{named}, ..." if len(item.requests) > MOST_REQUESTS else named,
        )
    return table


def _numbers(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    return table
