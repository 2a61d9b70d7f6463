"""``feather switch`` on a scripted server: what it orders, when it goes back, and what a mistake costs."""

from __future__ import annotations

import json
import math
import threading
from http.server import HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from answering import Answering
from feather_sglang.cli import main
from feather_sglang.scheduling.policy_names import SWITCH_PATH
from feather_sglang.switching import command
from feather_sglang.switching.bounds import parse
from feather_sglang.switching.metrics import figures, quantile, totals

KEY = "secret"


class Metrics:
    """SGLang's, as prometheus_client writes them."""

    def __init__(self):
        self.registry = CollectorRegistry()
        shared = {"labelnames": ["model_name", "rank"], "registry": self.registry}
        buckets = [0.1, 0.2, 0.4, 0.8, 1.6]
        self.ttft = Histogram("sglang:time_to_first_token_seconds", "x", buckets=buckets, **shared)
        self.tbt = Histogram("sglang:inter_token_latency_seconds", "x", buckets=buckets, **shared)
        self.tokens = Counter("sglang:generation_tokens_total", "x", **shared)

    def serve(self, ttft, requests=20, tokens=4):
        for number in range(requests):
            labels = {"model_name": "m", "rank": str(number % 2)}
            self.ttft.labels(**labels).observe(ttft)
            self.tbt.labels(**labels).observe(0.05)
            self.tokens.labels(**labels).inc(tokens)

    def text(self):
        return generate_latest(self.registry).decode()


class Handler(Answering):
    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if order:
            self.server.orders.append(order)
            status = self.server.statuses.pop(0) if self.server.statuses else 200
        else:  # as a server's ``Order`` refuses it
            status = self.server.without_order
        if self.headers["Authorization"] != f"Bearer {KEY}":
            status = 401
        if status == 200:
            self.server.state = {"schedule_policy": order["schedule_policy"], **self.server.next_state}
        assert self.path == SWITCH_PATH
        self.answer(status, {"schedule_policy": order["schedule_policy"]} if status == 200 else {"error": "no"})

    def do_GET(self):
        if self.path == "/server_info" and self.headers["Authorization"] != f"Bearer {self.server.reader}":
            self.answer(401, {"error": "Unauthorized"})
        elif self.path == "/server_info":
            self.answer(200, {"internal_states": [{"feather": self.server.state}] if self.server.state else [{}]})
        elif self.server.readings:
            self.answer(200, self.server.readings.pop(0)())
        else:
            self.answer(self.server.without_metrics, {})

    def answer(self, status, content):
        super().answer(status, (content if isinstance(content, str) else json.dumps(content)).encode())


@pytest.fixture
def http(monkeypatch):
    monkeypatch.delenv(command.KEY, raising=False)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.orders, server.statuses, server.readings, server.next_state = [], [], [], {}
        server.reader = KEY
        server.without_order, server.without_metrics = 400, 404
        server.state = {"schedule_policy": "fcfs"}
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def script(http, *windows):
    """Readings around the windows, in each of which requests were served so; a callable is done in place of that."""
    metrics = Metrics()

    def reading(window):
        def read():
            if callable(window):
                return window()
            if window:
                metrics.serve(**window)
            return metrics.text()

        return read

    http.readings = [reading(one) for window in windows for one in ({}, window)]


def switch(http, *flags, policy="lpm", key=KEY):
    keys = ("--admin-key", key) if key else ()
    return main(["switch", http.url, policy, "--watch", "0.05s", "--settle", "0s", *keys, *flags])


def ordered(http):
    return [order["schedule_policy"] for order in http.orders]


SAME = ("--keep", "ttft_p99<=1.1x")


def test_a_policy_that_holds_the_bounds_stays(http, capsys):
    script(http, {"ttft": 0.3}, {"ttft": 0.15})
    assert switch(http, *SAME) == 0
    assert http.orders == [{"schedule_policy": "lpm", "drain": True}]
    assert "ttft_p99 is 0.50x" in capsys.readouterr().out


def test_one_that_is_worse_is_taken_back(http, capsys):
    script(http, {"ttft": 0.15}, {"ttft": 0.3})
    assert switch(http, *SAME) == 1
    assert ordered(http) == ["lpm", "fcfs"]
    assert "ttft_p99 is 2.00x" in capsys.readouterr().out


