"""Draw the figures of the design pages, docs/design/*.svg.

    python docs/generators/figures.py            # write them
    python docs/generators/figures.py --check    # exit 1 where a file differs from what would be written

Plain text, no drawing library: each figure is a light card of fixed width, so that it reads on a white and on a dark
page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from feather_sglang.simulation.host_time import NO_HOST_TIME
from feather_sglang.simulation.timeline import Timeline

FOLDER = Path(__file__).parent.parent / "design"
WIDTH = 680
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, MUTED, LINE = "#1f2328", "#57606a", "#6e7781"
# (fill, stroke)
PLAIN, GREY = ("#ffffff", "#8c959f"), ("#eaeef2", "#8c959f")
BLUE, GREEN, YELLOW = ("#ddf4ff", "#0969da"), ("#dafbe1", "#1a7f37"), ("#fff8c5", "#9a6700")
RED, PURPLE, ORANGE = ("#ffebe9", "#cf222e"), ("#fbefff", "#8250df"), ("#fff1e5", "#bc4c00")

Colour = tuple[str, str]
Point = tuple[float, float]


class Figure:
    """A card of ``WIDTH`` by `height`, and what is drawn on it so far."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 16,
        anchor: str = "middle",
        bold: bool = False,
        colour: str = INK,
        mono: bool = False,
    ) -> None:
        """One line; `y` is its base."""
        style = ' font-weight="600"' if bold else ""
        style += f' font-family="{MONO}"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{style}>'
            f"{escape(words)}</text>"
        )

    def rect(
        self, x: float, y: float, w: float, h: float, colour: Colour = PLAIN, radius: float = 6, dashed: bool = False
    ) -> None:
        """A rounded rectangle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{colour[0]}" '
            f'stroke="{colour[1]}" stroke-width="1.5"{dash}/>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, lines: Sequence[str], colour: Colour = PLAIN, size: int = 16
    ) -> None:
        """A rectangle with lines of text in its middle, the first one bold."""
        self.rect(x, y, w, h, colour)
        step = size + 5
        top = y + h / 2 - (len(lines) - 1) * step / 2 + size * 0.36
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + i * step, line, size if i == 0 else size - 1, bold=i == 0)

    def arrow(self, *points: Point, dashed: bool = False, colour: str = LINE, tip: bool = True) -> None:
        """A line through the points, with a tip at the last."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        mark = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}{mark}/>')

    def circle(self, x: float, y: float, r: float, colour: Colour, words: str = "", size: int = 16) -> None:
        """A circle with a word in it."""
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" fill="{colour[0]}" stroke="{colour[1]}" stroke-width="1.5"/>'
        )
        if words:
            self.text(x, y + size * 0.36, words, size, bold=True)

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'font-family="{SANS}">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{LINE}"/></marker></defs>\n'
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{self.height - 2}" rx="14" fill="#fbfcfd" '
            'stroke="#d0d7de" stroke-width="2"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def request() -> Figure:
    """Two lanes: what SGLang does, and what feather does in between."""
    f = Figure("A request from arrival to its first token: SGLang's steps left, feather's right", 830)
    left, right, w = 20, 350, 310
    f.text(left + w / 2, 36, "SGLang", 18, bold=True)
    f.text(right + w / 2, 36, "feather", 18, bold=True)
    f.arrow((340, 20), (340, 772), dashed=True, colour="#d0d7de", tip=False)

    def ours(y: float, h: float, *lines: str, colour: Colour = BLUE) -> None:
        f.box(right, y, w, h, lines, colour, 16 if len(lines) < 3 else 13)

    def theirs(y: float, h: float, *lines: str, colour: Colour = GREY) -> None:
        f.box(left, y, w, h, lines, colour)

    theirs(54, 60, "1  Arrival", "into the waiting queue")
    ours(54, 60, "Tree: hashes the prompt by chunks", "scheduler/life_cycle.py", "scheduling/tree/cht.py")
    f.arrow((330, 84), (349, 84))
    theirs(144, 60, "2  A round opens", "calc_priority")
    ours(144, 60, "Gate: now, or delay for a moment?", "scheduler/rounds.py", "scheduling/admission/gate.py")
    f.arrow((330, 174), (349, 174))
    f.arrow((175, 114), (175, 143))

    f.rect(10, 228, 660, 356, ("#f6f8fa", "#d0d7de"), 10, dashed=True)
    f.text(left + w / 2, 254, "3  For each next request", 16, bold=True)
    f.arrow((505, 204), (505, 243))
    ours(244, 60, "Order: which request is next", "scheduling/admission/admission.py", "scheduling/tree/cht.py")
    f.arrow((505, 304), (505, 327))
    ours(328, 60, "Stop policy: ADD or STOP", "scheduling/policies/")
    f.arrow((350, 358), (250, 358))
    f.text(300, 350, "STOP", 15, colour=MUTED)
    f.text(240, 363, "the largest branch only", 15, "end", colour=MUTED)
    f.arrow((505, 388), (505, 411))
    ours(412, 60, "Rules: admit it, or defer it", "scheduling/admission/rules.py")
    f.arrow((505, 472), (505, 519))
    f.text(516, 501, "nothing against it", 15, "start", colour=MUTED)
    ours(520, 50, "PrefillAdder: SGLang's budgets", colour=GREY)
    f.arrow((350, 545), (60, 545), (60, 274), (349, 274))
    f.text(70, 435, "the next one, until no request", 15, "start", colour=MUTED)
    f.text(70, 455, "is left or a budget is full", 15, "start", colour=MUTED)
    f.arrow((175, 584), (175, 611))

    theirs(612, 60, "4  Prefill step", "the first token", colour=GREEN)
    ours(612, 60, "Deferred requests resume", "their prefix is in the cache now", "scheduling/admission/deferrals.py")
    f.arrow((330, 642), (349, 642))
    f.arrow((175, 672), (175, 701))
    theirs(702, 60, "5  Decode steps", "until the request ends", colour=GREEN)
    ours(702, 60, "Row order; meters (the reward)", "scheduler/row_order.py", "scheduling/meters/")
    f.arrow((330, 732), (349, 732))
    f.text(WIDTH / 2, 798, "Under any other policy no blue box exists.", 16, colour=MUTED)
    return f


