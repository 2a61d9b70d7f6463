"""The parts of a comparison on servers: its cases, its servers, its client, and the figures of given streams."""

import asyncio
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from server_cases import bench_case
from server_driver import read_log
from server_file import stock
from server_names import parse_server
from server_records import steady

from feather_sglang.compare.server.cases import Case, fold, parse_case, probes
from feather_sglang.compare.server.client import Address, HttpError, call, drive
from feather_sglang.compare.server.config import ServerConfig
from feather_sglang.compare.server.machine import machine
from feather_sglang.compare.server.process import group_alive
from feather_sglang.compare.server.stats import Stream, overall, peak_running
from feather_sglang.errors import FeatherError
from feather_sglang.replay.traces import Trace, TraceRequest


def stream(*events, due=0.0, prompt=10, cached=0, finished=True, error=None):
    return Stream(due, prompt, due, list(events), cached, finished, error)


class TestCases:
    def test_workloads_have_their_figures(self):
        trace = bench_case("W1").trace
        assert len(trace.requests) == 1000 and {r.input_length for r in trace.requests} == {5020}
        assert trace.requests[-1].arrival_s == pytest.approx(10, rel=0.1)
        assert len({r.hash_ids[0] for r in bench_case("W7").trace.requests}) == 20
        assert len(bench_case("W5:300").trace.requests) == 300

    def test_a_name_may_give_its_own_seed(self):
        for name in ("W2", "W5:300", "open:2,100,8,50,7"):
            case = bench_case(f"{name}@4", seed=3)
            assert case.name == f"{name}@4" and case.trace == bench_case(name, seed=4).trace
            assert case.trace != bench_case(name, seed=3).trace

    def test_fixed_arrivals_have_equal_gaps_and_the_same_rate(self):
        drawn, fixed = (bench_case("W3", arrivals=kind).trace.requests for kind in ("poisson", "fixed"))
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(fixed)]
        assert max(gaps) - min(gaps) < 1e-5 and fixed[-1].arrival_s == pytest.approx(drawn[-1].arrival_s, abs=1e-4)

    def test_open_takes_every_figure(self):
        case = parse_case("open:2,100,8,50,7")
        assert {(r.input_length, r.output_length) for r in case.trace.requests} == {(120, 7)}
        assert {r.input_length for r in parse_case("open:0,64,5,10").trace.requests} == {64}
        tree = parse_case("open:1,100,40,50,7,3").trace.requests
        assert [len({r.hash_ids[:depth] for r in tree}) for depth in (1, 2, 3, 4)] == [1, 2, 4, 4]

    def test_a_batch_shares_its_prefixes_and_nothing_else(self):
        case = parse_case("decode:6,2,100,9")
        prompts = [list(case.trace.tokens(r)) for r in case.trace.requests]
        warm = [list(case.trace.tokens(prefix)) for prefix in case.prefixes]
        assert [prompt[:100] for prompt in prompts] == warm * 3
        assert len({tuple(prompt[100:]) for prompt in prompts}) == 6
        assert case.steady and case.kv_tokens == 2 * 100 + 6 * (20 + 9)

    def test_without_groups_every_request_has_a_prefix_of_its_own(self):
        case = parse_case("decode:5,0,30")
        assert len(case.prefixes) == 5
        assert len({tuple(case.trace.tokens(prefix)[:5]) for prefix in case.prefixes}) == 5

    @pytest.mark.parametrize(
        "text",
        ["W9", "W1:", "W1:0", "W1:2,3", "decode:5,6,100", "decode:0,0,100", "decode:4,2", "decode:4,2,5", "open:1,2",
         "decode:4,2,100,5,6", "decode:a,2,100", "open:2,-3,8,50", "open:0,64,5,10,7,2",
         "open:2,100,8,50,7,1,1", "W2@", "W2@-1", "W2@a", "W9@1", "decode:4,2,100@1"],
    )  # fmt: skip
    def test_bad_cases_are_named(self, text):
        with pytest.raises(ValueError, match=text):
            bench_case(text)

    def test_a_small_vocabulary_is_respected(self):
        tokens = parse_case("decode:2,1,500").trace.tokens(probes().trace.requests[0])
        assert fold(tokens, 40_000) is tokens
        assert 10 <= min(fold(tokens, 260)) and max(fold(tokens, 260)) < 260 and len(set(fold(tokens, 260))) > 100
        with pytest.raises(FeatherError, match="a vocabulary of 11 tokens is too small"):
            fold(tokens, 11)


