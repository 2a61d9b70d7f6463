"""The work of a request, and the meters of prefill and decode on this server."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.meters.decode import DecodeMeter
from feather_sglang.scheduling.meters.prefill import PrefillMeter


def measured(pool=None, pair=0.0, step=0.0, finished=()):
    work = Work(pool)
    work.pair_tokens, work.step_tokens = pair, step
    for prompt, output in finished:
        work.finished(prompt, output)
    return work


# The size of a request --------------------------------------------------------------------------------------------


def test_before_anything_is_measured_work_is_what_is_computed():
    assert Work(None).of(300, 1000) == 300
    assert measured(pool=5000, step=50.0).of(300, 1000) == 300  # nobody has finished


def test_a_new_token_attends_to_all_before_it():
    """The last 300 of 1,000 have 700 before them, and half of themselves."""
    assert measured(pair=0.01).of(300, 1000) == pytest.approx(300 + 0.01 * 300 * 850)
    assert measured(pair=0.01).of(1000, 1000) == pytest.approx(1000 + 0.01 * 1000 * 500)
    assert measured(pair=0.01).of(0, 1000) == 0


def test_memory_counts_by_what_is_held_for_how_many_steps():
    """300 tokens and half of the 40 to come, over 40 steps of 50 tokens each, of a pool of 5,000."""
    work = measured(pool=5000, step=50.0, finished=[(900, 40)])
    assert work.of(300, 1000) == pytest.approx(300 + 320 * 40 * 50 / 5000)
    assert work.of(0, 1000) == pytest.approx(20 * 40 * 50 / 5000)
    assert measured(pool=None, step=50.0, finished=[(900, 40)]).of(300, 1000) == 300


def test_the_output_to_come_is_a_mean_by_memory_that_follows_those_that_finish():
    """A prompt of 10,000 tokens with one of output says more about what is held than ten short ones."""
    work = measured(pool=1, step=1.0, finished=[(90, 20)] * 10 + [(9999.5, 1)])

    def output():
        return (2 * work.of(0, 1)) ** 0.5

    assert output() == pytest.approx((10 * 100 * 20 + 10_000) / (10 * 100 + 10_000), rel=0.05)
    for _ in range(2000):
        work.finished(100, 7)
    assert output() == pytest.approx(7, rel=0.02)


@given(
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.floats(0, 0.1),
    st.floats(0, 1e4),
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 900)), max_size=20),
)
def test_more_to_compute_is_more_work_and_none_is_negative(new, old, pair, step, finished):
    work = measured(20_000, pair, step, finished)
    assert 0 <= work.of(new, new + old) < work.of(new + 1, new + 1 + old)
    assert new <= work.of(new, new + old)
    assert work.of(new, new + old) <= work.of(new, new + old + 100)


# What a token and a pair take -------------------------------------------------------------------------------------


def timed(steps, bare, pair):
    """A meter that has seen steps of (tokens, pairs) which take as much as these figures say."""
    meter, now = PrefillMeter(), 100.0
    meter.begin(now)
    for tokens, pairs in steps:
        now += bare * tokens + pair * pairs
        meter.step(now, tokens, pairs)
    return meter


VARIED = [(4096, 2.0 * 4096), (4096, 9000.0 * 4096), (2048, 500.0 * 2048), (8192, 4096.0 * 8192)]


def test_what_a_token_and_a_pair_take_is_found_again():
    meter = timed(VARIED * 3, 3e-5, 4e-9)
    assert meter.bare_seconds == pytest.approx(3e-5) and meter.pair_seconds == pytest.approx(4e-9)


@settings(max_examples=50)
@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_whatever_they_take(bare, pair):
    meter = timed(VARIED * 3, bare, pair)
    assert meter.bare_seconds == pytest.approx(bare, rel=1e-3)
    assert meter.pair_seconds == pytest.approx(pair, rel=1e-3, abs=1e-6 * bare)


def test_steps_that_are_all_alike_do_not_tell_what_a_pair_takes():
    meter = timed([(4096, 2048.0 * 4096)] * 9, 3e-5, 4e-9)
    assert meter.pair_seconds == 0
    assert meter.bare_seconds == pytest.approx(meter.seconds_per_token) == pytest.approx(3e-5 + 4e-9 * 2048)


def test_steps_that_are_nearly_alike_do_not_either():
    """Of these the slower had a few pairs more, by chance."""
    meter = PrefillMeter()
    meter.begin(0.0)
    for number in range(20):
        meter.step(number + 2e-4 * (number % 2), 4096, 8_000_000.0 + 9000 * (number % 2))
    assert meter.pair_seconds == 0 and meter.bare_seconds == pytest.approx(1 / 4096, rel=0.02)


def test_the_fit_follows_the_machine():
    meter = timed(VARIED, 3e-5, 4e-9)
    now = meter._previous
    for tokens, pairs in VARIED * 200:
        now += 1e-5 * tokens + 9e-9 * pairs
        meter.step(now, tokens, pairs)
    assert meter.bare_seconds == pytest.approx(1e-5, rel=0.02) and meter.pair_seconds == pytest.approx(9e-9, rel=0.02)


def test_small_steps_do_not_enter_the_fit():
    meter = timed(VARIED, 3e-5, 4e-9)
    meter.step(meter._previous + 7.0, 5, 1e6)
    assert meter.bare_seconds == pytest.approx(3e-5) and meter.pair_seconds == pytest.approx(4e-9)
    assert timed([(5, 50.0)], 3e-5, 4e-9).bare_seconds is None


@given(st.lists(st.tuples(st.floats(1e-4, 9.0), st.integers(1024, 9000), st.floats(0, 9000)), min_size=1, max_size=30))
def test_whatever_was_timed_nothing_takes_less_than_no_time(steps):
    meter, now = PrefillMeter(), 0.0
    meter.begin(now)
    for seconds, tokens, context in steps:
        now += seconds
        meter.step(now, tokens, context * tokens)
        assert meter.bare_seconds > 0 and meter.pair_seconds >= 0


# What a decode step takes -----------------------------------------------------------------------------------------


def test_a_decode_step_takes_the_time_between_two_of_them():
    meter = DecodeMeter()
    for now, is_decode in ((1.0, False), (1.3, True)):
        meter.step(now, 8, is_decode)
        assert meter.step_seconds is None  # the one before was prefill
    meter.step(1.32, 8, True)
    assert meter.step_seconds == pytest.approx(0.02)
    meter.step(9.0, 0, False)
    meter.step(9.5, 8, True)
    assert meter.step_seconds == pytest.approx(0.02)


def test_the_time_of_a_decode_step_is_a_moving_mean_that_outlives_batches():
    meter = DecodeMeter()
    for number in range(3):
        meter.step(0.02 * number, 8, True)
    meter.take()
    meter.restart()
    assert meter.rate is None and meter.step_seconds == pytest.approx(0.02)
    meter.step(5.0, 8, True)
    assert meter.step_seconds == pytest.approx(0.02)
    meter.step(5.02 + 0.64, 8, True)
    assert meter.step_seconds == pytest.approx(0.03)  # by a 64th
    for number in range(1, 600):
        meter.step(5.66 + 0.1 * number, 8, True)
    assert meter.step_seconds == pytest.approx(0.1, rel=0.01)


def test_a_step_in_flight_when_the_batch_changed_is_not_timed():
    meter = DecodeMeter()
    meter.step(1.0, 8, True)
    meter.restart(in_flight=1)
    meter.step(2.0, 8, True)
    meter.step(3.0, 8, True)
    assert meter.step_seconds is None
    meter.step(3.02, 8, True)
    assert meter.step_seconds == pytest.approx(0.02)
