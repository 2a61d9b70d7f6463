"""The clients of a replayed server: when their requests arrive, and the answers as they see them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.simulation.clients import STREAM_INTERVAL, Clients
from feather_sglang.simulation.host_time import NO_HOST_TIME, HostTime
from feather_sglang.simulation.timeline import Timeline

HOST = HostTime(front_request=0.01, front_token=1e-4, front_piece=0.003, hop_in=0.02, hop_out=0.04)
OUT = HOST.front_piece + HOST.hop_out  # from the scheduler to a client


def request(number, due=0.0, output=40, after=None, think=0.0, prompt=100):
    return TraceRequest(number, due, prompt, output, (number,), after, think)


def clients(*requests, host=NO_HOST_TIME, interval=STREAM_INTERVAL):
    return Clients(Trace("t", 100, list(requests)), Timeline(host), interval)


def never(taken):
    return False


def answer(ours, time, rid, tokens, seconds, ends=True):
    """The server makes an answer, a token every so many seconds; returns the tokens at which a piece was sent."""
    pieces = []
    for made in range(1, tokens + 1):
        time.spend(seconds)
        if ours.made(rid, made, ends and made == tokens):
            ours.sent(rid)
            pieces.append(made)
    if ends:
        ours.end(rid, 7)
    return pieces


def test_an_answer_comes_in_pieces_whose_tokens_share_the_time():
    ours = clients(request(0, due=1.0, output=40))
    time = ours._time
    time.wait(1.0)
    assert [one.request_id for one in ours.take(never)] == [0]
    assert answer(ours, time, "0", 40, 0.5) == [1, 17, 33, 40]  # the first at once, and the rest as it ends
    (served,) = ours.served
    assert (served.due, served.cached_tokens, served.request.request_id) == (1.0, 7, 0)
    assert served.first_token == pytest.approx(1.5) and served.finish == pytest.approx(21.0)
    assert list(served.gaps) == pytest.approx([0.5] * 39)
    assert ours.next is None


@given(
    interval=st.integers(1, 40),
    output=st.integers(1, 120),
    pauses=st.lists(st.floats(0, 1), min_size=120, max_size=120),
)
def test_every_token_but_the_first_has_a_gap_and_they_fill_the_answer(interval, output, pauses):
    ours = clients(request(0, output=output), host=HOST, interval=interval)
    time = ours._time
    time.wait(5.0)
    ours.take(never)
    pieces = []
    for made, pause in enumerate(pauses[:output], 1):
        time.spend(pause)
        if ours.made("0", made, made == output):
            ours.sent("0")
            pieces.append(made)
    ours.end("0", 0)
    assert pieces[0] == 1 and pieces[-1] == output
    assert all(one % interval == 1 % interval for one in pieces[:-1])
    (served,) = ours.served
    assert len(served.gaps) == output - 1 and min(served.gaps, default=0.0) >= 0
    assert sum(served.gaps) == pytest.approx(served.finish - served.first_token)
    # Within a piece all gaps are the same.
    for before, piece in pairwise(pieces):
        assert len(set(served.gaps[before - 1 : piece - 1])) == 1


def test_a_step_that_brings_no_token_brings_no_piece():
    """Under overlap one more step than an answer needs is launched; a retracted request is computed anew."""
    ours = clients(request(0, output=2), request(1, output=9), interval=1)
    ours.take(never)
    assert not ours.made("0", 0, False)  # a chunk of its prompt
    assert ours.made("0", 1, False)
    ours.sent("0")
    assert not ours.made("0", 1, False)
    assert ours.made("0", 2, True)
    ours.sent("0")
    ours.end("0", 0)
    assert not ours.made("0", 2, True) and not ours.made("0", 3, True)
    assert [one.request.request_id for one in ours.served] == [0] and len(ours.served[0].gaps) == 1


def test_several_tokens_of_one_step_share_its_time():
    ours = clients(request(0, output=5), interval=2)
    time = ours._time
    ours.take(never)
    for made, ended in ((1, False), (3, False), (5, True)):
        time.spend(0.4)
        assert ours.made("0", made, ended)
        ours.sent("0")
    ours.end("0", 0)
    assert list(ours.served[0].gaps) == pytest.approx([0.2] * 4)


def test_a_request_is_at_the_door_once_the_front_end_has_read_it():
    ours = clients(request(0, prompt=1000), request(1), host=HOST)
    time = ours._time
    doors = 0.01 + 0.1 + 0.02, 0.01 + 0.1 + 0.01 + 0.01 + 0.02  # the second is read after the first
    assert ours.next == 0.0 and ours.take(never) == []
    for place, door in enumerate(doors):
        assert ours.next == pytest.approx(door)
        time.wait(ours.next)
        assert [one.request_id for one in ours.take(never)] == [place]
    assert ours.next is None


def test_a_turn_takes_no_more_than_the_scheduler_does():
    ours = clients(*(request(number) for number in range(5)), request(5, due=2.0))
    assert [one.request_id for one in ours.take(lambda taken: taken >= 2)] == [0, 1]
    assert ours.next == 0.0  # three are left at the door
    assert [one.request_id for one in ours.take(never)] == [2, 3, 4]
    assert ours.next == 2.0


def test_a_further_turn_comes_a_while_after_its_user_has_seen_the_end():
    ours = clients(request(0, output=3), request(1, due=5.0, after=0, think=2.0), host=HOST, interval=16)
    time = ours._time
    time.wait(1.0)
    ours.take(never)
    assert ours.next is None  # whoever has not been answered asks nothing
    answer(ours, time, "0", 3, 0.1)
    seen = 1.3 + OUT
    assert ours.served[0].finish == pytest.approx(seen) and ours.next == pytest.approx(seen + 2.0)
    time.wait(ours.next)
    ours.take(never)
    time.wait(ours.next)
    (taken,) = ours.take(never)
    assert taken.request_id == 1
    assert ours.quotes(taken) == [(100, 103)]
    answer(ours, time, "1", 40, 0.1)
    assert ours.served[1].due == pytest.approx(seen + 2.0)


def test_clients_see_answers_when_the_front_end_has_handed_them_on():
    """Two pieces that the scheduler sends at once are handed on one after the other."""
    ours = clients(request(0, output=1), request(1, output=1), host=HOST)
    time = ours._time
    time.wait(1.0)
    assert len(ours.take(never)) == 2
    for rid in ("0", "1"):
        assert ours.made(rid, 1, True)
        ours.sent(rid)
        ours.end(rid, 0)
    first, second = (one.finish for one in ours.served)
    assert (first, second) == pytest.approx((1.0 + OUT, 1.0 + OUT + HOST.front_piece))
    assert all(one.first_token == one.finish and not one.gaps for one in ours.served)
