"""Replay a trace in virtual time through the installed SGLang's own scheduler and its own event loop.

Scheduler, loop, policy, ``PrefillAdder``, prefix cache, allocator, ``Req`` and ``ScheduleBatch`` are SGLang's. Replaced
are the socket that requests come by, the model's forward pass, the event that tells of its end, and the last hop of a
token; each moves a virtual clock (`Timeline`) by what it takes on the profile's machine. So the host prepares a step
while the GPU computes the one before, where SGLang does, and the later of both counts.
"""

from __future__ import annotations

import gc
import inspect
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import prefill_delayer
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

from feather_sglang.adapter.inprocess import build_scheduler
from feather_sglang.adapter.scheduler.k_lpm import KLpm
from feather_sglang.adapter.server_flags import estimates_output
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.policy_names import K_LPM, ORACLE
from feather_sglang.simulation.clients import STREAM_INTERVAL, Clients, Served
from feather_sglang.simulation.host_time import NO_HOST_TIME
from feather_sglang.simulation.inputs import Request, StepTimes, Workload
from feather_sglang.simulation.timeline import Timeline

ANSWER = 3  # every token that is generated
WARM_UP = 16  # tokens of the request that SGLang sends itself when it starts


@dataclass(frozen=True)
class ReplaySettings:
    """The settings of a replayed server."""

    kv_tokens: int
    max_running: int = 500
    chunked_prefill: int = 8192
    page_size: int = 1
    stream_interval: int = STREAM_INTERVAL
    scheduler_cost: str = "model"  # "measured": what forming a batch takes here; "off": the host takes no time
    server_flags: Sequence[str] = ()


class Outcome:
    """The measurements of a replay."""

    def __init__(self) -> None:
        self.served: list[Served] = []  # in the order of their ends
        self.batches: list[tuple[float, int, float]] = []  # (clock, rows, seconds) of each decode step
        self.prefills = 0  # steps
        self.makespan = 0.0
        self.gpu_busy = 0.0
        self.scheduler_seconds = 0.0  # in which batches were formed
        self.retractions = 0
        self.feather: dict[str, Any] | None = None


