"""Imports: a small sample of each format, what it lacks, what is asked for, and units that cannot be right."""

from __future__ import annotations

import gzip
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from feather_sglang.cli import main
from feather_sglang.replay.formats.registry import FORMATS
from feather_sglang.replay.traces import load_trace


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


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A model's folder with a tokenizer that has one token for each word."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "you": 1, "help": 2, "people": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(folder)


@pytest.fixture
def run(tmp_path, capsys):
    """Import a content under a name; returns status, the trace if there is one, stdout and stderr."""

    def run(content, *flags, name="in.txt", out="out.jsonl"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        status = main(["trace", "import", str(tmp_path / name), "--out", str(tmp_path / out), *flags])
        said = capsys.readouterr()
        written = (tmp_path / out).exists()
        return status, load_trace(tmp_path / out) if written else None, said.out, said.err

    return run


def test_each_format_has_a_sample():
    assert set(SAMPLES) == set(FORMATS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "openai")) for name in SAMPLES]
)
def test_a_sample_of_the_format_is_read(name, run, tokenizer):
    content, flags, expected, shares = SAMPLES[name]
    if name == "openai":
        flags = (*flags, "--tokenizer", tokenizer)
    status, trace, out, err = run(content, *flags)
    assert status == 0 and f": {name}, {len(expected)} requests" in out
    assert [(r.input_length, r.output_length) for r in trace.requests] == [row[1:] for row in expected]
    for request, (seconds, *_) in zip(trace.requests, expected, strict=True):
        assert seconds is None or request.arrival_s == seconds
    first, second = (request.hash_ids for request in trace.requests)
    assert (first[0] == second[0]) is shares and first != second
    skipped = 1 if name in ("azure", "burstgpt", "bench-serving", "vllm-bench") else 0
    assert err.count("left out") == skipped
    lacks_prefixes = name in ("azure", "burstgpt", "bench-serving", "vllm-bench")
    assert out.count("prefixes: ") == lacks_prefixes and out.count("times: ") == (name == "bench-serving")


@pytest.mark.slow
def test_blocks_of_text_agree_exactly_as_far_as_whole_blocks_of_it_do(run, tokenizer):
    content = SAMPLES["openai"][0]
    _, trace, *_ = run(content, "--tokenizer", tokenizer, "--block-size", "16")
    first, second = (request.hash_ids for request in trace.requests)
    assert first[:3] == second[:3] and first[3] != second[3]  # 60 words and two more in each agree


def test_seconds_read_as_milliseconds_are_noticed(run):
    rows = [blocks(n / 2, 600, 5, [n, n + 1]) for n in range(40)]  # twice a second, in seconds
    _, trace, _, err = run(json_lines(*rows))
    assert trace.rate == pytest.approx(2000) and "--time-unit s" in err
    _, trace, _, err = run(json_lines(*rows), "--time-unit", "s", "--overwrite")
    assert trace.rate == pytest.approx(2) and not err
    late = [blocks(n * 500, 33, 5, [1, 2, n], chat_id=n, parent_chat_id=-1) for n in range(40)]
    _, trace, _, err = run(json_lines(*late), out="late.jsonl")
    assert "--time-unit ms" in err
    assert "--time-unit ms" in " ".join(trace.notices)  # as any reader of the trace that was written is told


def test_blocks_of_another_size_are_noticed(run):
    status, trace, _, err = run(json_lines(blocks(0, 521, 5, list(range(33)))))
    assert status == 2 and trace is None and "blocks of 16 would fit: --block-size" in err and err.count("\n") == 1
    status, trace, _, _ = run(json_lines(blocks(0, 521, 5, list(range(33)))), "--block-size", "16")
    assert status == 0 and trace.block_size == 16


def test_blocks_that_are_not_full_may_have_no_name(run):
    rows = [blocks(n, 40, 5, [1, 2], chat_id=n, parent_chat_id=-1) for n in range(2)]
    _, trace, *_ = run(json_lines(*rows))
    first, second = (request.hash_ids for request in trace.requests)
    assert first[:2] == second[:2] == (1, 2) and len({first[2], second[2], 1, 2}) == 4