def _cells(f: Figure, x: float, y: float, runs: Sequence[tuple[int, Colour]], size: float = 20) -> None:
    for count, colour in runs:
        for _ in range(count):
            f.rect(x, y, size - 3, size - 3, colour, 2)
            x += size


def batch() -> Figure:
    """One small batch on its way: slots, forest, plan, kernel, result."""
    f = Figure("A decode batch of four requests: slots, forest, plan, kernel, merge", 900)
    a, b, tail = BLUE, PURPLE, YELLOW

    f.text(24, 38, "1  Slots", 17, "start", bold=True)
    f.text(130, 38, "equal slots are equal KV; hashed on the GPU, 32 at a time", 15, "start", colour=MUTED)
    rows = [(6, a), (3, b), (2, tail)], [(6, a), (3, b), (4, tail)], [(6, a), (3, tail)], [(6, a), (5, tail)]
    for i, runs in enumerate(rows):
        f.text(84, 68 + 26 * i, f"r{i + 1}", 16, "end", mono=True)
        _cells(f, 100, 54 + 26 * i, runs, 22)
    f.text(440, 86, "read by all four", 15, "start", colour=BLUE[1])
    f.text(440, 112, "read by r1 and r2", 15, "start", colour=PURPLE[1])
    f.text(440, 138, "private tails", 15, "start", colour=YELLOW[1])

    f.text(440, 64, "adapter/attention/rows.py", 13, "start", colour=MUTED, mono=True)
    f.arrow((340, 164), (340, 192))
    f.text(354, 183, "attention/running_forest.py", 13, "start", colour=MUTED, mono=True)
    f.text(24, 214, "2  Forest", 17, "start", bold=True)
    f.text(130, 214, "kept up to date as requests join and leave", 15, "start", colour=MUTED)
    f.arrow((340, 262), (220, 286), tip=False)
    for x in (420, 520):
        f.arrow((340, 262), (x, 288), tip=False)
    for x in (160, 280):
        f.arrow((220, 312), (x, 332), tip=False)
    f.box(250, 234, 180, 32, ["A: r1 to r4"], a)
    f.box(150, 286, 140, 32, ["B: r1, r2"], b)
    for x, y, name in ((120, 332, "r1"), (240, 332, "r2"), (380, 288, "r3"), (480, 288, "r4")):
        f.box(x, y, 80, 30, [name], tail)

    f.arrow((340, 370), (340, 398))
    f.text(354, 389, "feather_kernels/plan.py, csrc/planner/", 13, "start", colour=MUTED, mono=True)
    f.text(24, 420, "3  Plan", 17, "start", bold=True)
    f.text(130, 420, "on the CPU, reused while only tails grow", 15, "start", colour=MUTED)
    for x, w, lines, colour in (
        (24, 200, ["A x {r1, r2, r3, r4}", "cut into chunks"], a),
        (236, 160, ["B x {r1, r2}", "read once"], b),
        (408, 248, ["tails x one request each", "close their requests"], tail),
    ):
        f.box(x, 436, w, 58, lines, colour)

    f.arrow((340, 500), (340, 528))
    f.text(354, 519, "wrapper.py, csrc/sm90/forward.cuh", 13, "start", colour=MUTED, mono=True)
    f.text(24, 550, "4  Kernel", 17, "start", bold=True)
    f.text(130, 550, "one launch a layer; largest tiles first", 15, "start", colour=MUTED)
    for i, (name, units) in enumerate(
        (
            ("SM 0", ((250, "A, chunk 1", a), (150, "tail r3", tail))),
            ("SM 1", ((250, "A, chunk 2", a), (190, "tail r4", tail))),
            ("SM 2", ((180, "B", b), (120, "tail r1", tail), (190, "tail r2", tail))),
        )
    ):
        y, left = 566 + 40 * i, 100.0
        f.text(84, y + 22, name, 15, "end")
        for width, words, colour in units:
            f.box(left, y, width - 6, 32, [words], colour, 15)
            left += width

    f.arrow((340, 696), (340, 724))
    f.text(354, 715, "csrc/common/merge.cuh", 13, "start", colour=MUTED, mono=True)
    f.text(24, 746, "5  Merge", 17, "start", bold=True)
    f.text(130, 746, "each request's parts, by their log-sum-exps, in fp32", 15, "start", colour=MUTED)
    for i, parts in enumerate(("A1 A2 B tail", "A1 A2 B tail", "A1 A2 tail", "A1 A2 tail")):
        x = 24 + 160 * i
        f.box(x, 762, 152, 56, [f"r{i + 1}", parts], GREEN)
    f.text(340, 856, "CUDA graph: fixed buffers and grid, whatever plan lies in them", 16, colour=MUTED)
    f.text(340, 880, "(padding rows are requests of one token)", 15, colour=MUTED)
    return f


