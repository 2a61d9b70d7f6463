"""Imports: a small sample of each format, what it lacks, what is asked for, and units that cannot be right."""

from __future__ import annotations

import gzip

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from feather_sglang.cli import main
from feather_sglang.replay.formats.registry import FORMATS
from feather_sglang.replay.traces import load_trace
from trace_samples import LENGTHS, SAMPLES, bench, blocks, json_lines, vllm


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
        (json_lines(bench(**LENGTHS), bench(**LENGTHS)), (), ":2: a second run"),
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
