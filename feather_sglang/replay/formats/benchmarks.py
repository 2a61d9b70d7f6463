"""Results of a benchmark: of SGLang's ``bench_serving`` and of ``vllm bench serve``, one JSON object for each run.

Both have lengths where they were asked for details; only newer ones of vLLM say when each request was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.found import Format, Found, Source, moment, whole
from feather_sglang.replay.lines import json_rows


def read(details: str, source: Source) -> Iterator[Found]:
    """Its requests; `details` is the flag that makes the benchmark write them."""
    for number, (where, run) in enumerate(json_rows(source.path, source.notices)):
        if number:
            raise FeatherError(
                f"{where}: a second run of the benchmark: give a file of one run, as rates and times differ"
            )
        prompts, answers = run.get("input_lens"), run.get("output_lens")
        if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
            raise FeatherError(f"{where}: has no lengths of requests: run the benchmark with {details}")
        starts = run.get("start_times")
        if not isinstance(starts, list) or len(starts) != len(prompts):
            starts = [None] * len(prompts)
        source.rate = source.rate or _rate(run, len(prompts))
        for prompt, answer, start in zip(prompts, answers, starts, strict=True):
            lengths = {"input_lens": prompt, "output_lens": answer}
            time = None if start is None else moment(start, where)
            yield Found(where, time, whole(lengths, "input_lens", where), whole(lengths, "output_lens", where))


def _rate(run: dict[str, object], requests: int) -> float | None:
    """Requests a second: as asked for, or where that was "as fast as can be" as many as were served."""
    rate, duration = run.get("request_rate"), run.get("duration")
    if isinstance(rate, (int, float)) and 0 < rate < 1e9:
        return float(rate)
    return requests / duration if isinstance(duration, (int, float)) and duration > 0 else None


# vLLM's file names its model, SGLang's the flags of its data set.
VLLM = Format("vllm-bench", lambda row: row.keys() >= {"model_id", "num_prompts"}, partial(read, "--save-detailed"))
BENCH_SERVING = Format(
    "bench-serving",
    lambda row: row.keys() >= {"backend", "dataset_name", "duration", "request_rate"},
    partial(read, "--output-details"),
)