def tree() -> Figure:
    """A small trie: what runs, what waits, and what one change touches."""
    f = Figure("A Chunked Hash Tree: two requests run, five wait; one admission touches one path", 690)
    root, a, b, a1, a2 = (340, 90), (215, 205), (540, 205), (130, 330), (290, 330)
    running = {"run 1": (72, 455), "run 2": (176, 455)}
    waiting = {"w1": (255, 455), "w2": (325, 455), "w3": (400, 330), "w4": (490, 330), "w5": (590, 330)}
    chunks = {"w1": 60, "w2": 75, "w3": 48, "w4": 35, "w5": 44}
    legend = (
        (24, GREEN, "in the batch"),
        (180, YELLOW, "waits, with its chunks"),
        (410, PLAIN, "node, with its depth"),
    )
    for x, colour, words in legend:
        f.rect(x, 22, 18, 18, colour, 9 if colour is PLAIN else 4)
        f.text(x + 26, 36, words, 15, "start", colour=MUTED)
    for end, hot in ((a, True), (b, False)):
        f.arrow(root, end, colour=GREEN[1] if hot else LINE, tip=False)
    for end, hot in ((a1, True), (a2, False), (waiting["w3"], False)):
        f.arrow(a, end, colour=GREEN[1] if hot else LINE, tip=False)
    for node, names in ((a1, running), (a2, ("w1", "w2")), (b, ("w4", "w5"))):
        for name in names:
            f.arrow(node, {**running, **waiting}[name], colour=GREEN[1] if node is a1 else LINE, tip=False)
    f.circle(*root, 22, GREY, "0")
    for place, colour, depth in ((a, GREEN, "40"), (b, PLAIN, "30"), (a1, GREEN, "60"), (a2, PLAIN, "52")):
        f.circle(*place, 24, colour, depth)
    for name, (x, y) in running.items():
        f.box(x - 42, y - 17, 84, 34, [name], GREEN, 15)
    for name, (x, y) in waiting.items():
        f.box(x - 28, y - 17, 56, 34, [name], YELLOW, 15)
        f.text(x, y + 38, str(chunks[name]), 15)
    for (x, y), best in ((a, "best below: w3"), (b, "best: w4"), (a2, "w1")):
        f.text(x + 32, y - 8, best, 15, "start", colour=MUTED)
    f.rect(20, 530, 640, 140, ("#f6f8fa", "#d0d7de"), 10)
    f.text(340, 560, "missing(w) = chunks(w) - depth of the deepest green node above w", 16, bold=True)
    covered = {"w1": 40, "w2": 40, "w3": 40, "w4": 0, "w5": 0}
    for rank, name in enumerate(sorted(chunks, key=lambda name: (chunks[name] - covered[name], name != "w2"))):
        x, missing = 90 + 125 * rank, chunks[name] - covered[name]
        f.text(x, 594, f"{name}: {chunks[name]}-{covered[name]}", 15, mono=True)
        f.text(x, 618, f"= {missing}", 15, bold=not rank, colour=INK if rank else GREEN[1], mono=True)
    f.text(340, 652, "w3 is next. Admitting it updates the two nodes above it, no other request.", 15, colour=MUTED)
    return f


