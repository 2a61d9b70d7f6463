"""The life cycle of requests: the tree holds the same requests as SGLang's queues."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sglang.srt.managers.schedule_policy import CacheAwarePolicy

from feather_sglang.adapter.scheduler.guard import Guard, guarded
from feather_sglang.adapter.scheduler.prefix_use import tokens_to_share
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.forecast import Outlook
from feather_sglang.scheduling.admission.queue import LEAST_CACHED

_ENDLESS = 1 << 40  # tokens of a request without a limit


def cached_tokens(req: Any) -> int:
    """Tokens of a request that SGLang has found in its prefix cache."""
    return int(req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices))  # since 0.5.22


def total_tokens(req: Any) -> int:
    """Prompt and output of a request: what it holds, or has to compute before it goes on."""
    return len(req.origin_input_ids) + len(req.output_ids)


class LifeCycle:
    """Enters requests as they arrive, and drops them when a round finds that they have left SGLang's queues.

    Attributes
    ----------
    requests : dict
        SGLang's, by id: every one that the tree knows.
    """

    def __init__(self, scheduler: Any, guard: Guard) -> None:
        self.scheduler = scheduler
        self.guard = guard
        self.requests: dict[Hashable, Any] = {}
        self.admission: Admission  # set by whoever makes one: it asks for this object's ``outlook``
        self._twins = False  # whether two of one id may wait
        self._outputs: dict[Hashable, int] = {}  # tokens that requests in prefill had when they were admitted

    def enter(self, req: Any) -> None:
        """Enter a waiting request into the tree."""
        admission = self.admission
        tokens = tokens_to_share(req, admission.chunk_size)
        if req.rid in admission.running and self.requests[req.rid] is req:
            # Retracted or preempted: it now owes its prompt and what it has generated.
            admission.retracted(req.rid, tokens)
        else:
            # The id of a request that has finished or was aborted since the last round may be used again.
            if req.rid in admission.running:
                admission.finished(req.rid, len(self.requests[req.rid].output_ids))
            elif req.rid in admission.waiting:
                admission.aborted(req.rid)
                self._twins = True
            isolation = (req.extra_key, getattr(req, "cache_salt", None), req.lora_id)
            admission.arrived(
                req.rid,
                tokens,
                extra_key=isolation if any(isolation) else None,
                priority=(req.priority or 0) * self.scheduler.policy.priority_sign
                if self.scheduler.enable_priority_scheduling
                else 0,
                most_tokens=req.sampling_params.max_new_tokens or 0,
                cached_tokens=self._look_up(req),
            )
        self.requests[req.rid] = req

    queued = guarded("a request could not be entered")(enter)  # that arrives, or comes back: the last of SGLang's queue

    def _look_up(self, req: Any) -> int:
        """Tokens of a prompt in the prefix cache, where others wait; who waits alone is proposed next anyway.

        Nor is a prompt looked up that is too short for its cached prefix to change any order.
        """
        scheduler = self.scheduler
        if self.admission.policy is None or len(scheduler.waiting_queue) < 2 or total_tokens(req) <= LEAST_CACHED:
            return 0
        scheduler.policy._compute_prefix_matches([req], CacheAwarePolicy.LPM)
        return int(req.num_matched_prefix_tokens)

    def alive(self, running: Any) -> set[Hashable]:
        """Ids of the requests that run, among them the one whose prompt is computed chunk by chunk."""
        chunked = self.scheduler.chunked_req
        return {req.rid for req in (*running, *([chunked] if chunked is not None else [])) if not req.finished()}

    def synchronise(self, running: Any) -> None:
        """Drop from the tree what finished, was aborted or timed out since the last round.

        Requests enter the queue through ``_add_request_to_queue`` only, so equal counts mean equal queues, unless two
        of one id wait: tokenizer workers do not know of each other's.
        """
        admission, alive = self.admission, self.alive(running)
        for rid in [rid for rid in admission.running if rid not in alive]:
            admission.finished(rid, len(self.requests.pop(rid).output_ids))
        queue = self.scheduler.waiting_queue
        if self._twins or len(admission.waiting) != len(queue):
            queued = {req.rid for req in list.__iter__(queue)}
            for rid in [rid for rid in admission.waiting if rid not in queued]:
                admission.aborted(rid)
                del self.requests[rid]
            for req in list.__iter__(queue):
                if req.rid not in self.requests:
                    self.enter(req)
            self._twins = len(queued) != len(queue)

    def admitted(self, req: Any, cached: int) -> None:
        """SGLang has added a request to its prefill batch, of whose tokens it has found so many."""
        self.admission.admitted(req.rid, cached)
        self._outputs[req.rid] = len(req.output_ids)

    def computed(self) -> None:
        """Tell of those whose first new token says that their prompts are computed and in the cache."""
        for rid, outputs in list(self._outputs.items()):
            if rid not in self.admission.in_flight:
                del self._outputs[rid]
            elif len(self.requests[rid].output_ids) > outputs:
                self.admission.computed(rid)
                del self._outputs[rid]

    def outlook(self, rid: Hashable) -> Outlook:
        """Lengths of a request, for the look ahead at memory."""
        req = self.requests[rid]
        params = req.sampling_params
        most = params.max_new_tokens
        may_stop = not params.ignore_eos or params.stop_strs or getattr(params, "stop_regex_strs", None)
        fixed = most is not None and not may_stop
        return Outlook(total_tokens(req), len(req.output_ids), _ENDLESS if most is None else most, fixed)
