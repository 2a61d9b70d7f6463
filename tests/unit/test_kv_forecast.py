"""The memory that lies ahead of an admission round, against a pool that is filled step by step; expected lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.kv_forecast import KVForecast, Outlook


def simulated(running, candidate, page_size=1):
    """Peak of a pool above what it holds at first; of the candidate's prompt, what it has generated comes back."""
    first = used = peak = sum(alone + outlook.generated for outlook, alone in running)
    here = [*running] if candidate is None else [*running, (candidate, 0)]
    while here:
        here = [(one._replace(generated=one.generated + 1), alone) for one, alone in here]
        used += len(here)
        peak = max(peak, used + len(here) * (page_size - 1))  # each has begun a page, perhaps just now
        used -= sum(alone + one.generated for one, alone in here if one.generated >= one.most)
        here = [(one, alone) for one, alone in here if one.generated < one.most]
    return peak - first


def opened(running, page_size=1, finished=()):
    forecast = KVForecast(page_size)
    for tokens in finished:
        forecast.finished(tokens)
    forecast.open([(outlook, alone + outlook.generated) for outlook, alone in running])
    return forecast


def fixed(generated, left):
    return Outlook(50 + generated, generated, generated + left, True)


def unknown(generated=0, most=1000):
    return Outlook(50 + generated, generated, most, False)


few = st.integers(0, 20)
fixed_ones = st.builds(fixed, few, st.integers(-2, 12))  # many end at a time; some are at their end already
unknown_ones = st.builds(unknown, few, st.integers(1, 60))
batches = st.lists(st.tuples(fixed_ones, few), max_size=8)
histories = st.lists(st.integers(1, 40), min_size=1, max_size=10)


# Memory ahead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "needed"),
    [
        pytest.param(fixed(0, 2), 2 * 4, id="shorter than all: the peak comes when it is gone"),
        pytest.param(fixed(3, 2), 3 * 2, id="retracted, shorter than all: gives its output back"),
        pytest.param(fixed(0, 4), 3 * 4, id="ends with the first"),
        pytest.param(fixed(0, 6), 3 * 4, id="ends with the last"),
        pytest.param(fixed(0, 20), 20 - 5 - 1, id="longer than all: the peak is its own end"),
    ],
)
def test_the_peak_is_where_one_of_them_ends(candidate, needed):
    running = [(fixed(2, 4), 3), (fixed(1, 6), 0)]
    assert opened(running).needs(candidate) == needed
    assert opened(running[::-1]).needs(candidate) == needed


def test_beside_nobody_it_needs_its_output():
    assert opened([]).needs(fixed(0, 30)) == 30
    assert opened([], page_size=16).needs(fixed(0, 30)) == 30 + 15


@given(batches, fixed_ones, st.just(1) | st.integers(2, 64))
def test_it_needs_what_a_pool_filled_step_by_step_does(running, candidate, page_size):
    assert opened(running, page_size).needs(candidate) == simulated(running, candidate, page_size)


@given(batches, few, few, st.sampled_from([1, 16]))
def test_ties_with_anybody_are_exact(running, alone, generated, page_size):
    for outlook, _ in running:
        candidate = fixed(generated, max(1, outlook.most - outlook.generated))
        among = [*running, (candidate, alone)]
        assert opened(among, page_size).needs(candidate) == simulated(among, candidate, page_size)


@given(st.lists(st.tuples(fixed_ones | unknown_ones, few), max_size=8), fixed_ones | unknown_ones, histories)
def test_expected_lengths_count_like_fixed_ones(running, candidate, history):
    forecast = opened(running, finished=history)
    *known, joins = [fixed(o.generated, forecast.remaining(o)) for o in [*(o for o, _ in running), candidate]]
    alone = [tokens for _, tokens in running]
    assert forecast.needs(candidate) == simulated(list(zip(known, alone, strict=True)), joins)


@given(batches, st.lists(fixed_ones | unknown_ones, max_size=4), fixed_ones, histories)
def test_who_is_admitted_counts_like_one_who_ran_and_shares_all_of_its_prompt(running, joined, last, history):
    forecast = opened(running, 4, history)
    for number, outlook in enumerate(joined, 1):
        forecast.admit(outlook)
        same = opened([*running, *((outlook, 0) for outlook in joined[:number])], 4, history)
        assert forecast.needs(last) == same.needs(last)


@given(batches, fixed_ones, st.integers(0, 20), st.integers(1, 64))
def test_who_may_have_more_never_needs_less(running, candidate, more, page_size):
    forecast, longer = opened(running, page_size), candidate._replace(most=candidate.most + more)
    assert forecast.needs(longer) >= forecast.needs(candidate)


@given(batches, st.tuples(unknown_ones, few), st.data(), fixed_ones)
def test_who_may_stay_for_ever_neither_grows_nor_gives_back(running, endless, data, candidate):
    place = data.draw(st.integers(0, len(running)))
    forecast = opened([*running[:place], endless, *running[place:]])
    assert forecast.needs(candidate) == simulated(running, candidate)
    assert forecast.needs(unknown()) == simulated(running, None)
    forecast.admit(unknown())
    assert forecast.needs(candidate) == simulated(running, candidate)


@given(batches, unknown_ones, fixed_ones)
def test_who_was_retracted_before_anybody_finished_gives_nothing_back(running, endless, candidate):
    forecast = opened(running)
    assert forecast.needs(endless) == simulated(running, None)
    forecast.admit(endless)
    assert forecast.needs(candidate) == simulated(running, candidate)


# Lengths --------------------------------------------------------------------------------------------------------


@given(few, st.integers(-5, 50), st.lists(few, max_size=5))
def test_a_fixed_length_is_what_is_left_of_it_whatever_others_had(generated, left, history):
    assert opened([], finished=history).remaining(fixed(generated, left)) == max(1, left)


def test_before_anybody_has_finished_nothing_is_expected():
    assert opened([]).remaining(unknown(generated=5)) == 0


def test_the_mean_of_those_that_had_more_is_expected():
    forecast = opened([], finished=[10, 41, 20])
    assert [forecast.remaining(unknown(n)) for n in (0, 9, 10, 19, 20, 40)] == [23, 14, 20, 11, 21, 1]
    assert forecast.remaining(unknown(0, most=15)) == 15


def test_who_is_longer_than_all_is_expected_to_have_as_many_again():
    forecast = opened([], finished=[10, 40])
    assert [forecast.remaining(unknown(n)) for n in (40, 41, 600)] == [40, 41, 400]
    assert forecast.remaining(unknown(1000)) == forecast.remaining(unknown(1001)) == 1


@given(unknown_ones, st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_expected_lengths_lie_between_one_and_what_is_allowed(outlook, history):
    left, had = outlook.most - outlook.generated, outlook.generated
    longer = [n for n in history if n > had]
    expected = sum(longer) // len(longer) - had if longer else had
    assert opened([], finished=history).remaining(outlook) == max(1, min(left, expected))


def test_only_the_last_256_finished_are_remembered():
    assert opened([], finished=[500, *[10] * 255]).remaining(unknown(20)) == 480
    assert opened([], finished=[500, *[10] * 256]).remaining(unknown(20)) == 20


def test_lengths_are_taken_in_when_it_is_opened():
    forecast = opened([(unknown(5), 3)])
    forecast.finished(100)
    assert forecast.remaining(unknown()) == 0 and forecast.needs(unknown()) == 0
    forecast.open([(unknown(5), 8)])
    assert forecast.remaining(unknown()) == 100 and forecast.needs(unknown()) == 2 * 95
    forecast.finished(300)
    assert forecast.remaining(unknown()) == 100
