"""Replay a trace in virtual time through the installed SGLang's own scheduler.

Scheduler, policy, ``PrefillAdder``, prefix cache, allocator, ``Req`` and ``ScheduleBatch`` are SGLang's. Replaced are
the model's forward pass, by a step-time model that advances a virtual clock, and the last hop of a finished token.
The CPU time that scheduling takes is measured and charged to the same clock, so an expensive policy pays.
"""

from __future__ import annotations

import gc
import inspect
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

from feather_sglang.adapter.inprocess import build_scheduler
from feather_sglang.adapter.scheduler.k_lpm import KLpm
from feather_sglang.adapter.server_flags import estimates_output
from feather_sglang.adapter.virtual_time import delay_prefill_by
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.policy_names import K_LPM, ORACLE

if TYPE_CHECKING:  # it is handed a trace and a model, and makes neither
    from feather_sglang.replay.step_time import BatchSharing, StepTimeModel
    from feather_sglang.replay.traces import Trace, TraceRequest

ANSWER = 3  # every token that is generated
WARM_UP = 16  # tokens of the request that SGLang sends itself when it starts


@dataclass(frozen=True)
class ReplaySettings:
    """What a replayed server was started with."""

    kv_tokens: int
    max_running: int = 500
    chunked_prefill: int = 8192
    page_size: int = 1
    charge_scheduler: bool = True
    server_flags: Sequence[str] = ()


@dataclass
class Served:
    """One finished request; times in virtual seconds since the trace began, `gaps` between its tokens."""

    request: TraceRequest
    due: float
    first_token: float
    finish: float
    cached_tokens: int
    gaps: array[float]


