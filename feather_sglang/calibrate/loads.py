"""The loads of a calibration: steady batches, lone prompts, and mixed traffic."""

from __future__ import annotations

from typing import NamedTuple

from feather_sglang.compare.server.cases import Case, parse_case

OUTPUT_TOKENS = 48
# Requests, groups that share a prefix (0: none), prompt tokens: from one long request to a full batch.
STEADY = ((1, 0, 8000), (16, 0, 1000), (64, 0, 1500), (128, 16, 2000), (256, 4, 4000), (400, 8, 2000), (500, 5, 5000))
# Prompt tokens, requests, requests a second: one prompt at a time, and the last in more chunks than one.
LONE = ((100, 30, 8), (1000, 20, 6), (4000, 12, 4), (16000, 4, 1))
MIXED = ("open:5,1000,300,100", "open:20,2000,300,60,100")
# Sent before anything is logged: a server's first batches of any new size take several times as long to launch.
WARM_UP = "open:16,1500,500,60,60"
HELD_OUT = ("open:8,3000,300,80,150",)


class Load(NamedTuple):
    """One case, and whether the fit sees its steps."""

    case: Case
    held_out: bool = False


def loads(kv_tokens: int, context: int) -> list[Load]:
    """Those that fit so many KV tokens, and prompts of so many tokens."""
    names = [f"decode:{rows},{groups},{tokens},{OUTPUT_TOKENS}" for rows, groups, tokens in STEADY]
    names += [f"open:0,{tokens},{count},{rate},2" for tokens, count, rate in LONE]
    every = [
        *(Load(parse_case(name)) for name in [*names, *MIXED]),
        *(Load(parse_case(name), True) for name in HELD_OUT),
    ]
    return [
        load
        for load in every
        if (not load.case.steady or load.case.kv_tokens <= kv_tokens)
        and all(one.input_length + one.output_length + 64 < context for one in load.case.trace.requests)
    ]