def decisions() -> Figure:
    """State, table, action, reward, update: the loop of a learner."""
    f = Figure("A learner's loop: state, table, ADD or STOP, decode throughput, update", 560)
    f.box(
        20,
        20,
        300,
        138,
        [
            "State, in bins",
            "requests in the batch: 13",
            "shared chunks lost: 5",
            "waiting peers: 10",
        ],
        BLUE,
    )
    f.arrow((320, 89), (359, 89))
    f.rect(360, 20, 300, 138, PLAIN)
    f.text(510, 44, "Table: one cell a state", 16, bold=True)
    for x, words in ((440, "ADD"), (580, "STOP")):
        f.text(x, 70, words, 15, bold=True)
    f.arrow((376, 78), (644, 78), colour="#d0d7de", tip=False)
    for x in (440, 580):
        f.text(x, 102, "mean tok/s", 15)
        f.text(x, 124, "count", 15)
    f.text(510, 148, "spread of both", 15, colour=MUTED)
    f.arrow((510, 158), (510, 199))
    f.box(
        360,
        200,
        300,
        116,
        [
            "STOP only if",
            "ADD was measured here, and",
            "STOP leads by 2% and by three",
            "standard errors, or is on trial",
        ],
        ORANGE,
    )
    f.arrow((432, 316), (432, 357))
    f.arrow((588, 316), (588, 357))
    f.box(360, 358, 144, 64, ["ADD", "the next one joins"], GREEN, 15)
    f.box(516, 358, 144, 64, ["STOP", "largest branch only"], RED, 15)
    f.arrow((588, 422), (588, 438), (340, 438), (340, 390), tip=False)
    f.arrow((360, 390), (321, 390))
    f.box(20, 340, 300, 100, ["Decode steps", "reward: tokens/s between rounds,", "prefill left out"], GREY)
    f.arrow((170, 340), (170, 289))
    f.box(20, 200, 300, 88, ["Update", "each (state, action) since", "the last reward, once"], PURPLE)
    f.arrow((320, 225), (340, 225), (340, 130), (359, 130))
    f.rect(20, 464, 640, 76, ("#f6f8fa", "#d0d7de"), 10)
    f.text(340, 494, "No question, always ADD: nothing shared is lost, or the batch is empty.", 16)
    f.text(340, 522, "Frozen: the table decides, nothing is explored or learnt.", 16)
    return f


