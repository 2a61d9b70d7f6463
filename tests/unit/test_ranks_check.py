"""The check of ranks without a server: its load, its judgement of memory, and what it refuses."""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_ranks
import ranks_load
from ranks_load import Job, Jobs, Load
from ranks_memory import Sample, growths
from sending import outcome, reason_of

from feather_sglang.adapter.scheduler.decision_log import HEAD
from feather_sglang.compare.server.client import Address

POOL = 200_000


def short(count, seed=0):
    return list(itertools.islice(Jobs(150_000, POOL, seed).short(), count))


def test_short_requests():
    jobs = short(3000)
    assert jobs == short(3000) and jobs[:50] != short(50, seed=1)
    assert min(len(job.prompt) for job in jobs) >= 40 and max(len(job.prompt) for job in jobs) <= 600
    assert {job.tokens for job in jobs} == set(range(1, 17))
    given_up = [job.fate for job in jobs if job.fate != "finish"]
    assert 0.07 < len(given_up) / len(jobs) < 0.13 and set(given_up) == {"abort", "hang up"}
    beginnings = [tuple(job.prompt[:24]) for job in jobs]
    shared = sum(beginnings.count(one) > 1 for one in set(beginnings))
    assert ranks_load.GROUPS <= shared <= 2 * ranks_load.GROUPS  # old groups go, new ones come
    assert sum(beginnings.count(one) == 1 for one in set(beginnings)) < 0.15 * len(jobs)


@pytest.mark.parametrize("pool", [12_000, 60_000])
def test_the_long_prefixes_of_the_mixed_load_exceed_the_pool(pool):
    arrivals = list(itertools.islice(Jobs(150_000, pool, 0).mixed(), 700))
    assert arrivals == list(itertools.islice(Jobs(150_000, pool, 0).mixed(), 700))
    jobs = [job for arrival in arrivals for job in arrival]
    prefixes = {tuple(job.prompt[:600]): len(job.prompt) - 60 for job in jobs if len(job.prompt) > 660}
    assert pool < sum(prefixes.values()) < 1.3 * pool
    assert max(map(len, arrivals)) > 30 and sum(len(arrival) == 1 for arrival in arrivals) > 650
    assert {job.tokens for job in jobs} <= set(range(1, 201)) and max(job.tokens for job in jobs) > 190


