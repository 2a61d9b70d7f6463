"""What a request takes alone on a replayed server with an empty cache: the measure of its slowdown."""

from __future__ import annotations

from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.slo import Timing


class IdleServer:
    """The replayed server when nobody else is there.

    Parameters
    ----------
    chunk : most prompt tokens of a step; none if not positive.
    """

    def __init__(self, model: StepTimeModel, trace: Trace, chunk: int) -> None:
        self._model, self._block_size, self._chunk = model, trace.block_size, chunk

    def timing(self, request: TraceRequest) -> Timing:
        """Its whole prompt computed in chunks; its last decode step, the longest; and the one in the middle."""
        length = request.input_length
        chunk = self._chunk if self._chunk > 0 else length
        starts = range(0, length, chunk)
        ttft = sum(self._model.prefill([min(chunk, length - start)], [start]) for start in starts)
        if request.output_length == 1:
            return Timing(ttft)
        return Timing(
            ttft, self._decode(request, request.output_length), self._decode(request, request.output_length // 2)
        )

    def _decode(self, request: TraceRequest, generated: int) -> float:
        lengths = [request.input_length + generated]
        return self._model.decode(lengths, self._model.sharing([request.hash_ids], self._block_size, lengths))