def admission() -> Figure:
    """A round from the gate to SGLang's adder, and what becomes of requests that do not pass."""
    f = Figure("An admission round: gate, order, bound, policy, rules, SGLang's adder", 832)
    x, w = 20, 350

    def step(y: float, h: float, colour: Colour, *lines: str) -> None:
        f.box(x, y, w, h, lines, colour)

    def out(y: float, *lines: str) -> None:
        f.arrow((x + w, y), (429, y))
        top = y + 5 - (len(lines) - 1) * 10
        for i, line in enumerate(lines):
            f.text(438, top + 20 * i, line, 15, "start", colour=INK if i == 0 else MUTED)

    def down(y: float) -> None:
        f.arrow((x + w / 2, y), (x + w / 2, y + 25))

    step(20, 84, BLUE, "Gate", "would a prefill step cost the running", "requests more than it saves the others?")
    out(62, "delay the round", "at most 0.1 s")
    down(104)
    step(130, 84, BLUE, "Order", "most urgent class, then fewest tokens", "to compute, then age")
    out(172, "no request left", "the round ends")
    down(214)
    step(240, 84, YELLOW, "Ceiling", "is the oldest request overdue, and were", "enough others admitted since it came?")
    out(282, "it is next", "no rule, no policy")
    down(324)
    step(350, 84, YELLOW, "Bound", "may it pass every older request", "within both bounds of the guarantee?")
    out(392, "no: the shortest that may", "of the 16 oldest")
    down(434)
    step(460, 62, PURPLE, "Stop policy", "ADD, or keep the shared prefix")
    out(491, "STOP: only the", "largest branch grows")
    down(522)
    f.rect(x, 548, w, 178, ORANGE)
    f.text(x + w / 2, 574, "Rules", 16, bold=True)
    for i, (rule, outcome) in enumerate(
        (
            ("does it need more than it seemed to?", "out for this round"),
            ("will more requests share its prefix?", "wait for them"),
            ("would something be evicted for it?", "last in the round"),
            ("would memory run short later?", "the round ends"),
        )
    ):
        y = 602 + 36 * i
        f.text(x + 18, y, rule, 15, "start")
        f.arrow((x + w, y - 5), (429, y - 5))
        f.text(438, y, outcome, 15, "start")
    down(726)
    f.box(x, 752, w, 60, ["SGLang's PrefillAdder", "memory, token and chunk budgets"], GREY)
    f.arrow((x + w, 782), (429, 782))
    f.text(438, 778, "admitted: prefix in flight", 15, "start")
    f.text(438, 798, "for requests that share it", 15, "start", colour=MUTED)
    return f


def kernel() -> Figure:
    """One processor of the Hopper path: which warps do what, one queue after the other."""
    f = Figure("One CTA of the packed kernel on Hopper: twelve warps and their queues over time", 640)
    f.text(340, 34, "One CTA on each SM, head_dim up to 128", 17, bold=True)
    lanes = (("warpgroup 0", 92), ("warpgroup 1", 182), ("copy warps", 272))
    for name, y in lanes:
        f.text(110, y + 46, name, 15, "end")
    columns = ((120, 150, "m = 128"), (276, 120, "m = 64"), (402, 100, "m = 16"), (508, 152, "m = 8"))
    for x, w, name in columns:
        f.text(x + w / 2, 66, name, 16, bold=True)
    f.text(590, 84, "tails", 15, colour=MUTED)
    f.box(120, 92, 150, 172, ["wgmma", "64 + 64 rows", "share each", "KV tile"], BLUE, 15)
    for y in (92, 182):
        f.box(276, y, 120, 82, ["wgmma", "64 rows"], BLUE, 15)
        f.box(402, y, 100, 82, ["mma.sync", "each warp", "its own unit"], PURPLE, 15)
        f.box(508, y, 152, 82, ["mma.sync", "each warp its own", "unit, tokens as rows"], YELLOW, 15)
    f.box(120, 272, 276, 82, ["cp.async, 128-byte swizzle", "rows of scattered slots, units ahead"], GREEN, 15)
    f.rect(402, 272, 100, 82, ("#f6f8fa", "#d0d7de"), dashed=True)
    f.text(452, 318, "idle", 15, colour=MUTED)
    f.box(508, 272, 152, 82, ["mma.sync", "each warp its own", "unit, tokens as rows"], YELLOW, 15)
    f.arrow((120, 376), (660, 376))
    f.text(390, 398, "queues follow each other, largest tile and longest item first", 15, colour=MUTED)

    f.text(24, 440, "What merges a request's parts", 17, "start", bold=True)
    for y, lines, note in (
        (456, ["the last part's unit"], "up to 16 parts: it waits for the others, adds them"),
        (512, ["warps with no units left"], "more parts: each warp merges a row at a time"),
        (568, ["a second kernel"], 'option merge="kernel": no unit waits for another'),
    ):
        f.box(24, y, 212, 44, lines, ORANGE, 15)
        f.text(248, y + 27, note, 15, "start")
    return f


