"""The next turn of a conversation whose last request has ended goes before requests with more to compute."""

import pytest
from harness import Server

from effort import newest_is_enough

pytestmark = newest_is_enough


@pytest.fixture
def one(tmp_path):
    server = Server(tmp_path, "feather", max_total_tokens=40_000, chunked_prefill_size=1024, max_running_requests=8)
    yield server
    server.close()


def test_a_cached_turn_goes_before_a_shorter_prompt(one):
    history = list(range(10, 400)) * 5
    one.submit("first turn", history, max_new_tokens=2)
    one.drain()
    one.submit("runs", [5] * 3000, max_new_tokens=2)
    one.step()  # chunk by chunk: the next ones wait
    one.submit("short", [6] * 900, max_new_tokens=2)
    one.submit("next turn", [*history, *[7] * 30], max_new_tokens=2)
    cached = one.feather.admission.state.cached_prefixes
    assert cached.tokens("next turn") >= len(history) - 64 and not cached.tokens("short")
    order = []
    admitted = one.feather.admission.admitted
    one.feather.admission.admitted = lambda name, *args: (order.append(name), admitted(name, *args))[1]
    one.drain()
    assert order == ["next turn", "short"]
    one.assert_nothing_left()
