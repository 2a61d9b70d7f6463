"""Host times of a server for requests and steps (docs/design/step_time.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTime:
    """Processor times of a server's host, in seconds; ``feather calibrate`` fits them to SGLang's own.

    The front end (HTTP, tokenizer manager) and the scheduler are one thread each. Every field is a price for one of
    what its name ends with; those without such an end are for each turn, step or launch.

    Attributes
    ----------
    front_request, front_token : the front end reads a request, and each token of its prompt.
    front_piece : the front end hands on one piece of an answer.
    hop_in, hop_out : a request is on its way to the scheduler, and a piece of an answer to its client, besides.
    turn : a turn of the scheduler's loop, whatever it does.
    take_request, take_token : the scheduler takes in a request, and each token of its prompt.
    form_decode, form_decode_row : it forms a decode batch.
    form_prefill, form_prefill_row, form_waiting : it forms a prefill batch; each request that is left waiting.
    launch_decode, launch_decode_row : it prepares and launches a decode step, a CUDA graph.
    prepare_prefill, prepare_prefill_row : it prepares a prefill step, before the first of its kernels.
    graph_layer, eager_layer : it launches a layer of a prefill step, in CUDA graphs and without.
    result_decode, result_decode_row : it processes the result of a decode step.
    result_prefill, result_prefill_row : of a prefill step, the first pieces of answers sent.
    stream_piece : it sends one piece of an answer to the front end.
    """

    front_request: float = 0.0
    front_token: float = 0.0
    front_piece: float = 0.0
    hop_in: float = 0.0
    hop_out: float = 0.0
    turn: float = 0.0
    take_request: float = 0.0
    take_token: float = 0.0
    form_decode: float = 0.0
    form_decode_row: float = 0.0
    form_prefill: float = 0.0
    form_prefill_row: float = 0.0
    form_waiting: float = 0.0
    launch_decode: float = 0.0
    launch_decode_row: float = 0.0
    prepare_prefill: float = 0.0
    prepare_prefill_row: float = 0.0
    graph_layer: float = 0.0
    eager_layer: float = 0.0
    result_decode: float = 0.0
    result_decode_row: float = 0.0
    result_prefill: float = 0.0
    result_prefill_row: float = 0.0
    stream_piece: float = 0.0

    def receive(self, requests: int, tokens: int) -> float:
        """A turn of the scheduler's loop, and what it takes in with prompts of so many `tokens` together."""
        return self.turn + requests * self.take_request + tokens * self.take_token

    def form(self, rows: int, is_prefill: bool, waiting: int) -> float:
        """Form a batch of so many rows, while others are left `waiting`."""
        if is_prefill:
            return self.form_prefill + rows * self.form_prefill_row + waiting * self.form_waiting
        return self.form_decode + rows * self.form_decode_row

    def launch(self, rows: int, is_prefill: bool, layers: int, graphs: bool) -> tuple[float, float]:
        """Before a step's first kernel runs, and from then on until all are launched, if the GPU does not delay it."""
        if not is_prefill:
            return self.launch_decode + rows * self.launch_decode_row, 0.0
        layer = self.graph_layer if graphs else self.eager_layer
        return self.prepare_prefill + rows * self.prepare_prefill_row, layers * layer

    def result(self, rows: int, is_prefill: bool, pieces: int) -> float:
        """Process a step's result and send so many pieces of answers."""
        if is_prefill:
            return self.result_prefill + rows * self.result_prefill_row
        return self.result_decode + rows * self.result_decode_row + pieces * self.stream_piece


NO_HOST_TIME = HostTime()