class Work(NamedTuple):
    """A step of the example: its colour, and milliseconds to form, prepare, launch, compute and process it."""

    name: str
    colour: Colour
    form: float
    prepare: float
    launch: float
    compute: float
    result: float


def overlapped(steps: Sequence[Work]) -> list[tuple[str, str, float, float, Colour]]:
    """What host and GPU do in SGLang's overlapped loop: (lane, label, begin, end, colour), as a replay has it."""
    time, drawn = Timeline(NO_HOST_TIME), []
    before: tuple[Work, float] | None = None

    def process() -> None:
        assert before is not None
        step, ready = before
        if ready > time.now:
            told = f"waits for {step.name}" if ready - time.now > 8 else f"awaits {step.name}"
            drawn.append(("host", told, time.now, ready, GREY))
        time.wait(ready)
        drawn.append(("host", "", time.now, time.now + step.result, YELLOW))
        time.spend(step.result)

    for step in steps:
        begin = time.now
        time.spend(step.form)
        start = max(time.now + step.prepare, time.gpu)
        ready = time.launch(step.prepare, step.launch, step.compute)
        long = step.launch > step.compute / 3
        told = f"{step.name}: {step.form:g} + {step.launch:g} ms" if long else step.name
        drawn.append(("host", told, begin, time.now, step.colour))
        stretched = ready - start > step.compute
        told = f"{step.name}: {step.compute:g} ms" + (", waits for its launches" if stretched else "")
        drawn.append(("GPU", told, start, ready, step.colour))
        if before is not None:
            process()
        before = step, ready
    process()
    return drawn


def step_time() -> Figure:
    """Three steps, the prefill step launched kernel by kernel and in CUDA graphs."""
    f = Figure("Three overlapped steps: without prefill CUDA graphs the host binds, with them the GPU", 440)
    left, scale = 82.0, 10.5
    for at, colour, words in (
        (24, BLUE, "A, decode"),
        (144, PURPLE, "B, prefill"),
        (264, GREEN, "C, decode"),
        (384, YELLOW, "host processes a result"),
    ):
        f.rect(at, 20, 18, 18, colour, 4)
        f.text(at + 26, 34, words, 15, "start", colour=MUTED)
    for top, title, launch in (
        (60.0, "B is formed in 3 ms and launched kernel by kernel in 34 ms", 34.0),
        (250.0, "B is formed in 3 ms and launched in CUDA graphs in 10 ms", 10.0),
    ):
        steps = (
            Work("A", BLUE, 1, 2, 0, 9, 1),
            Work("B", PURPLE, 3, 0, launch, 20, 2),
            Work("C", GREEN, 1, 2, 0, 9, 1),
        )
        f.text(24, top + 16, title, 16, "start", bold=True)
        lanes = {"host": top + 30.0, "GPU": top + 82.0}
        for lane, y in lanes.items():
            f.text(left - 10, y + 26, lane, 15, "end")
        for lane, label, begin, end, colour in overlapped(steps):
            x, w = left + begin * scale, (end - begin) * scale
            idle = colour is GREY
            f.rect(x, lanes[lane], w, 42, PLAIN if idle else colour, 3, dashed=idle)
            if label:
                f.text(x + w / 2, lanes[lane] + 26, label, 14, colour=MUTED if idle else INK)
        y = top + 136
        f.arrow((left, y), (left + 55 * scale, y), tip=False)
        for moment in range(0, 60, 10):
            x = left + moment * scale
            if moment <= 55:
                f.arrow((x, y), (x, y + 6), tip=False)
                f.text(x, y + 22, f"{moment} ms" if moment == 0 else str(moment), 14, colour=MUTED)
    return f


FIGURES: tuple[Callable[[], Figure], ...] = (request, batch, tree, decisions, admission, kernel, step_time)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figures, or say which differ."""
    parser = argparse.ArgumentParser(description="Draw the figures of the design pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file would change")
    options = parser.parse_args(arguments)
    stale = []
    for draw in FIGURES:
        path, text = FOLDER / f"{draw.__name__}.svg", draw().svg()
        if options.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
        else:
            path.write_text(text, encoding="utf-8", newline="\n")
    if stale:
        print(f"{', '.join(stale)}: not what docs/generators/figures.py draws; run it", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