class Replay:
    """One server under one policy; ``run`` may be called again, with the policy's state kept and the cache flushed."""

    def __init__(self, folder: Path, policy: str, trace: Workload, model: StepTimes, settings: ReplaySettings) -> None:
        longest = max((r.input_length + r.output_length for r in trace.requests), default=1)
        self.settings = settings
        self.model = model
        self.host = NO_HOST_TIME if settings.scheduler_cost == "off" else model.profile.known_host()
        self.time = Timeline(self.host)
        self.scheduler = build_scheduler(
            folder,
            {K_LPM: "lpm", ORACLE: "feather"}.get(policy, policy),
            longest + 8,
            settings.server_flags,
            max_total_tokens=settings.kv_tokens,
            max_running_requests=settings.max_running,
            chunked_prefill_size=settings.chunked_prefill,
            page_size=settings.page_size,
            disable_overlap_schedule=False,  # as a server; its flags overrule
        )
        if policy == K_LPM:
            self.scheduler.policy.calc_priority = KLpm(self.scheduler.policy)
        scheduler = self.scheduler
        scheduler.tp_worker.forward_batch_generation = self._forward
        scheduler.device_module = _Device(scheduler.device_module, self.time)
        self._wrappings = Wrappings()
        self._wrappings.wrap(scheduler, "get_next_batch_to_run", self._form)
        self._wrappings.wrap(scheduler, "process_batch_result", self._process)
        # The class has slots, so it is what is changed.
        type(scheduler.request_receiver).recv_requests = lambda _self, *args, **kwargs: self._receive()
        delay_prefill_by(lambda: self.time.now)
        self.feather = getattr(self.scheduler, "feather", None)
        if self.feather is not None:
            self.feather.clock = lambda: self.time.now
            # A fixed hash seed, where a server draws a secret one: the same replay permutes the same rows.
            self.feather.admission.reseed(0)
            # A server has served its warm-up request.
            self.feather.meters.warmed_up(model.decode([WARM_UP], model.sharing([()], 1, [WARM_UP])))
            if policy == ORACLE:
                self.feather.admission.consult(make_policy("oracle"), lambda rid: self._paths[rid][:1])
        self._paths: dict[str, tuple[int, ...]] = {}  # of the requests that have not ended
        self._block_size = trace.block_size
        self._ran = False  # whether this turn of the loop has launched a step or processed a result
        self._idle = self._aside = 0  # turns that have not, on end; `_put_aside` before this turn
        self._told = 0.0
        self._rows: list[Any] | None = None
        self._sharing: Any = None  # of these rows
        self._fields = inspect.signature(TokenizedGenerateReqInput).parameters

    # What is replaced --------------------------------------------------------------------------------------------

    def _forward(self, batch: Any, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        rows, model, is_prefill = len(batch.reqs), self.model, batch.forward_mode.is_extend()
        if is_prefill:
            paths = [self._paths[req.rid] for req in batch.reqs]
            seconds = model.prefill(batch.extend_lens, batch.prefix_lens, paths, self._block_size)
            self._outcome.prefills += 1
        else:
            lengths = batch.seq_lens_cpu.numpy()
            if batch.reqs is not self._rows:  # SGLang makes a new list whenever the composition changes
                paths = [self._paths[req.rid] for req in batch.reqs]
                self._sharing = model.sharing(paths, self._block_size, lengths.tolist())
                self._rows = batch.reqs
            seconds = model.decode(lengths, self._sharing)
            self._outcome.batches.append((self.time.now, rows, seconds))
        prepare, launch = self.host.launch(rows, is_prefill, model.model.layers, model.prefill_graphs)
        done = self.time.launch(prepare, launch, seconds)
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.full((rows,), ANSWER, dtype=torch.int64),
            can_run_cuda_graph=False,
            copy_done=_Event(self.time, done),
        )

    def _form(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        plan = original(*args, **kwargs)
        spent = time.thread_time() - start
        batch = plan.batch_to_run
        self._ran = self._ran or batch is not None
        if batch is not None:
            if self.settings.scheduler_cost != "measured":
                waiting = len(self.scheduler.waiting_queue)
                spent = self.host.form(len(batch.reqs), batch.forward_mode.is_extend(), waiting)
            self.time.spend(spent)
            self._outcome.scheduler_seconds += spent
        return plan

    def _process(self, original: Callable[..., Any], batch: Any, result: Any, *args: Any) -> Any:
        processed = original(batch, result, *args)
        self._ran = True
        clients = self._clients
        sent = [req for req in batch.reqs if clients.made(req.rid, len(req.output_ids), req.finished())]
        self.time.spend(self.host.result(len(batch.reqs), batch.forward_mode.is_extend(), len(sent)))
        for req in sent:
            clients.sent(req.rid)
            if req.finished():
                self._end(req)
        return processed

    def _end(self, req: Any) -> None:
        wanted = req.sampling_params.max_new_tokens
        if len(req.output_ids) != wanted:
            raise FeatherError(
                f"SGLang ended request {req.rid} after {len(req.output_ids)} of {wanted} tokens; raise --kv-tokens"
            )
        self._outcome.retractions += req.retraction_count
        self._clients.end(req.rid, req.cached_tokens)
        del self._paths[req.rid]

    def _receive(self) -> list[Any]:
        """What SGLang receives at the beginning of a turn of its loop."""
        clients = self._clients
        if time.monotonic() - self._told > 0.5:
            self._told = time.monotonic()
            self._progress(len(clients.served))
        if clients.done:
            self.scheduler.gracefully_exit = True
            return []
        self._rest()
        came = clients.take(self.scheduler.request_receiver.recv_limit_reached)
        self.time.spend(self.host.receive(len(came), sum(request.input_length for request in came)))
        return [self._request(request) for request in came]

    def _rest(self) -> None:
        """Let time pass until somebody comes where the turn before ran nothing."""
        put_aside = self._put_aside()
        # Who puts some aside has looked at no more of them: the next turn goes on with others.
        self._idle = 0 if self._ran or put_aside > self._aside else self._idle + 1
        self._ran, self._aside = False, put_aside
        # One idle turn is no rest: up to 0.5.21 SGLang frees a full batch's place only in the turn after.
        if self._idle > 1:
            if (moment := self._clients.next) is None:
                waiting = [req.rid for req in self.scheduler.waiting_queue]
                raise FeatherError(f"the replay is stuck: requests {waiting[:5]} wait and nothing can run")
            self.time.wait(moment)

    # Requests ---------------------------------------------------------------------------------------------------

    def _request(self, request: Request) -> TokenizedGenerateReqInput:
        rid = str(request.request_id)
        ignore_eos = not estimates_output(self.settings.server_flags)  # no token ends an answer, either way
        params = SamplingParams(max_new_tokens=request.output_length, temperature=0.0, ignore_eos=ignore_eos)
        params.normalize(None)
        wanted = {
            "rid": rid,
            "input_text": "",
            "input_ids": self._prompt(request),
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
        return TokenizedGenerateReqInput(**{name: value for name, value in wanted.items() if name in self._fields})

    def _prompt(self, request: Request) -> array[int]:
        tokens = self._clients.trace.tokens(request)
        for begin, end in self._clients.quotes(request):
            tokens[begin:end] = array("q", [ANSWER]) * (end - begin)
        return tokens

    def run(self, trace: Workload, progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Serve the whole trace from an empty cache; ``progress`` hears the number of requests done now and then."""
        scheduler = self.scheduler
        self.time.restart()
        self._outcome = outcome = Outcome()
        self._clients = Clients(trace, self.time, self.settings.stream_interval)
        self._progress, self._told = progress, 0.0
        self._idle, self._ran, self._aside = 0, False, self._put_aside()
        gc.collect()
        gc.freeze()
        scheduler.gracefully_exit = False
        with torch.no_grad():
            scheduler.run_event_loop()
        outcome.served = self._clients.served
        progress(len(outcome.served))
        if self.feather is not None and self.feather.failed:  # a server would go on, but these are fcfs's figures
            raise RuntimeError(f"feather failed and went on as fcfs: {self.feather.guard.reason}")
        outcome.makespan = max((one.finish for one in outcome.served), default=0.0)
        outcome.gpu_busy = self.time.gpu_busy
        if self.feather is not None:  # but for what this machine took
            outcome.feather = {k: v for k, v in self.feather.stats().items() if k != "permutation_seconds"}
        scheduler.flush_cache()
        self._paths.clear()
        return outcome

    def _put_aside(self) -> int:
        """How many prefixes feather has made to wait or to go last so far."""
        return 0 if self.feather is None else self.feather.admission.prefixes_deferred


def delay_prefill_by(clock: Callable[[], float]) -> None:
    """Let SGLang's prefill delayer, which alone reads a clock of its own, count its longest delay by this one."""
    state = prefill_delayer._State
    prefill_delayer._State = lambda: state(start_time=clock())
    prefill_delayer.time = SimpleNamespace(perf_counter=clock)


class _Event:
    """A virtual CUDA event, for which SGLang waits: the time at which the GPU has a step's result."""

    def __init__(self, timeline: Timeline, moment: float | None = None) -> None:
        self._time, self._moment = timeline, moment

    def record(self, *args: Any, **kwargs: Any) -> None:
        """All that was launched by now."""
        self._moment = self._time.gpu

    def synchronize(self) -> None:
        """The scheduler waits for it."""
        assert self._moment is not None
        self._time.wait(self._moment)

    def query(self) -> bool:
        """Whether it has come."""
        return self._moment is not None and self._moment <= self._time.now


class _Device:
    """PyTorch's module of the device, with the virtual GPU's events."""

    def __init__(self, module: Any, timeline: Timeline) -> None:
        self._module, self._time = module, timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def Event(self, *args: Any, **kwargs: Any) -> _Event:
        """Return an event of the virtual GPU."""
        return _Event(self._time)
