"""Requests that come and go at random, and the fate of each: the schedule needs no server, `Churn` drives one."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pat_compare
from pat_compare import Answers, Divergence, Spread, Tolerance, Verdict
from sending import outcome, reason_of, send

from feather_sglang.compare.server.client import Address, HttpError, call

FATES = {"finish": 0.7, "abort": 0.15, "hang up": 0.15}
LOST_SECONDS = 120.0  # after which a request that has no answer is lost


class Job(NamedTuple):
    """One request: when it is sent in its wave, how many tokens it wants, and after how long it is given up if ever."""

    due: float
    prompt: str
    tokens: int
    fate: str
    after: float


class Wave(NamedTuple):
    """Requests that come within `seconds`; `flush`: all of them end before the cache is emptied and the next come."""

    jobs: tuple[Job, ...]
    seconds: float
    flush: bool


def waves(prompts: Sequence[str], most_tokens: int, most_jobs: int, pace: float, seed: int) -> Iterator[Wave]:
    """Bursts and trickles without end, the largest burst first; the same seed gives the same.

    Parameters
    ----------
    pace : seconds in which this server makes some ten tokens of a request; all times are multiples of it.
    """
    rng = random.Random(seed)
    for number in itertools.count():
        count = rng.choice((1, 3, most_jobs // 4, most_jobs // 2, most_jobs)) if number else most_jobs
        seconds = rng.choice((0.0, 1.0, 4.0)) * pace if number else 0.0
        # Few prompts in a wave are many requests that share all; many prompts, several groups side by side.
        chosen = rng.sample(prompts, rng.randint(1, len(prompts)) if number else len(prompts))
        jobs = []
        for _ in range(max(1, count)):
            fate = rng.choices(list(FATES), list(FATES.values()))[0]
            # Who gives up asks for everything, else it would often be done before.
            tokens = rng.randint(1, most_tokens) if fate == "finish" else most_tokens
            jobs.append(
                Job(rng.uniform(0, seconds), rng.choice(chosen), tokens, fate, rng.choice((0.02, 1.0, 3.0)) * pace)
            )
        yield Wave(tuple(sorted(jobs)), seconds + rng.choice((0.0, 0.5, 2.0)) * pace, number % 5 == 2)


@dataclass
class Churn:
    """Random requests to one server; every token that comes back is compared with the request's own run alone.

    Attributes
    ----------
    prompts : token ids by name.
    expected : answers to the prompts, each from a run alone.
    fates : what became of the requests, by number.
    """

    address: Address
    prompts: dict[str, list[int]]
    expected: Answers
    tolerance: Tolerance
    most_jobs: int
    pace: float
    seed: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=lambda: Verdict(Spread(0.0, 0.0, 0, 0, 0)))
    flushes: int = 0

    async def run(self, seconds: float) -> None:
        """Send waves for so long, then wait for every answer."""
        most_tokens = min(len(answer.tokens) for answer in self.expected.values())
        end = time.monotonic() + seconds
        running: set[asyncio.Task[None]] = set()
        for wave in waves(list(self.prompts), most_tokens, self.most_jobs, self.pace, self.seed):
            running |= {asyncio.create_task(self._send(job)) for job in wave.jobs}
            await asyncio.sleep(min(wave.seconds, max(0.0, end - time.monotonic())))
            # So many may be on their way that some always wait, and no more: the rest would only wait longer.
            while running and (wave.flush or len(running) > 2 * self.most_jobs or time.monotonic() > end):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what is no server's answer but a mistake in here
            if wave.flush:
                await self._flush()
            if time.monotonic() > end:
                break

    @property
    def problems(self) -> list[str]:
        """What must not have happened."""
        lost = [f"{count} requests {fate}" for fate, count in self.fates.items() if fate.startswith("lost")]
        return lost + self.verdict.wrong

    async def _flush(self) -> None:
        """Empty the cache once the requests that were given up have left the server too."""
        deadline = time.monotonic() + LOST_SECONDS
        while True:
            try:
                await call(self.address, "/flush_cache", b"")
                self.flushes += 1
                return
            except HttpError:
                if time.monotonic() > deadline:
                    self.verdict.wrong.append("the server does not become idle")
                    return
            await asyncio.sleep(0.05)

    async def _send(self, job: Job) -> None:
        await asyncio.sleep(job.due)
        answer = await send(self.address, self.prompts[job.prompt], job.tokens, job.fate, job.after, LOST_SECONDS)
        self.fates[answer if isinstance(answer, str) else self._outcome(job, answer)] += 1

    def _outcome(self, job: Job, answer: dict[str, Any]) -> str:
        """What became of a request that was answered; its tokens go into the verdict."""
        tokens = answer.get("output_ids") or []
        says = outcome(job.fate, job.tokens, len(tokens), reason_of(answer))
        # SGLang cuts the accepted drafts of a last step down to what was asked for only where that ended the request.
        compared = tokens[: job.tokens] if says == "aborted" else tokens
        found: Divergence | None = pat_compare.divergence(job.prompt, compared, self.expected[job.prompt])
        if found is not None and not pat_compare.accept(found, self.tolerance, self.verdict):
            return "wrong"
        if says != "answered":
            return says
        return "equal" if found is None else "near tie"