def test_another_order_that_came_meanwhile_is_left_alone(http, capsys):
    script(http, {"ttft": 0.15}, {"ttft": 0.3})
    last = http.readings.pop()

    def meanwhile():
        http.state = {"schedule_policy": "hrrn"}
        return last()

    http.readings.append(meanwhile)
    assert switch(http, *SAME) == 2
    assert ordered(http) == ["lpm"] and "runs hrrn: another order came" in capsys.readouterr().err


def test_a_second_interrupt_on_the_way_back_says_what_is_left_to_do(http, monkeypatch, capsys):
    script(http, {"ttft": 0.15}, {"ttft": 0.3})
    order = command.RunningServer.order

    def interrupted(server, wanted):
        if wanted.policy == "fcfs":
            raise KeyboardInterrupt
        order(server, wanted)

    monkeypatch.setattr(command.RunningServer, "order", interrupted)
    switch(http, *SAME)
    assert ordered(http) == ["lpm"] and "has not confirmed fcfs" in capsys.readouterr().out


def test_options_go_there_and_back(http):
    http.state = {"schedule_policy": "feather", "options": {"max_wait": 9}}
    script(http, {"ttft": 0.15}, {"ttft": 0.3})
    assert switch(http, *SAME, "--options", '{"max_wait": 30}', policy="feather") == 1
    assert [order["options"] for order in http.orders] == [{"max_wait": 30}, {"max_wait": 9}]


def test_what_nobody_measured_is_not_held(http):
    script(http, {"ttft": 0.15}, {})
    assert switch(http, *SAME) == 1
    assert ordered(http) == ["lpm", "fcfs"]


def test_without_traffic_before_nothing_is_changed(http, capsys):
    script(http, {}, {"ttft": 0.15})
    assert switch(http) == 2 and not http.orders
    assert "nothing was changed" in capsys.readouterr().err


@pytest.mark.parametrize("problem", [KeyboardInterrupt, SystemExit])
def test_a_signal_after_the_switch_goes_back(http, monkeypatch, problem):
    script(http, {"ttft": 0.15}, {"ttft": 0.15})
    before, slept = command.time.sleep, []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise problem
        before(seconds)

    monkeypatch.setattr(command.time, "sleep", sleep)
    if problem is KeyboardInterrupt:
        assert switch(http) == 130
    else:
        with pytest.raises(SystemExit):
            switch(http)
    assert ordered(http) == ["lpm", "fcfs"]


@pytest.mark.parametrize("status", [401, 404, 500])
def test_metrics_that_end_go_back(http, status):
    script(http, {"ttft": 0.15})
    http.without_metrics = status
    assert switch(http) == 2
    assert ordered(http) == ["lpm", "fcfs"]


def test_where_nobody_reads_the_table_the_policy_does_not_stay(http, monkeypatch):
    def broken(*given):
        raise BrokenPipeError

    script(http, {"ttft": 0.15}, {"ttft": 0.15})
    monkeypatch.setattr(command, "table", broken)
    switch(http)
    assert ordered(http) == ["lpm", "fcfs"]


def test_a_server_that_was_started_anew_goes_back(http):
    fresh = Metrics()
    script(http, {"ttft": 0.15}, fresh.text)
    fresh.serve(0.15, requests=1)
    assert switch(http) == 2
    assert ordered(http) == ["lpm", "fcfs"]


def test_a_policy_that_failed_goes_back(http, capsys):
    http.next_state = {"failed": True}
    script(http, {"ttft": 0.15}, {"ttft": 0.15})
    assert switch(http, policy="feather") == 2
    assert ordered(http) == ["feather", "fcfs"] and "failed" in capsys.readouterr().err


def test_where_going_back_fails_the_user_is_told(http, capsys):
    script(http, {"ttft": 0.15}, {"ttft": 0.3})
    http.statuses = [200, 500]
    assert switch(http, *SAME) == 2
    assert "could not go back to fcfs" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "back"), [(400, []), (404, []), (409, ["fcfs"]), (500, ["fcfs"])])
