"""Several replayed servers behind a router, in lock-step virtual time, a process each.

A replica runs no further than the moment before which all of its requests are known, its horizon. Then it says until
when it has run and which answers have ended, and the router assigns the requests that come by the next moment. All of
this follows from virtual times alone, so a run repeats.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

from feather_sglang.errors import FeatherError
from feather_sglang.replay.arrivals import Arrivals
from feather_sglang.replay.jobs import Job, ReplayResult, engine_of, idle_of, result_of
from feather_sglang.replay.routers import ROUTERS
from feather_sglang.replay.traces import Trace, TraceRequest


class _Turn(NamedTuple):
    """A replica waits for a later horizon. No answer that it has not told of ends before `clock`.

    An idle one does nothing before that either, unless a request comes.
    """

    clock: float
    idle: bool
    ended: list[tuple[int, float]]  # requests, and when their clients had the whole answer


class _Grant(NamedTuple):
    """Up to the horizon a replica gets these requests, at these times, and no others."""

    horizon: float
    requests: list[tuple[float, TraceRequest]]


class RoutedArrivals(Arrivals):
    """The requests that a router sends to one replica."""

    def __init__(self, trace: Trace, link: Connection) -> None:
        super().__init__(trace.requests)  # an answer that a prompt quotes may be another replica's
        self._due.clear()
        self._followers.clear()
        self._link = link
        self._horizon = 0.0
        self._ended: list[tuple[int, float]] = []

    @property
    def over(self) -> bool:
        """Whether all have come."""
        return not self._due and self._horizon == math.inf

    def before(self, moment: float) -> float | None:
        """When the next one comes, if that is before the moment."""
        while not self._due and self._horizon < moment:
            self._wait(moment, idle=True)
        return self.next

    def until(self, now: float) -> Iterator[tuple[float, TraceRequest]]:
        """Take those that have come by now."""
        while self._horizon <= now:
            self._wait(now, idle=False)
        return super().until(now)

    def ended(self, request_id: int, at: float) -> None:
        """The router hears of it with the next turn."""
        self._ended.append((request_id, at))

    def _wait(self, clock: float, idle: bool) -> None:
        self._link.send(_Turn(clock, idle, self._ended))
        self._ended = []
        self._horizon, requests = self._link.recv()
        for due, request in requests:
            heapq.heappush(self._due, (due, self._place[request.request_id], request))


@dataclass(frozen=True)
class _RoutedTrace(Trace):
    """A trace of which a router sends a part to this process."""

    link: Any = None

    def arrivals(self) -> Arrivals:
        """When its requests come, for one run."""
        return RoutedArrivals(self, self.link)


def _replica(job: Job, link: Connection, others: Sequence[Connection]) -> None:
    """Entry point of a replica's process; `others` are ends that it inherits, and that would outlive the router."""
    for end in others:
        end.close()
    parent: Any = multiprocessing.parent_process()
    last: Any
    try:
        with engine_of(job) as engine:
            trace = _RoutedTrace(job.trace.name, job.trace.block_size, job.trace.requests, link=link)
            last = (engine.run(trace, lambda done: parent.is_alive() or os._exit(1)), idle_of(job, engine))
    except (EOFError, ConnectionError):
        os._exit(1)  # the router's process was ended
    except FeatherError as error:
        last = error
    except BaseException as error:
        traceback.print_exc()
        last = RuntimeError(f"{type(error).__name__}: {error}")
    link.send(last)
    os._exit(0)