def answer(reason, tokens):
    return {"meta_info": {"finish_reason": reason and {"type": reason}, "completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("fate", "reason", "tokens", "says"),
    [
        ("finish", "length", 8, "answered"),
        ("finish", "length", 7, "lost (ended by length after 7 of 8 tokens)"),
        ("finish", "abort", 3, "lost (ended by abort after 3 of 8 tokens)"),
        ("finish", None, 8, "lost (ended by None after 8 of 8 tokens)"),
        ("abort", "abort", 3, "aborted"),
        ("abort", "length", 8, "over before it was given up"),
        ("abort", "length", 7, "lost (ended by length after 7 of 8 tokens)"),
    ],
)
def test_what_becomes_of_a_request(fate, reason, tokens, says):
    answered = answer(reason, tokens)
    assert outcome(fate, 8, answered["meta_info"]["completion_tokens"], reason_of(answered)) == says


async def serve(respond):
    """A server of which ``respond(body)`` is the answer, or None for none."""

    async def handle(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        content = await respond(json.loads(await reader.readexactly(length)))
        if content is not None:
            text = json.dumps(content).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, Address("127.0.0.1", server.sockets[0].getsockname()[1])


def test_so_many_requests_are_open_and_all_are_accounted_for():
    seen, together, lost = [], [], []

    async def respond(body):
        if "sampling_params" not in body:
            return {}
        seen.append(body["rid"])
        if not body["stream"] and len(lost) < 4:
            lost.append(body["rid"])
        together.append(load.open)
        await asyncio.sleep(0.01)
        if body["rid"] in lost:
            return None  # the connection ends without an answer
        return answer("length", body["sampling_params"]["max_new_tokens"])

    async def run():
        nonlocal load
        server, address = await serve(respond)
        load = Load(address)
        patient = (job._replace(after=60.0) for job in short(200))  # nobody is gone before the server has seen it
        await load.keep_open(patient, 20, float("inf"))
        server.close()

    load = None
    asyncio.run(run())
    assert load.open == 0 and load.ended == 200 == len(set(seen))
    assert len(set(map(len, seen))) == 1  # SGLang aborts all whose ids begin with the one that is given
    assert 10 < max(together) <= 20
    assert load.fates["answered"] > 150 and load.lost == ["4 requests lost (IncompleteReadError)"]


def test_a_server_that_hangs_is_noticed(monkeypatch):
    monkeypatch.setattr(ranks_load, "LOST_SECONDS", 2.4)
    monkeypatch.setattr(ranks_load, "STALL_SECONDS", 0.8)

    async def run():
        server, address = await serve(lambda body: asyncio.sleep(0.05 if len(body["input_ids"]) < 3 else 4.0, {}))
        load = Load(address)
        work = asyncio.create_task(load.keep_open(iter([Job([1, 2, 3], 4, "finish", 0.0)]), 1, float("inf")))
        await asyncio.sleep(0.05)
        assert not load.stalled
        await asyncio.sleep(1.2)
        assert load.stalled
        await work
        server.close()
        return load

    load = asyncio.run(run())
    assert not load.stalled and load.lost == ["1 requests lost (no end in 2 s)"]


# Memory -----------------------------------------------------------------------------------------------------------


def samples(bytes_per_request, noise=6000):
    """A scheduler that leaks so much, and whose heap swells and shrinks."""
    return [
        Sample(3.0 * i, "short", 1000 * i, 1500, 500, 900,
               {"scheduler_TP0 1": 500_000 + bytes_per_request * i * 1000 // 1024 + noise * (i * 7 % 5),
                "worker 2": 100} if i != 20 else {"scheduler_TP0 1": 500_000})
        for i in range(51)
    ]  # fmt: skip


@pytest.mark.parametrize("leak", [0, 300, 5000])
def test_growth_is_told_from_noise(leak):
    (growth,) = growths(samples(leak), 10_000)  # the other process was not always there
    assert growth.name == "scheduler_TP0 1" and 25_000 < growth.requests < 30_000
    assert growth.bytes_per_request == pytest.approx(leak, abs=250)
    assert growths(samples(leak), 45_000) == []


# Command line and verdict -----------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    return str(tmp_path)


@pytest.fixture
def check(model, tmp_path):
    options = check_ranks.arguments(["--model", model, "--device", "cpu", "--requests", "50000", "--phase", "short"])
    return check_ranks.Check(options, tmp_path)


@pytest.mark.parametrize(("leak", "wrong"), [(0, False), (5000, True)])
def test_a_leak_is_wrong(check, leak, wrong):
    check.samples = samples(leak)
    check.judge_memory()
    assert not check.cut and bool(check.problems) == wrong
    if wrong:
        assert "a leak? scheduler_TP0 1 grew by" in check.problems[0]


def test_too_few_samples_are_no_judgement(check):
    check.samples = samples(0)[:6]
    check.judge_memory()
    assert not check.problems and check.cut == ["the judgement of memory: too few samples"]


def test_ranks_that_part_are_wrong(check, tmp_path):
    folder = tmp_path / "decisions"
    check.judge_decisions(False)
    assert "rank0.log: No such file" in check.problems.pop()
    folder.mkdir()
    lines = [f"{HEAD}: feather\n", "0 prefill 2 aa 3 0 0\n", "1 decode 2 bb 3 0 0\n"]
    for rank in range(2):
        (folder / f"rank{rank}.log").write_text("".join(lines))
    check.judge_decisions(False)
    assert not check.problems
    (folder / "rank1.log").write_text("".join(lines).replace("bb", "bc"))
    check.judge_decisions(False)
    assert "the ranks decided differently: line 3: rank0.log has" in check.problems[0]
    assert "too little was decided" in check.problems[1]


def test_on_gpus_the_ranks_decided_alike_and_nothing_was_lost():
    """What docs/measured holds: 50,000 short requests and those of the mixed load, on two GPUs."""
    found = json.loads((Path(__file__).parents[2] / "docs" / "measured" / "ranks_h200.json").read_text())
    decisions, fates = found["decisions"], found["fates"]
    assert decisions["difference"] is None and not found["problems"] and not found["not_run"]
    assert sum(fates.values()) == 50_000 + found["mixed"]["requests"]
    assert not any(fate.startswith("lost") for fate in fates)
    assert min(decisions["batches"].values()) > 1000 and found["retractions"] > 100 and decisions["postponed"] > 0
    for one in found["growths"]:
        if one["name"].startswith("scheduler"):
            assert one["kib"] * 1024 < check_ranks.ALLOWED_BYTES * one["requests"] and one["requests"] > 25_000
