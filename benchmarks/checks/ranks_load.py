"""The load of the check of ranks: its requests, how they are sent, and the fate of each."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from sending import outcome, reason_of, send

from feather_sglang.compare.server.client import Address

LOST_SECONDS = 300.0  # a request without an end after so long hangs; a policy may let one wait for 120 s
STALL_SECONDS = 90.0  # or where none of the open ones ends in such a time
GROUPS = 48  # prefixes that the short requests share
RENEWAL = 1 / 400  # chance that a short request begins with a prefix that nobody has had
LONG_GROUPS = 50  # or fewer, so that a policy finds their prefixes worth a wait
LONG_SHARE = 1.25  # of the KV pool: what the long prefixes hold together
LEAST_LONG = 700
BURST = 1 / 60  # chance that an arrival is a burst of up to `BURST_MOST` requests
BURST_MOST = 48


class Job(NamedTuple):
    """A request: its prompt, how many tokens it wants, and after how many seconds it is given up, if ever."""

    prompt: list[int]
    tokens: int
    fate: str
    after: float


class Jobs:
    """Requests without end; the same seed gives the same ones in the same order.

    Parameters
    ----------
    vocabulary : token ids are below.
    kv_tokens : that the server's pool holds; prompts are cut where that is small.
    """

    def __init__(self, vocabulary: int, kv_tokens: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary
        self._kv_tokens = kv_tokens

    def short(self) -> Iterator[Job]:
        """40 to 600 tokens, of which most are shared in some dozens of groups, 1 to 16 new ones; one in ten given up.

        New prefixes take the places of old ones all the time: what is kept of those would show as a leak.
        """
        rng = self._rng
        most = min(540, self._kv_tokens // 16)
        prefixes = [self._tokens(rng.randint(24, most)) for _ in range(GROUPS)]
        while True:
            place = rng.randrange(GROUPS)
            if rng.random() < RENEWAL:
                prefixes[place] = self._tokens(rng.randint(24, most))
            if rng.random() < 0.1:
                prompt = self._tokens(rng.randint(40, most))
            else:
                prompt = prefixes[place] + self._tokens(rng.randint(16, 60))
            yield self._job(prompt, rng.randint(1, 16), 0.1)

    def mixed(self) -> Iterator[tuple[Job, ...]]:
        """What arrives at the same moment: mostly one request, 16 to 200 tokens for one of the long prefixes.

        All long prefixes together do not fit into the pool. One request in five is a short one, and some come in bursts
        of few prefixes. One in five is given up.
        """
        rng = self._rng
        together = int(self._kv_tokens * LONG_SHARE)
        length = max(together // LONG_GROUPS, LEAST_LONG)
        prefixes = [self._tokens(length) for _ in range(max(2, together // length))]
        short = self.short()
        while True:
            if rng.random() < 0.2:
                yield (next(short),)
                continue
            count = rng.randint(2, BURST_MOST) if rng.random() < BURST else 1
            chosen = rng.sample(prefixes, min(3, count))
            yield tuple(
                self._job(rng.choice(chosen) + self._tokens(rng.randint(20, 60)), self._output(), 0.2)
                for _ in range(count)
            )

    def _job(self, prompt: list[int], tokens: int, given_up: float) -> Job:
        rng = self._rng
        fate = rng.choice(("abort", "hang up")) if rng.random() < given_up else "finish"
        # In the queue, in prefill, in the middle of decoding: the delays span what a request takes.
        return Job(prompt, tokens, fate, math.exp(rng.uniform(math.log(0.05), math.log(10.0))))

    def _output(self) -> int:
        return int(math.exp(self._rng.uniform(math.log(16), math.log(200))))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._vocabulary) for _ in range(count)]


class Load:
    """Sends jobs to a server.

    Attributes
    ----------
    fates : what became of the requests, by number; all that begin with "lost" should not have happened.
    open : requests that have not ended.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.fates: Counter[str] = Counter()
        self.open = 0
        self._last_end = time.monotonic()

    @property
    def ended(self) -> int:
        return sum(self.fates.values())

    @property
    def lost(self) -> list[str]:
        return [f"{count} requests {fate}" for fate, count in self.fates.items() if fate.startswith("lost")]

    @property
    def stalled(self) -> bool:
        """Whether the server seems to hang: requests are open and none of them ends."""
        return self.open > 0 and time.monotonic() - self._last_end > STALL_SECONDS

    async def keep_open(self, jobs: Iterator[Job], most_open: int, until: float) -> None:
        """Keep so many requests open until there are no more jobs, or until that moment; wait for their ends."""

        async def work() -> None:
            for job in jobs:
                await self._send(job)
                if time.monotonic() > until:
                    break

        await asyncio.gather(*(work() for _ in range(most_open)))

    async def arrive(self, arrivals: Iterator[tuple[Job, ...]], rate: float, most_open: int, until: float) -> None:
        """Let jobs arrive at random, so many moments a second, until that moment; then wait for their ends.

        Arrivals pause while more than `most_open` are open: an overloaded server could not end them in time.
        """
        rng = random.Random(0)
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while (due := max(due, time.monotonic() - 1.0) + rng.expovariate(rate)) < until:
            await asyncio.sleep(due - time.monotonic())
            while self.open >= most_open and time.monotonic() < until:
                await asyncio.sleep(0.05)
            tasks = {task for task in tasks if not task.done()}
            tasks |= {asyncio.create_task(self._send(job)) for job in next(arrivals)}
        await asyncio.gather(*tasks)

    async def _send(self, job: Job) -> None:
        self._last_end = time.monotonic() if not self.open else self._last_end
        self.open += 1
        try:
            answer = await send(self.address, job.prompt, job.tokens, job.fate, job.after, LOST_SECONDS)
        finally:
            self.open -= 1
        if isinstance(answer, str):
            self.fates[answer] += 1
        else:
            made = answer["meta_info"]["completion_tokens"]
            self.fates[outcome(job.fate, job.tokens, made, reason_of(answer))] += 1
        self._last_end = time.monotonic()