class TestStatistics:
    def test_the_window_in_which_all_run(self):
        # The first runs from 1 to 5 with 10 tokens a second, the second from 2 to 6 with 5.
        streams = [stream((1.0, 1), (5.0, 41)), stream((2.0, 1), (4.0, 11), (6.0, 21))]
        window = steady(streams)
        assert window["seconds"] == 3 and window["output_tokens"] == 45 and window["tok_s"] == 15
        assert window["tpot_ms"]["mean"] == 150

    def test_no_window(self):
        assert steady([]) is None
        assert steady([stream((1.0, 1), (2.0, 5)), stream((3.0, 1), (4.0, 5))]) is None
        assert steady([stream((1.0, 1), (2.0, 5)), stream((1.5, 1))]) is None
        assert steady([stream((1.0, 1), (2.0, 5)), stream(error="gone")]) is None

    def test_all_of_a_run(self):
        streams = [
            stream((1.0, 1), (3.0, 11), due=0.5, cached=5),
            stream((2.0, 1), (5.0, 11), due=1.0),
            stream((4.0, 1), due=1.0, finished=False, error="gone"),
        ]
        whole = overall(streams, 9.0)
        assert (whole["finished"], whole["failed"], whole["unfinished"]) == (2, 1, 0)
        assert whole["seconds"] == 4.5 and whole["tok_s"] == pytest.approx(23 / 4.5, abs=0.1)
        assert whole["ttft_s"]["mean"] == 0.75 and whole["tpot_ms"]["mean"] == 250 and whole["e2e_s"]["mean"] == 3.25
        assert whole["cache_hit"] == pytest.approx(5 / 30, abs=1e-4) and whole["errors"] == ["gone"]

    def test_a_stall_is_told_from_slow_steps(self):
        """Both take 4 s for 40 tokens, so only the gaps between pieces tell them apart."""
        stalled = overall([stream((0.0, 1), (0.5, 11), (1.0, 21), (3.5, 31), (4.0, 41))], 9.0)
        slow = overall([stream((0.0, 1), (1.0, 11), (2.0, 21), (3.0, 31), (4.0, 41))], 9.0)
        assert stalled["tpot_ms"] == slow["tpot_ms"] and stalled["tpot_ms"]["mean"] == 100
        assert stalled["tbt_ms"] == {"mean": 100, "p50": 50, "p99": 250}
        assert slow["tbt_ms"] == {"mean": 100, "p50": 100, "p99": 100}
        assert (stalled["longest_gap_ms"]["p99"], slow["longest_gap_ms"]["p99"]) == (2500, 1000)

    def test_a_run_that_was_cut_counts_up_to_the_cut(self):
        whole = overall([stream((1.0, 1), (2.0, 11)), stream((1.0, 1), (3.0, 9), finished=False)], 4.0)
        assert whole["unfinished"] == 1 and whole["seconds"] == 4 and whole["tok_s"] == 5

    def test_peak(self):
        assert peak_running([]) == 0
        assert peak_running([stream((0, 1), (2, 2)), stream((1, 1), (3, 2)), stream((2.5, 1), (4, 2))]) == 2
        assert peak_running([stream((0, 1), (2, 2)), stream((2, 1), (3, 2))]) == 2


