"""An SLO: how it is written, which requests meet it, and which rate is sustained."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.errors import FeatherError
from feather_sglang.replay.idle import IdleServer
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.slo import SHARE, SLO, Bound, Timing, enough, judge, parse, sustained

SECONDS = st.floats(1e-3, 1e3)
TIMINGS = st.lists(st.builds(Timing, SECONDS, SECONDS, SECONDS), min_size=1, max_size=30)
BOUNDS = st.none() | st.builds(Bound, SECONDS, st.booleans())
SLOS = st.builds(SLO, st.just("any"), BOUNDS, BOUNDS, BOUNDS)


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=2,tbt=50", SLO("ttft=2,tbt=50", Bound(2.0), Bound(0.05))),
        ("tpot=20", SLO("tpot=20", tpot=Bound(0.02))),
        (" tbt = 3x , ttft=0.5", SLO(" tbt = 3x , ttft=0.5", Bound(0.5), Bound(3.0, True))),
        ("mooncake", SLO("mooncake", Bound(10.0, True), Bound(5.0, True))),
    ],
)
def test_how_it_is_written(text, slo):
    assert parse(text) == slo


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "tbt=inf", "ttft=1,ttft=2", "e2e=3", "ttft=2s", "x"]
)
def test_a_mistake_is_one_line(text):
    with pytest.raises(FeatherError, match=r"^--slo .*expected ttft=SECONDS, tbt=MS and tpot=MS, .*mooncake$"):
        parse(text)


@given(st.lists(SECONDS, min_size=1, max_size=400))
def test_all_but_one_gap_in_a_hundred_are_within_the_tbt(gaps):
    timing = Timing.of(1.0, gaps)
    above = sum(gap > timing.tbt for gap in gaps)
    assert timing.tbt in gaps and above <= len(gaps) // 100
    at_least = sum(gap >= timing.tbt for gap in gaps)
    assert at_least > len(gaps) // 100  # no smaller bound would do
    assert timing.tpot == pytest.approx(sum(gaps) / len(gaps))


def test_a_single_token_has_no_gaps():
    assert Timing.of(2.0, []) == Timing(2.0, 0.0, 0.0)


@given(SLOS, TIMINGS, st.data())
def test_looser_bounds_and_shorter_times_never_lose(slo, timings, data):
    idle = data.draw(
        st.lists(st.builds(Timing, SECONDS, SECONDS, SECONDS), min_size=len(timings), max_size=len(timings))
    )
    looser = SLO(
        "looser",
        *(
            bound and bound._replace(most=bound.most * data.draw(st.floats(1, 10)))
            for bound in (slo.ttft, slo.tbt, slo.tpot)
        ),
    )
    shorter = [Timing(*(value * data.draw(st.floats(0, 1)) for value in timing)) for timing in timings]

    def share(slo, timings):
        return judge(slo, timings, idle, len(timings), 1.0)["slo_share"]

    assert share(slo, timings) <= min(share(looser, timings), share(slo, shorter))


@given(SLOS, TIMINGS, st.integers(0, 5), st.floats(0.1, 100))
def test_goodput_is_at_most_the_throughput_and_who_did_not_end_has_not_met_it(slo, timings, lost, seconds):
    judged = judge(slo, timings, timings, len(timings) + lost, seconds)
    assert 0 <= judged["goodput"] <= len(timings) / seconds
    assert judged["slo_share"] == pytest.approx(judged["goodput"] * seconds / (len(timings) + lost))


def test_judged_by_hand():
    slo = parse("ttft=2x,tbt=50")
    timings = [Timing(1.0, 0.05), Timing(2.1, 0.01), Timing(1.9, 0.051), Timing(0.5, 0.0)]
    idle = [Timing(1.0)] * 4
    judged = judge(slo, timings, idle, 5, 10.0)
    assert (judged["slo_share"], judged["goodput"]) == (2 / 5, 2 / 10)
    assert judged["slowdown_p50"] == np.percentile([1.0, 2.1, 1.9, 0.5], 50)
    missed = [judged[f"slo_missed_{name}"] for name in Timing._fields]
    assert missed == [1 / 5, 1 / 5, None]
    # Nobody knows what they take alone: no relative bound is met, and there is no slowdown.
    unknown = judge(slo, timings, None, 4, 10.0)
    assert (unknown["slo_share"], unknown["goodput"], unknown["slowdown_p50"]) == (0.0, 0.0, None)
    assert (unknown["slo_missed_ttft"], unknown["slo_missed_tbt"]) == (1.0, 1 / 4)
    assert list(judge(None, timings, idle, 4, 10.0).values())[:2] == [None, None]


@given(st.lists(st.tuples(st.floats(0.1, 100), st.none() | st.floats(0, 1)), unique_by=lambda pair: pair[0]))
def test_the_sustained_rate(shares):
    """The oracle looks at each rate by itself."""

    def meets(rate):
        return all(share is not None and share >= SHARE for other, share in shares if other <= rate)

    assert sustained(shares) == max((rate for rate, _ in shares if meets(rate)), default=None)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.9, 1)), unique_by=lambda pair: pair[0]))
def test_serving_more_within_the_slo_sustains_no_less(shares):
    better = [(rate, math.sqrt(share)) for rate, share in shares]
    assert (sustained(better) or 0.0) >= (sustained(shares) or 0.0)


class TestIdle:
    model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"))

    def timing(self, tokens, output=100, chunk=8192):
        request = TraceRequest(0, 0.0, tokens, output, (0,))
        return IdleServer(self.model, Trace("t", tokens, [request]), chunk).timing(request)

    def test_the_first_token_comes_when_all_chunks_are_computed(self):
        by_hand = self.model.prefill([4000], [0]) + self.model.prefill([4000], [4000]) + self.model.prefill([1], [8000])
        assert self.timing(8001, chunk=4000).ttft == by_hand
        assert self.timing(8001, chunk=-1).ttft == self.model.prefill([8001], [0])

    def test_a_longer_prompt_takes_longer_in_all(self):
        short, long = self.timing(1000), self.timing(100_000)
        assert all(a < b for a, b in zip(short, long, strict=True))
        assert long.tpot < long.tbt and self.timing(1000, output=1)[1:] == (0.0, 0.0)


@pytest.mark.parametrize(
    ("shares", "least"),
    [
        ([(1, 0.2), (2, 0.96), (4, 1.0)], 2),
        ([(4, 1.0), (1, 0.96), (2, 0.5)], 4),  # what is enough for one by chance is not enough
        ([(1, 0.99), (2, 0.94)], None),
        ([(1, 1.0), (2, None), (4, 1.0)], 4),
        ([], None),
    ],
)
def test_the_smallest_number_is_that_from_which_on_all_keep_the_bounds(shares, least):
    assert enough(shares) == least
