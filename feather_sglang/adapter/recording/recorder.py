"""``--feather-record-trace``: requests that a scheduler finishes, under any policy, written to a trace by a thread.

The scheduler is told of a finished request by its own ``process_batch_result``, and puts a few references into a queue;
hashing and writing is the thread's. Where the thread falls behind, requests are left out, and counted. Whatever goes
wrong is one line of the log: the recording ends, and the server goes on.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from feather_sglang.adapter.options import FeatherOptions, records_trace
from feather_sglang.adapter.recording.files import RotatedFiles
from feather_sglang.adapter.recording.requests import Finished, TraceLines
from feather_sglang.adapter.scheduler.agreement import is_first_rank
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)

_WAITING = 1000  # finished requests that wait for the thread, at most
_HEALTH_CHECK = "HEALTH_CHECK"  # begins the ids of SGLang's own requests


def start_recording(scheduler: Any) -> None:
    """Record what this scheduler serves, where FEATHER_OPTIONS names a folder."""
    from sglang.srt.runtime_context import get_parallel  # which takes seconds where nothing else is SGLang's

    if not records_trace() or not is_first_rank() or getattr(get_parallel(), "pp_rank", None):
        return
    options = FeatherOptions.from_environment()
    assert options.record_trace is not None  # it was asked for
    try:
        files = RotatedFiles(Path(options.record_trace), int(options.record_trace_mb * 1e6))
    except OSError as error:
        raise FeatherError(f"--feather-record-trace {options.record_trace}: {error.strerror or error}") from None
    recorder = Recorder(files, options.record_trace_hours * 3600, bool(scheduler.enable_priority_scheduling))
    Wrappings().wrap(scheduler, "process_batch_result", recorder.process_batch_result)
    logger.info(
        "feather: requests are recorded in %s, of %g MB and %g hours at most",
        files.path,
        options.record_trace_mb,
        options.record_trace_hours,
    )


class Recorder:
    """Of one scheduler.

    Parameters
    ----------
    seconds : after which it ends.
    priorities : whether requests have some that count.
    """

    def __init__(self, files: RotatedFiles, seconds: float, priorities: bool = False) -> None:
        self._files = files
        self._priorities = priorities
        self._start = time.perf_counter()  # the clock of SGLang's times of requests
        self._end = self._start + seconds
        self._lines = TraceLines(self._start)
        self._queue: SimpleQueue[Finished] = SimpleQueue()
        self._left_out = 0
        self.ended = False
        threading.Thread(target=self._run, name="feather-recording", daemon=True).start()

    def process_batch_result(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own, and who has finished by it."""
        if self.ended:
            return original(batch, *args, **kwargs)
        running = [req for req in batch.reqs if req.finished_reason is None]
        processed = original(batch, *args, **kwargs)
        for req in running:
            if req.finished_reason is not None:
                self._finished(req)
        return processed

    def _finished(self, req: Any) -> None:
        try:
            output = req.output_ids_through_stop
            if not output or str(req.rid).startswith(_HEALTH_CHECK):
                return
            if self._queue.qsize() >= _WAITING:
                self._left_out += 1
                return
            isolation = (req.extra_key, getattr(req, "cache_salt", None), req.lora_id)
            priority = req.priority if self._priorities else None
            arrival, finish = req.time_stats.scheduler_recv_time, time.perf_counter()
            self._queue.put(Finished(arrival, finish, req.origin_input_ids, output[:], priority, isolation))
        except Exception as error:
            self._give_up(repr(error))

    def _run(self) -> None:
        try:
            while not self.ended:
                self._write(self._queue.get())
        except OSError as error:
            self._give_up(f"{self._files.path}: {error.strerror or error}")
        except Exception as error:
            self._give_up(repr(error))
        finally:
            self._files.close()
            self._queue = SimpleQueue()  # prompts that nobody will write

    def _write(self, request: Finished) -> None:
        if request.finish > self._end:
            self.ended = True
            logger.info("feather: the recording has reached its time, and ends: %s", self._files.path)
            return
        line = self._encoded(request)
        if not self._files.fits(line):
            self._files.rotate()
            self._lines.begin_file()
            line = self._encoded(request)  # which follows no line of another file
        self._files.append(line)
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            logger.warning("feather: %d requests are missing in the recording: the disk was too slow", left_out)

    def _encoded(self, request: Finished) -> bytes:
        return json.dumps(self._lines.line(request), separators=(",", ":")).encode() + b"\n"

    def _give_up(self, reason: str) -> None:
        if not self.ended:
            self.ended = True
            logger.warning("feather: requests are no longer recorded: %s", reason)