def test_a_refusal_that_may_have_changed_something_is_taken_back(http, capsys, status, back):
    """409 comes where one replica of several has switched."""
    script(http, {"ttft": 0.15}, {"ttft": 0.15})
    http.statuses = [status]
    assert switch(http) == 2
    assert ordered(http) == ["lpm", *back]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "more", "said"),
    [
        (["--keep", "ttft_p99<1.1x"], {}, "--keep"),
        (["--keep", "speed>=1x"], {}, "--keep"),
        (["--watch", "soon"], {}, "--watch"),
        (["--watch", "0s"], {}, "--watch"),
        (["--settle", "-1s"], {}, "--settle"),
        (["--options", "{"], {}, "--options"),
        (["--options", '{"max_wait": 1}'], {}, "--options"),
        (["--options", '{"patience": 1}'], {"policy": "feather"}, "patience"),
        ([], {"policy": "fifo"}, "fifo"),
        ([], {"policy": "fcfs"}, "already"),
        ([], {"key": None}, command.KEY),
        (["--api-key", KEY], {"key": "guessed"}, "refused the admin key"),
        ([], {"key": "no\nkey"}, "feather: error"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(http, capsys, flags, more, said):
    script(http, {"ttft": 0.15}, {"ttft": 0.15})
    if flags[:1] == ["--settle"]:
        flags = ["--settle=-1s"]
    assert switch(http, *flags, **more) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not http.orders


@pytest.mark.parametrize(
    ("state", "without_order", "readings", "said"),
    [
        ({}, 400, [], "--feather-allow-switch"),
        ({"schedule_policy": "fcfs"}, 404, [], "--feather-allow-switch"),
        ({"schedule_policy": "fcfs"}, 400, [], "--enable-metrics"),
        ({"schedule_policy": "fcfs"}, 400, [lambda: "<html>{"], "/metrics"),
    ],
)
def test_a_server_that_was_started_otherwise_is_named_so(http, capsys, state, without_order, readings, said):
    http.state, http.without_order, http.readings = state, without_order, readings
    assert switch(http) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not http.orders


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:1", "http://[", "http://127.0.0.1:port"])
def test_an_address_where_no_server_is(url, capsys):
    assert main(["switch", url, "lpm", "--admin-key", "k"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_key_comes_from_the_environment_too(http, monkeypatch):
    monkeypatch.setenv(command.KEY, KEY)
    script(http, {"ttft": 0.3}, {"ttft": 0.15})
    assert switch(http, *SAME, key=None) == 0


def test_a_server_with_another_key_for_reading_is_read_with_that(http, capsys):
    http.reader = "normal"
    assert switch(http) == 2 and "--api-key" in capsys.readouterr().err
    script(http, {"ttft": 0.3}, {"ttft": 0.15})
    assert switch(http, *SAME, "--api-key", "normal") == 0


def test_figures_of_a_window_are_over_all_ranks():
    metrics = Metrics()
    metrics.serve(1.0)
    before = totals(metrics.text())
    metrics.serve(0.3, requests=10, tokens=8)
    found = figures(before, totals(metrics.text()), 2.0)
    assert found["tok/s"] == 40 and found["requests/s"] == 5
    assert found["ttft_mean"] == pytest.approx(0.3) and found["tbt_mean"] == pytest.approx(50)
    assert found["ttft_p50"] == pytest.approx(0.3) and found["ttft_p99"] == pytest.approx(0.398)


def test_a_quantile_beyond_the_last_bound_is_not_known_to_be_small():
    assert quantile({1.0: 10, 2.0: 10, math.inf: 20}, 0.99) == math.inf
    assert quantile({1.0: 10, 2.0: 20, math.inf: 20}, 0.75) == 1.5


def test_bounds_are_multiples_or_values():
    most, least = parse("ttft_p99<=2x, tok/s>=100")
    assert most.held({"ttft_p99": 1.0}, {"ttft_p99": 2.0}) and not most.held({"ttft_p99": 1.0}, {"ttft_p99": 2.1})
    assert least.held({"tok/s": 1.0}, {"tok/s": 100.0}) and not least.held({"tok/s": 500.0}, {"tok/s": 99.0})
    assert not most.held({"ttft_p99": 1.0}, {"ttft_p99": None}) and not most.held(
        {"ttft_p99": 1}, {"ttft_p99": math.inf}
    )
