"""Host times from logged steps: each stage of SGLang's loop by its rows and tokens, the front end by its CPU time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from feather_sglang.calibrate.recording import STEP, Recording, Steps
from feather_sglang.errors import FeatherError
from feather_sglang.simulation.host_time import NO_HOST_TIME, HostTime

GPU_BOUND_SECONDS = 0.01  # a step that the host waited for so long was no shorter than its launch
ROUNDS = 5  # of weighted squares
Column = Sequence[float] | np.ndarray


def fit_prices(columns: Mapping[str, Column], seconds: Column) -> dict[str, float]:
    """Return the prices, none below 0, whose sum comes nearest to `seconds`, relative to what they predict."""
    measured = np.asarray(seconds, dtype=np.float64)
    features = np.stack([np.asarray(column, dtype=np.float64) for column in columns.values()], axis=1)
    scale = np.maximum(features.max(axis=0), 1e-12)
    weight = np.ones(len(measured))
    for _ in range(ROUNDS):  # by what is predicted: by what was measured, the short times would win
        prices, _ = nnls(features / scale * weight[:, None], measured * weight)
        weight = 1 / np.maximum(features / scale @ prices, 1e-6)
    return dict(zip(columns, (prices / scale).tolist(), strict=True))


def alike(steps: Sequence[Steps]) -> list[Steps]:
    """The steps of servers that compute prompts by the backend of the first: a profile is of one."""
    return [one for one in steps if one.setting.prefill_attention == steps[0].setting.prefill_attention]


def together(steps: Iterable[Steps]) -> np.ndarray:
    """The steps of several loads, one after the other."""
    return np.concatenate([np.empty(0, STEP), *(one.table for one in steps)])


class Stage(NamedTuple):
    """A stage of SGLang's loop: its kind of steps, the features of its time, and the columns of `STEP` around it.

    `features` are columns by the `HostTime` field that prices them; None: the same for each step.
    """

    prefill: bool | None
    features: dict[str, str | None]
    begin: str
    end: str


STAGES = {
    "receive": Stage(None, {"turn": None, "take_request": "came", "take_token": "came_tokens"}, "begin", "received"),
    "form decode": Stage(False, {"form_decode": None, "form_decode_row": "rows"}, "received", "formed"),
    "form prefill": Stage(
        True, {"form_prefill": None, "form_prefill_row": "rows", "form_waiting": "waiting"}, "received", "formed"
    ),
    "launch decode": Stage(False, {"launch_decode": None, "launch_decode_row": "rows"}, "launch", "launched"),
    "prepare prefill": Stage(True, {"prepare_prefill": None, "prepare_prefill_row": "rows"}, "launch", "forward"),
    "result decode": Stage(
        False, {"result_decode": None, "result_decode_row": "rows", "stream_piece": "pieces"}, "ready", "end_result"
    ),
    "result prefill": Stage(True, {"result_prefill": None, "result_prefill_row": "rows"}, "ready", "end_result"),
}


def stages(steps: Sequence[Steps]) -> dict[str, tuple[dict[str, Column], np.ndarray]]:
    """Each stage's features, and its seconds."""
    every, found = together(steps), {}
    for name, stage in STAGES.items():
        of = every if stage.prefill is None else every[every["prefill"] == stage.prefill]
        features = {
            price: np.ones(len(of)) if column is None else of[column] for price, column in stage.features.items()
        }
        found[name] = features, of[stage.end] - of[stage.begin]
    return found


def launches(steps: Sequence[Steps], graphs: bool, layers: int) -> dict[str, tuple[dict[str, Column], np.ndarray]]:
    """The launch of prefill steps, with CUDA graphs or without."""
    every = together(one for one in steps if one.setting.prefill_graphs == graphs)
    waited = every["ready"] - every["begin_result"]
    launched = every[every["prefill"] & ((every["graph"] > 0) == graphs) & (waited < GPU_BOUND_SECONDS)]
    seconds = launched["launched"] - launched["forward"]
    name = "graph_layer" if graphs else "eager_layer"
    return {f"launch prefill, graphs {'on' if graphs else 'off'}": ({name: np.full(len(seconds), layers)}, seconds)}


def gpu_seconds(steps: np.ndarray) -> np.ndarray:
    """From when the GPU was free and the host called the model until the result was there, for each step."""
    before = np.concatenate([[-np.inf], steps["ready"][:-1]])
    return steps["ready"] - np.maximum(before, steps["forward"])


def fit_front(recording: Recording) -> dict[str, float]:
    """The front end's prices from its processor time, and the ways in and out from lone requests."""
    rows, spent = [], []
    ways_in, ways_out = [], []
    for _, run in recording.runs():
        if run["held_out"]:
            continue
        streams = run["streams"]
        pieces = sum(stream[4] for stream in streams)
        rows.append((len(streams), sum(stream[2] for stream in streams), pieces, run["end"] - run["begin"]))
        spent.append(run["front_cpu"])
        came = {line[1]: line[3] for line in run["log"] if line[0] == "request"}
        sent = {rid: line[-1] for line in run["log"] if line[0] == "result" for rid in line[2]}
        lone = run["load"].startswith("open:0,")
        for rid, at, tokens, first, _ in streams if lone else ():
            if rid in came and rid in sent:
                ways_in.append((came[rid] - at, tokens))
                ways_out.append(first - sent[rid])
    requests, tokens, pieces, seconds = zip(*rows, strict=True)
    names = ("front_request", "front_token", "front_piece", "idle")
    prices = fit_prices(dict(zip(names, (requests, tokens, pieces, seconds), strict=True)), spent)
    prices.pop("idle")
    # A prompt that came while a step was being formed or launched waited for its end, so the quickest ones tell.
    rest = [way - prices["front_request"] - count * prices["front_token"] for way, count in ways_in]
    if rest:
        prices["hop_in"] = max(0.0, float(np.percentile(rest, 25)))
        prices["hop_out"] = max(0.0, float(np.median(ways_out)) - prices["front_piece"])
    return prices


def fit_host(recording: Recording, layers: int, base: HostTime | None = None) -> tuple[HostTime, list[dict[str, Any]]]:
    """Return the host times, and for each stage how far they are from the steps fitted on and held out.

    A price that no server of the recording tells, such as that of a launch with CUDA graphs, is the base's.
    """
    every = alike(recording.steps())
    fitted, held = [one for one in every if not one.held_out], [one for one in every if one.held_out]

    def all_stages(steps: Sequence[Steps]) -> dict[str, tuple[dict[str, Column], np.ndarray]]:
        return {**stages(steps), **launches(steps, True, layers), **launches(steps, False, layers)}

    if not fitted:
        raise FeatherError("this recording has no steps to fit: record longer (--time-limit)")
    prices = asdict(base or NO_HOST_TIME) | fit_front(recording)
    for columns, seconds in all_stages(fitted).values():
        if len(seconds):
            prices |= fit_prices(columns, seconds)
    host = HostTime(**prices)
    known = asdict(host)
    errors = []
    for kind, steps in (("fitted on", fitted), ("held out", held)):
        for name, (columns, seconds) in all_stages(steps).items() if steps else ():
            if len(seconds):
                predicted = sum(known[price] * np.asarray(column).mean() for price, column in columns.items())
                mean = float(seconds.mean())
                errors.append({"stage": name, "steps": len(seconds), "kind": kind, "seconds": mean,
                               "predicted": float(predicted)})  # fmt: skip
    return host, errors