class TestServers:
    def test_known_names_and_given_flags(self):
        assert parse_server("pat").flags == ("--attention-backend", "fa3", "--decode-attention-backend", "pat")
        joined = parse_server("fa3+feather-order")
        assert joined.flags == ("--attention-backend", "fa3", "--schedule-policy", "feather-order")
        assert parse_server('x=--a "b c"') == ServerConfig("x", ("--a", "b c"))
        assert parse_server("plain=").flags == ()
        with pytest.raises(ValueError, match="fa4"):
            parse_server("fa4")

    def test_what_is_stock(self):
        assert [stock(parse_server(name)) for name in ("fa3", "triton+lpm", "pat", "fa3+feather", "pat+fcfs")] == [
            True, True, False, False, False,
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "flag", ["--schedule-policy=feather", "--decode-attention-backend=pat", "--feather-pace=1"]
    )
    def test_what_is_not_stock_in_one_word(self, flag):
        assert not stock(parse_server(f"x=--page-size 1 {flag}"))

    def test_a_policy_in_one_word_or_two(self):
        for flags in ("--schedule-policy=lpm --page-size 16", "--page-size 16 --schedule-policy lpm"):
            one = parse_server(f"x={flags}")
            assert (one.policy, one.server_flags) == ("lpm", ("--page-size", "16"))
        with pytest.raises(ValueError, match="x=--schedule-policy: --schedule-policy names no policy"):
            parse_server("x=--schedule-policy")

    def test_options_that_can_be_switched(self):
        one = parse_server("x=--feather-pace 0.1 --page-size 16 --schedule-policy feather --feather-max-wait=30")
        assert (one.policy, one.policy_options) == ("feather", {"pace": "0.1", "max_wait": "30"})
        assert one.server_flags == ("--page-size", "16")
        assert parse_server("x=--feather-pat-beside fa3").server_flags == ("--feather-pat-beside", "fa3")
        with pytest.raises(ValueError, match="x=--feather-pace: --feather-pace has no value"):
            parse_server("x=--feather-pace")

    def test_log_lines(self):
        line = "[..] Decode batch, #running-req: {}, #token: 9, cuda graph: True, gen throughput (token/s): {}, #queue"
        text = "\n".join(line.format(*pair) for pair in ((3, 5.0), (8, 60.0), (8, 90.0), (8, 100.0), (2, 7.5)))
        found = read_log(
            f"{text}\nKV cache pool is full. Retract requests. #retracted_reqs: 3" + "\n...#retracted_reqs: 2"
        )
        assert found == {"peak_running": 8, "full_batch_tok_s": 95.0, "retractions": 5}
        assert read_log(text, batch=9)["full_batch_tok_s"] is None
        assert read_log("") == {"peak_running": None, "full_batch_tok_s": None, "retractions": 0}

    def test_a_group_that_was_killed_is_gone(self):
        process = subprocess.Popen(["sleep", "60"], preexec_fn=os.setpgrp)
        assert group_alive(process.pid)
        process.kill()
        process.wait()
        assert not group_alive(process.pid)


class TestMachine:
    @pytest.mark.parametrize("seen, index", [(None, "0"), ("", "0"), ("2", "2"), ("GPU-7,1", "GPU-7")])
    def test_it_is_that_of_the_gpu_that_the_servers_have(self, seen, index, monkeypatch, tmp_path):
        smi = tmp_path / "nvidia-smi"
        smi.write_text('#!/bin/sh\ncase "$*" in *loop*) ;; *) echo "$1, 1, 2, 3, 4" ;; esac\n')
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert machine()["gpu"] == f"--id={index}"


