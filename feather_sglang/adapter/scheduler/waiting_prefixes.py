"""Cached prefixes of waiting requests: feather's rounds mark them as used, as SGLang's own policies do.

So the cache evicts other prefixes first, and a server's load report counts only the tokens of the waiting prompts that
are not in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import CacheAwarePolicy

from feather_sglang.scheduling.admission.admission import Admission

EVERY_ROUNDS = 32  # a prefix is used again; as SGLang has it
OLDEST = 128  # requests whose prefixes are; as SGLang has it


class WaitingPrefixes:
    """The cached prefixes of one scheduler's waiting requests."""

    def __init__(self, scheduler: Any, admission: Admission) -> None:
        self.scheduler = scheduler
        self.admission = admission
        self._rounds = 0

    def use(self, queue: Sequence[Any]) -> None:
        """A round has opened: mark the prefixes of waiting requests as used, the oldest last, if this SGLang does so.

        Where its cache looks prompts up fast SGLang looks up all that wait, each time; a few of them do as well.
        """
        policy, cache = self.scheduler.policy, self.scheduler.tree_cache
        if not hasattr(policy, "_touch_waiting_prefixes"):  # before 0.5.22 nobody does
            return
        if not cache.supports_fast_match_prefix():
            policy._touch_waiting_prefixes(policy.policy, queue)
            return
        self._rounds += 1
        if self._rounds % EVERY_ROUNDS == 1:
            from sglang.srt.mem_cache.common import touch_waiting_prefix  # older releases have none

            for req in reversed(queue[:OLDEST]):
                touch_waiting_prefix(req, cache)

    def count(self) -> None:
        """A load report comes: say of each request that waits how much of its prompt is cached, as admission has it."""
        queue = list(list.__iter__(self.scheduler.waiting_queue))
        if len(queue) == 1:  # when it came nobody looked it up
            self.scheduler.policy._compute_prefix_matches(queue, CacheAwarePolicy.LPM)
            return
        for req in queue:
            if req.rid in self.admission.waiting:
                req.num_matched_prefix_tokens = max(0, req.seqlen - self.admission.uncached(req.rid))
