"""The step log: host times of each step of a server, which ``feather calibrate`` fits.

The environment variable FEATHER_STEP_LOG names a folder; each scheduler process writes a file of JSON lines into it.
Without the variable nothing is wrapped. Times are seconds of ``time.monotonic()``, which a client on the same machine
reads, too. Three kinds of line, each a list whose first entry names it:

``request``, id, prompt tokens, time
    The scheduler was handed a request.
``step``, number, kind, `SIZES` ..., `TIMES` ...
    What was launched: ``prefill``, or ``decode``.
``result``, number, ids of the requests that have a first token by it, pieces of answers that were sent, begin, ready,
end
    When SGLang began to process a step's result, when the GPU had it ready, and when it was processed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.errors import FeatherError

VARIABLE = "FEATHER_STEP_LOG"
# Of the batch: rows; prompt tokens to compute and in the cache; pairs of a query and a key; tokens in the KV cache. Of
# the turn of SGLang's loop: requests and prompt tokens that it took in; requests left waiting. Last, whether the step
# ran as a CUDA graph.
SIZES = ("rows", "new_tokens", "cached_tokens", "pairs", "kv_tokens", "came", "came_tokens", "waiting", "graph")
# When the turn began, had taken requests in, had formed the batch, launched it, called the model, and came back.
TIMES = ("begin", "received", "formed", "launch", "forward", "launched")
FLUSH_EVERY_STEPS = 64


def start_step_log(scheduler: Any) -> None:
    """Log this scheduler's steps where the variable names a folder."""
    if folder := os.environ.get(VARIABLE):
        try:
            StepLog(scheduler, Path(folder) / f"steps-{os.getpid()}.jsonl")
        except OSError as error:
            raise FeatherError(f"{VARIABLE}={folder}: no log can be written there: {error.strerror}") from None


class StepLog:
    """Wraps one scheduler's own methods and writes what each step took."""

    def __init__(self, scheduler: Any, path: Path) -> None:
        self._file = path.open("w")
        self._scheduler = scheduler
        self._step = 0
        self._begin = self._received = self._formed = self._forward = time.monotonic()
        self._came = self._came_tokens = 0
        self._worker: Any = None
        self._steps: dict[int, int] = {}  # id of a result that is to come -> its step
        self._wrappings = Wrappings()
        for method, wrapper in (
            ("process_input_requests", self._process_input_requests),
            ("get_next_batch_to_run", self._get_next_batch_to_run),
            ("run_batch", self._run_batch),
            ("process_batch_result", self._process_batch_result),
        ):
            self._wrappings.wrap(scheduler, method, wrapper)

    def _write(self, *values: Any) -> None:
        self._file.write(json.dumps([round(v, 7) if isinstance(v, float) else v for v in values]) + "\n")

    def _process_input_requests(self, original: Callable[..., Any], requests: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        result = original(requests, *args, **kwargs)
        self._received = time.monotonic()
        self._came = self._came_tokens = 0
        for request in requests or ():
            if (tokens := getattr(request, "input_ids", None)) is not None:
                self._came, self._came_tokens = self._came + 1, self._came_tokens + len(tokens)
                self._write("request", request.rid, len(tokens), now)
        return result

    def _get_next_batch_to_run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        self._formed = time.monotonic()
        if plan.batch_to_run is None:
            self._begin = self._formed  # the next turn's
        return plan

    def _run_batch(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._worker is None:  # it does not exist yet when a policy starts
            self._worker = getattr(self._scheduler, "model_worker", None) or self._scheduler.tp_worker
            self._wrappings.wrap(self._worker, "forward_batch_generation", self._forward_batch_generation)
        self._step += 1
        launch = time.monotonic()
        result = original(batch, *args, **kwargs)
        launched = time.monotonic()
        prefill = batch.forward_mode.is_extend()
        new = [int(n) for n in batch.extend_lens] if prefill else []
        cached = [int(n) for n in batch.prefix_lens] if prefill else []
        pairs = sum(n * (c + (n + 1) / 2) for n, c in zip(new, cached, strict=True))
        kv = sum(new) + sum(cached)
        if not prefill:
            kv = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
        graph = bool(getattr(result, "can_run_cuda_graph", False))
        sizes = len(batch.reqs), sum(new), sum(cached), pairs, kv, self._came, self._came_tokens
        times = self._begin, self._received, self._formed, launch, self._forward, launched
        waiting = len(self._scheduler.waiting_queue)
        self._write("step", self._step, "prefill" if prefill else "decode", *sizes, waiting, graph, *times)
        self._steps[id(result)] = self._step
        self._begin = time.monotonic()
        return result

    def _forward_batch_generation(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._forward = time.monotonic()
        return original(*args, **kwargs)

    def _process_batch_result(self, original: Callable[..., Any], batch: Any, result: Any, *args: Any) -> Any:
        begin = time.monotonic()
        if (done := getattr(result, "copy_done", None)) is not None:
            done.synchronize()
        ready = time.monotonic()
        before = [len(req.output_ids) for req in batch.reqs]
        processed = original(batch, result, *args)
        end = time.monotonic()
        first = [req.rid for req, had in zip(batch.reqs, before, strict=True) if not had and req.output_ids]
        pieces = sum(self._sends(req) for req, had in zip(batch.reqs, before, strict=True) if len(req.output_ids) > had)
        self._write("result", self._steps.pop(id(result), None), first, pieces, begin, ready, end)
        if self._step % FLUSH_EVERY_STEPS == 0 or all(req.finished() for req in self._scheduler.running_batch.reqs):
            self._file.flush()
        self._begin = time.monotonic()
        return processed

    def _sends(self, req: Any) -> bool:
        """Whether a request whose answer has just grown is sent a piece of it."""
        interval = req.sampling_params.stream_interval or self._scheduler.server_args.stream_interval or 1
        return req.finished() or (req.stream and (len(req.output_ids) - 1) % interval == 0)