class Outcome:
    """What a replay measured."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.batches: list[tuple[float, int, float]] = []  # (clock, rows, seconds) of each decode step
        self.prefills = 0  # steps
        self.makespan = 0.0
        self.scheduler_seconds = 0.0
        self.retractions = 0
        self.feather: dict[str, Any] | None = None


class Replay:
    """One server under one policy; ``run`` may be called again, with the policy's state kept and the cache flushed."""

    def __init__(self, folder: Path, policy: str, trace: Trace, model: StepTimeModel, settings: ReplaySettings) -> None:
        longest = max((r.input_length + r.output_length for r in trace.requests), default=1)
        self.settings = settings
        self.model = model
        self.clock = 0.0
        self.scheduler = build_scheduler(
            folder,
            {K_LPM: "lpm", ORACLE: "feather"}.get(policy, policy),
            longest + 8,
            settings.server_flags,
            max_total_tokens=settings.kv_tokens,
            max_running_requests=settings.max_running,
            chunked_prefill_size=settings.chunked_prefill,
            page_size=settings.page_size,
        )
        if policy == K_LPM:
            self.scheduler.policy.calc_priority = KLpm(self.scheduler.policy)
        self.scheduler.tp_worker.forward_batch_generation = self._forward
        delay_prefill_by(lambda: self.clock)
        self.feather = getattr(self.scheduler, "feather", None)
        if self.feather is not None:
            self.feather.clock = lambda: self.clock
            # A fixed hash seed, where a server draws a secret one: the same replay permutes the same rows.
            self.feather.admission.tree.reseed(0)
            if self.feather.meters.still is not None:  # a server has served its warm-up request
                self.feather.meters.still.least_decode_seconds = model.decode(
                    [WARM_UP], model.sharing([()], 1, [WARM_UP])
                )
            if policy == ORACLE:
                self.feather.admission.policy = make_policy("oracle")
                self.feather.admission.order.group_of = lambda rid: self._paths[rid][:1]
        self._paths: dict[str, tuple[int, ...]] = {}
        self._block_size = trace.block_size
        self._rows: list[Any] | None = None
        self._sharing: BatchSharing | None = None
        self._fields = inspect.signature(TokenizedGenerateReqInput).parameters

    # The one thing replaced: the forward pass -------------------------------------------------------------------

    def _forward(self, batch: Any, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            paths = [self._paths[req.rid] for req in batch.reqs]
            seconds = self.model.prefill(batch.extend_lens, batch.prefix_lens, paths, self._block_size)
            self._outcome.prefills += 1
        else:
            lengths = batch.seq_lens_cpu.numpy()
            if batch.reqs is not self._rows:  # SGLang makes a new list whenever the composition changes
                paths = [self._paths[req.rid] for req in batch.reqs]
                self._sharing = self.model.sharing(paths, self._block_size, lengths.tolist())
                self._rows = batch.reqs
            assert self._sharing is not None
            seconds = self.model.decode(lengths, self._sharing)
            self._outcome.batches.append((self.clock, len(lengths), seconds))
        self.clock += seconds
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.full((len(batch.reqs),), ANSWER, dtype=torch.int64),
            can_run_cuda_graph=False,
        )

    # Requests ---------------------------------------------------------------------------------------------------

    def _submit(self, trace: Trace, request: TraceRequest) -> None:
        rid = str(request.request_id)
        ignore_eos = not estimates_output(self.settings.server_flags)  # no token ends an answer, either way
        params = SamplingParams(max_new_tokens=request.output_length, temperature=0.0, ignore_eos=ignore_eos)
        params.normalize(None)
        wanted = {
            "rid": rid,
            "input_text": "",
            "input_ids": self._prompt(trace, request),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": [],
            "sampling_params": params,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": [],
            "stream": False,
        }
        self._paths[rid] = request.hash_ids
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(**{name: value for name, value in wanted.items() if name in self._fields})
        )

    def _prompt(self, trace: Trace, request: TraceRequest) -> array[int]:
        tokens = trace.tokens(request)
        for _, begin, end in self._arrivals.answers_in(request):
            tokens[begin:end] = array("q", [ANSWER]) * (end - begin)
        return tokens

    def run(self, trace: Trace, progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Serve the whole trace from an empty cache; ``progress`` hears the number of requests done now and then."""
        scheduler = self.scheduler
        self._outcome = outcome = Outcome()
        self.clock = 0.0
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._gaps: dict[str, array[float]] = {}
        self._due: dict[str, float] = {}
        self._arrivals = arrivals = trace.arrivals()
        by_id = {str(request.request_id): request for request in trace.requests}
        told, idle = 0.0, 0
        gc.collect()
        gc.freeze()
        with torch.no_grad():
            while len(outcome.served) < len(by_id):
                for due, request in arrivals.until(self.clock):
                    self._due[str(request.request_id)] = due
                    self._submit(trace, request)
                put_aside = self._put_aside()
                ran = self._turn(by_id)
                # Who puts some aside has looked at no more of them: the next turn goes on with others.
                idle = 0 if ran or self._put_aside() > put_aside else idle + 1
                # One idle turn is no rest: up to 0.5.21 SGLang frees a full batch's place only in the turn after.
                if idle > 1:
                    if arrivals.next is None:
                        waiting = [req.rid for req in scheduler.waiting_queue]
                        raise FeatherError(f"the replay is stuck: requests {waiting[:5]} wait and nothing can run")
                    self.clock = max(self.clock, arrivals.next)
                if time.monotonic() - told > 0.5:
                    told = time.monotonic()
                    progress(len(outcome.served))
        progress(len(outcome.served))
        if self.feather is not None and self.feather.failed:  # a server would go on, but these are fcfs's figures
            raise RuntimeError(f"feather failed and went on as fcfs: {self.feather.guard.reason}")
        outcome.makespan = self.clock
        outcome.feather = self.feather.stats() if self.feather is not None else None
        self._turn(by_id)  # lets SGLang merge and drop the last batch
        scheduler.flush_cache()
        self._paths.clear()
        return outcome

    def _put_aside(self) -> int:
        """How many prefixes feather has made to wait or to go last so far."""
        if self.feather is None:
            return 0
        deferrals = self.feather.admission.state.deferrals
        return deferrals.postponements + deferrals.put_last

    def _turn(self, by_id: dict[str, TraceRequest]) -> bool:
        """One turn of SGLang's ``event_loop_normal``; False if nothing ran."""
        scheduler = self.scheduler
        start = time.thread_time()
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        spent = time.thread_time() - start
        self._outcome.scheduler_seconds += spent
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch is not None:
            if self.settings.charge_scheduler:
                self.clock += spent
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            self._note(batch, by_id)
        scheduler.last_batch = batch
        return batch is not None

    def _note(self, batch: Any, by_id: dict[str, TraceRequest]) -> None:
        """Book the tokens of a step that has just ended."""
        now, first, last, gaps, outcome = self.clock, self._first, self._last, self._gaps, self._outcome
        for req in batch.reqs:
            rid = req.rid
            if rid in last:
                gaps[rid].append(now - last[rid])
            elif req.output_ids:
                first[rid] = now
                gaps[rid] = array("d")
            else:
                continue  # a chunk of a prompt
            last[rid] = now
            if req.finished():
                if len(req.output_ids) != by_id[rid].output_length:
                    raise FeatherError(
                        f"SGLang ended request {rid} after {len(req.output_ids)} of {by_id[rid].output_length} tokens; "
                        "raise --kv-tokens"
                    )
                outcome.retractions += req.retraction_count
                request, due = by_id[rid], self._due.pop(rid)
                outcome.served.append(Served(request, due, first[rid], now, req.cached_tokens, gaps.pop(rid)))
                self._arrivals.ended(request.request_id, now)
                del last[rid], self._paths[rid]
