"""The memory that lies ahead of an admission round, against a pool that is filled step by step; expected lengths."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.forecast import KVForecast, Outlook

# Prompts begin with one of these, each part of it with its tokens.
PARTS = {"": 0, "a": 7, "ab": 3, "ac": 30, "acd": 1, "e": 11}


class Held(NamedTuple):
    """A request: its shared prefix, its own prompt tokens, its output so far and the rest of its output.

    ``left``: None if it is not known to end at all.
    """

    start: str
    own: int
    generated: int
    left: int | None

    @property
    def outlook(self):
        tokens = sum(tokens for _, tokens in self.parts) + self.own + self.generated
        return Outlook(tokens, self.generated, self.generated + (1000 if self.left is None else self.left), self.ends)

    @property
    def parts(self):
        return [(self.start[:end], PARTS[self.start[:end]]) for end in range(len(self.start), 0, -1)]

    @property
    def ends(self):
        return self.left is not None


def held(requests):
    """What they take of a pool; the last token of an output gets its place in the step after."""
    shared = {part: tokens for request in requests for part, tokens in request.parts}
    return sum(one.own + max(0, one.generated - 1) for one in requests) + sum(shared.values())


def simulated(running, candidate, page_size=1, late_steps=0):
    """Most of a pool that is taken beyond what the running hold now, step by step; who has no end does not grow."""
    first = held(running)
    joins = candidate._replace(own=candidate.own + candidate.generated, generated=0)  # all of it is computed at once
    here = [one._replace(left=max(1, one.left) + late_steps) if one.ends else one for one in [*running, joins]]
    peak = held(here)
    here = [one._replace(generated=max(1, one.generated)) for one in here]
    while any(one.ends for one in here):
        here = [one._replace(generated=one.generated + one.ends) for one in here]
        growing = [one for one in here if one.ends]
        peak = max(peak, held(here) + len(growing) * (page_size - 1))  # each has begun a page, perhaps just now
        here = [one._replace(left=one.left - 1) if one.ends else one for one in here]
        here = [one for one in here if not one.ends or one.left > 0]
    return peak - first


def opened(running, page_size=1, finished=(), late_steps=0):
    forecast = KVForecast(page_size, late_steps)
    for tokens in finished:
        forecast.finished(tokens)
    forecast.open([(one.outlook, one.parts) for one in running])
    return forecast


def needs(forecast, one):
    return forecast.needs(one.outlook, one.parts)


def unknown(generated=0, most=1000):
    return Outlook(50 + generated, generated, most, False)


few = st.integers(0, 20)
lefts = st.integers(-2, 12)  # many end at a time; some are at their end already
known = st.builds(Held, st.sampled_from(list(PARTS)), few, few, lefts)
any_length = known | st.builds(Held, st.sampled_from(list(PARTS)), few, few, st.none())
batches = st.lists(any_length, max_size=8)
pages = st.just(1) | st.integers(2, 64)
histories = st.lists(st.integers(1, 40), min_size=1, max_size=10)


# Memory ahead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "needed"),
    [
        pytest.param(Held("", 10, 0, 2), 10 + 3 * 2, id="shorter than all: all of it is gone at the next one's end"),
        pytest.param(Held("", 0, 3, 2), 3 + 3 * 2, id="retracted: what it had is needed again, and its prompt"),
        pytest.param(Held("", 1, 0, 2), 2 * 4, id="shorter than all: the peak comes when it is gone"),
        pytest.param(Held("", 10, 0, 4), 10 + 3 * 4, id="ends with the first"),
        pytest.param(Held("", 10, 0, 6), 10 + 3 * 4, id="ends with the last"),
        pytest.param(Held("", 10, 0, 20), 10 + 20 - (3 + 1), id="longer than all: the peak is its own end"),
    ],
)
def test_the_peak_is_where_one_of_them_ends(candidate, needed):
    running = [Held("", 3, 2, 4), Held("", 0, 1, 6)]
    assert needs(opened(running), candidate) == needs(opened(running[::-1]), candidate) == needed


def test_beside_nobody_it_needs_its_prompt_and_its_output():
    assert needs(opened([]), Held("ab", 10, 0, 30)) == 10 + 10 + 30
    assert needs(opened([], page_size=16), Held("", 10, 0, 30)) == 10 + 30 + 15


def test_a_part_is_needed_until_the_last_that_has_it_ends():
    running = [Held("ac", 0, 0, 2), Held("e", 0, 0, 9)]
    assert needs(opened(running), Held("e", 0, 0, 9)) == 3 * 2  # then the other prompt is given back
    assert needs(opened(running), Held("ac", 0, 0, 9)) == 2 * 9  # not before the candidate's end


@given(batches, any_length, pages, st.integers(0, 2))
def test_it_needs_what_a_pool_filled_step_by_step_does(running, candidate, page_size, late_steps):
    forecast = opened(running, page_size, late_steps=late_steps)
    assert needs(forecast, candidate) == simulated(running, candidate, page_size, late_steps)


@given(batches, known, few, few, st.sampled_from([1, 16]))
def test_ties_with_anybody_are_exact(running, candidate, own, generated, page_size):
    for one in running:
        if one.ends:
            tied = candidate._replace(own=own, generated=generated, left=max(1, one.left))
            assert needs(opened([*running, tied], page_size), tied) == simulated([*running, tied], tied, page_size)


@given(batches, any_length, histories)
def test_expected_lengths_count_like_fixed_ones(running, candidate, history):
    forecast = opened(running, finished=history)
    *others, joins = [one._replace(left=forecast.remaining(one.outlook)) for one in [*running, candidate]]
    assert needs(forecast, candidate) == simulated(others, joins)


@given(batches, batches, any_length, histories, st.sampled_from([1, 4]))
def test_who_is_admitted_counts_like_one_who_ran(running, joined, last, history, page_size):
    forecast = opened(running, page_size, history)
    for number, one in enumerate(joined, 1):
        forecast.admit(one.outlook, one.parts)
        assert needs(forecast, last) == needs(opened([*running, *joined[:number]], page_size, history), last)


@given(batches, known, st.integers(0, 20), pages)
def test_who_may_have_more_never_needs_less(running, candidate, more, page_size):
    forecast = opened(running, page_size)
    assert needs(forecast, candidate._replace(left=candidate.left + more)) >= needs(forecast, candidate)


# Lengths --------------------------------------------------------------------------------------------------------


@given(few, st.integers(-5, 50), st.lists(few, max_size=5))
def test_a_fixed_length_is_what_is_left_of_it_whatever_others_had(generated, left, history):
    assert opened([], finished=history).remaining(Held("", 50, generated, left).outlook) == max(1, left)


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


@given(st.builds(unknown, few, st.integers(1, 60)), st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_expected_lengths_lie_between_one_and_what_is_allowed(outlook, history):
    left, had = outlook.most - outlook.generated, outlook.generated
    longer = [n for n in history if n > had]
    expected = sum(longer) // len(longer) - had if longer else had
    assert opened([], finished=history).remaining(outlook) == max(1, min(left, expected))


def test_only_the_last_256_finished_are_remembered():
    assert opened([], finished=[500, *[10] * 255]).remaining(unknown(20)) == 480
    assert opened([], finished=[500, *[10] * 256]).remaining(unknown(20)) == 20


def test_lengths_are_taken_in_when_it_is_opened():
    forecast = opened([Held("", 50, 5, None)])
    forecast.finished(100)
    assert forecast.remaining(unknown()) == 0 and forecast.needs(unknown(), []) == 50
    forecast.open([(unknown(5), [])])
    assert forecast.remaining(unknown()) == 100 and forecast.needs(unknown(), []) == 50 + 2 * 95
    forecast.finished(300)
    assert forecast.remaining(unknown()) == 100
