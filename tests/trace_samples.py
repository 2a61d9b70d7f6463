"""A small sample of each format that ``feather trace import`` reads, made in its schema."""

from __future__ import annotations

import json


def json_lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def blocks(time, prompt, answer, ids, **more):
    return {"timestamp": time, "input_length": prompt, "output_length": answer, "hash_ids": ids, **more}


def bench(**more):
    """A line of bench_serving's output, with the fields that tell it."""
    head = {"tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": 8.0, "max_concurrency": None}
    return {**head, "duration": 1.5, "completed": 3, "total_input_tokens": 60, **more}


def vllm(**more):
    head = {"date": "20260102-030405", "endpoint_type": "vllm", "model_id": "m", "tokenizer_id": "m", "num_prompts": 3}
    return {**head, "request_rate": "inf", "duration": 1.5, "completed": 2, **more}


def finished(rid, second, prompt, answer, latency, **obj):
    out = {"meta_info": {"id": rid, "prompt_tokens": prompt, "completion_tokens": answer, "e2e_latency": latency}}
    stamp = f"2026-01-02T03:04:{second:09.6f}"
    return {"timestamp": stamp, "event": "request.finished", "rid": rid, "obj": {"rid": rid, **obj}, "out": out}


def chat(time, *texts, answer=7):
    messages = [{"role": "user" if n % 2 else "system", "content": text} for n, text in enumerate(texts)]
    body = {"model": "m", "messages": messages, "max_tokens": 99}
    return {"timestamp": time, "request": body, "response": {"usage": {"completion_tokens": answer}}}


LONG = "you help people who write " * 12  # 60 words and more: several blocks of 16
LENGTHS = {"input_lens": [20, 10, 30], "output_lens": [5, 0, 7], "errors": ["", "timeout", ""]}
# By format: the file, its name, further flags; then (seconds, prompt, answer) of each request and whether two share.
SAMPLES = {
    "mooncake": (
        json_lines(blocks(0, 700, 5, [0, 1]), blocks(250, 600, 6, [0, 2])),
        (),
        [(0, 700, 5), (0.25, 600, 6)],
        True,
    ),
    "bailian": (
        json_lines(
            blocks(61.1, 33, 5, [1, 2, 3], chat_id=159, parent_chat_id=-1, type="text", turn=1),
            blocks(61.35, 40, 6, [1, 2, 9], chat_id=160, parent_chat_id=159, type="text", turn=2),
        ),
        (),
        [(0, 33, 5), (0.25, 40, 6)],
        True,
    ),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:16:00.6805900,0,5\n",
        (),
        [(0, 374, 44), (4.314579, 396, 109)],
        False,
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,Conversation log\n",
        ("--shared-prefix", "1x100"),
        [(0, 472, 18), (113, 417, 276)],
        True,
    ),
    "bench-serving": (json_lines(bench(**LENGTHS)), (), [(0, 20, 5), (None, 30, 7)], False),
    "vllm-bench": (
        json_lines(vllm(**LENGTHS, start_times=[10.5, 11.0, 12.0])),
        (),
        [(0, 20, 5), (1.5, 30, 7)],
        False,
    ),
    "sglang-log": (
        "INFO: Uvicorn running\n"
        + json_lines(
            {"timestamp": "2026-01-02T03:04:01.000000", "event": "request.received", "rid": "b", "obj": {"rid": "b"}},
            finished("a", 2.0, 20, 9, 1.5, input_ids=list(range(20))),
            finished("b", 3.0, 20, 4, 0.1, input_ids=[*range(16), 7, 7, 7, 7]),
        ),
        ("--block-size", "16"),
        [(0, 20, 9), (0.5, 20, 4)],
        True,
    ),
    "openai": (
        json_lines(chat(1_700_000_000.0, LONG, "one"), chat("2023-11-14T22:13:21Z", LONG, "two more")),
        ("--block-size", "16"),
        [(0, 63, 7), (1, 64, 7)],
        True,
    ),
}