class TestClient:
    """Against a stub server that answers as SGLang does."""

    @staticmethod
    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")), b": 0")
        body = await reader.readexactly(int(length.split(b": ")[1]))
        path = head.split()[1]
        if path == b"/generate" and b'"stream": true' in body:
            tokens = json.loads(body)["sampling_params"]["max_new_tokens"]
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for count in (1, tokens):
                reason = {"type": "length"} if count == tokens else None
                meta = {"completion_tokens": count, "cached_tokens": 3, "finish_reason": reason}
                data = b"data: " + json.dumps({"output_ids": [], "meta_info": meta}).encode() + b"\n\n"
                if tokens == 99 and reason:
                    break  # hangs up in the middle
                for part in (data[:20], data[20:]):  # events are not whole chunks
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                await asyncio.sleep(0.01 if tokens != 98 else 30)
            else:
                if tokens != 97:  # else it hangs up before the last chunk
                    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            status = b"404 Not Found" if path == b"/nowhere" else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b'\r\ncontent-length: 8\r\n\r\n{"a": 1}')
        writer.close()

    def served(self, use):
        async def run():
            server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
            async with server:
                return await use(Address(*server.sockets[0].getsockname()))

        return asyncio.run(run())

    def test_calls(self):
        assert self.served(lambda address: call(address, "/info")) == {"a": 1}
        with pytest.raises(HttpError, match="404"):
            self.served(lambda address: call(address, "/nowhere", b"{}"))

    @pytest.mark.parametrize("hold", [False, True])
    def test_streams(self, hold):
        requests = parse_case("decode:4,2,40,16").requests(300, 16)
        driven = self.served(lambda address: drive(address, requests, 5.0, hold))
        assert driven.held == hold and 0 <= driven.cpu_share < 2
        assert all(s.finished and s.tokens == 16 and s.cached_tokens == 3 for s in driven.streams)
        assert overall(driven.streams, driven.end)["output_tokens"] == 64

    def test_arrivals_are_kept(self):
        requests = bench_case("open:1,40,5,50,8", arrivals="fixed").requests(300, 16)

        async def beside_plain_sleeps(address):
            """The streams, and when tasks ran that did nothing but sleep until the same times."""

            async def sleep(until):
                await asyncio.sleep(until - time.monotonic())
                return time.monotonic()

            begun = time.monotonic()
            sleeps = asyncio.gather(*(sleep(begun + request.due) for request in requests))
            return (await drive(address, requests, 60.0)).streams, await sleeps

        streams, woken = self.served(beside_plain_sleeps)
        busy = max(at - woken[0] - request.due for at, request in zip(woken, requests, strict=True))
        for stream, request in zip(streams, requests, strict=True):
            assert stream.due - streams[0].due == pytest.approx(request.due, abs=1e-6)
            assert stream.due - 1e-3 <= stream.sent <= stream.due + max(busy, 0.0) + 0.05

    def test_a_stream_that_was_whole_before_its_connection_broke_has_not_failed(self):
        requests = [parse_case("decode:1,1,40,97").requests(300, 16)[0]] * 3
        driven = self.served(lambda address: drive(address, requests, 5.0))
        whole = overall(driven.streams, driven.end)
        assert (whole["finished"], whole["failed"], whole["unfinished"]) == (3, 0, 0)

    def test_broken_and_hanging_streams(self):
        requests = [parse_case(f"decode:1,1,40,{tokens}").requests(300, 16)[0] for tokens in (16, 98, 99)]
        begun = time.monotonic()
        streams = self.served(lambda address: drive(address, requests, 3.0)).streams
        assert 3 <= time.monotonic() - begun < 4.7
        assert [(s.finished, s.error is None) for s in streams] == [(True, True), (False, True), (False, False)]

    def test_a_server_that_has_ended_is_not_waited_for(self):
        requests = parse_case("decode:1,1,40,98").requests(300, 16)
        begun = time.monotonic()
        (stream,) = self.served(lambda address: drive(address, requests, 20.0, alive=lambda: False)).streams
        assert time.monotonic() - begun < 2 and not stream.finished


