"""Times of lone requests on a replayed server with an empty cache, to which slowdown is relative."""

from __future__ import annotations

from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.simulation.host_time import NO_HOST_TIME, HostTime
from feather_sglang.simulation.timeline import Timeline
from feather_sglang.slo import Timing


class IdleServer:
    """The replayed server when it has no other request.

    Parameters
    ----------
    chunk : most prompt tokens of a step; none if not positive.
    host : what its host takes.
    """

    def __init__(self, model: StepTimeModel, trace: Trace, chunk: int, host: HostTime = NO_HOST_TIME) -> None:
        self._model, self._block_size, self._chunk, self._host = model, trace.block_size, chunk, host

    def timing(self, request: TraceRequest) -> Timing:
        """Its whole prompt computed in chunks; its last decode step, the longest; and the one in the middle."""
        ttft = self._first_token(request)
        if request.output_length == 1:
            return Timing(ttft)
        return Timing(
            ttft, self._decode(request, request.output_length), self._decode(request, request.output_length // 2)
        )

    def _first_token(self, request: TraceRequest) -> float:
        host, model, length = self._host, self._model, request.input_length
        chunk = self._chunk if self._chunk > 0 else length
        time = Timeline(host)
        time.wait(time.arrive(0.0, length))
        time.spend(host.receive(1, length) - host.turn)
        ready = 0.0
        for start in range(0, length, chunk):
            time.spend(host.turn + host.form(1, True, 0))
            seconds = model.prefill([min(chunk, length - start)], [start])
            ready = time.launch(*host.launch(1, True, model.model.layers, model.prefill_graphs), seconds)
        if request.output_length > 1:  # whose step is launched before SGLang looks at the prompt's result
            time.spend(host.turn + host.form(1, False, 0) + sum(host.launch(1, False, 0, True)))
        time.wait(ready)
        time.spend(host.result(1, True, 1))
        return time.answer()

    def _decode(self, request: TraceRequest, generated: int) -> float:
        """The GPU's time, or the host's where that is longer: each works while the other does."""
        host, lengths = self._host, [request.input_length + generated]
        gpu = self._model.decode(lengths, self._model.sharing([request.hash_ids], self._block_size, lengths))
        turn = host.turn + host.form(1, False, 0) + sum(host.launch(1, False, 0, True)) + host.result(1, False, 1)
        return max(gpu, turn)