@pytest.mark.parametrize(
    ("content", "flags", "reason"),
    [
        (json_lines(bench()), (), "--output-details"),
        (json_lines(vllm()), (), "--save-detailed"),
        (json_lines({**bench(**LENGTHS), "request_rate": "trace", "duration": 0}), (), "give --rate"),
        (SAMPLES["openai"][0], (), "give --tokenizer"),
        (SAMPLES["azure"][0], ("--rate", "5"), "--rate is for a file without times"),
        (SAMPLES["mooncake"][0], ("--shared-prefix", "5x10"), "names blocks"),
        (SAMPLES["azure"][0], ("--shared-prefix", "0x10"), "must lie between 1"),
        (SAMPLES["azure"][0], ("--format", "burstgpt"), "must have the columns Timestamp"),
        (SAMPLES["azure"][0].replace("396", "many"), (), ":3: ContextTokens: must be a whole number"),
        (SAMPLES["azure"][0].replace("2023-11-16 18:15:50", "yesterday"), (), ":3: time: must be a number or a date"),
        (json_lines(blocks(0, 700, 5, [0, 1], block_size=512)), (), "use it as it is"),
        ("a,b\n1,2\n", (), "none of the known formats"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", (), "has no request"),
        (b"\x1f\x8bnot packed", (), "damaged"),
    ],
)
def test_what_cannot_be_imported_is_refused_in_one_line(run, content, flags, reason):
    status, trace, out, err = run(content, *flags)
    assert (status, trace, out) == (2, None, "") and reason in err and err.count("\n") == 1


def test_times_are_made_up_at_the_rate_asked_for(run):
    rows = {"input_lens": [20] * 2000, "output_lens": [5] * 2000}
    _, trace, out, _ = run(json_lines(bench(**rows)), "--rate", "50")
    assert trace.rate == pytest.approx(50, rel=0.1) and "50 requests a second" in out
    _, own, *_ = run(json_lines(bench(**rows)), "--overwrite")
    assert own.rate == pytest.approx(8, rel=0.1)


def test_made_up_prefixes_are_those_asked_for(run):
    rows = "".join(f"{n},ChatGPT,{50 + n},5,0,x\n" for n in range(200))
    _, trace, *_ = run("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + rows,
                       "--shared-prefix", "4x100")  # fmt: skip
    openings = {request.hash_ids[0] for request in trace.requests}
    rest = [one for request in trace.requests for one in request.hash_ids[1:]]
    assert len(openings) == 4 and trace.block_size == 100 and len(set(rest)) == len(rest) and not openings & set(rest)


def test_an_earlier_file_gives_way_only_where_that_is_asked_for(run):
    content = SAMPLES["mooncake"][0]
    assert run(content)[0] == 0
    status, trace, _, err = run(SAMPLES["bailian"][0])
    assert status == 2 and "--overwrite" in err and trace.requests[0].input_length == 700
    assert run(SAMPLES["bailian"][0], "--overwrite")[1].requests[0].input_length == 33


@pytest.mark.parametrize("out", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"])
def test_files_are_packed_as_their_names_say_and_read_as_they_are_packed(run, out, tmp_path):
    packed = gzip.compress(SAMPLES["azure"][0].encode())
    status, trace, *_ = run(packed, name="azure.csv.gz", out=out)
    assert status == 0 and [r.input_length for r in trace.requests] == [374, 396] and trace.name == "out"
    head = {".jsonl": b"{", ".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}[(tmp_path / out).suffix]
    assert (tmp_path / out).read_bytes().startswith(head)


def test_only_so_many_requests_are_read(run):
    broken = SAMPLES["mooncake"][0] + "what comes then is never looked at\n"
    status, trace, *_ = run(broken, "--requests", "2")
    assert status == 0 and len(trace.requests) == 2
