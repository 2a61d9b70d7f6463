"""A server in virtual time that forms batches as SGLang's scheduler does, without SGLang.

Admission, tree, meters and step times are those of a replay; what is left of the scheduler is its loop: who has come,
which prompts are computed in which chunks, who decodes, and whose result is known one step late. Two things are left
out, and so a decision costs microseconds: the host takes no time, as with ``--scheduler-cost off``, and KV memory holds
all that the trace asks for, so nothing is evicted. Under these terms its decisions are those of SGLang's scheduler
(``tests/sglang/test_gym_decisions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.construction import make_admission
from feather_sglang.errors import FeatherError
from feather_sglang.replay.batch_sharing import BatchSharing, CommonSharing, nodes_of
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.scheduling.admission.forecast import Outlook
from feather_sglang.scheduling.admission.queue import LEAST_CACHED
from feather_sglang.scheduling.admission.types import Batch, Proposal, Verdict
from feather_sglang.scheduling.meters.steps import StepMeters
from feather_sglang.scheduling.policies import StopPolicy
from feather_sglang.scheduling.policy_names import FEATHER
from feather_sglang.scheduling.tree.chunk_hash import HashedPrompt
from feather_sglang.simulation.host_time import NO_HOST_TIME
from feather_sglang.simulation.timeline import Timeline

_HASH_SEED = 0  # as in a replay
_PREFILL_TOKENS = 16384  # that SGLang computes in a step where prompts are not cut into chunks
_OVERLAP = 1  # steps in flight while the next one is formed


class Prompts:
    """The prompts of a trace, hashed once however often they are served.

    Attributes
    ----------
    of : each request's, by its id, and the nodes of its path.
    """

    def __init__(self, trace: Trace, chunk_tokens: int) -> None:
        if any(request.after is not None for request in trace.requests):
            raise FeatherError(f"{trace.name} has conversations, whose turns wait for answers: `feather ab` replays it")
        self.block_size, self.chunk_tokens = trace.block_size, chunk_tokens
        nodes = nodes_of(request.hash_ids for request in trace.requests)
        self.of = {
            request.request_id: (HashedPrompt(trace.tokens(request), chunk_tokens, _HASH_SEED), path)
            for request, path in zip(trace.requests, nodes, strict=True)
        }

    def check_fits(self, trace: Trace, kv_tokens: int) -> None:
        """Raise ``FeatherError`` where a pool does not hold all that a part of the trace asks for."""
        longest: dict[int, int] = {}  # of a node: its tokens, in the longest prompt through it
        for request in trace.requests:
            for place, node in enumerate(self.of[request.request_id][1]):
                tokens = min(self.block_size, request.input_length - place * self.block_size)
                longest[node] = max(longest.get(node, 0), tokens)
        asked = sum(longest.values()) + sum(r.output_length + self.chunk_tokens for r in trace.requests)
        if asked > kv_tokens:
            raise FeatherError(
                f"{trace.name}: {len(trace.requests):,} requests ask for {asked:,} tokens of KV, more than kv_tokens "
                f"{kv_tokens:,}: raise it, or take fewer requests; nothing is evicted here"
            )


class _Row:
    """A request of an episode."""

    __slots__ = (
        "cached",
        "computed",
        "entered",
        "finished",
        "last",
        "leaving",
        "longest",
        "nodes",
        "prompt",
        "request",
        "tokens",
    )

    def __init__(self, request: TraceRequest, prompt: HashedPrompt, nodes: list[int]) -> None:
        self.request, self.prompt, self.nodes = request, prompt, nodes
        self.tokens = request.input_length
        self.cached = 0  # of its prompt, what was or is computed before the next step
        self.computed = self.leaving = self.finished = False  # the first token is known; the last is coming; is known
        self.last = -1  # the decode step that brings the last one
        self.longest = self.tokens + request.output_length - 1  # its KV then
        self.entered = 0  # its place among those admitted


class _Step(NamedTuple):
    """A step that was launched; of a prefill step the prompts, and what it computes of each behind what is cached."""

    done: float
    rows: list[_Row]
    new: list[int]
    cached: list[int]
    chunked: _Row | None  # whose prompt ends in a later step
    number: int = 0  # of a decode step; 0: a prefill step
    decoded: int = 0  # rows of a decode step


class PrefixCache:
    """How much of each prompt is cached; nothing is ever evicted."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ends: dict[int, int] = {}  # tokens from the start of a prompt to where a node's cached ones end

    def insert(self, nodes: list[int], tokens: int) -> None:
        """Cache so many tokens of a prompt."""
        size, ends = self.block_size, self._ends
        for place in range(min(len(nodes), -(-tokens // size)) - 1, -1, -1):
            end = min(tokens, (place + 1) * size)
            if ends.get(nodes[place], 0) >= end:
                return
            ends[nodes[place]] = end

    def match(self, nodes: list[int], tokens: int) -> int:
        """Tokens that a prompt finds; its last one is computed in any case."""
        size, found = self.block_size, 0
        for place, node in enumerate(nodes):
            end = self._ends.get(node)
            if end is None:
                break
            found = end
            if end < (place + 1) * size:
                break
        return min(found, tokens - 1)


class _RunningBatch:
    """The rows that decode, and what a step of them takes."""

    def __init__(self, model: StepTimeModel, block_size: int) -> None:
        self.rows: dict[_Row, None] = {}
        self._model, self._block_size = model, block_size
        self._common = None if model.needs_rows else CommonSharing(block_size)
        self._changed = False
        self._sharing = BatchSharing.from_paths((), block_size, ())
        self._lengths: np.ndarray | None = None  # of the rows, where the time depends on each

    def join(self, row: _Row) -> None:
        """A row has been prefilled."""
        self.rows[row] = None
        self._changed = True
        if self._common is not None:
            self._common.change(row.nodes, row.tokens, row.tokens, True)

    def drop(self, rows: Iterable[_Row]) -> None:
        """Rows have had their last step."""
        self._changed = True
        for row in rows:
            del self.rows[row]
            if self._common is not None:
                self._common.change(row.nodes, row.tokens, row.longest, False)

    def decode(self, number: int, order_of: Callable[[Iterable[Hashable]], list[int] | None] | None) -> float:
        """Seconds of decode step `number`, in which every row grows by a token."""
        model, common = self._model, self._common
        if common is not None:
            common.total_tokens += common.rows
        if self._changed:
            self._changed, self._lengths = False, None
            sharing = None if common is None else common.of(next(iter(self.rows)).nodes)
            self._sharing = sharing or self._compare(number, order_of)
        elif self._lengths is not None:
            self._lengths += 1
        if self._lengths is None and common is not None:
            return model.decode_total(common.total_tokens, self._sharing)
        assert self._lengths is not None
        return model.decode(self._lengths, self._sharing)

    def _compare(self, number: int, order_of: Callable[[Iterable[Hashable]], list[int] | None] | None) -> BatchSharing:
        rows = list(self.rows)
        order = None if order_of is None else order_of([row.request.request_id for row in rows])
        if order is not None:
            rows = [rows[place] for place in order]
            self.rows = dict.fromkeys(rows)
        lengths = [row.longest - (row.last - number) for row in rows]
        self._lengths = np.array(lengths, dtype=np.int64)
        return self._model.sharing([row.request.hash_ids for row in rows], self._block_size, lengths)


class BatchServer:
    """One episode: a trace is served once, under a policy that is asked as on a server.

    Attributes
    ----------
    finished : requests that got all of their tokens.
    tokens : that they got.
    """

    def __init__(
        self,
        trace: Trace,
        prompts: Prompts,
        model: StepTimeModel,
        options: FeatherOptions,
        policy: StopPolicy,
        *,
        kv_tokens: int,
        max_running: int,
        chunk_tokens: int,
    ) -> None:
        prompts.check_fits(trace, kv_tokens)
        self.model, self.prompts = model, prompts
        self.kv_tokens, self.max_running, self.chunk_tokens = kv_tokens, max_running, chunk_tokens
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(), max_total_num_tokens=kv_tokens, page_size=1, enable_overlap=True
        )
        self.admission = make_admission(
            scheduler, FEATHER[0], options, policy, seed=_HASH_SEED, outlook_of=self._outlook
        )
        self.meters = StepMeters(chunk_tokens)
        self.time = Timeline(NO_HOST_TIME)
        self.cache = PrefixCache(prompts.block_size)
        self.finished = self.tokens = 0
        self._row_order = options.row_order
        self._requests = len(trace.requests)
        self._arrivals = trace.arrivals()
        self._rows: dict[Hashable, _Row] = {}  # that admission knows
        self._waiting = 0
        self._batch = _RunningBatch(model, prompts.block_size)
        self._full = False  # SGLang's ``batch_is_full``
        self._chunked: _Row | None = None
        self._step: _Step | None = None  # in flight
        self._decodes = 0  # decode steps launched
        self._ending: dict[int, list[_Row]] = {}  # decode step -> rows that it brings the last token
        self._gone: list[_Row] = []  # rows of the running batch that have finished
        self._left: list[_Row] = []  # finished since the last round
        self._started: dict[_Row, None] = {}  # whose first token admission waits for
        self._admitted = 0

    def _outlook(self, request_id: Hashable) -> Outlook:
        row = self._rows[request_id]
        return Outlook(row.tokens, 0, row.request.output_length, True)

    def outcome(self) -> dict[str, Any]:
        """What an episode has come to."""
        makespan = self.time.now
        return {"output_tok_s": self.tokens / makespan, "makespan": makespan, "stops": self.admission.stops}

    def run(self) -> None:
        """Serve the trace."""
        idle = 1
        while True:
            if idle > 1:
                self._rest()
            self._receive()
            formed = self._form()
            processed, self._step = self._step, formed
            if processed is not None:
                self._process(processed)
            idle = 0 if formed is not None or processed is not None else idle + 1
            if self.finished == self._requests:
                return

    def _rest(self) -> None:
        moment = self._arrivals.next
        if moment is None:
            raise FeatherError(f"the episode is stuck: {self._waiting} requests wait and nothing can run")
        self.time.wait(moment)

    def _receive(self) -> None:
        for _, request in self._arrivals.until(self.time.now):
            row = _Row(request, *self.prompts.of[request.request_id])
            self._rows[request.request_id] = row
            self._waiting += 1
            looks = self._waiting > 1 and row.tokens > LEAST_CACHED  # who waits alone is proposed next anyway
            self.admission.arrived(
                request.request_id,
                row.prompt,
                most_tokens=request.output_length,
                cached_tokens=self.cache.match(row.nodes, row.tokens) if looks else 0,
            )

    # A turn of the loop -------------------------------------------------------------------------------------------

    def _form(self) -> _Step | None:
        """Form the next batch, and launch it."""
        if self._chunked is not None:
            self.cache.insert(self._chunked.nodes, self._chunked.cached)
        self._merge()
        step = self._prefill()
        return step if step is not None else self._decode()

    def _merge(self) -> None:
        """Let who was prefilled decode, and drop who has finished."""
        last = self._step
        if last is not None and not last.number:
            if last.chunked is not None:
                self._full = False
            for row in last.rows:
                if row is not last.chunked:
                    row.last = self._decodes + row.request.output_length - 1
                    self._ending.setdefault(row.last, []).append(row)
                    self._batch.join(row)
        if self._gone:
            self._batch.drop(self._gone)
            self._full = False
            self._gone.clear()

    def _prefill(self) -> _Step | None:
        admission, rows = self.admission, len(self._batch.rows)
        if admission.in_flight or not rows:
            self._full = False
        step = None
        blocked = (self._full or not self._waiting) and self._chunked is None
        if not blocked and rows >= self.max_running and self._chunked is None:
            self._full = blocked = True
        if not blocked:
            self._open()
            step = self._admit(rows)
            if step is not None:
                self.meters.launched(self.time.now, _OVERLAP)
        admission.close_round()
        return step

    def _open(self) -> None:
        admission, chunked = self.admission, self._chunked
        for row in sorted(self._left, key=lambda row: row.entered):
            admission.finished(row.request.request_id, row.request.output_length)
            del self._rows[row.request.request_id]
        self._left.clear()
        for row in list(self._started):
            request_id = row.request.request_id
            if request_id not in admission.in_flight:
                del self._started[row]
            elif row.computed:
                admission.computed(request_id)
                del self._started[row]
        pending = 0 if chunked is None else max(1, chunked.tokens - chunked.cached)
        if admission.open_round(self.meters.measured(self.time.now), pending_tokens=pending):
            self.meters.reward_paid()

    def _admit(self, running: int) -> _Step | None:
        """One admission round; who is admitted is prefilled."""
        admission = self.admission
        rows: list[_Row] = []
        new: list[int] = []
        cached: list[int] = []
        room = self.max_running - running
        free = room - (self._chunked is not None)  # of places, as the policy is told
        left = min(self.chunk_tokens, _PREFILL_TOKENS)

        def compute(row: _Row, found: int) -> None:
            nonlocal left
            tokens = min(row.tokens - found, left)
            rows.append(row)
            new.append(tokens)
            cached.append(found)
            left -= tokens
            row.cached = found + tokens
            self._chunked = row if row.cached < row.tokens else None

        if self._chunked is not None:
            compute(self._chunked, self._chunked.cached)
        while True:
            request_id = admission.propose(Batch(len(admission.running), len(rows) < free))
            if request_id is None or left <= 0:
                break
            if len(rows) >= room:
                self._full = True
            if self._full:
                break
            row = self._rows[request_id]
            found = self.cache.match(row.nodes, row.tokens)
            verdict = admission.check(Proposal(request_id, found, row.tokens - found, self.kv_tokens, self.kv_tokens))
            if verdict is not Verdict.ADMIT:
                continue
            compute(row, found)
            self._waiting -= 1
            self._admitted += 1
            row.entered = self._admitted
            admission.admitted(request_id, found)
            self._started[row] = None
            if left <= 0:
                break
        if not rows:
            return None
        paths = [row.request.hash_ids for row in rows]
        seconds = self.model.prefill(new, cached, paths, self.prompts.block_size)
        return _Step(self.time.launch(0.0, 0.0, seconds), rows, new, cached, self._chunked)

    def _decode(self) -> _Step | None:
        """Let the running batch decode, but for rows whose last token is on its way."""
        batch = self._batch
        ending = [row for row in self._ending.get(self._decodes, ()) if not row.finished]
        if ending:
            for row in ending:
                row.leaving = True
            batch.drop(ending)
            self._full = False
        if not batch.rows:
            return None
        self._decodes += 1
        seconds = batch.decode(self._decodes, self.admission.row_order if self._row_order else None)
        return _Step(self.time.launch(0.0, 0.0, seconds), [], [], [], None, self._decodes, len(batch.rows))

    def _process(self, step: _Step) -> None:
        """Take in the result of a step."""
        self.time.wait(step.done)
        if step.number:
            for row in self._ending.pop(step.number, ()):
                self._end(row)
        else:
            for row in step.rows:
                if row is step.chunked:
                    continue
                self.cache.insert(row.nodes, row.tokens)
                row.computed = True
                if row.request.output_length == 1:
                    self._ending[row.last].remove(row)
                    self._end(row)
        self.meters.ended(self.time.now, step.decoded, bool(step.number), step.new, step.cached)
        if step.chunked is None and len(self._gone) == len(self._batch.rows):
            self.meters.prefill.idle()

    def _end(self, row: _Row) -> None:
        row.finished = True
        self.finished += 1
        self.tokens += row.request.output_length
        self._left.append(row)
        if not row.leaving:
            self._gone.append(row)
