"""The time of a plan, as learnt from plans."""

import pytest

from feather_sglang.attention.packed_prefill.gain import HICCUP, SHARE, SLOWEST, PlanTime


@pytest.mark.parametrize("pace", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("shapes", [1, 2])
def test_plans_of_all_sizes_teach_the_pace_of_the_host(pace, shapes):
    measured, learned = PlanTime(1), PlanTime(shapes)
    assert learned.seconds(500) == pytest.approx(shapes * measured.seconds(500))
    for tokens in [16, 8192, 400] * 20:
        learned.learn(tokens, pace * shapes * measured.seconds(tokens))
    for tokens in (1, 2000, 16384):
        assert learned.seconds(tokens) == pytest.approx(pace * shapes * measured.seconds(tokens), rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_one_plan_says_little(seconds):
    learned = PlanTime(1)
    learned.learn(100, seconds)
    assert abs(learned.pace - 1) <= SHARE * (HICCUP - 1)


def test_a_host_that_stood_still_is_believed_again():
    learned = PlanTime(1)
    for _ in range(100):
        learned.learn(8192, 1.0)
    assert learned.pace == SLOWEST
    for _ in range(60):
        learned.learn(8192, PlanTime(1).seconds(8192))
    assert learned.pace == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("pace", [0.3, 1.0, SLOWEST])
def test_a_host_that_was_too_slow_for_any_plan_is_tried_again_some_time(pace):
    """Without plans there is nothing to learn from; that it was fast, or as the one that was measured, holds."""
    learned = PlanTime(1)
    learned.pace = pace
    for _ in range(10):
        learned.declined()
    assert learned.pace == pytest.approx(pace, rel=0.01)  # a mean of many plans does not go at once
    for _ in range(10_000):
        learned.declined()
    assert learned.pace == min(pace, 1.0)