class Replica:
    """A replica, as the router sees it."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.clock = 0.0
        self.idle = False
        self.load = 0  # requests without a whole answer
        self.talks = 0  # requests that others come after, of which nothing is known of the end
        self.given: list[tuple[float, TraceRequest]] = []
        self.last: Any = None  # what it measured

    def hear(self) -> list[tuple[int, float]]:
        """Wait until it waits or has come to its end; returns which answers have ended, and when."""
        try:
            said = self.link.recv()
        except EOFError:
            raise RuntimeError("a replica ended without a result") from None
        if isinstance(said, Exception):
            raise said
        if not isinstance(said, _Turn):
            self.clock, self.last = math.inf, said
            return []
        self.clock, self.idle = said.clock, said.idle
        return said.ended

    def give(self, due: float, request: TraceRequest) -> None:
        """A request is its own."""
        self.load += 1
        self.given.append((due, request))
        if self.idle:
            self.clock = min(self.clock, due)

    def run(self, horizon: float) -> None:
        """Let it run so far."""
        self.link.send(_Grant(horizon, self.given))
        self.given = []


def route(job: Job, replicas: Sequence[Replica], tell: Callable[[int], None]) -> None:
    """Send the job's requests to the replicas, and let them run to their ends."""
    router, arrivals = ROUTERS[job.router](job.trace), job.trace.arrivals()
    followed = {request.after for request in job.trace.requests if request.after is not None}
    think = min((r.think_s for r in job.trace.requests if r.after is not None), default=math.inf)
    ends: list[tuple[float, int, Replica]] = []  # of answers that the router's next request may not see yet
    served = 0
    running = list(replicas)
    while True:
        for replica in running:
            for request_id, at in replica.hear():
                served += 1
                heapq.heappush(ends, (at, request_id, replica))
                replica.talks -= request_id in followed
                arrivals.ended(request_id, at)
        tell(served)
        clock = min(replica.clock for replica in replicas)
        while arrivals.next is not None and arrivals.next <= clock:
            for due, request in arrivals.until(arrivals.next):
                while ends and ends[0][0] <= due:
                    heapq.heappop(ends)[2].load -= 1
                chosen = replicas[router.choose(request, [replica.load for replica in replicas])]
                chosen.give(due, request)
                chosen.talks += request.request_id in followed
            clock = min(replica.clock for replica in replicas)
        # Nobody comes before the next request that is known, or the first that may follow an answer still to end.
        coming = math.inf if arrivals.next is None else arrivals.next
        follows = min((replica.clock for replica in replicas if replica.talks), default=math.inf) + think
        horizon = min(coming, max(follows, math.nextafter(clock, math.inf)))
        running = [one for one in replicas if one.last is None and (one.clock < horizon or horizon == math.inf)]
        if not running:
            return
        for replica in running:
            replica.run(horizon)


def _together(outcomes: Sequence[Any]) -> Any:
    """What the replicas measured, as one server's; seconds of GPU and host are a replica's in the mean."""
    count = len(outcomes)
    stats = [outcome.feather for outcome in outcomes if outcome.feather]
    return SimpleNamespace(
        served=sorted((one for outcome in outcomes for one in outcome.served), key=lambda one: one.finish),
        batches=sorted(batch for outcome in outcomes for batch in outcome.batches),
        prefills=sum(outcome.prefills for outcome in outcomes),
        makespan=max(outcome.makespan for outcome in outcomes),
        gpu_busy=sum(outcome.gpu_busy for outcome in outcomes) / count,
        scheduler_seconds=sum(outcome.scheduler_seconds for outcome in outcomes) / count,
        retractions=sum(outcome.retractions for outcome in outcomes),
        feather={"stops": sum(one["stops"] for one in stats), "replicas": stats} if stats else None,
    )


def serve(job: Job, tell: Callable[[int], None]) -> ReplayResult:
    """Run one job on its replicas, each in a process that is forked from this one."""
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe() for _ in range(job.replicas)]
    processes = []
    try:
        for number, (_, link) in enumerate(ends):
            others = [ours for ours, _ in ends] + [theirs for _, theirs in ends[number + 1 :]]
            processes.append(context.Process(target=_replica, args=(job, link, others)))
            processes[-1].start()
            link.close()
        replicas = [Replica(ours) for ours, _ in ends]
        route(job, replicas, tell)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    outcomes, idle = [replica.last[0] for replica in replicas], replicas[0].last[1]
    result = result_of(job.name, _together(outcomes), idle, job.slo)
    busy = [outcome.gpu_busy for outcome in outcomes]
    imbalance = max(busy) * len(busy) / sum(busy) if any(busy) else 1.0
    return replace(result, summary=replace(result.summary, imbalance=imbalance))