class TestConversations:
    """Conversations on servers: a stub server answers with tokens of its own and notes its requests."""

    turns = Trace("turns", 8, [
        TraceRequest(0, 0.0, 8, 4, (1,)),
        TraceRequest(1, 0.1, 8, 4, (2,)),
        TraceRequest(2, 0.2, 16, 6, (1, 3), 0, 0.2),
        TraceRequest(3, 0.3, 32, 4, (1, 3, 4, 5), 2, 0.1),
    ])  # fmt: skip

    def served(self, trace, pieces=lambda tokens: [tokens], dies_at=None, limit=10.0):
        """(streams, what each prompt was) of a run; an answer comes in pieces, as SGLang has them by default or not."""
        asked = []

        async def answer(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
            body = json.loads(await reader.readexactly(int(length.split(b": ")[1])))
            asked.append(body["input_ids"])
            count = body["sampling_params"]["max_new_tokens"]
            tokens = [1000 + 100 * len(asked) + place for place in range(count)]
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            seen = 0
            for piece in pieces(tokens):
                await asyncio.sleep(0.02)
                seen = max(seen, tokens.index(piece[-1]) + 1)
                reason = {"type": "abort" if len(asked) == dies_at else "length"} if seen == count else None
                meta = {"completion_tokens": seen, "cached_tokens": 0, "finish_reason": reason}
                data = b"data: " + json.dumps({"output_ids": piece, "meta_info": meta}).encode() + b"\n\n"
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            writer.close()

        async def run():
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            async with server:
                requests = Case(trace.name, trace).requests(30_000, 1)
                return await drive(Address(*server.sockets[0].getsockname()), requests, limit)

        return asyncio.run(run()), asked

    @pytest.mark.parametrize(
        "pieces",
        [lambda t: [t[:1], t[:3], t], lambda t: [t[:1], t[1:3], t[3:]]],
        ids=["all so far", "the latest"],
    )
    def test_a_turn_quotes_what_was_answered_and_comes_when_its_user_has_thought(self, pieces):
        driven, asked = self.served(self.turns, pieces)
        prompts = [list(fold(self.turns.tokens(request), 30_000)) for request in self.turns.requests]
        assert all(stream.finished for stream in driven.streams)
        assert sorted(asked[:2]) == sorted(prompts[:2])
        first = asked.index(prompts[0])
        answers = [1000 + 100 * (first + 1) + place for place in range(4)]
        assert asked[2] == [*prompts[2][:8], *answers, *prompts[2][12:]]
        more = [1300 + place for place in range(6)]
        assert asked[3] == [*asked[2], *more, *prompts[3][22:]]
        for turn, before in ((2, 0), (3, 2)):
            think, stream = self.turns.requests[turn].think_s, driven.streams[turn]
            assert stream.due == pytest.approx(driven.streams[before].span[1] + think)
            assert stream.sent >= stream.due
        assert overall(driven.streams, driven.end)["ttft_s"]["mean"] < 0.2  # nobody waits while somebody thinks

    def test_after_a_failure_no_turn_is_sent(self):
        driven, asked = self.served(self.turns, dies_at=1)
        assert len(asked) == 2
        assert [stream.error for stream in driven.streams[2:]] == [driven.streams[2].error] * 2 != [None] * 2
        counted = overall(driven.streams, driven.end)
        assert (counted["finished"], counted["failed"], counted["unfinished"]) == (1, 3, 0)

    def test_an_answer_without_its_tokens_cannot_be_quoted(self):
        driven, asked = self.served(self.turns, lambda tokens: [tokens[-1:]])
        assert len(asked) == 2 and "4 tokens" in str(driven.streams[2].error)

    def test_a_turn_that_was_never_due_has_not_waited(self):
        from feather_sglang.compare.server.result import summarize

        driven, _ = self.served(self.turns, limit=0.15)
        assert [stream.finished for stream in driven.streams] == [True, True, False, False]
        result = summarize(
            "fcfs", driven, SimpleNamespace(lines=[], scheduler_seconds=None, retractions=0, fell_back=False)
        )
        assert result.summary.max_wait < 0.15 and result.counted["unfinished"] == 2
