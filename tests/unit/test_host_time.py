"""Host times of requests and steps: sums of prices."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.replay.profiles import list_profiles, load_profile
from feather_sglang.simulation.host_time import NO_HOST_TIME, HostTime

NAMES = [field.name for field in fields(HostTime)]
HOST = HostTime(**{name: 2.0**-place for place, name in enumerate(NAMES)})  # no two sums of these are the same
ROWS = st.integers(0, 600)


def test_a_turn_and_what_it_takes_in():
    assert HOST.receive(0, 0) == HOST.turn
    assert HOST.receive(3, 500) == HOST.turn + 3 * HOST.take_request + 500 * HOST.take_token


def test_a_batch_is_formed_and_who_waits_costs_a_prefill_alone():
    assert HOST.form(7, True, 5) == HOST.form_prefill + 7 * HOST.form_prefill_row + 5 * HOST.form_waiting
    assert HOST.form(7, False, 5) == HOST.form(7, False, 0) == HOST.form_decode + 7 * HOST.form_decode_row


def test_a_decode_step_is_one_launch_and_a_prefill_step_one_a_layer():
    decode = HOST.launch_decode + 9 * HOST.launch_decode_row
    assert HOST.launch(9, False, 36, True) == HOST.launch(9, False, 36, False) == (decode, 0.0)
    prepare = HOST.prepare_prefill + 9 * HOST.prepare_prefill_row
    assert HOST.launch(9, True, 36, True) == (prepare, 36 * HOST.graph_layer)
    assert HOST.launch(9, True, 36, False) == (prepare, 36 * HOST.eager_layer)


def test_a_result_is_processed_and_pieces_are_sent():
    assert HOST.result(4, True, 0) == HOST.result_prefill + 4 * HOST.result_prefill_row
    assert HOST.result(4, False, 2) == HOST.result(4, False, 0) + 2 * HOST.stream_piece
    assert HOST.result(4, False, 0) == HOST.result_decode + 4 * HOST.result_decode_row


@given(ROWS, st.booleans(), ROWS, st.integers(1, 100), st.booleans())
def test_without_a_host_nothing_takes_time(rows, is_prefill, others, layers, graphs):
    host = NO_HOST_TIME
    assert (
        host.receive(rows, others) == host.form(rows, is_prefill, others) == host.result(rows, is_prefill, others) == 0
    )
    assert host.launch(rows, is_prefill, layers, graphs) == (0, 0)
    assert set(asdict(host).values()) == {0.0}


@pytest.mark.parametrize("name", list_profiles())
@given(rows=ROWS, is_prefill=st.booleans(), graphs=st.booleans())
def test_a_shipped_profiles_host_takes_longer_for_more(name, rows, is_prefill, graphs):
    host = load_profile(name).known_host()
    for price in (
        lambda more: host.receive(rows + more, 1000 * (rows + more)),
        lambda more: host.form(rows + more, is_prefill, more),
        lambda more: sum(host.launch(rows + more, is_prefill, 36, graphs)),
        lambda more: host.result(rows + more, is_prefill, more),
    ):
        assert 0 < price(0) <= price(1) < 1
